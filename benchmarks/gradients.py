"""How long do the gradients of real models take, beside what else can reduce them?

    mpiexec -n 2 python benchmarks/gradients.py [--quick] [--only NAME] [--json PATH] [--plot PATH]

Lists of float32 gradients: ResNet-50 (161 arrays, 102 MB), BERT-base (199, 438 MB), a small MLP (6,
0.9 MB) and 400 tiny arrays (64 numbers each). All peers run in one job and take turns; every array
is written again before each repetition; a time is that of the slowest rank, and a row shows the
median. Results are checked.

``arena``           ``ctx.all_reduce("sum", b, out=b)`` on ``strategy.gradient_buffers``
``arena mean``      the mean with a weight that is the same on all ranks, as of full batches
``arena uneven``    the mean with another weight on each rank
``out=``            ordinary arrays into ordinary arrays that are there already
``fresh``           ordinary arrays, results in new arrays
``raw in place``    mpi4py, one ``Allreduce(IN_PLACE, a)`` per array
``raw per array``   mpi4py, one ``Allreduce(a, b)`` per array
``raw flat``        mpi4py, one ``Allreduce`` in place of one flat array: nothing to pack
``raw packed``      mpi4py, pack, one ``Allreduce``, unpack
``gloo``            torch.distributed with gloo, in buckets of 25 MB, where torch can be imported
``copy``            one plain copy of the same bytes: no peer, but what memory can do
``own memory``      the loop of ``arena`` on as many bytes of each rank's own memory, without a word
                    to others: no peer either; faster than that ``arena`` cannot be

The path that each of our calls takes is looked at; the benchmark fails if it is not the one that
belongs to these bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from common import (
    Arrays,
    Peer,
    arguments,
    contains_result,
    expected,
    gloo,
    measure,
    print_introduction,
    sums,
    take,
    write_json,
)
from mpi4py import MPI
from pictures import Panel, bars

import mpistrat
from mpistrat.kernels.rows import reduce_rows

BUCKET = 25 * 2**20
REPETITIONS = 15
OURS = ("arena", "arena mean", "arena uneven", "out=", "fresh")


def resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of its parameters (He et al. 2015; the layout of torchvision)."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def bert_base() -> list[tuple[int, ...]]:
    """Return the shapes of its parameters (Devlin et al. 2018; the layout of its release)."""
    width, inner = 768, 3072
    shapes: list[tuple[int, ...]] = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(12):
        shapes += [(width, width), (width,)] * 4 + [(width,), (width,)]
        shapes += [(inner, width), (inner,), (width, inner), (width,), (width,), (width,)]
    return [*shapes, (width, width), (width,)]


MODELS: dict[str, list[tuple[int, ...]]] = {
    "ResNet-50": resnet50(),
    "BERT-base": bert_base(),
    "MLP": [(784, 256), (256,), (256, 128), (128,), (128, 10), (10,)],
    "400 tiny": [(64,)] * 400,
}


def like(shapes: list[tuple[int, ...]]) -> Arrays:
    return [np.zeros(shape, np.float32) for shape in shapes]


def list_own_ways(
    shapes: list[tuple[int, ...]], strategy: mpistrat.Strategy, buffers: Arrays, comm: MPI.Intracomm
) -> dict[str, Peer]:
    """Return our four ways; to be called in replica code."""
    ordinary, outs = like(shapes), like(shapes)
    ctx = mpistrat.get_replica_context()

    def is_mean(_: Any, number: int) -> bool:
        want = np.float32(sum(rank + number for rank in range(comm.size))) / np.float32(comm.size)
        return all(contains_result(b, want, number) for b in buffers)

    local_weight = 3 + comm.rank

    def is_uneven(_: Any, number: int) -> bool:
        weights = range(3, 3 + comm.size)
        total = sum((rank + number) * weight for rank, weight in enumerate(weights))
        return all(
            contains_result(b, np.float32(total) / np.float32(sum(weights)), number)
            for b in buffers
        )

    return {
        "arena": Peer(
            buffers,
            lambda: ctx.all_reduce("sum", buffers, out=buffers),
            sums(comm, lambda _: buffers),
        ),
        "arena mean": Peer(
            buffers, lambda: ctx.all_reduce("mean", buffers, weight=3, out=buffers), is_mean
        ),
        "arena uneven": Peer(
            buffers,
            lambda: ctx.all_reduce("mean", buffers, weight=local_weight, out=buffers),
            is_uneven,
        ),
        "out=": Peer(
            ordinary,
            lambda: ctx.all_reduce("sum", ordinary, out=outs),
            sums(comm, lambda _: outs),
        ),
        "fresh": Peer(
            ordinary, lambda: ctx.all_reduce("sum", ordinary), sums(comm, lambda found: found)
        ),
    }


def raw(shapes: list[tuple[int, ...]], comm: MPI.Intracomm) -> dict[str, Peer]:
    """Return the ways that a program with mpi4py has."""
    reads, outs = like(shapes), like(shapes)
    flat = np.zeros(sum(a.size for a in reads), np.float32)
    total = np.zeros_like(flat)

    def in_place() -> None:
        for array in reads:
            comm.Allreduce(MPI.IN_PLACE, array)

    def per_array() -> None:
        for array, out in zip(reads, outs, strict=True):
            comm.Allreduce(array, out)

    def all_flat() -> None:
        comm.Allreduce(MPI.IN_PLACE, flat)

    def packed() -> None:
        np.concatenate(reads, axis=None, out=flat)
        comm.Allreduce(flat, total)
        at = 0
        for out in outs:
            out.reshape(-1)[:] = total[at : at + out.size]
            at += out.size

    return {
        "raw in place": Peer(reads, in_place, sums(comm, lambda _: reads)),
        "raw per array": Peer(reads, per_array, sums(comm, lambda _: outs)),
        "raw flat": Peer([flat], all_flat, sums(comm, lambda _: [flat])),
        "raw packed": Peer(reads, packed, sums(comm, lambda _: outs)),
    }


def with_gloo(shapes: list[tuple[int, ...]], comm: MPI.Intracomm) -> dict[str, Peer]:
    """Return torch.distributed's way, or nothing where torch is not installed."""
    torch = gloo(comm)
    if torch is None:
        return {}
    reads = like(shapes)
    tensors = [torch.from_numpy(array) for array in reads]
    buckets: list[list[Any]] = [[]]
    for tensor in tensors:
        if sum(t.numel() * 4 for t in buckets[-1]) >= BUCKET:
            buckets.append([])
        buckets[-1].append(tensor)

    def call() -> None:
        for bucket in buckets:
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            torch.distributed.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    return {"gloo": Peer(reads, call, sums(comm, lambda _: reads))}


