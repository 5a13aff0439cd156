"""How long do the gradients of real models take, beside what else can reduce them?

    mpiexec -n 2 python benchmarks/gradients.py [--quick] [--only NAME] [--json PATH] [--plot PATH]

Lists of float32 gradients: ResNet-50 (161 arrays, 102 MB), BERT-base (199, 438 MB), a small MLP (6,
0.9 MB) and 400 tiny arrays (64 numbers each). All peers run in one job and take turns; every array
is written anew before each repetition; a time is that of the slowest rank, and a row shows the
median. Results are checked.

``arena``           ``ctx.all_reduce("sum", b, out=b)`` on ``strategy.gradient_buffers``
``arena mean``      the same with a weight, as a training step has it
``out=``            ordinary arrays into ordinary arrays that are there already
``fresh``           ordinary arrays, results in new arrays
``raw in place``    mpi4py, one ``Allreduce(IN_PLACE, a)`` per array
``raw per array``   mpi4py, one ``Allreduce(a, b)`` per array
``raw flat``        mpi4py, one ``Allreduce`` in place of one flat array: nothing to pack
``raw packed``      mpi4py, pack, one ``Allreduce``, unpack
``gloo``            torch.distributed with gloo, in buckets of 25 MB, where torch can be imported
``copy``            one plain copy of the same bytes: no peer, but what memory can do
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from all_reduce import facts, print_facts
from mpi4py import MPI

import mpistrat

Arrays = list[np.ndarray]
BUCKET = 25 * 2**20
REPETITIONS = 15


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
    wide, inner = 768, 3072
    shapes: list[tuple[int, ...]] = [(30522, wide), (512, wide), (2, wide), (wide,), (wide,)]
    for _ in range(12):
        shapes += [(wide, wide), (wide,)] * 4 + [(wide,), (wide,)]
        shapes += [(inner, wide), (inner,), (wide, inner), (wide,), (wide,), (wide,)]
    return [*shapes, (wide, wide), (wide,)]


MODELS: dict[str, list[tuple[int, ...]]] = {
    "ResNet-50": resnet50(),
    "BERT-base": bert_base(),
    "MLP": [(784, 256), (256,), (256, 128), (128,), (128, 10), (10,)],
    "400 tiny": [(64,)] * 400,
}


def like(shapes: list[tuple[int, ...]]) -> Arrays:
    return [np.zeros(shape, np.float32) for shape in shapes]


class Peer:
    """One way to reduce a list: what it reads, what it calls, and where the results are."""

    def __init__(self, reads: Arrays, call: Callable[[], Any], results: Callable[[Any], Any]):
        self.reads, self.call, self.results = reads, call, results


def ours(shapes: list[tuple[int, ...]], strategy: mpistrat.Strategy, buffers: Arrays) -> Any:
    """Return our four ways; to be called in replica code."""
    ordinary, outs = like(shapes), like(shapes)
    ctx = mpistrat.get_replica_context()
    return {
        "arena": Peer(
            buffers, lambda: ctx.all_reduce("sum", buffers, out=buffers), lambda _: buffers
        ),
        "arena mean": Peer(
            buffers,
            lambda: ctx.all_reduce("mean", buffers, weight=3, out=buffers),
            lambda _: [b * np.float32(ctx.num_replicas_in_sync) for b in buffers],
        ),
        "out=": Peer(ordinary, lambda: ctx.all_reduce("sum", ordinary, out=outs), lambda _: outs),
        "fresh": Peer(ordinary, lambda: ctx.all_reduce("sum", ordinary), lambda found: found),
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

    def packed() -> None:
        np.concatenate(reads, axis=None, out=flat)
        comm.Allreduce(flat, total)
        at = 0
        for out in outs:
            out.reshape(-1)[:] = total[at : at + out.size]
            at += out.size

    return {
        "raw in place": Peer(reads, in_place, lambda _: reads),
        "raw per array": Peer(reads, per_array, lambda _: outs),
        "raw flat": Peer([flat], lambda: comm.Allreduce(MPI.IN_PLACE, flat), lambda _: [flat]),
        "raw packed": Peer(reads, packed, lambda _: outs),
    }


def gloo(shapes: list[tuple[int, ...]], comm: MPI.Intracomm) -> dict[str, Peer]:
    """Return torch.distributed's way, or nothing where torch is not installed."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return {}
    torch.set_num_threads(1)
    if not dist.is_initialized():
        port = comm.bcast(20000 + os.getpid() % 20000)
        url = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", url, rank=comm.rank, world_size=comm.size)
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
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    return {"gloo": Peer(reads, call, lambda _: reads)}


