"""How long does `ctx.all_reduce` take beside mpi4py's `Allreduce`, from 4 bytes to 64 MiB?

    mpiexec -n 2 python benchmarks/all_reduce.py [--quick] [--json PATH] [--plot PATH]

Both run in one job, taking turns, and fold float32 by SUM. ``ours`` is the public call in replica
code with every guard on; it returns a fresh array. ``raw`` reduces into a buffer that is there
already, on a communicator of its own. Every repetition writes new numbers to the send buffer, waits
for all ranks, and is timed on each; its time is that of the slowest rank. A row shows the median.

Columns: ``alg GB/s`` is bytes / time of ours; ``bus GB/s`` is that times 2 (n - 1) / n, the bytes
that each of n ranks has to send or receive whatever the algorithm, and so comparable between n.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import mpistrat

SIZES = tuple(4**k for k in range(1, 14))  # 4 B to 64 MiB
BUDGET = 1.5  # seconds for one size and one peer, from which the number of repetitions follows
MOST, LEAST = 1000, 7
WARM_UPS = 3


class Row(NamedTuple):
    """One size; times are medians over repetitions of the slowest rank, in microseconds."""

    bytes: int
    path: str
    repetitions: int
    raw_us: float
    ours_us: float
    ratio: float
    alg_gbps: float
    bus_gbps: float


Call = Callable[[np.ndarray], np.ndarray]


def slowest(comm: MPI.Intracomm, seconds: float) -> float:
    return float(comm.allreduce(seconds, op=MPI.MAX))


def timed(comm: MPI.Intracomm, call: Call, send: np.ndarray, number: int) -> float:
    """Return this rank's seconds for one call on fresh numbers; infinity if the result is wrong."""
    send.fill(comm.rank + number)
    comm.Barrier()
    begin = MPI.Wtime()
    total = call(send)
    seconds = MPI.Wtime() - begin
    want = sum(rank + number for rank in range(comm.size))
    # To raise here would leave the other ranks waiting; infinity reaches them with the times.
    return seconds if total[0] == want and total[-1] == want else math.inf


