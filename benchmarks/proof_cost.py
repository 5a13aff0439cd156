"""What does the handshake cost, beside the same call without it?

    mpiexec -n 2 python benchmarks/proof_cost.py [--quick] [--json PATH] [--plot PATH] [--check]

``proved`` is the public ``ctx.all_reduce`` in replica code, every guard on. ``bare`` is the same
public call on a strategy whose collectives move their payload and prove nothing: no frame, no
digest, no board, no look at thread and process. ``raw`` is mpi4py's ``Allreduce`` of the same bytes
into a buffer that is there already. All three run in one job and take turns, in blocks of calls;
a block's time is that of the slowest rank, and a row shows the median over blocks.

``nan`` is ``proved`` with ``MPISTRAT_NAN=report``, which looks at every number before it leaves.
Last comes the time of the preflight, which compares versions and options of all ranks at start.

``--check`` fails if the handshake adds more than 5 us to a number, or more than 5 % to 1 MB.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import arguments, introduced, median, turns, write_json
from mpi4py import MPI
from pictures import Panel, bars

import mpistrat
from mpistrat.collectives.calls import Calls
from mpistrat.collectives.reducer import Reducer
from mpistrat.comm.mpi import MPIComm
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.strategy import Strategy
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.startup import preflight

BLOCKS = 60
PEERS = ("raw", "bare", "proved", "nan")
HEADER = "case           raw us    bare us  proved us   added us   added %   x raw    nan us"
CASES = {
    "a number": (lambda: np.float64(1.5), 400),
    "8 numbers": (lambda: np.ones(8), 400),
    "4 KiB": (lambda: np.ones(512), 200),
    "64 KiB": (lambda: np.ones(8192), 100),
    "1 MB": (lambda: np.ones(125_000), 10),
    "8 MB": (lambda: np.ones(1_000_000), 3),
}


class Bare:
    """Stands where the handshake stands, and lets every call pass unseen."""

    def __init__(self, lockstep: Lockstep, comm: MPIComm):
        self.session, self.options, self.comm = lockstep.session, lockstep.options, comm
        self.frames, self.order, self.received = True, lockstep.order, lockstep.received
        self.hooks, self.state = lockstep.hooks, lockstep.state
        self._shared: dict[str, Any] = {}

    def fits(self, nbytes: int) -> bool:
        """Nothing rides where there is no frame."""
        return nbytes == 0

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what reducers have together; those of the handshake have theirs."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def ride(self, call: str, digest: bytes, payload: bytes) -> None:
        """Wait for all ranks where the handshake would have, and move nothing."""
        self.session.calls += 1  # by which shared rows take turns
        self.comm.barrier()


class BarePlan:
    """A small array without the handshake: two copies and ``Allreduce``."""

    def __init__(self, comm: MPIComm, like: Any):
        self.comm, self.lone = comm, not isinstance(like, np.ndarray)
        self.send = np.array(like, ndmin=1)

    def one(self, value: Any) -> Any:
        self.send[...] = value
        total = np.empty_like(self.send)
        self.comm.allreduce(self.send, total, "SUM")
        return total[0] if self.lone else total


def bare_strategy(comm: MPI.Intracomm) -> Strategy:
    """Return a strategy that proves nothing once its replicas have begun to run."""
    own = mpistrat.MirroredStrategy(comm=comm).replicas
    reducer = Reducer(Bare(own.lockstep, MPIComm(comm)))  # type: ignore[arg-type]  # stands in for it
    return Strategy(ReplicaGroup(own.view, own.lockstep, Calls(reducer), reducer, own.regroup))


def watchful_strategy(comm: MPI.Intracomm) -> Strategy:
    """Return a strategy that looks for NaN; options are read once for each communicator."""
    os.environ["MPISTRAT_NAN"] = "report"
    try:
        return mpistrat.MirroredStrategy(comm=comm)
    finally:
        del os.environ["MPISTRAT_NAN"]


def contestants(comm: MPI.Intracomm, bare: Strategy) -> dict[str, Any]:
    """Return for each peer a function from a value to its call."""
    inner = MPIComm(comm.Dup())

    def ours(value: Any) -> Callable[[], Any]:
        return lambda: mpistrat.get_replica_context().all_reduce("SUM", value)

    def unproved(value: Any) -> Callable[[], Any]:
        key = ("SUM", value.dtype, value.shape) if value.ndim else ("SUM", type(value))
        if value.nbytes <= 200:
            bare.replicas.calls._lone[key] = BarePlan(inner, value)
        return ours(value)

    def raw(value: Any) -> Callable[[], Any]:
        send = np.array(value, ndmin=1)
        recv = np.empty_like(send)
        return lambda: comm.Allreduce(send, recv)

    return {"raw": raw, "bare": unproved, "proved": ours, "nan": ours}


def block(comm: MPI.Intracomm, run: Callable[..., Any], call: Callable[[], Any], n: int) -> float:
    """Return this rank's seconds per call over `n` calls."""

    def timed() -> float:
        for _ in range(3):
            call()
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(n):
            call()
        return (time.perf_counter() - begin) / n

    return run(timed)