def copying(shapes: list[tuple[int, ...]]) -> dict[str, Peer]:
    source = np.zeros(sum(int(np.prod(shape)) for shape in shapes), np.float32)
    target = np.zeros_like(source)
    return {"copy": Peer([source], lambda: np.copyto(target, source), lambda _: None)}


def timed(comm: MPI.Intracomm, peer: Peer, number: int) -> tuple[float, bool]:
    """Return this rank's seconds for one call on fresh numbers, and whether it was right."""
    for array in peer.reads:
        array.fill(comm.rank + number)
    comm.Barrier()
    begin = time.perf_counter()
    found = peer.call()
    seconds = time.perf_counter() - begin
    want = sum(rank + number for rank in range(comm.size))
    results = peer.results(found)
    right = results is None or all(r.flat[0] == r.flat[-1] == want for r in results)
    begin = time.perf_counter()
    del found, results  # to give new arrays back costs as well
    return seconds + time.perf_counter() - begin, right


def measure(
    comm: MPI.Intracomm, strategy: mpistrat.Strategy, name: str, repetitions: int
) -> dict[str, Any]:
    """Return the medians of one model in ms. Collective."""
    shapes = MODELS[name]
    buffers = strategy.gradient_buffers(like(shapes))
    node = strategy.parts.reducer.node
    if comm.size > 1 and not (node.possible and node.arena.home(buffers[0])):
        raise SystemExit("the path to measure is not taken: no memory is shared here")
    times: dict[str, list[float]] = {}
    right: list[bool] = []

    def replica() -> None:
        peers = {**ours(shapes, strategy, buffers), **raw(shapes, comm)}
        peers |= {**gloo(shapes, comm), **copying(shapes)}
        for number in range(repetitions + 2):
            for peer in list(peers) if number % 2 else list(peers)[::-1]:
                seconds, good = timed(comm, peers[peer], number)
                right.append(good)
                if number >= 2:  # before that, memory is touched and compilers run
                    times.setdefault(peer, []).append(seconds)

    strategy.run(replica)
    row = {peer: median(comm, seconds) for peer, seconds in times.items()}
    if not all(comm.allgather(all(right))):
        raise ArithmeticError(f"{name}: a sum was wrong on some rank")
    nbytes = sum(int(np.prod(shape)) for shape in shapes) * 4
    return {"model": name, "arrays": len(shapes), "bytes": nbytes, "ms": row}


def median(comm: MPI.Intracomm, seconds: list[float]) -> float:
    worst = np.empty(len(seconds))
    comm.Allreduce(np.array(seconds), worst, op=MPI.MAX)
    return 1e3 * statistics.median(worst)


def show(row: dict[str, Any]) -> None:
    times = row["ms"]
    best = min(ms for peer, ms in times.items() if peer.startswith("raw"))
    print(f"\n{row['model']}: {row['arrays']} arrays, {row['bytes'] / 1e6:.1f} MB")
    print(f"  {'':14} {'ms':>9} {'best raw / it':>14} {'it / copy':>10}")
    for peer, ms in times.items():
        print(f"  {peer:14} {ms:9.3f} {best / ms:14.2f} {ms / times['copy']:10.2f}")


def plot(known: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(rows), 4), dpi=120, layout="constrained")
    library = " ".join(known["mpi"].split(",")[0].replace("Version:", "").split())
    figure.suptitle(f"Gradients on {known['ranks']} ranks of one node, {library}")
    for panel, row in zip(np.atleast_1d(figure.subplots(1, len(rows))), rows, strict=True):
        names = list(row["ms"])[::-1]
        colors = ["C0" if n in ("arena", "arena mean", "out=", "fresh") else "C1" for n in names]
        colors = ["0.6" if n == "copy" else c for n, c in zip(names, colors, strict=True)]
        panel.barh(names, [row["ms"][n] for n in names], color=colors)
        panel.set(title=f"{row['model']}, {row['bytes'] / 1e6:.1f} MB", xlabel="ms")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions, without BERT-base")
    parser.add_argument("--only", choices=list(MODELS), help="one model")
    parser.add_argument("--json", metavar="PATH", help="where the numbers go")
    parser.add_argument("--plot", metavar="PATH", help="where the picture goes")
    chosen = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MirroredStrategy()
    known = facts(comm)
    if comm.rank == 0:
        print_facts(known, "")
    names = [chosen.only] if chosen.only else list(MODELS)
    rows = []
    for name in names:
        if chosen.quick and name == "BERT-base":
            continue
        rows.append(measure(comm, strategy, name, 3 if chosen.quick else REPETITIONS))
        if comm.rank == 0:
            show(rows[-1])
            sys.stdout.flush()
    if comm.rank == 0 and chosen.json:
        Path(chosen.json).write_text(json.dumps({**known, "rows": rows}, indent=2) + "\n")
    if comm.rank == 0 and chosen.plot:
        plot(known, rows, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
