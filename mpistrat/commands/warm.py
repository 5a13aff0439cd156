"""Compile kernels and modules once, so that programs start faster.

Run it when the package has been installed, as who installed it, on a node with the processor of
those that will compute: `srun -n 1 mpistrat warm`. What it makes is next to the package; where
that cannot be written, kernels are kept for this user alone.
"""

from __future__ import annotations

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: there are none."""


def main(args: argparse.Namespace) -> int:
    """Make what is missing, and print it."""
    from mpistrat.launch.warm import warm

    for name, text in warm():
        print(f"{name}: {text}", flush=True)
    return 0