def measure(comm: MPI.Intracomm, peers: dict[str, Call], nbytes: int, budget: float) -> Any:
    """Return the repetitions of one size and each peer's median time in seconds."""
    send = np.empty(nbytes // 4, np.float32)
    last = 0.0
    for number in range(WARM_UPS):
        last = sum(timed(comm, call, send, number) for call in peers.values())
    # From the slowest rank's time, so that every rank counts alike.
    wanted = math.ceil(len(peers) * budget / max(slowest(comm, last), 1e-9))
    repetitions = min(max(wanted, LEAST), MOST)
    mine: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(repetitions):
        # The peers take turns, and take turns in beginning: what disturbs one disturbs the others.
        names = list(peers) if number % 2 else list(peers)[::-1]
        for name in names:
            mine[name].append(timed(comm, peers[name], send, number % 64))
    medians = {}
    for name, seconds in mine.items():
        worst = np.empty(repetitions)
        comm.Allreduce(np.array(seconds), worst, op=MPI.MAX)
        if np.isinf(worst).any():
            raise ArithmeticError(f"{name} gave a wrong sum of {nbytes} bytes on some rank")
        medians[name] = statistics.median(worst.tolist())
    return repetitions, medians


def rows(comm: MPI.Intracomm, strategy: Any, context: Any, sizes: Any, budget: float) -> list[Row]:
    found = []
    for nbytes in sizes:
        recv = np.empty(nbytes // 4, np.float32)

        def raw(send: np.ndarray, recv: np.ndarray = recv) -> np.ndarray:
            comm.Allreduce(send, recv, op=MPI.SUM)
            return recv

        peers: dict[str, Call] = {"raw": raw, "ours": lambda send: context.all_reduce("SUM", send)}
        repetitions, medians = measure(comm, peers, nbytes, budget)
        raw_s, ours_s = medians["raw"], medians["ours"]
        alg = nbytes / ours_s / 1e9
        path = "small" if strategy.parts.lockstep.fits(nbytes) else "native"
        bus = alg * 2 * (comm.size - 1) / comm.size
        us = (raw_s * 1e6, ours_s * 1e6)
        found.append(Row(nbytes, path, repetitions, *us, ours_s / raw_s, alg, bus))
        if comm.rank == 0:
            print(line(found[-1]), flush=True)
    return found


HEADER = (
    f"{'bytes':>10} {'path':>6} {'reps':>5} {'raw us':>11} {'ours us':>11} {'ratio':>6} "
    f"{'alg GB/s':>9} {'bus GB/s':>9}"
)


def line(row: Row) -> str:
    return (
        f"{row.bytes:10d} {row.path:>6} {row.repetitions:5d} {row.raw_us:11.1f} "
        f"{row.ours_us:11.1f} {row.ratio:6.2f} {row.alg_gbps:9.3f} {row.bus_gbps:9.3f}"
    )


def paths_line(found: list[Row]) -> str:
    """Say which way each size went."""
    small = [row.bytes for row in found if row.path == "small"]
    native = [row.bytes for row in found if row.path == "native"]
    parts = []
    if small:
        parts.append(f"up to {max(small)} bytes rode in the proof's frame (small)")
    if native:
        parts.append(f"from {min(native)} bytes took the proof and MPI_Allreduce (native)")
    return "paths: " + "; ".join(parts)


def facts(comm: MPI.Intracomm) -> dict[str, Any]:
    """Return what a reader must know to compare these numbers with others. Collective."""
    hosts = sorted(set(comm.allgather(MPI.Get_processor_name())))
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        text.partition(":")[2].strip()
        for text in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
        if text.startswith("model name")
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {
        "mpi": MPI.Get_library_version().strip("\0\n ").splitlines()[0],
        "ranks": comm.size,
        "hosts": len(hosts),
        "cores": cores,
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "system": platform.platform(),
        "load": load,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpistrat": mpistrat.__version__,
    }


def print_facts(known: dict[str, Any], header: str = HEADER) -> None:
    print(f"MPI     {known['mpi']}")
    print(f"ranks   {known['ranks']} on {known['hosts']} host(s) with {known['cores']} cores")
    print(f"host    {known['cpu']}, {known['system']}, load {known['load']}")
    print(f"with    Python {known['python']}, NumPy {known['numpy']}, mpistrat {known['mpistrat']}")
    if known["hosts"] == 1 and known["ranks"] > known["cores"]:
        print("note    more ranks than cores: times are those of the scheduler")
    print(f"\n{header}")


def plot(known: dict[str, Any], found: list[Row], path: str) -> None:
    from matplotlib.figure import Figure

    sizes = [row.bytes for row in found]
    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    library = " ".join(known["mpi"].split(",")[0].replace("Version:", "").split())
    figure.suptitle(f"All-reduce of float32 on {known['ranks']} ranks, {library}")
    left, right = figure.subplots(1, 2)
    bus = 2 * (known["ranks"] - 1) / known["ranks"] / 1e3  # bytes per us to GB/s
    for label, times, color in (
        ("mpi4py Allreduce", [row.raw_us for row in found], "C1"),
        ("ctx.all_reduce", [row.ours_us for row in found], "C0"),
    ):
        style = {"color": color, "label": label, "marker": "o", "markersize": 4}
        left.loglog(sizes, times, **style)
        speeds = [bus * size / time for size, time in zip(sizes, times, strict=True)]
        right.semilogx(sizes, speeds, **style)
    left.set(title="Time", ylabel="median time of the slowest rank (us)")
    right.set(title="Bus bandwidth", ylabel="GB/s")
    small = [row.bytes for row in found if row.path == "small"]
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes[::2], [short(size) for size in sizes[::2]])
        panel.minorticks_off()
        panel.set_xlabel("size of the array (bytes)")
        panel.grid(alpha=0.3)
        if small:
            panel.axvspan(sizes[0], max(small), color="C0", alpha=0.1, label="rides in the proof")
        panel.legend(loc="upper left")
    figure.savefig(path)


def short(size: int) -> str:
    for unit, name in ((2**20, " Mi"), (2**10, " Ki")):
        if size >= unit:
            return f"{size // unit}{name}"
    return str(size)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every other size, in seconds")
    parser.add_argument("--json", metavar="PATH", help="where the numbers go")
    parser.add_argument("--plot", metavar="PATH", help="where the picture goes")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    # A communicator of its own: the measuring must not meet the measured.
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MirroredStrategy()
    known = facts(comm)
    if comm.rank == 0:
        print_facts(known)
    sizes = SIZES[::2] if chosen.quick else SIZES
    found: list[Row] = []

    def program() -> None:
        budget = BUDGET / 10 if chosen.quick else BUDGET
        found.extend(rows(comm, strategy, mpistrat.get_replica_context(), sizes, budget))

    strategy.run(program)
    if comm.rank == 0:
        print(f"\n{paths_line(found)}")
        if chosen.json:
            data = {**known, "dtype": "float32", "op": "SUM", "rows": [r._asdict() for r in found]}
            Path(chosen.json).write_text(json.dumps(data, indent=2) + "\n")
        if chosen.plot:
            plot(known, found, chosen.plot)
    comm.Free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
