"""Layouts and kinds of arrays that differ between the ranks of a job."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import same

pytestmark = pytest.mark.mpi


class Sub(np.ndarray):
    pass


def unaligned(array):
    out = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def fixed(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# Every row gives the same values in another layout.
LAYOUTS = {
    "C": lambda a: a,
    "F": np.asfortranarray,
    "negative": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "step": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "swapped": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "read-only": fixed,
    "unaligned": unaligned,
    "subclass": lambda a: a.copy().view(Sub),
    "transposed": lambda a: a.T.copy().T,
}


def base(rank, shape, code):
    return (np.arange(np.prod(shape)) % 11 + rank).reshape(shape).astype(code)


@pytest.mark.parametrize("shape", [(3, 4), (200, 90)], ids=str)
@pytest.mark.parametrize("code", ["i1", "u4", "f2", "f4", "f8", "g", "c8", "c16"])
def test_ranks_use_different_layouts_at_once(world, shape, code):
    strategy = ms.MirroredStrategy()
    names = list(LAYOUTS)
    want = sum(base(r, shape, code) for r in range(world.size))
    rows = np.concatenate([base(r, shape, code) for r in range(world.size)])
    for shift in range(len(names)):
        mine = LAYOUTS[names[(shift + world.rank) % len(names)]](base(world.rank, shape, code))
        before = mine.tobytes()
        total, gathered = strategy.run(
            lambda m=mine: (
                ms.get_replica_context().all_reduce("SUM", m),
                ms.get_replica_context().all_gather(m, 0),
            )
        )
        same(world, total.local, want.astype(code))
        same(world, gathered.local, rows)
        sums = strategy.reduce("SUM", ms.PerReplica(mine), axis=0)
        wide = "f4" if code == "f2" else code
        near = np.allclose(sums, rows.sum(axis=0, dtype=wide), rtol=1e-3 if code == "f2" else 1e-5)
        same(world, np.int8(near and sums.dtype == code), np.int8(1))
        owned = total.local.flags.writeable and not np.shares_memory(total.local, mine)
        same(world, np.int8(owned and mine.tobytes() == before), np.int8(1))


WAYS = {
    "usual": None,
    "function": ms.ReductionToOneDevice(accumulation_fn=sum),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_aligned_moves_on_every_way(world, way):
    strategy = ms.MirroredStrategy(cross_device_ops=WAYS[way])
    total = world.size * (world.size + 1) / 2
    for code in ("i4", "f4", "f8", "g", "c16"):
        for size in (3, 70_000):
            given = unaligned(np.full(size, world.rank + 1, code))
            out = unaligned(np.zeros(size, code))

            def replica(given=given, out=out):
                context = ms.get_replica_context()
                for _ in range(3):
                    found = context.all_reduce("SUM", given)
                return found, context.all_reduce("SUM", [given], out=[out])[0]

            found, filled = strategy.run(replica)
            same(world, found.local, np.full(size, total, code))
            same(world, np.array(filled.local), np.full(size, total, code))
            sums = strategy.reduce("SUM", ms.PerReplica(given), axis=0)
            same(world, sums, np.array(size * total, code))


def test_memmaps_and_broadcast_views(world, tmp_path):
    mapped = np.memmap(tmp_path / "a", np.float32, "w+", shape=(70, 300))
    mapped[:] = world.rank
    view = np.broadcast_to(np.float32(world.rank), (70, 300))
    strategy = ms.MirroredStrategy()
    total = strategy.run(
        lambda: ms.get_replica_context().all_reduce("SUM", [mapped, view, view[:0]])
    )
    n = world.size
    want = np.full((70, 300), n * (n - 1) / 2, np.float32)
    same(world, [leaf.local for leaf in total], [want, want, want[:0]])


BAD = {
    "text": "text",
    "none": None,
    "masked": np.ma.array([1.0, 2.0], mask=[1, 0]),
    "strings": np.array(["a", "b"]),
    "dates": np.array(["2020", "2021"], "M8[Y]"),
    "records": np.zeros(2, [("x", "f8")]),
    "bool": np.ones(2, bool),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_leaf_on_one_rank_is_a_type_error_on_all(world, kind):
    strategy = ms.MirroredStrategy()
    odd = world.size - 1
    leaf = BAD[kind] if world.rank == odd else np.ones(2)
    calls = (
        lambda: strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", {"a": [leaf]})),
        lambda: strategy.reduce("MEAN", {"a": [ms.PerReplica(leaf)]}, axis=0),
        lambda: strategy.reduce("SUM", {"a": [ms.PerReplica(leaf)]}, None),
    )
    for call in calls:
        found = None
        try:
            call()
        except TypeError as error:
            found = error
        wanted = ms.LeafTypeError if world.rank == odd else ms.RemoteError
        ok = isinstance(found, wanted) and "a/0" in str(found)
        same(world, np.int8(ok), np.int8(1))
        total = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(1000)))
        same(world, total.local, np.full(1000, float(world.size)))


def test_c_names_of_one_dtype_are_one_dtype(world):
    code = "q" if world.rank % 2 else "l"
    total = ms.MirroredStrategy().run(
        lambda: ms.get_replica_context().all_reduce("SUM", np.ones(30_000, code))
    )
    same(world, np.int8((total.local == world.size).all()), np.int8(1))
