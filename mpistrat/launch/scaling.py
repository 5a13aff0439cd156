"""Measure a program at several numbers of ranks or nodes: speed-up, efficiency, core-hours.

Runs it with `mpistrat run`, one run after the other: on this machine, or in the current allocation.
Choose arguments that make a run short and all runs do the same work; the program must not resume
from a checkpoint. The rate is the last number per second that the program prints ("examples per
second 1,234" on a line), else the steps per second that mpistrat counts, else runs per second.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import csv
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from mpistrat.config import affinity_mask, child_environment
from mpistrat.errors import LaunchError
from mpistrat.launch.plan import file, positive, seconds
from mpistrat.lockstep.handshake import Lockstep

if TYPE_CHECKING:
    pass

_PRINTED = re.compile(r"^\W*(\w+ per second)\b\W*([0-9][0-9,_]*\.?[0-9]*)", re.MULTILINE | re.I)


class Study(NamedTuple):
    """What is to be run.

    Attributes:
      program: A script, or ``-m`` and a module, then its arguments.
      counts: Numbers of ranks, or of nodes if `per_node` is given, the least first.
      per_node: Ranks on each node, or None.
      cores: Cores of each rank, which are its threads of BLAS in every run.
      timeout: Seconds after which a run is ended, or None.
    """

    program: tuple[str, ...]
    counts: tuple[int, ...]
    per_node: int | None = None
    cores: int = 1
    timeout: float | None = None


class Run(NamedTuple):
    """What one run came to.

    Attributes:
      ranks: How many there were.
      nodes: On how many nodes they were, by the names of the hosts.
      cores: Cores that the ranks could run on, on all nodes.
      seconds: From the start of the launcher to its end.
      rates: Numbers per second by what they count, the one to take first.
    """

    ranks: int
    nodes: int
    cores: int
    seconds: float
    rates: dict[str, float]


class Row(NamedTuple):
    """One line of the table.

    Attributes:
      ranks: Number of ranks.
      nodes: Number of nodes.
      rate: What was counted, per second.
      speedup: `rate` divided by that of the first row.
      efficiency: `speedup` divided by how many times as many ranks there are as in the first row.
      core_hours: Cores of all ranks times the time of the run, start-up included, in hours.
      crowded: More ranks than cores: what it says of scaling is nothing.
    """

    ranks: int
    nodes: int
    rate: float
    speedup: float
    efficiency: float
    core_hours: float
    crowded: bool


def doubling(max_count: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, up to and with `max_count`.

    Example:
      >>> doubling(6)
      (1, 2, 4, 6)
    """
    counts = [1]
    while 2 * counts[-1] < max_count:
        counts.append(2 * counts[-1])
    return tuple(dict.fromkeys([*counts, max_count]))


def command(study: Study, count: int) -> list[str]:
    """Return the words of ``mpistrat run`` for one run of a study.

    Example:
      >>> command(Study(("train.py",), (1, 2)), 2)
      ['run', '-n', '2', 'train.py']
      >>> command(Study(("-m", "train"), (1, 2), per_node=8), 2)
      ['run', '-n', '16', '--nodes', '2', '--per-node', '8', '-m', 'train']
    """
    words = ["run", "-n", str(count * (study.per_node or 1))]
    if study.per_node is not None:
        words += ["--nodes", str(count), "--per-node", str(study.per_node)]
    words += [] if study.timeout is None else ["--timeout", f"{study.timeout:g}"]
    return [*words, *study.program]


def printed(text: str) -> dict[str, float]:
    """Return the numbers per second that a program has printed, the last of each kind.

    Example:
      >>> printed("examples per second  60,301 (median epoch)")
      {'examples per second': 60301.0}
    """
    pairs = ((name.lower(), number) for name, number in _PRINTED.findall(text))
    numbers = {name: float(re.sub("[,_]", "", number)) for name, number in pairs}
    return {name: number for name, number in numbers.items() if number > 0}


