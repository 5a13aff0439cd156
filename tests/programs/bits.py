"""Prints what all-reduces gave, as hashes: for each layout of nodes, way, and dtype.

What each rank gives is made from seeds, so the test that starts this can make it too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys

import numpy as np

SHAPES = [(3,), (17, 33), (0, 4), (30_000,), (300_001,)]
OPS = ("SUM", "PROD", "MIN", "MAX", "MEAN")
BETWEEN = ("SUM", "MEAN", "MIN")  # what is tried on several nodes
DTYPES = ("f4", "f8")


@functools.cache
def values(rank: int, dtype: str) -> list[np.ndarray]:
    """Return one rank's leaves: exponents over 2**±40, NaN, infinities, zeros of both signs.

    They are made once, so nobody may write to them.
    """
    rng = np.random.default_rng([rank, 7])
    leaves = [rng.standard_normal(s) * 2.0 ** rng.integers(-40, 41, s) for s in SHAPES]
    for leaf in leaves[1::2]:
        flat = leaf.reshape(-1)
        odd = rng.permutation([np.nan, np.inf, -np.inf, 0.0, -0.0, -0.0, 1.0, 2.0**40])
        flat[: odd.size] = odd
    with np.errstate(over="ignore"):
        made = [leaf.astype(dtype) for leaf in leaves]
    for leaf in made:
        leaf.flags.writeable = False
    return made


def weight(rank: int) -> int:
    """Return how many examples a rank has: some have none."""
    return (3 * rank + 2) % 5


def digest(leaves: list[np.ndarray], quiet: bool) -> str:
    """Return a hash of the bits; `quiet` for one that takes every NaN for the same."""
    found = hashlib.sha256()
    for leaf in leaves:
        bits = np.where(np.isnan(leaf), leaf.dtype.type(1e30), leaf) if quiet else leaf
        found.update(np.ascontiguousarray(bits).data.cast("B") if bits.size else b"")
    return found.hexdigest()


def ways(strategy, op: str, dtype: str, rank: int) -> dict[str, list[np.ndarray]]:
    """Return the results of each way that arrays can come and go."""
    import mpistrat as ms

    given = values(rank, dtype)
    weighted = {"weight": weight(rank)} if op == "MEAN" else {}
    buffers, outs = strategy.buffers(given), [np.empty_like(leaf) for leaf in given]
    found: dict[str, list[np.ndarray]] = {}

    def fn():
        ctx = ms.get_replica_context()
        for turn in range(2):  # the second time it is remembered
            for buffer, leaf in zip(buffers, given, strict=True):
                buffer[...] = leaf
            found[f"fresh {turn}"] = ctx.all_reduce(op, given, **weighted)
            ctx.all_reduce(op, given, out=outs, **weighted)
            found[f"out {turn}"] = [leaf.copy() for leaf in outs]
            ctx.all_reduce(op, buffers, out=buffers, **weighted)
            found[f"in place {turn}"] = [leaf.copy() for leaf in buffers]
            found[f"apart {turn}"] = [ctx.all_reduce(op, leaf, **weighted) for leaf in given]

    strategy.run(fn)
    return found


def main() -> None:
    from mpi4py import MPI

    import mpistrat as ms

    hashes = {}
    for per_node in (MPI.COMM_WORLD.size, *map(int, sys.argv[1:])):
        os.environ["MPISTRAT_RANKS_PER_NODE"] = str(per_node)
        group = MPI.COMM_WORLD.Dup()  # a group of its own: options are read once for each
        strategy = ms.MirroredStrategy(comm=group)
        for dtype in DTYPES:
            for op in OPS if per_node == group.size else BETWEEN:
                for way, leaves in ways(strategy, op, dtype, group.rank).items():
                    mine = [digest(leaves, quiet=False)]
                    if per_node == group.size:  # what NumPy folds too, with NaN of its own
                        mine.append(digest(leaves, quiet=True))
                    everyones = group.allgather(mine)
                    if any(other != mine for other in everyones):
                        raise SystemExit(f"ranks differ: {per_node} {dtype} {op} {way}")
                    hashes[f"{per_node} {dtype} {op} {way}"] = mine
        nodes = strategy._replicas.reducer.node.arena.nodes().node_count
        assert nodes == -(-group.size // per_node), "not the layout to test"
        group.Free()
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(hashes))


if __name__ == "__main__":
    main()
