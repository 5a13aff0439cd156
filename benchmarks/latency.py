"""How long does one all-reduce take, from 4 bytes to 256 MiB, beside what else can do it?

    mpiexec -n 2 python benchmarks/latency.py [--quick] [--json PATH] [--plot PATH]

One float32 array is summed over all ranks. All peers run in one job and take turns; what they read
is written again before each repetition; a time is that of the slowest rank, and a row shows the
median. Results are checked. Our calls are the public ones, every guard on; the path that each takes
is looked at, and the benchmark fails if it is not the one that belongs to the size.

``fresh``         ``ctx.all_reduce("sum", a)``: a new array
``out=``          ``ctx.all_reduce("sum", a, out=b)``: ordinary arrays that are there already
``arena``         ``ctx.all_reduce("sum", g, out=g)`` on ``strategy.gradient_buffers``
``raw in place``  mpi4py, ``Allreduce(IN_PLACE, a)``
``raw into``      mpi4py, ``Allreduce(a, b)``
``gloo``          torch.distributed, in place; it, and the following, where they can be imported
``mpi4jax``       ``mpi4jax.allreduce`` under ``jax.jit``
``Horovod``       ``horovod.torch.allreduce_``, in place
``TensorFlow``    ``all_reduce`` of a MultiWorkerMirroredStrategy under ``tf.function``

The last two keep threads of their own, which slow the others down; so they are begun, and measured
one at a time, when the others are through.

Columns: ``algbw`` is bytes / time; ``busbw`` is that times 2 (n - 1) / n, the bytes that each of n
ranks has to send or receive whatever the algorithm, and so comparable between n. ``speed`` is the
time of the best raw way / this time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from common import (
    Peer,
    address,
    arguments,
    count_repetitions,
    expected,
    gloo,
    import_everywhere,
    measure,
    print_introduction,
    sums,
    take,
    write_json,
)
from mpi4py import MPI
from pictures import Panel, curves, points

import mpistrat

SIZES = tuple(4**k for k in range(1, 15))  # 4 B to 256 MiB
QUICK = SIZES[:11:2]  # to 4 MiB
BUDGET = 1.0  # seconds for one size and one peer, from which the number of repetitions follows
OURS = ("fresh", "out=", "arena")

HEADER = (
    f"{'bytes':>10} {'count':>9} {'dtype':>8} {'op':>4} {'way':13} {'path':9} {'reps':>5} "
    f"{'time us':>11} {'algbw GB/s':>10} {'busbw GB/s':>10} {'speed':>6}"
)
Arrays = tuple[np.ndarray, np.ndarray]
Make = Callable[[MPI.Intracomm, np.ndarray, np.ndarray], dict[str, Peer]]


class Case(NamedTuple):
    """The arrays that are summed, on how many ranks and how often."""

    nbytes: int
    size: int
    repetitions: int


def list_own_ways(
    comm: MPI.Intracomm, strategy: mpistrat.Strategy, buffer: np.ndarray, arrays: Arrays
) -> dict[str, Peer]:
    """Return our three ways; to be called in replica code."""
    reads, out = arrays
    ctx = mpistrat.get_replica_context()
    return {
        "fresh": Peer([reads], lambda: ctx.all_reduce("sum", reads), sums(comm, lambda a: [a])),
        "out=": Peer(
            [reads], lambda: ctx.all_reduce("sum", reads, out=out), sums(comm, lambda _: [out])
        ),
        "arena": Peer(
            [buffer],
            lambda: ctx.all_reduce("sum", buffer, out=buffer),
            sums(comm, lambda _: [buffer]),
        ),
    }


def raw(comm: MPI.Intracomm, reads: np.ndarray, out: np.ndarray) -> dict[str, Peer]:
    """Return the ways of a program with mpi4py."""
    return {
        "raw in place": Peer(
            [reads], lambda: comm.Allreduce(MPI.IN_PLACE, reads), sums(comm, lambda _: [reads])
        ),
        "raw into": Peer([reads], lambda: comm.Allreduce(reads, out), sums(comm, lambda _: [out])),
    }


def with_gloo(comm: MPI.Intracomm, reads: np.ndarray, out: np.ndarray) -> dict[str, Peer]:
    torch = gloo(comm)
    if torch is None:
        return {}
    tensor = torch.from_numpy(reads)
    call = lambda: torch.distributed.all_reduce(tensor)  # noqa: E731
    return {"gloo": Peer([reads], call, sums(comm, lambda _: [reads]))}


def with_horovod(comm: MPI.Intracomm, reads: np.ndarray, out: np.ndarray) -> dict[str, Peer]:
    torch, hvd = import_everywhere(comm, "torch"), import_everywhere(comm, "horovod.torch")
    if torch is None or hvd is None:
        return {}
    hvd.init()
    if hvd.size() != comm.size:
        raise SystemExit(f"Horovod was built without this MPI: it sees {hvd.size()} rank(s)")
    tensor, name = torch.from_numpy(reads), f"of {reads.nbytes}"
    call = lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name)  # noqa: E731
    return {"Horovod": Peer([reads], call, sums(comm, lambda _: [reads]))}


def with_mpi4jax(comm: MPI.Intracomm, reads: np.ndarray, out: np.ndarray) -> dict[str, Peer]:
    jax, mpi4jax = import_everywhere(comm, "jax"), import_everywhere(comm, "mpi4jax")
    if jax is None or mpi4jax is None:
        return {}
    inputs: list[Any] = []

    def reduce(array: Any) -> Any:
        results = mpi4jax.allreduce(array, op=MPI.SUM, comm=comm)
        return (
            results[0] if isinstance(results, tuple) else results
        )  # older ones return a token too

    compiled = jax.jit(reduce)

    def prepare() -> None:
        inputs[:] = [jax.numpy.array(reads).block_until_ready()]

    call = lambda: compiled(inputs[0]).block_until_ready()  # noqa: E731
    return {"mpi4jax": Peer([reads], call, sums(comm, lambda a: [a]), prepare)}


def tensorflow_cluster(comm: MPI.Intracomm) -> Any:
    """Return TensorFlow and its strategy over these ranks, or None. Collective."""
    # Before it is imported: it prints what it finds on the machine.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    tf = import_everywhere(comm, "tensorflow")
    if tf is None:
        return None
    cluster, task = (
        {"worker": comm.allgather(address(comm))},
        {"type": "worker", "index": comm.rank},
    )
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    return tf, tf.distribute.MultiWorkerMirroredStrategy()


def with_tensorflow(tf_cluster: Any) -> Make:
    def make(comm: MPI.Intracomm, reads: np.ndarray, out: np.ndarray) -> dict[str, Peer]:
        if tf_cluster is None:
            return {}
        tf, strategy = tf_cluster
        inputs: list[Any] = []

        @tf.function
        def step(tensor: Any) -> Any:
            def reduce_in_replica(value: Any) -> Any:
                # An identity, because an argument of a graph is on no device, and has to be on one.
                return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(value))

            return strategy.run(reduce_in_replica, (tensor,))

        def prepare() -> None:
            inputs[:] = [tf.constant(reads)]

        # As an array, for a result that nobody has looked at may not be there yet.
        call = lambda: step(inputs[0]).numpy()  # noqa: E731
        return {"TensorFlow": Peer([reads], call, sums(comm, lambda a: [a]), prepare)}

    return make


def take_paths(comm: MPI.Intracomm, strategy: mpistrat.Strategy, peers: dict[str, Peer]) -> Any:
    """Return the paths of our ways, which have been called before. Collective."""
    paths = {}
    for peer_name in OURS:
        nbytes = peers[peer_name].reads[0].nbytes
        want = expected(strategy, nbytes, peer_name == "arena")
        paths[peer_name] = take(comm, f"{peer_name}, {nbytes} B", peers[peer_name].call, want)
    return paths


def rows(
    comm: MPI.Intracomm, strategy: mpistrat.Strategy, buffer: np.ndarray, budget: float
) -> list[dict[str, Any]]:
    """Return one row for each way to sum arrays like `buffer`. Collective; in replica code."""
    arrays = np.zeros_like(buffer), np.zeros_like(buffer)
    peers = list_own_ways(comm, strategy, buffer, arrays)
    for make in (raw, with_gloo, with_mpi4jax):
        peers |= make(comm, *arrays)
    repetitions = count_repetitions(comm, peers, budget)
    paths = take_paths(comm, strategy, peers)
    median_seconds = measure(comm, peers, repetitions)
    best = min(median_seconds["raw in place"], median_seconds["raw into"])
    case = Case(buffer.nbytes, comm.size, repetitions)
    return [
        row(case, peer_name, seconds, best, paths.get(peer_name, ""))
        for peer_name, seconds in median_seconds.items()
    ]


def later_rows(
    comm: MPI.Intracomm, makers: list[Make], earlier_rows: list[dict[str, Any]], budget: float
) -> list[dict[str, Any]]:
    """Return rows of those that disturb others, for the sizes that others were measured at."""
    rows = []
    for nbytes in dict.fromkeys(row_before["bytes"] for row_before in earlier_rows):
        arrays = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
        raw_us = [
            earlier_row["time_us"]
            for earlier_row in earlier_rows
            if earlier_row["bytes"] == nbytes and earlier_row["way"].startswith("raw")
        ]
        for make in makers:
            peers = make(comm, *arrays)
            repetitions = count_repetitions(comm, peers, budget) if peers else 0
            case = Case(nbytes, comm.size, repetitions)
            for peer_name, seconds in measure(comm, peers, repetitions).items():
                rows.append(row(case, peer_name, seconds, min(raw_us) / 1e6))
    return rows


def row(
    case: Case, peer_name: str, seconds: float, best_seconds: float, path: str = ""
) -> dict[str, Any]:
    nbytes, size = case.nbytes, case.size
    return {
        "bytes": nbytes,
        "count": nbytes // 4,
        "dtype": "float32",
        "op": "sum",
        "way": peer_name,
        "path": path,
        "repetitions": case.repetitions,
        "time_us": seconds * 1e6,
        "algbw_gbps": nbytes / seconds / 1e9,
        "busbw_gbps": nbytes / seconds / 1e9 * 2 * (size - 1) / size,
        "speed": best_seconds / seconds,
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['bytes']:10d} {row['count']:9d} {row['dtype']:>8} {row['op']:>4} {row['way']:13} "
        f"{row['path']:9} {row['repetitions']:5d} {row['time_us']:11.1f} {row['algbw_gbps']:10.3f} "
        f"{row['busbw_gbps']:10.3f} {row['speed']:6.2f}"
    )


def plot(path: str | None, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    panels = [
        Panel("Time", "median time of the slowest rank, us", points(rows, "time_us")),
        Panel("Bus bandwidth", "GB/s", points(rows, "busbw_gbps")),
    ]
    curves(path, facts, "All-reduce of float32", panels, OURS)


def main() -> int:
    options = arguments(__doc__, "every other size to 4 MiB, few repetitions").parse_args()
    # A communicator of its own: the measuring must not meet the measured.
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MirroredStrategy()
    facts = print_introduction(comm, HEADER)
    all_rows: list[dict[str, Any]] = []
    budget = BUDGET / 20 if options.quick else BUDGET
    for nbytes in QUICK if options.quick else SIZES:
        buffer = strategy.gradient_buffers(np.empty(nbytes // 4, np.float32))

        def size(buffer: np.ndarray = buffer) -> None:
            all_rows.extend(rows(comm, strategy, buffer, budget))

        strategy.run(size)
        if comm.rank == 0:
            print("\n".join(line(row) for row in all_rows if row["bytes"] == nbytes), flush=True)
    late_makers = [with_horovod, with_tensorflow(tensorflow_cluster(comm))]
    late_rows = later_rows(comm, late_makers, all_rows, budget)
    all_rows += late_rows
    if comm.rank == 0:
        print("\n".join(map(line, late_rows)), flush=True)
        write_json(options.json, {**facts, "rows": all_rows})
        plot(options.plot, facts, all_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