def measure(study: Study, print_text: Callable[[str], None]) -> Iterator[Run]:
    """Run a study, one run after the other.

    Args:
      study: What to run.
      print_text: Prints the output of the program, and a line before each run.

    Yields:
      The result of each run.

    Raises:
      LaunchError: A run has failed, or was on fewer ranks or nodes than were asked for.
    """
    for count in study.counts:
        words = command(study, count)
        print_text(f"mpistrat {' '.join(words)}")
        with tempfile.TemporaryDirectory(
            prefix="mpistrat-", dir=Path.cwd(), ignore_cleanup_errors=True
        ) as directory:
            report_path = Path(directory, "measured")
            extra = {"MPISTRAT_MEASURE": str(report_path), "OMP_NUM_THREADS": str(study.cores)}
            begin = time.perf_counter()
            got = subprocess.run(
                [sys.executable, "-m", "mpistrat", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=child_environment(extra),
                check=False,
            )
            seconds = time.perf_counter() - begin
            text = got.stdout.decode(errors="replace")
            print_text(text.rstrip("\n"))
            report: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError, ValueError):  # cut off by a full disk
                report = json.loads(report_path.read_text(encoding="utf-8"))
        if got.returncode:
            run_text = _ranks_text(study, count)
            raise LaunchError(f"the run on {run_text} has failed with exit code {got.returncode}.")
        yield _checked(study, count, report, seconds, text)


def _ranks_text(study: Study, count: int) -> str:
    ranks = count * (study.per_node or 1)
    nodes_text = f" on {count} node{'s' * (count != 1)}" if study.per_node else ""
    return f"{ranks} rank{'s' * (ranks != 1)}{nodes_text}"


def _checked(study: Study, count: int, report: dict[str, Any], seconds: float, text: str) -> Run:
    """Return what a run came to, if it was where it should have been."""
    ranks = count * (study.per_node or 1)
    if not report:
        raise LaunchError(
            "the run has not reported its numbers of ranks and nodes, so it is not counted: "
            "start `mpistrat scaling` in a directory that all nodes see, with free space."
        )
    if report["ranks"] != ranks or (study.per_node is not None and report["nodes"] != count):
        run_text = _ranks_text(study, count)
        raise LaunchError(
            f"{run_text} were requested, but there were {report['ranks']} on {report['nodes']}, "
            "so the run is not counted. Request as many nodes as the study needs."
        )
    rates = printed(text)
    if report["steps_per_second"] is not None:
        rates.setdefault("steps per second", report["steps_per_second"])
    rates["runs per second"] = 1 / seconds
    return Run(ranks, report["nodes"], report["cores"], seconds, rates)


def rows(study: Study, runs: Sequence[Run]) -> tuple[str, list[Row]]:
    """Return what was counted, and the lines of the table.

    Args:
      study: What was run.
      runs: What the runs came to, at least one.

    Raises:
      LaunchError: The runs have no kind of number in common.
    """
    kind = next(k for k in runs[0].rates if all(k in run.rates for run in runs))
    first = runs[0]
    lines = []
    for run in runs:
        speedup = run.rates[kind] / first.rates[kind]
        core_count = run.ranks * study.cores
        lines.append(
            Row(
                run.ranks,
                run.nodes,
                run.rates[kind],
                speedup,
                speedup * first.ranks / run.ranks,
                core_count * run.seconds / 3600,
                core_count > run.cores,
            )
        )
    return kind, lines


