"""How long do the parts of a training step take, beside the least that they could?

    mpiexec -n 2 python benchmarks/step.py [CASE ...] [--list] [--quick] [--repetitions N]
                                           [--json PATH] [--plot PATH]

Each case is a few peers that run in one job and take turns; a row shows the medians of one of ours
and of its reference, over at least 9 repetitions, each of the slowest rank. The last column is the
limit for ours: a multiple of the other's time, or a time. It is printed for some numbers of ranks,
and a figure above it is marked; that is not an error, as on a busy machine it means nothing. The
cases are in ``step_cases.py``.

Every rank has one thread: of BLAS, of torch, and of mpistrat unless MPISTRAT_THREADS says more;
torch then gets as many. Cases that need something missing (torch, an example, its data) are left
out with a message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MPISTRAT_THREADS"):
    os.environ.setdefault(_name, "1")  # before NumPy is imported

import step_cases  # noqa: E402
from common import WARM_UPS, arguments, median, print_introduction, turns, write_json  # noqa: E402
from mpi4py import MPI  # noqa: E402
from pictures import Panel, bars  # noqa: E402

REPETITIONS = 9

HEADER = f"{'case':12} {'ours':22} {'ms':>9}  {'beside':24} {'ms':>9} {'ratio':>7}  at most"


class Row(NamedTuple):
    """A line of the table."""

    case: str
    peer: str
    ms: float
    reference: str
    reference_ms: float
    limit: str
    is_reached: bool | None

    def __str__(self) -> str:
        ratio = f"{self.ms / self.reference_ms:7.2f}" if self.reference else " " * 7
        other = f"{self.reference_ms:9.3f}" if self.reference else " " * 9
        mark = "" if self.is_reached is not False else "   not reached"
        return (
            f"{self.case:12} {self.peer:22} {self.ms:9.3f}  {self.reference:24} {other} {ratio}  "
            f"{self.limit}{mark}"
        )


def medians(
    comm: MPI.Intracomm, peers: dict[str, step_cases.Clock], repetitions: int
) -> dict[str, float]:
    """Return each peer's median of the slowest rank, in ms. Collective.

    Raises:
      ArithmeticError: On every rank, if a result was wrong on some rank.
    """
    times: dict[str, list[float]] = {name: [] for name in peers}
    wrong_peers: set[str] = set()
    for number in range(WARM_UPS + repetitions):
        for name in turns(peers, number):
            seconds, right = peers[name](number)
            if number >= WARM_UPS:
                times[name].append(seconds)
            wrong_peers.update([] if right else [name])
    wrong_peers = set().union(
        *comm.allgather(wrong_peers)
    )  # to raise at once would leave others waiting
    if wrong_peers:
        raise ArithmeticError(f"wrong results on some rank: {', '.join(sorted(wrong_peers))}")
    return {name: 1e3 * median(comm, seconds) for name, seconds in times.items()}


def rows_of(
    name: str, case: step_cases.Case, ms: dict[str, float], job: step_cases.Job
) -> list[Row]:
    """Return the lines of one case."""
    rows = []
    for figure in case.figures:
        if figure.peer not in ms or figure.reference not in (*ms, ""):
            continue
        peer_ms, reference_ms = ms[figure.peer], ms.get(figure.reference, 0.0)
        has_limit = not job.quick and (figure.ranks is None or job.size in figure.ranks)
        limit = figure.limit if has_limit else None
        rows.append(
            Row(
                case=name,
                peer=figure.peer,
                ms=peer_ms,
                reference=figure.reference,
                reference_ms=reference_ms,
                limit=str(limit or ""),
                is_reached=None if limit is None else peer_ms <= limit.bound_ms(reference_ms),
            )
        )
    return rows


def measured(job: step_cases.Job, name: str, repetitions: int) -> list[Row]:
    """Return the lines of one case, or none if it says why not. Collective."""
    try:
        case = step_cases.CASES[name](job)
    except step_cases.Absent as absent:
        job.print_on_rank0(f"{name:12} left out: {absent}")
        return []
    for missing in case.absent:
        job.print_on_rank0(f"{name:12} without {missing}")
    ms = case.measure(lambda peers: medians(job.comm, peers, repetitions))
    return rows_of(name, case, ms, job)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, "small arrays, few repetitions")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="which; all, if none is named")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="at least 9")
    options = parser.parse_args(argv)
    unknown = set(options.cases) - set(step_cases.CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; see --list")
    if options.repetitions < REPETITIONS and not options.quick:
        parser.error(f"medians of fewer than {REPETITIONS} say little")
    comm = MPI.COMM_WORLD.Dup()
    if options.list:
        if comm.rank == 0:
            print("\n".join(f"{n:12} {c.__doc__}" for n, c in step_cases.CASES.items()))
        return 0
    job = step_cases.Job(comm, options.quick)
    facts = print_introduction(comm, HEADER)
    rows: list[Row] = []
    for name in dict.fromkeys(options.cases or step_cases.CASES):
        case_rows = measured(job, name, 3 if options.quick else options.repetitions)
        for row in case_rows:
            job.print_on_rank0(str(row))
        rows += case_rows
    if not rows:
        job.print_on_rank0("nothing was measured")
        return 1
    if comm.rank == 0:
        write_json(options.json, {**facts, "rows": [row._asdict() for row in rows]})
        draw(options.plot, facts, rows)
    return 0


def draw(path: str | None, facts: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw one panel for each case."""
    panels = []
    for name in dict.fromkeys(row.case for row in rows):
        values: dict[str, float] = {}
        for row in (row for row in rows if row.case == name):
            values[row.peer] = row.ms
            values.update({row.reference: row.reference_ms} if row.reference else {})
        panels.append(Panel(name, "MB" if name == "memory" else "ms", values))
    bars(path, facts, "Parts of a step", panels, {row.peer for row in rows})


if __name__ == "__main__":
    sys.exit(main())
