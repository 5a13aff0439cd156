"""Folds of float16 and bfloat16 where they lie: added in float32 in rank order, rounded once."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.kernels import rows as rows_module
from mpistrat.kernels.rows import reduce_rows
from mpistrat.testing import run_ranks

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
EVERY = np.arange(2**16, dtype=np.uint16)
FOLDS = {"SUM": np.add, "MEAN": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


def values_of(rank, dtype, size=2**16 + 777):
    """Return every value there is, and random ones; paired otherwise on each rank."""
    bits = np.roll(EVERY, 4711 * rank) if rank else EVERY
    more = np.random.default_rng(rank).integers(0, 2**16, size - 2**16, np.uint16)
    return np.concatenate([bits, more]).view(dtype)


def wanted(op, values, weights=None):
    """Return NumPy's sum of what NumPy or ml_dtypes widen, divided, and rounded by them."""
    dtype, wide = values[0].dtype, np.float32
    with np.errstate(all="ignore"):
        each = [v.astype(wide) for v in values]
        if weights is not None:  # whole numbers: scaled by a power of two, as is their sum
            size = wide(2.0 ** -np.frexp(sum(weights))[1])
            each = [v * (wide(w) * size) for v, w in zip(each, weights, strict=True)]
        total = functools.reduce(FOLDS[op], each)
        if op == "MEAN":
            by = len(values) if weights is None else sum(weights) * float(size)
            mean, exact = total / wide(by), sum(v.astype("f8") for v in values) / len(values)
            # What overflows float32, which only sums of bfloat16 can, is a mean that does not.
            lost = np.isinf(mean) & np.isfinite(exact) if weights is None else False
            total = np.where(lost, exact.astype(wide), mean)
        return total.astype(dtype)


def assert_same(found, want):
    """Assert equal bits; all NaNs are equal."""
    missing = np.isnan(want.astype("f4"))
    np.testing.assert_array_equal(np.isnan(found.astype("f4")), missing)
    np.testing.assert_array_equal(found.view("u2")[~missing], want.view("u2")[~missing])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 2.0, 5.0]])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_buffers_are_folded_in_place_with_numpys_bits(n, weights, dtype, monkeypatch):
    monkeypatch.setattr(rows_module, "_MIN_COMPILED_COLUMNS", 2**16)
    shapes = [(2**16 + 777,), (300, 7)]

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        mine = [values_of(comm.rank, dtype), values_of(comm.rank, dtype)[: 300 * 7].reshape(300, 7)]
        given = strategy.buffers(mine)
        reduce = lambda op, **kw: strategy.run(  # noqa: E731
            lambda: ms.get_replica_context().all_reduce(op, given, **kw)
        )
        found = {}
        for op in FOLDS if weights is None else ["MEAN"]:
            more = {} if weights is None else {"weight": weights[comm.rank]}
            for how in ("in place", "remembered", "out", "fresh"):
                for room, values in zip(given, mine, strict=True):
                    room[...] = values
                outs = [np.zeros_like(array) for array in mine]
                if how in ("in place", "remembered"):
                    reduce(op, out=given, **more)
                    outs = [room.copy() for room in given]
                elif how == "out":
                    reduce(op, out=outs, **more)
                else:
                    outs = [np.asarray(getattr(x, "local", x)) for x in reduce(op, **more)]
                found[op, how] = outs
        return found

    ranks = run_ranks(rank, n)
    every = [values_of(r, dtype) for r in range(n)]
    for op, how in ranks[0]:
        want = wanted(op, every, None if weights is None or n == 1 else weights[:n])
        for found in ranks:
            assert [x.shape for x in found[op, how]] == shapes
            flat, small = found[op, how][0], found[op, how][1].reshape(-1)
            assert_same(flat, want)
            assert_same(small, want[: 300 * 7])
            assert flat.tobytes() == ranks[0][op, how][0].tobytes()


@every("dtype", DTYPES)
@every("by", [1.0, 2.0, 3.0])
@every("scales", [None, [0.5, 0.25, 0.125], [0.5, 0.0, 0.25]])
@every("count", [2, 3])
def test_the_loop_has_the_bits_of_numpy(count, scales, by, dtype):
    rows = np.array([values_of(r, dtype) for r in range(count)])
    twin = rows.copy()
    given = {"scales": None if scales is None else np.array(scales[:count]), "divisor": by}
    reduce_rows(np.add, rows, rows, 17, 60_011, **given, is_compiled=True)
    reduce_rows(np.add, twin, twin, 17, 60_011, **given, is_compiled=False, total_columns=1)
    assert_same(rows, twin)
    np.testing.assert_array_equal(rows[:, :17].view("u2"), twin[:, :17].view("u2"))
    assert rows[0].tobytes()[34:120_022] == rows[1].tobytes()[34:120_022]
