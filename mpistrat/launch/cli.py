"""The command ``mpistrat``: its subcommands, each of which is a module."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from mpistrat import __version__
from mpistrat.checkpoint import inspection
from mpistrat.errors import MpistratError
from mpistrat.launch import batch, doctor, drill, profile, requeue, run, scaling, warm
from mpistrat.launch.completion import SHELLS, PrintCompletion

# Each module has a docstring, which is the help text, and the functions `add_arguments` and `main`.
COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "doctor": doctor,
    "warm": warm,
    "drill": drill,
    "batch": batch,
    "scaling": scaling,
    "profile": profile,
    "requeue": requeue,
    "checkpoint": inspection,
}


_EXAMPLES = """\
examples:
  mpistrat doctor                                 check Python, MPI and the launcher
  mpistrat run -n 4 train.py --epochs 3           run train.py on 4 ranks
  mpistrat run -n 4 --profile train.py            and print where they spend their time
  mpistrat batch --nodes 2 -o job.sh -- train.py  write a job script for Slurm

`mpistrat COMMAND --help` describes a command.
"""


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpistrat",
        description="tf.distribute for NumPy on MPI.",
        epilog=_EXAMPLES,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=14
        ),
    )
    parser.add_argument("--version", action="version", version=f"mpistrat {__version__}")
    text = "print a script for completion, as for eval in ~/.bashrc, and exit"
    parser.add_argument("--print-completion", action=PrintCompletion, choices=SHELLS, help=text)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        text = inspect.getdoc(module) or f"{name}: `python -OO` leaves out what it does."
        module.add_arguments(
            commands.add_parser(
                name,
                allow_abbrev=False,
                help=text.splitlines()[0],
                description=text,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
      argv: The words after ``mpistrat``, or None for those of this process.

    Returns:
      The exit code: the command's own, or 2 for an error of mpistrat or of a file, printed on
      stderr, or for no word at all, which prints the help there. Where nobody reads the output to
      its end, 141 and no message, as with other commands.
    """
    parser = _build_parser()
    argv = sys.argv[1:] if argv is None else argv
    if not argv:  # a script whose subcommand is missing must not count as success
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(argv)
    try:
        code: int = COMMANDS[args.command].main(args)
    except BrokenPipeError:  # whoever reads the output has enough of it, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes at its end
        return 128 + signal.SIGPIPE
    except (MpistratError, OSError) as error:
        print(f"mpistrat {args.command}: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        message = (
            f"{error}. Raise `ulimit -u`, or the limit of processes of the container (pids.max)."
        )
        print(f"mpistrat {args.command}: error: {message}", file=sys.stderr)
        return 2
    return code
