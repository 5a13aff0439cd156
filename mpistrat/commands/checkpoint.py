"""List, show, verify, compare and export checkpoints. MPI is not started.

PATH is a checkpoint, or a directory of checkpoints, of which the newest is used; verify checks all.
The exit code is 1 if verify finds damage, or diff a difference.
"""

from __future__ import annotations

import argparse
import sys

_ACTS = {
    "list": ("DIR", "each checkpoint of a directory: number, time, bytes, and what is wrong"),
    "show": ("PATH", "names, dtypes, shapes, single numbers, and how many are not finite"),
    "verify": ("PATH", "read every byte"),
    "diff": ("PATH OTHER", "what differs between two"),
    "export": ("PATH OUT", "write OUT, which ends with .safetensors or .npz"),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    for name, (words, text) in _ACTS.items():
        act = acts.add_parser(name, help=text, description=text)
        for word in words.split():
            act.add_argument(word.lower(), metavar=word)


def main(args: argparse.Namespace) -> int:
    """Do what was asked for."""
    from mpistrat.checkpoint.inspection import REPORTS

    words = [getattr(args, word.lower()) for word in _ACTS[args.act][0].split()]
    try:
        lines, code = REPORTS[args.act](*words)
    except (OSError, ImportError) as error:
        print(f"mpistrat checkpoint {args.act}: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines), flush=True)
    return int(code)