def own_memory(shapes: list[tuple[int, ...]], comm: MPI.Intracomm) -> dict[str, Peer]:
    """Return what reads and writes the bytes of an arena, with pages as large as there are."""
    size = -(-sum(int(np.prod(shape)) for shape in shapes) // comm.size)
    rows = np.zeros((comm.size, size), np.float32)

    def call() -> None:
        reduce_rows(np.add, rows, rows, 0, size)

    def right(_: Any, number: int) -> bool:
        return bool(rows[0, -1] == rows[-1, 0] == np.float32(comm.size * (comm.rank + number)))

    return {"own memory": Peer([*rows], call, right)}


def copying(shapes: list[tuple[int, ...]]) -> dict[str, Peer]:
    source = np.zeros(sum(int(np.prod(shape)) for shape in shapes), np.float32)
    target = np.zeros_like(source)
    call, same = (lambda: np.copyto(target, source)), lambda *_: bool(target[-1] == source[-1])
    return {"copy": Peer([source], call, same)}


def reduced(
    comm: MPI.Intracomm, strategy: mpistrat.Strategy, name: str, repetitions: int
) -> dict[str, Any]:
    """Return the medians of one model in ms, and the paths taken. Collective."""
    shapes = MODELS[name]
    nbytes = sum(int(np.prod(shape)) for shape in shapes) * 4
    buffers = strategy.gradient_buffers(like(shapes))
    seconds_of_peers: dict[str, float] = {}
    paths: dict[str, str] = {}

    def replica() -> None:
        peers = list_own_ways(shapes, strategy, buffers, comm)
        for peer_name in OURS:
            peers[peer_name].call()  # what is called first may have to make room
        for peer_name in OURS:
            want = expected(strategy, nbytes, peer_name.startswith("arena"))
            paths[peer_name] = take(comm, f"{name}, {peer_name}", peers[peer_name].call, want)
        peers |= {**raw(shapes, comm), **with_gloo(shapes, comm), **copying(shapes)}
        peers |= own_memory(shapes, comm)
        seconds_of_peers.update(measure(comm, peers, repetitions))

    strategy.run(replica)
    times = {peer: 1e3 * seconds for peer, seconds in seconds_of_peers.items()}
    return {"model": name, "arrays": len(shapes), "bytes": nbytes, "ms": times, "paths": paths}


def show(row: dict[str, Any]) -> None:
    times = row["ms"]
    best = min(ms for peer, ms in times.items() if peer.startswith("raw"))
    print(f"\n{row['model']}: {row['arrays']} arrays, {row['bytes'] / 1e6:.1f} MB")
    print(f"  {'':14} {'path':9} {'ms':>9} {'best raw / it':>14} {'it / copy':>10}")
    for peer, ms in times.items():
        ratios = f"{best / ms:14.2f} {ms / times['copy']:10.2f}"
        print(f"  {peer:14} {row['paths'].get(peer, ''):9} {ms:9.3f} {ratios}", flush=True)


def main() -> int:
    parser = arguments(__doc__, "few repetitions, without BERT-base")
    parser.add_argument("--only", choices=list(MODELS), help="one model")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MirroredStrategy()
    facts = print_introduction(comm)
    rows = []
    for name in [options.only] if options.only else list(MODELS):
        if options.quick and name == "BERT-base":
            continue
        rows.append(reduced(comm, strategy, name, 3 if options.quick else REPETITIONS))
        if comm.rank == 0:
            show(rows[-1])
    if comm.rank == 0:
        write_json(options.json, {**facts, "rows": rows})
        panels = [Panel(f"{r['model']}, {r['bytes'] / 1e6:.1f} MB", "ms", r["ms"]) for r in rows]
        bars(options.plot, facts, "Gradients", panels, OURS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
