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
from typing import Any, NamedTuple, final

from mpistrat.config import affinity_mask, child_environment
from mpistrat.errors import LaunchError
from mpistrat.launch.arguments import parse_file_path, parse_positive, parse_seconds
from mpistrat.lockstep.handshake import Lockstep

_PRINTED_RATE = re.compile(
    r"^\W*(\w+ per second)\b\W*([0-9][0-9,_]*\.?[0-9]*)", re.MULTILINE | re.I
)


class Study(NamedTuple):
    """The options of a study.

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
    """The result of one run.

    Attributes:
      rank_count: Number of ranks.
      node_count: Number of their nodes, by the names of the hosts.
      core_count: Number of cores that the ranks could run on, on all nodes.
      seconds: From the start of the launcher to its end.
      rates: Numbers per second by name ("steps per second"), the preferred one first.
    """

    rank_count: int
    node_count: int
    core_count: int
    seconds: float
    rates: dict[str, float]


class Row(NamedTuple):
    """One line of the table; the names of the fields are the head of the CSV file.

    Attributes:
      ranks: Number of ranks.
      nodes: Number of nodes.
      rate: The number that was counted, per second.
      speedup: `rate` divided by that of the first row.
      efficiency: `speedup` divided by the number of ranks, relative to that of the first row.
      core_hours: Cores of all ranks times the time of the run, start-up included, in hours.
      crowded: Whether there are more ranks than cores, so that the row says nothing of scaling.
    """

    ranks: int
    nodes: int
    rate: float
    speedup: float
    efficiency: float
    core_hours: float
    crowded: bool


def list_doublings(max_count: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, up to and with `max_count`.

    Example:
      >>> list_doublings(6)
      (1, 2, 4, 6)
    """
    counts = [1]
    while 2 * counts[-1] < max_count:
        counts.append(2 * counts[-1])
    return tuple(dict.fromkeys([*counts, max_count]))


def build_run_words(study: Study, count: int) -> list[str]:
    """Return the words of ``mpistrat run`` for one run of a study.

    Example:
      >>> build_run_words(Study(("train.py",), (1, 2)), 2)
      ['run', '-n', '2', 'train.py']
      >>> build_run_words(Study(("-m", "train"), (1, 2), per_node=8), 2)
      ['run', '-n', '16', '--nodes', '2', '--per-node', '8', '-m', 'train']
    """
    words = ["run", "-n", str(count * (study.per_node or 1))]
    if study.per_node is not None:
        words += ["--nodes", str(count), "--per-node", str(study.per_node)]
    words += [] if study.timeout is None else ["--timeout", f"{study.timeout:g}"]
    return [*words, *study.program]


def parse_rates(printed_text: str) -> dict[str, float]:
    """Return the numbers per second that a program has printed, the last of each kind.

    Example:
      >>> parse_rates("examples per second  60,301 (median epoch)")
      {'examples per second': 60301.0}
    """
    pairs = ((name.lower(), number) for name, number in _PRINTED_RATE.findall(printed_text))
    rates = {name: float(re.sub("[,_]", "", number)) for name, number in pairs}
    return {name: number for name, number in rates.items() if number > 0}


def measure_runs(study: Study, print_text: Callable[[str], None]) -> Iterator[Run]:
    """Run a study, one run after the other.

    Args:
      study: The study.
      print_text: Prints the output of the program, and a line before each run.

    Yields:
      The result of each run.

    Raises:
      LaunchError: A run has failed, or was on fewer ranks or nodes than were asked for.
    """
    for count in study.counts:
        words = build_run_words(study, count)
        print_text(f"mpistrat {' '.join(words)}")
        with tempfile.TemporaryDirectory(
            prefix="mpistrat-", dir=Path.cwd(), ignore_cleanup_errors=True
        ) as directory:
            report_path = Path(directory, "measured")
            variables = {"MPISTRAT_MEASURE": str(report_path), "OMP_NUM_THREADS": str(study.cores)}
            begin_time = time.perf_counter()
            completed = subprocess.run(
                [sys.executable, "-m", "mpistrat", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=child_environment(variables),
                check=False,
            )
            run_seconds = time.perf_counter() - begin_time
            printed_text = completed.stdout.decode(errors="replace")
            print_text(printed_text.rstrip("\n"))
            report: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError, ValueError):  # a full disk cuts it off
                report = json.loads(report_path.read_text(encoding="utf-8"))
        if completed.returncode:
            run_text = _format_ranks(study, count)
            raise LaunchError(
                f"the run on {run_text} has failed with exit code {completed.returncode}."
            )
        yield _check_run(study, count, report, run_seconds, printed_text)


