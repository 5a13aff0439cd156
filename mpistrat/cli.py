"""The command ``mpistrat``: one function per subcommand, whose docstring is its help.

How to add a command: write a function ``(args) -> int``, name it in `COMMANDS`, and declare its
options in `_parser`. The work itself belongs into the library, where a test can call it.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence

from mpistrat.errors import MpistratError

__all__ = ["COMMANDS", "doctor", "main", "run"]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds greater than 0, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Run a Python program on N ranks with the MPI of this environment.

    Finds the mpiexec that belongs to the MPI library of mpi4py, prints the call, and runs it.
    A failure on one rank ends the whole job. The exit code is the launcher's.
    """
    from mpistrat.launch.run import run as launch

    program = args.module or args.script
    if not program:
        print("mpistrat run: error: give a SCRIPT or -m MODULE to run", file=sys.stderr)
        return 2
    return launch(args.ranks, program, module=bool(args.module), timeout=args.timeout)


def doctor(args: argparse.Namespace) -> int:
    """Check whether Python, MPI and the launcher of this environment fit together.

    The exit code is 1 if something does not.
    """
    from mpistrat.launch.doctor import examine

    wrong = 0
    for finding in examine():
        mark = "ok " if finding.ok else "BAD"
        print(f"{mark} {finding.name + ':':<13}{finding.text}", flush=True)
        wrong += not finding.ok
    return 1 if wrong else 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"run": run, "doctor": doctor}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpistrat", description="tf.distribute for NumPy on MPI.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    added = {}
    for name, function in COMMANDS.items():
        text = inspect.getdoc(function) or ""
        added[name] = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    rest = argparse.REMAINDER
    job = added["run"]
    job.add_argument("-n", dest="ranks", metavar="N", type=_positive, required=True, help="ranks")
    job.add_argument("--timeout", metavar="S", type=_seconds, help="end the job after S seconds")
    text = "a module and its arguments, as after python -m"
    job.add_argument("-m", dest="module", metavar="MODULE ...", nargs=rest, help=text)
    job.add_argument("script", metavar="SCRIPT ...", nargs=rest, help="a script and its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
      argv: The words after ``mpistrat``, or None for those of this process.

    Returns:
      The exit code: the command's own, or 2 for an error of mpistrat, printed on stderr.
    """
    args = _parser().parse_args(argv)
    try:
        return COMMANDS[args.command](args)
    except MpistratError as error:
        print(f"mpistrat {args.command}: error: {error}", file=sys.stderr)
        return 2
