"""How long do the parts of a training step take, beside the least that they could?

    mpiexec -n 2 python benchmarks/step.py [CASE ...] [--list] [--quick] [--repetitions N]
                                           [--json PATH] [--plot PATH]

Each case is a few peers that run in one job and take turns; a row shows the medians of one of ours
and of what it is held against, over at least 9 repetitions, each of the slowest rank. The last
column is the limit for ours: a multiple of the other's time, or a time. It is printed for some
numbers of ranks, and a figure above it is marked; that is not an error, as on a busy machine it
means nothing. The cases stand in ``step_cases.py``.

Every rank has one thread: of BLAS, of torch, and of mpistrat unless MPISTRAT_THREADS says more;
torch then gets as many. What is missing (torch, an example, its data) is said, and left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MPISTRAT_THREADS"):
    os.environ.setdefault(_name, "1")  # before NumPy is imported

import step_cases  # noqa: E402
from common import WARM_UPS, arguments, introduced, median, turns, write_json  # noqa: E402
from mpi4py import MPI  # noqa: E402
from pictures import Panel, bars  # noqa: E402

REPETITIONS = 9

HEADER = f"{'case':12} {'ours':22} {'ms':>9}  {'beside':24} {'ms':>9} {'ratio':>7}  at most"


class Row(NamedTuple):
    """A line of the table."""

    case: str
    what: str
    ms: float
    beside: str
    beside_ms: float
    wanted: str
    holds: bool | None

    def __str__(self) -> str:
        ratio = f"{self.ms / self.beside_ms:7.2f}" if self.beside else " " * 7
        other = f"{self.beside_ms:9.3f}" if self.beside else " " * 9
        mark = "" if self.holds is not False else "   not reached"
        return (
            f"{self.case:12} {self.what:22} {self.ms:9.3f}  {self.beside:24} {other} {ratio}  "
            f"{self.wanted}{mark}"
        )


def medians(
    comm: MPI.Intracomm, peers: dict[str, step_cases.Clock], repetitions: int
) -> dict[str, float]:
    """Return each peer's median of the slowest rank, in ms. Collective.

    Raises:
      ArithmeticError: On every rank, if a result was wrong on some rank.
    """
    times: dict[str, list[float]] = {name: [] for name in peers}
    wrong: set[str] = set()
    for number in range(WARM_UPS + repetitions):
        for name in turns(peers, number):
            seconds, right = peers[name](number)
            if number >= WARM_UPS:
                times[name].append(seconds)
            wrong.update([] if right else [name])
    wrong = set().union(*comm.allgather(wrong))  # to raise at once would leave others waiting
    if wrong:
        raise ArithmeticError(f"wrong results on some rank: {', '.join(sorted(wrong))}")
    return {name: 1e3 * median(comm, seconds) for name, seconds in times.items()}


def rows_of(
    name: str, case: step_cases.Case, ms: dict[str, float], job: step_cases.Job
) -> list[Row]:
    """Return the lines of one case."""
    found = []
    for figure in case.figures:
        if figure.what not in ms or figure.beside not in (*ms, ""):
            continue
        mine, other = ms[figure.what], ms.get(figure.beside, 0.0)
        wanted = not job.quick and (figure.at is None or job.size in figure.at)
        limit = figure.limit if wanted else None
        holds = None if limit is None else mine <= limit.of(other)
        found.append(Row(name, figure.what, mine, figure.beside, other, str(limit or ""), holds))
    return found


def measured(job: step_cases.Job, name: str, repetitions: int) -> list[Row]:
    """Return the lines of one case, or none if it says why not. Collective."""
    try:
        case = step_cases.CASES[name](job)
    except step_cases.Absent as absent:
        job.say(f"{name:12} left out: {absent}")
        return []
    for missing in case.absent:
        job.say(f"{name:12} without {missing}")
    ms = case.measure(lambda peers: medians(job.comm, peers, repetitions))
    return rows_of(name, case, ms, job)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, "small arrays, few repetitions")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="which; all, if none is named")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="at least 9")
    chosen = parser.parse_args(argv)
    unknown = set(chosen.cases) - set(step_cases.CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; see --list")
    if chosen.repetitions < REPETITIONS and not chosen.quick:
        parser.error(f"medians of fewer than {REPETITIONS} say little")
    comm = MPI.COMM_WORLD.Dup()
    if chosen.list:
        if comm.rank == 0:
            print("\n".join(f"{n:12} {c.__doc__}" for n, c in step_cases.CASES.items()))
        return 0
    job = step_cases.Job(comm, chosen.quick)
    known = introduced(comm, HEADER)
    rows: list[Row] = []
    for name in dict.fromkeys(chosen.cases or step_cases.CASES):
        found = measured(job, name, 3 if chosen.quick else chosen.repetitions)
        for row in found:
            job.say(str(row))
        rows += found
    if not rows:
        job.say("nothing was measured")
        return 1
    if comm.rank == 0:
        write_json(chosen.json, {**known, "rows": [row._asdict() for row in rows]})
        draw(chosen.plot, known, rows)
    return 0


def draw(path: str | None, known: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw one panel for each case."""
    panels = []
    for name in dict.fromkeys(row.case for row in rows):
        values: dict[str, float] = {}
        for row in (row for row in rows if row.case == name):
            values[row.what] = row.ms
            values.update({row.beside: row.beside_ms} if row.beside else {})
        panels.append(Panel(name, "MB" if name == "memory" else "ms", values))
    bars(path, known, "Parts of a step", panels, {row.what for row in rows})


if __name__ == "__main__":
    sys.exit(main())