def table(kind: str, lines: Sequence[Row]) -> str:
    """Return the table as text.

    Example:
      >>> print(table("steps per second", [Row(1, 1, 10.0, 1.0, 1.0, 0.001, False)]))
       ranks  nodes  steps per second  speed-up  efficiency  core-hours
           1      1              10.0      1.00       100 %      0.0010
    """
    width = max(len(kind), 12)
    text = [f" ranks  nodes  {kind:>{width}}  speed-up  efficiency  core-hours"]
    for row in lines:
        digits = 0 if row.rate >= 1000 else 1 if row.rate >= 10 else 4
        text.append(
            f"{row.ranks:6}  {row.nodes:5}  {row.rate:{width},.{digits}f}  {row.speedup:8.2f}  "
            f"{row.efficiency:9.0%}  {row.core_hours:10.4f}".replace("%", " %")
            + ("  more ranks than cores" if row.crowded else "")
        )
    return "\n".join(text)


def draw(kind: str, lines: Sequence[Row], path: Path) -> None:
    """Draw speed-up over ranks, beside the line that would be perfect up to the last run.

    Args:
      kind: What was counted.
      lines: The table.
      path: Where the picture goes.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    ranks = [row.ranks for row in lines]
    ideal = [row.ranks / lines[0].ranks for row in lines]
    axes.plot(ranks, ideal, color="0.7", label="perfect")
    axes.plot(ranks, [row.speedup for row in lines], marker="o", label=kind)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [f"{row.ranks}\n{row.nodes}" for row in lines])
    axes.set(xlabel="ranks, and below them nodes", ylabel=f"speed-up over {ranks[0]} ranks")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()
    figure.savefig(path)


def _counts(text: str) -> tuple[int, ...]:
    """Return numbers in rising order."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    size_options = parser.add_mutually_exclusive_group()
    text = "numbers of ranks, as 1,2,4; by default 1, 2, 4 ... up to the cores of this machine"
    size_options.add_argument("--ranks", metavar="N,...", type=_counts, help=text)
    text = "numbers of nodes instead, with --per-node ranks on each"
    size_options.add_argument("--nodes", metavar="N,...", type=_counts, help=text)
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
    from mpistrat.launch.mpi_libraries import cores

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

    name = kind.replace(" ", "_")
    with output.with_name(f"{output.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([name if field == "rate" else field for field in lines[0]._fields])
        writer.writerows(lines)
    try:
        draw(kind, lines, output.with_name(f"{output.name}.png"))
    except ImportError:
        print("no picture: it needs matplotlib (pip install matplotlib)", file=sys.stderr)


@final
class Measured:
    """Counts the steps of this job. Collective to create, on all ranks.

    Args:
      lockstep: Of all ranks of the job.
      path: The file.

    Cost: an exchange of some bytes of each rank; then 0.1 us a step.
    """

    def __init__(self, lockstep: Lockstep, path: str):
        """Gather where the ranks are, and begin to count."""
        self._path, self._start, self._steps = Path(path), time.perf_counter(), 0
        self._second = self._last = self._start
        local_place = json.dumps([socket.gethostname(), affinity_mask()]).encode()
        rows = [json.loads(row) for row in lockstep.gather_payloads("measure", local_place)]
        masks: dict[str, int] = {}
        for host, mask in rows:
            masks[host] = masks.get(host, 0) | mask
        cores = sum(bin(mask).count("1") for mask in masks.values())
        self._resources = {"ranks": len(rows), "nodes": len(masks), "cores": cores}
        if lockstep.comm.rank:
            return
        atexit.register(self.write)
        if lockstep.hooks.on_fn is None:  # else a fault is injected there
            lockstep.hooks.on_fn = self._step

    def _step(self) -> None:
        self._last = time.perf_counter()
        self._steps += 1
        if self._steps == 2:
            self._second = self._last

    def write(self) -> None:
        """Write the file; nothing happens if it cannot be written."""
        end_time, rate = time.perf_counter(), None
        if self._steps > 2:
            rate = (self._steps - 2) / (self._last - self._second)
        measurements = {
            "seconds": end_time - self._start,
            "steps": self._steps,
            "steps_per_second": rate,
        }
        with contextlib.suppress(OSError):
            self._path.write_text(
                json.dumps(self._resources | measurements) + "\n", encoding="ascii"
            )