def _format_ranks(study: Study, count: int) -> str:
    ranks = count * (study.per_node or 1)
    nodes_text = f" on {count} node{'s' * (count != 1)}" if study.per_node else ""
    return f"{ranks} rank{'s' * (ranks != 1)}{nodes_text}"


def _check_run(
    study: Study, count: int, report: dict[str, Any], run_seconds: float, printed_text: str
) -> Run:
    """Return the result of a run, if it was on the ranks and nodes that were requested."""
    rank_count = count * (study.per_node or 1)
    if not report:
        raise LaunchError(
            "the run has not reported its numbers of ranks and nodes, so it is not counted: "
            "start `mpistrat scaling` in a directory that all nodes see, with free space."
        )
    if report["ranks"] != rank_count or (study.per_node is not None and report["nodes"] != count):
        run_text = _format_ranks(study, count)
        raise LaunchError(
            f"{run_text} were requested, but there were {report['ranks']} on {report['nodes']}, "
            "so the run is not counted. Request as many nodes as the study needs."
        )
    rates = parse_rates(printed_text)
    if report["steps_per_second"] is not None:
        rates.setdefault("steps per second", report["steps_per_second"])
    rates["runs per second"] = 1 / run_seconds
    return Run(rank_count, report["nodes"], report["cores"], run_seconds, rates)


def build_table(study: Study, runs: Sequence[Run]) -> tuple[str, list[Row]]:
    """Return the name of the rate that is compared, and the rows of the table.

    Args:
      study: The study.
      runs: The results of its runs, at least one.
    """
    rate_name = next(k for k in runs[0].rates if all(k in run.rates for run in runs))
    first_run = runs[0]
    table_rows = []
    for run in runs:
        speedup = run.rates[rate_name] / first_run.rates[rate_name]
        core_count = run.rank_count * study.cores
        table_rows.append(
            Row(
                run.rank_count,
                run.node_count,
                run.rates[rate_name],
                speedup,
                speedup * first_run.rank_count / run.rank_count,
                core_count * run.seconds / 3600,
                core_count > run.core_count,
            )
        )
    return rate_name, table_rows


def format_table(rate_name: str, table_rows: Sequence[Row]) -> str:
    """Return the table as text.

    Example:
      >>> table_rows = [Row(1, 1, 10.0, 1.0, 1.0, 0.001, False)]
      >>> print(format_table("steps per second", table_rows))
       ranks  nodes  steps per second  speed-up  efficiency  core-hours
           1      1              10.0      1.00       100 %      0.0010
    """
    width = max(len(rate_name), 12)
    lines = [f" ranks  nodes  {rate_name:>{width}}  speed-up  efficiency  core-hours"]
    for table_row in table_rows:
        digits = 0 if table_row.rate >= 1000 else 1 if table_row.rate >= 10 else 4
        columns = (
            f"{table_row.ranks:6}",
            f"{table_row.nodes:5}",
            f"{table_row.rate:{width},.{digits}f}",
            f"{table_row.speedup:8.2f}",
            f"{table_row.efficiency:9.0%}".replace("%", " %"),
            f"{table_row.core_hours:10.4f}",
            *(["more ranks than cores"] if table_row.crowded else []),
        )
        lines.append("  ".join(columns))
    return "\n".join(lines)


