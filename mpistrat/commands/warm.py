"""Compile kernels and modules once, so that programs start faster.

Run it after installation, as the user who installed the package, on a compute node:
`srun -n 1 mpistrat warm`. The files are stored next to the package; if that is not writable,
kernels are stored for this user only.
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