def measure(
    comm: MPI.Intracomm, strategies: dict[str, Strategy], name: str, blocks: int
) -> dict[str, Any]:
    """Return one row: medians in us, and what the handshake adds. Collective."""
    make, calls = CASES[name]
    value = make()
    runs = {"raw": lambda f: f()}
    runs |= {peer: inside(strategy) for peer, strategy in strategies.items()}
    made = {peer: build(value) for peer, build in contestants(comm, strategies["bare"]).items()}
    times: dict[str, list[float]] = {peer: [] for peer in made}
    for number in range(blocks):
        for peer in turns(made, number):
            times[peer].append(block(comm, runs[peer], made[peer], calls))
    row: dict[str, Any] = {"case": name, "bytes": int(value.nbytes)}
    for peer, seconds in times.items():
        row[f"{peer}_us"] = 1e6 * median(comm, seconds)
    row["added_us"] = row["proved_us"] - row["bare_us"]
    row["added_percent"] = 100 * row["added_us"] / row["bare_us"]
    row["times_raw"] = row["proved_us"] / row["raw_us"]
    return row


def preflight_ms(comm: MPI.Intracomm, strategy: Strategy) -> float:
    """Return the median time of the preflight in ms. Collective."""
    times = []
    for _ in range(20):
        comm.Barrier()
        begin = time.perf_counter()
        preflight(strategy.replicas.lockstep)
        times.append(time.perf_counter() - begin)
    return 1e3 * median(comm, times)


def inside(strategy: Strategy) -> Callable[[Callable[[], float]], float]:
    """Return what runs a function in replica code of `strategy`, and returns its own number."""

    def run(timed: Callable[[], float]) -> float:
        seconds: list[float] = []
        strategy.run(lambda: seconds.append(timed()))
        return seconds[0]

    return run


def main() -> int:
    parser = arguments(__doc__, "few blocks")
    parser.add_argument("--check", action="store_true", help="fail above 5 us, or 5 % at 1 MB")
    chosen = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    strategies = {
        "bare": bare_strategy(MPI.COMM_WORLD.Dup()),
        "proved": mpistrat.MirroredStrategy(),
        "nan": watchful_strategy(MPI.COMM_WORLD.Dup()),
    }
    known = introduced(comm, HEADER)
    rows = []
    for name in CASES:
        row = measure(comm, strategies, name, 3 if chosen.quick else BLOCKS)
        rows.append(row)
        if comm.rank == 0:
            print(
                f"{name:10} {row['raw_us']:10.2f} {row['bare_us']:10.2f} {row['proved_us']:10.2f} "
                f"{row['added_us']:10.2f} {row['added_percent']:9.1f} {row['times_raw']:7.2f} "
                f"{row['nan_us']:9.2f}",
                flush=True,
            )
    at_start = preflight_ms(comm, strategies["proved"])
    if comm.rank == 0:
        print(f"\npreflight: {at_start:.2f} ms")
    if comm.rank == 0:
        write_json(chosen.json, {**known, "rows": rows, "preflight_ms": at_start})
        panels = [Panel(r["case"], "us", {peer: r[f"{peer}_us"] for peer in PEERS}) for r in rows]
        bars(chosen.plot, known, "The handshake", panels, ("proved", "nan"))
    by = {row["case"]: row for row in rows}
    good = by["a number"]["added_us"] <= 5 and by["1 MB"]["added_percent"] <= 5
    # Rank 0 decides, so that all leave alike.
    return int(chosen.check and not comm.bcast(good))


if __name__ == "__main__":
    sys.exit(main())
