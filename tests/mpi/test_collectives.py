"""Every dtype, operation and path through the MPI library, against NumPy; same bits everywhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import same

pytestmark = pytest.mark.mpi

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(code) for code in "bhilqBHILQefdgFDG"] + [BF16]
ORDER = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
SPECIAL = [
    [np.nan, 1.0, np.inf, -0.0, 0.0, -np.inf, 3.0, -np.inf],
    [2.0, np.nan, 1.0, -0.0, -0.0, -np.inf, -3.0, np.inf],
    [5.0, 4.0, np.nan, -0.0, 1e-45, -1.0, np.nan, 0.0],
    [-np.nan, 0.0, -1.0, -0.0, 2.0, 7.0, 1.0, np.nan],
]


def value(dtype, rank, shape):
    """Whole numbers whose folds are exact in any order."""
    count = int(np.prod(shape))
    top = 3 if dtype.itemsize == 1 or dtype == BF16 else 5
    return ((np.arange(count) * (rank + 3) + rank) % top + 1).reshape(shape).astype(dtype)


def fold(op, values, dtype):
    small = dtype in (np.float16, BF16)
    wide = np.dtype("f4") if small else dtype
    if op == "MEAN" and dtype.kind in "iu":
        total = sum(v.astype("f8") for v in values)
        return (total / len(values)).astype("f8" if dtype.itemsize > 2 else "f4")
    stacked = np.stack([v.astype(wide) for v in values])
    if op == "MEAN":
        total = np.array(np.add.reduce(stacked, axis=0, dtype=wide))
        if dtype.kind == "c":  # by a real number; NumPy's complex division rounds once more
            total.real /= len(values)
            total.imag /= len(values)
            return total
        return (total / wide.type(len(values))).astype(dtype)
    return ORDER[op].reduce(stacked, axis=0, dtype=wide).astype(dtype)


def reduced(op, tree, **how):
    got = ms.MirroredStrategy().run(lambda: ms.get_replica_context().all_reduce(op, tree, **how))
    return [leaf.local for leaf in got]


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PROD"])
@pytest.mark.parametrize("shape", [(), (5,), (40, 30), (0, 3), (300, 300)], ids=str)
def test_every_dtype(world, op, shape):
    dtypes = [d for d in DTYPES if op not in ("MIN", "MAX") or d.kind != "c"]
    got = reduced(op, [value(d, world.rank, shape) for d in dtypes])
    want = [fold(op, [value(d, r, shape) for r in range(world.size)], d) for d in dtypes]
    same(world, got, want)
    same(world, np.array([g.dtype == w.dtype for g, w in zip(got, want, strict=True)]).astype("i1"),
         np.ones(len(got), "i1"))  # fmt: skip


@pytest.mark.parametrize("copies", [1, 100], ids=["frame", "native"])
@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX", "PROD"])
def test_nan_and_infinity_are_never_lost(world, op, copies):
    def mine(rank, dtype):
        return np.tile(np.array(SPECIAL[rank % 4]), copies).astype(dtype)

    dtypes = [np.dtype(c) for c in "efdg"] + [BF16]
    with np.errstate(all="ignore"):
        got = reduced(op, [mine(world.rank, d) for d in dtypes])
        want = [fold(op, [mine(r, d) for r in range(world.size)], d) for d in dtypes]
    ok = all(
        np.array_equal(g.astype("f8"), w.astype("f8"), equal_nan=True)
        for g, w in zip(got, want, strict=True)
    )
    same(world, np.int8(ok), np.int8(1))


def test_every_rank_holds_the_same_bits_of_sums_that_round(world):
    draw = np.random.default_rng(world.rank)
    for size in (3, 1000, 30_000, 500_000):
        numbers = draw.standard_normal(size) * 10.0 ** draw.integers(-8, 4, size)
        for op in ("SUM", "MEAN", "PROD"):
            same(world, reduced(op, [numbers.astype(code) for code in "fde"]))


@pytest.mark.parametrize("count", [3, 5000])
def test_weighted_means(world, count):
    r, n = world.rank, world.size
    mine = np.full(count, np.nan if r == n - 1 and n > 1 else r + 1.0)
    weights = [float(i + 1) for i in range(n)]
    if n > 1:
        weights[-1] = 0.0
    values = np.arange(1.0, n + 1)
    want = (values * weights).sum() / sum(weights)
    (got,) = reduced("MEAN", [mine], weight=weights[r])
    same(world, got)
    same(world, np.int8(np.allclose(got, want, rtol=1e-14)), np.int8(1))
    (none,) = reduced("MEAN", [mine], weight=0)
    same(world, np.isnan(none).astype("i1"), np.ones(count, "i1"))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("scale", [1, 50])
@pytest.mark.parametrize("pattern", ["uneven", "one", "none"])
def test_gathers(world, axis, scale, pattern):
    lengths = {
        "uneven": [3, 0, 5, 1, 0, 2],
        "one": [0, 0, 0, 4, 0, 1],
        "none": [0] * 6,
    }[pattern]

    def part(rank, dtype):
        shape = [scale + 1, scale + 1]
        shape[axis] = lengths[rank % 6] * scale
        return (np.arange(shape[0] * shape[1]) % 100 + rank).reshape(shape).astype(dtype)

    dtypes = [np.dtype(c) for c in "?bHiqefdgFG"] + [BF16]
    tree = [part(world.rank, d) for d in dtypes]
    got = ms.MirroredStrategy().gather([ms.PerReplica(leaf) for leaf in tree], axis)
    want = [np.concatenate([part(r, d) for r in range(world.size)], axis=axis) for d in dtypes]
    same(world, got, want)


def test_a_hundred_leaves_of_three_dtypes(world):
    tree = [value(np.dtype("fdi"[i % 3]), world.rank, (i * 7 % 50,)) for i in range(100)]
    got = reduced("SUM", tree)
    want = [
        fold("SUM", [value(np.dtype("fdi"[i % 3]), r, (i * 7 % 50,)) for r in range(world.size)],
             np.dtype("fdi"[i % 3]))
        for i in range(100)
    ]  # fmt: skip
    same(world, got, want)


def test_reduce_over_uneven_rows(world):
    rows = [4, 2, 0, 3, 0, 1][: world.size]
    every = np.arange(sum(rows) * 3.0).reshape(-1, 3)
    low = sum(rows[: world.rank])
    mine = ms.PerReplica(every[low : low + rows[world.rank]])
    strategy = ms.MirroredStrategy()
    for op, f in [("SUM", np.sum), ("MEAN", np.mean), ("MIN", np.min), ("MAX", np.max)]:
        for axis in (0, (0, 1)):
            got = strategy.reduce(op, mine, axis=axis)
            same(world, got)
            same(world, np.int8(np.allclose(got, f(every, axis=axis))), np.int8(1))


@pytest.mark.parametrize("count", [5, 5000, 200_000])
@pytest.mark.parametrize("code", ["f4", "f8"])
def test_not_a_number_has_the_same_bits_everywhere(world, count, code):
    """Sign and payload of a NaN, and of the NaN that infinities make, may depend on the order."""
    quiet = {"f4": (0x7FC00000, 0xFFC00000), "f8": (0x7FF8 << 48, 0xFFF8 << 48)}[code]
    nan = np.full(count, quiet[world.rank % 2] + world.rank, f"u{code[1]}").view(code)
    infinite = np.full(count, [np.inf, -np.inf][world.rank % 2], code)
    for op in ("SUM", "MEAN", "PROD", "MIN", "MAX"):
        with np.errstate(all="ignore"):
            same(world, reduced(op, [nan, infinite]))
