"""Interrupt a program at random times, restart it until it finishes, and compare its result.

Runs the program once without interruptions. Then it runs it in another directory, where a random
rank is killed at random times and the program is started again each time. The newest checkpoints
of both must be equal. {dir} in the arguments of the program stands for its checkpoint directory;
without it, --checkpoint DIR is added. The exit code is 0 if the checkpoints are equal, else 1.

  mpistrat drill -n 2 --kills 3 train.py --epochs 4
  mpistrat drill -n 2 --signal USR1 --ranks 2,3,1 --tolerance 1e-6 train.py --output {dir}
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import tempfile
from pathlib import Path

from mpistrat.commands.arguments import part, positive, seconds
from mpistrat.errors import LaunchError


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, rest = parser.add_argument, argparse.REMAINDER
    add("-n", dest="ranks", metavar="N", type=positive, required=True, help="number of ranks")
    add("--kills", metavar="K", type=positive, default=3, help="interruptions (3)")
    add(
        "--signal",
        type=_signal,
        default="KILL",
        help="KILL, or USR1, TERM, ... if the program saves and exits on it",
    )
    text = "ranks of the interrupted runs in turns, such as 2,3,1; else N"
    add("--ranks", dest="sizes", metavar="N,N,..", type=_sizes, default=(), help=text)
    text = "how far floating-point arrays may be apart, as a part of their largest number (0)"
    add("--tolerance", metavar="T", type=part, default=0.0, help=text)
    text = "names of arrays that may differ, such as '*seconds*'; may be given several times"
    add("--ignore", metavar="PATTERN", action="append", default=[], help=text)
    add("--seed", metavar="S", type=int, help="of ranks and moments; printed, to play it again")
    add("--timeout", metavar="S", type=seconds, help="time limit of a run in seconds")
    text = "an empty one for checkpoints and output, kept; else one that is kept on failure"
    add("--directory", metavar="DIR", type=Path, help=text)
    text = "a module and its arguments, as after python -m"
    add("-m", dest="module", metavar="MODULE ...", nargs=rest, help=text)
    add("script", metavar="SCRIPT ...", nargs=rest, help="a script and its arguments")


def _signal(text: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a signal; use KILL or USR1") from None


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


def main(args: argparse.Namespace) -> int:
    """Play the drill."""
    from mpistrat.errors import CheckpointError
    from mpistrat.launch.drill import Drill, play

    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    program = ("-m", *args.module) if args.module else tuple(script)
    if not program:
        raise LaunchError("give a SCRIPT or -m MODULE to run")
    directory = _directory(args.directory)
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    sizes = args.sizes or (args.ranks,)
    drill = Drill(
        *(program, args.ranks, sizes, args.kills, args.signal, seed),
        *(args.tolerance, tuple(args.ignore), args.timeout),
    )
    print(f"seed {seed}, {directory}", flush=True)
    try:
        for line in play(drill, directory):
            print(line, flush=True)
    except (CheckpointError, LaunchError) as error:
        print(f"mpistrat drill: {error}\n  kept: {directory}; again: --seed {seed}", flush=True)
        return 1 if isinstance(error, CheckpointError) else 2
    except KeyboardInterrupt:
        return 130
    if args.directory is None:
        shutil.rmtree(directory)
    return 0


def _directory(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="mpistrat-drill-")).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise LaunchError(
            f"--directory {directory} is not empty; a drill begins with nothing saved."
        )
    return directory.resolve()
