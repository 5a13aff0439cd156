"""Measure a program at several numbers of ranks or nodes: speed-up, efficiency, core-hours.

Runs it with `mpistrat run`, one run after the other: on this machine, or in the current allocation.
Choose arguments that make a run short and all runs do the same work; the program must not resume
from a checkpoint. The rate is the last number per second that the program prints ("examples per
second 1,234" on a line), else the steps per second that mpistrat counts, else runs per second.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpistrat.commands.arguments import file, positive, seconds
from mpistrat.errors import LaunchError

if TYPE_CHECKING:
    from mpistrat.launch.scaling import Row


def _counts(text: str) -> tuple[int, ...]:
    """Return numbers in rising order."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    where = parser.add_mutually_exclusive_group()
    text = "numbers of ranks, as 1,2,4; by default 1, 2, 4 ... up to the cores of this machine"
    where.add_argument("--ranks", metavar="N,...", type=_counts, help=text)
    text = "numbers of nodes instead, with --per-node ranks on each"
    where.add_argument("--nodes", metavar="N,...", type=_counts, help=text)
    parser.add_argument("--per-node", metavar="N", type=positive, default=1, help="1")
    text = "cores, and BLAS threads, of each rank (1)"
    parser.add_argument("--cores", metavar="N", type=positive, default=1, help=text)
    text = "write the table to NAME.csv, and the picture to NAME.png"
    parser.add_argument("--output", metavar="NAME", type=file, help=text)
    parser.add_argument("--timeout", metavar="S", type=seconds, help="end a run after S seconds")
    text = "-- and the program: a script, or -m and a module, then its arguments"
    parser.add_argument("program", metavar="PROGRAM ...", nargs=argparse.REMAINDER, help=text)


def main(args: argparse.Namespace) -> int:
    """Run the study."""
    from mpistrat.launch.mpiexec import cores
    from mpistrat.launch.scaling import Study, doubling, measure, rows, table

    program = tuple(args.program[1:] if args.program[:1] == ["--"] else args.program)
    if not program:
        raise LaunchError("give -- and a program to run")
    counts = args.nodes or args.ranks or doubling(max(1, cores() // args.cores))
    per_node = args.per_node if args.nodes else None
    study = Study(program, counts, per_node, args.cores, args.timeout)
    runs, code = [], 0
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)  # before hours of computing
    try:
        for run in measure(study, lambda text: print(text, file=sys.stderr, flush=True)):
            runs.append(run)
    except (LaunchError, OSError) as error:  # what was measured before it is shown
        print(f"mpistrat scaling: error: {error}", file=sys.stderr)
        code = 1
    if runs:
        kind, lines = rows(study, runs)
        print(table(kind, lines))
        if args.output is not None:
            _write(args.output, kind, lines)
    return code


def _write(output: Path, kind: str, lines: list[Row]) -> None:
    from mpistrat.launch.scaling import draw

    name = kind.replace(" ", "_")
    with output.with_name(f"{output.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([name if field == "rate" else field for field in lines[0]._fields])
        writer.writerows(lines)
    try:
        draw(kind, lines, output.with_name(f"{output.name}.png"))
    except ImportError:
        print("no picture: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
