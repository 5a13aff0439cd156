"""Check whether Python, MPI and the launcher of this environment fit together.

The exit code is 1 if something does not.
"""

from __future__ import annotations

import argparse

__all__ = ["main", "options"]


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: there are none."""


def main(args: argparse.Namespace) -> int:
    """Print what was found."""
    from mpistrat.launch.doctor import examine

    wrong = 0
    for finding in examine():
        mark = "ok " if finding.ok else "BAD"
        print(f"{mark} {finding.name + ':':<13}{finding.text}", flush=True)
        wrong += not finding.ok
    return 1 if wrong else 0