def draw_speedup(rate_name: str, table_rows: Sequence[Row], path: Path) -> None:
    """Draw speed-up over ranks, beside the line of a perfect one up to the last run.

    Args:
      rate_name: The name of the rate.
      table_rows: The rows of the table.
      path: The file for the picture.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    ranks = [table_row.ranks for table_row in table_rows]
    ideal_speedups = [table_row.ranks / table_rows[0].ranks for table_row in table_rows]
    axes.plot(ranks, ideal_speedups, color="0.7", label="perfect")
    axes.plot(ranks, [table_row.speedup for table_row in table_rows], marker="o", label=rate_name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [f"{table_row.ranks}\n{table_row.nodes}" for table_row in table_rows])
    axes.set(xlabel="ranks, and below them nodes", ylabel=f"speed-up over {ranks[0]} ranks")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()
    figure.savefig(path)


def _parse_counts(text: str) -> tuple[int, ...]:
    """Return numbers in rising order."""
    return tuple(sorted({parse_positive(word) for word in text.split(",")}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    size_options = parser.add_mutually_exclusive_group()
    text = "numbers of ranks, as 1,2,4; by default 1, 2, 4 ... up to the cores of this machine"
    size_options.add_argument("--ranks", metavar="N,...", type=_parse_counts, help=text)
    text = "numbers of nodes instead, with --per-node ranks on each"
    size_options.add_argument("--nodes", metavar="N,...", type=_parse_counts, help=text)
    parser.add_argument("--per-node", metavar="N", type=parse_positive, default=1, help="1")
    text = "cores, and BLAS threads, of each rank (1)"
    parser.add_argument("--cores", metavar="N", type=parse_positive, default=1, help=text)
    text = "write the table to NAME.csv, and the picture to NAME.png"
    parser.add_argument("--output", metavar="NAME", type=parse_file_path, help=text)
    parser.add_argument(
        "--timeout", metavar="S", type=parse_seconds, help="end a run after S seconds"
    )
    text = "-- and the program: a script, or -m and a module, then its arguments"
    parser.add_argument("program", metavar="PROGRAM ...", nargs=argparse.REMAINDER, help=text)


def main(args: argparse.Namespace) -> int:
    """Run the study."""
    from mpistrat.launch.mpi_libraries import count_cores

    program = tuple(args.program[1:] if args.program[:1] == ["--"] else args.program)
    if not program:
        raise LaunchError("give -- and a program to run")
    counts = args.nodes or args.ranks or list_doublings(max(1, count_cores() // args.cores))
    per_node = args.per_node if args.nodes else None
    study = Study(program, counts, per_node, args.cores, args.timeout)
    runs, code = [], 0
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)  # before hours of computing
    try:
        for run in measure_runs(study, lambda text: print(text, file=sys.stderr, flush=True)):
            runs.append(run)
    except (LaunchError, OSError) as error:  # the runs before it are shown
        print(f"mpistrat scaling: error: {error}", file=sys.stderr)
        code = 1
    if runs:
        rate_name, table_rows = build_table(study, runs)
        print(format_table(rate_name, table_rows))
        if args.output is not None:
            _write_files(args.output, rate_name, table_rows)
    return code


def _write_files(output_path: Path, rate_name: str, table_rows: list[Row]) -> None:
    """Write the table, and the picture if matplotlib is installed."""
    name = rate_name.replace(" ", "_")
    with output_path.with_name(f"{output_path.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([name if field == "rate" else field for field in table_rows[0]._fields])
        writer.writerows(table_rows)
    try:
        draw_speedup(rate_name, table_rows, output_path.with_name(f"{output_path.name}.png"))
    except ImportError:
        print("no picture: it needs matplotlib (pip install matplotlib)", file=sys.stderr)


@final
class StepCounter:
    """Counts the steps of this job. Collective to create, on all ranks.

    Args:
      lockstep: The handshakes of all ranks of the job.
      report_path: The file for the report.

    Cost: an exchange of some bytes of each rank; then 0.1 us a step.
    """

    def __init__(self, lockstep: Lockstep, report_path: str):
        """Gather the hosts and cores of the ranks, and begin to count."""
        self._report_path, self._start_time, self._step_count = (
            Path(report_path),
            time.perf_counter(),
            0,
        )
        self._second_step_time = self._last_step_time = self._start_time
        local_payload = json.dumps([socket.gethostname(), affinity_mask()]).encode()
        payloads = lockstep.gather_payloads("measure", local_payload)
        masks: dict[str, int] = {}
        for host, mask in map(json.loads, payloads):
            masks[host] = masks.get(host, 0) | mask
        core_count = sum(bin(mask).count("1") for mask in masks.values())
        self._resources = {"ranks": len(payloads), "nodes": len(masks), "cores": core_count}
        if lockstep.comm.rank:
            return
        atexit.register(self.write_report)
        if lockstep.hooks.on_fn is None:  # else a fault is injected there
            lockstep.hooks.on_fn = self._count_step

    def _count_step(self) -> None:
        self._last_step_time = time.perf_counter()
        self._step_count += 1
        if self._step_count == 2:
            self._second_step_time = self._last_step_time

    def write_report(self) -> None:
        """Write the file; nothing happens if it cannot be written."""
        end_time, step_rate = time.perf_counter(), None
        if self._step_count > 2:
            step_rate = (self._step_count - 2) / (self._last_step_time - self._second_step_time)
        measurements = {
            "seconds": end_time - self._start_time,
            "steps": self._step_count,
            "steps_per_second": step_rate,
        }
        with contextlib.suppress(OSError):
            self._report_path.write_text(
                json.dumps(self._resources | measurements) + "\n", encoding="ascii"
            )
