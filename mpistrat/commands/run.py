"""Run a Python program on N ranks with the MPI of this environment.

Finds the mpiexec that belongs to the MPI library of mpi4py, prints the call, and runs it.
A failure on one rank ends the whole job. The exit code is the launcher's.
"""

from __future__ import annotations

import argparse
import sys

from mpistrat.commands.arguments import positive, seconds

__all__ = ["main", "options"]


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    rest = argparse.REMAINDER
    parser.add_argument("-n", dest="ranks", metavar="N", type=positive, required=True, help="ranks")
    parser.add_argument("--timeout", metavar="S", type=seconds, help="end the job after S seconds")
    text = "a module and its arguments, as after python -m"
    parser.add_argument("-m", dest="module", metavar="MODULE ...", nargs=rest, help=text)
    text = "a script and its arguments"
    parser.add_argument("script", metavar="SCRIPT ...", nargs=rest, help=text)


def main(args: argparse.Namespace) -> int:
    """Run the program."""
    from mpistrat.launch.run import run

    program = args.module or args.script
    if not program:
        print("mpistrat run: error: give a SCRIPT or -m MODULE to run", file=sys.stderr)
        return 2
    return run(args.ranks, program, module=bool(args.module), timeout=args.timeout)
