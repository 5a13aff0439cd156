"""How much of an all-reduce between nodes is hidden behind a computation?

    mpiexec -n 2 -ppn 1 -hosts a,b python benchmarks/overlap.py [--quick] [--json PATH]

On one node nothing can be hidden; ``--nodes N`` takes so many parts of the ranks as nodes, to see
that it works. Each round does four things in turn: the communication alone (``all_reduce_start``
and ``wait`` at once), a computation alone that takes about as long (products of matrices, in the
rank's own cache, on one thread), both (the computation between the two), and ``all_reduce``. A
time is that of the slowest rank; what is shown is the shortest of all rounds, since whatever else
the machine does only makes them longer.

Columns: ``bytes`` of each rank; ``where`` the arrays are; ``comm``, ``compute``, ``both`` and
``blocking``, in ms; ``cpu`` is the time of a core that the communication alone takes, so where all
cores are in use no more than 1 - cpu / comm of it can be hidden; ``hidden`` is the part of the
communication that takes no time of its own, (comm + compute - both) / the shorter of the
two; ``step us`` and ``open us`` are the shortest ``all_reduce`` of a number, without and with a
handle open.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import arguments, print_introduction, write_json
from mpi4py import MPI

import mpistrat

SIZES = (2**20, 2**22, 2**24)  # numbers of float32: 4 to 64 MiB
QUICK = (2**16,)
ROUNDS = 15
SIDE = 96  # of a matrix: three of them fit a cache of 128 KiB
HEADER = (
    f"{'bytes':>10} {'where':8} {'comm ms':>8} {'cpu':>6} {'compute':>8} {'both':>8} "
    f"{'blocking':>8} {'hidden':>6} {'step us':>8} {'open us':>8}"
)


class Work:
    """A computation of so many products."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(1).random((SIDE, SIDE), np.float32)
        self._product = np.empty_like(self._matrix)
        self.count = 1

    def __call__(self) -> None:
        for _ in range(self.count):
            np.matmul(self._matrix, self._matrix, out=self._product)

    def lasts(self, comm: MPI.Intracomm, seconds: float) -> None:
        """Take about so long. Collective: all ranks do as much."""
        self.count = 200
        best = min(clocked(comm, self) for _ in range(20))
        self.count = comm.bcast(max(1, round(self.count * seconds / best)))


def clocked(comm: MPI.Intracomm, call: Callable[[], Any]) -> float:
    """Return the seconds of the slowest rank. Collective."""
    comm.Barrier()
    begin = time.perf_counter()
    call()
    return max(comm.allgather(time.perf_counter() - begin))


def case(
    comm: MPI.Intracomm, values: list[np.ndarray], out: list[np.ndarray], rounds: int
) -> dict[str, float]:
    """Return the shortest times, in seconds; to be called in replica code. Collective."""
    ctx, work = mpistrat.get_replica_context(), Work()
    steps: dict[str, list[float]] = {"step": [], "open": []}

    def start() -> Any:
        return ctx.all_reduce_start("MEAN", values, out=out)

    def number(times: list[float]) -> None:
        for _ in range(20):
            begin = time.perf_counter()
            ctx.all_reduce("SUM", 1.0)
            times.append(time.perf_counter() - begin)

    def communicate_and_compute() -> None:
        handle = start()
        work()
        handle.wait()

    def communicate() -> None:
        begin = time.process_time()
        start().wait()
        times["cpu"].append(time.process_time() - begin)

    calls = {
        "comm": communicate,
        "compute": work,
        "both": communicate_and_compute,
        "blocking": lambda: ctx.all_reduce("MEAN", values, out=out),
    }
    times: dict[str, list[float]] = {name: [] for name in (*calls, "cpu")}
    work.lasts(comm, min(clocked(comm, calls["comm"]) for _ in range(3)))
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clocked(comm, call))
        number(steps["step"])
        handle = start()
        number(steps["open"])
        handle.wait()
    if not all((array == (comm.size + 1) / 2).all() for array in out):
        raise SystemExit("wrong results")
    return {name: min(seconds) for name, seconds in (times | steps).items()}


def rows(comm: MPI.Intracomm, strategy: Any, sizes: Any, rounds: int) -> list[dict[str, Any]]:
    all_rows = []
    for size in sizes:
        ordinary = [np.empty(size, np.float32)]
        for where, arrays in (("ordinary", ordinary), ("buffers", strategy.buffers(ordinary))):
            # The mean of equal values: so the values in place do not change.
            arrays[0].fill((comm.size + 1) / 2)
            out = arrays if where == "buffers" else [np.empty_like(ordinary[0])]
            times = strategy.run(case, (comm, arrays, out, rounds))
            times = strategy.experimental_local_results(times)[0]
            saved = times["comm"] + times["compute"] - times["both"]
            row = {"bytes": 4 * size, "where": where, "rounds": rounds}
            row |= {f"{name}_s": seconds for name, seconds in times.items()}
            row["hidden"] = saved / min(times["comm"], times["compute"])
            all_rows.append(row)
            if comm.rank == 0:
                print(line(row), flush=True)
    return all_rows


def line(row: dict[str, Any]) -> str:
    spent = " ".join(f"{1e3 * row[f'{name}_s']:8.2f}" for name in ("compute", "both"))
    return (
        f"{row['bytes']:10d} {row['where']:8} {1e3 * row['comm_s']:8.2f} "
        f"{1e3 * row['cpu_s']:6.2f} {spent} {1e3 * row['blocking_s']:8.2f} "
        f"{row['hidden']:6.2f} {1e6 * row['step_s']:8.1f} {1e6 * row['open_s']:8.1f}"
    )


def main() -> int:
    parser = arguments(__doc__, "one small size, few rounds")
    parser.add_argument("--nodes", type=int, default=0, help="take the ranks as so many nodes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each thing is done")
    parser.add_argument("--sizes", help="numbers of float32, with commas between")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    if options.nodes:
        os.environ["MPISTRAT_RANKS_PER_NODE"] = str(max(1, comm.size // options.nodes))
    sizes = QUICK if options.quick else SIZES
    if options.sizes:
        sizes = tuple(map(int, options.sizes.split(",")))
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    facts = print_introduction(comm, HEADER)
    all_rows = rows(comm, strategy, sizes, 3 if options.quick else options.rounds)
    if comm.rank == 0:
        write_json(options.json, {**facts, "rows": all_rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
