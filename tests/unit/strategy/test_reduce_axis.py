"""`reduce` over axes: any axes, uneven and empty values, against NumPy on all of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

FOLD = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PROD": np.prod}


def whole(rows, rank=None):
    """Whole numbers 1 to 5 of shape (sum(rows), 3, 2), or the part of one rank."""
    everything = (np.arange(sum(rows) * 6) * 7 % 5 + 1.0).reshape(-1, 3, 2)
    if rank is None:
        return everything
    low = sum(rows[:rank])
    return everything[low : low + rows[rank]]


def reduced(n, op, make, axis):
    def rank(comm):
        return ms.MirroredStrategy().reduce(op, ms.PerReplica(make(comm.rank)), axis=axis)

    return run_ranks(rank, n)


@every("op", FOLD)
@every("axis", [0, -3, (0,), [0], (0, 1), [0, 2], (-3, -1), (0, 1, 2), (2, 0), np.int64(0)])
@every("rows", [[4, 2, 0], [3, 3, 3], [0, 0, 1], [1, 0, 70]])
@every("n", [1, 3])
def test_axes_that_meet_all_rows(op, axis, rows, n):
    rows = [max(1, sum(rows))] if n == 1 else rows
    want = FOLD[op](whole(rows), axis=tuple(np.atleast_1d(axis)))
    for got in reduced(n, op, lambda r: whole(rows, r), axis):
        assert np.shape(got) == np.shape(want)
        assert np.allclose(got, want, rtol=1e-14)


@every("axis", [1, 2, (1, 2), -1, ()])
@every("op", FOLD)
def test_axes_besides_the_rows(op, axis):
    """Equal rows on all ranks are folded over the replicas too."""
    parts = [whole([2, 2, 2], r) for r in range(3)]
    axes = (axis,) if isinstance(axis, int) else axis
    stacked = np.stack(parts)
    want = FOLD[op](stacked, axis=(0, *(a + 1 if a >= 0 else a for a in axes)))
    for got in reduced(3, op, lambda r: parts[r], axis):
        assert np.allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_mean_has_the_number_of_examples_below(n):
    rows = [4, 2, 0, 0][:n]
    values = [np.arange(6.0)[sum(rows[:r]) : sum(rows[: r + 1])] for r in range(n)]
    for got in reduced(n, "MEAN", lambda r: values[r], 0):
        assert got == 2.5
    for got in reduced(n, "MEAN", lambda r: np.zeros((0, 2), np.float32), 0):
        assert got.dtype == np.float32
        assert np.isnan(got).all()
        assert got.shape == (2,)
    for got in reduced(n, "SUM", lambda r: np.zeros((0, 2), np.int16), 0):
        assert got.dtype == np.int16
        assert got.tolist() == [0, 0]


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("axis", [0, (0, 1)])
def test_no_extreme_of_nothing(op, axis):
    def rank(comm):
        s = ms.MirroredStrategy()
        with pytest.raises(ValueError, match="empty on every replica"):
            s.reduce(op, {"a": ms.PerReplica(np.zeros((0, 2)))}, axis=axis)
        return float(s.reduce(op, ms.PerReplica(np.arange(float(comm.rank))), axis=0))

    assert run_ranks(rank, 3) == [{"MIN": 0.0, "MAX": 1.0}[op]] * 3


# Both float types of means, with a sign and without; each other one compiles loops for seconds.
CODES = [
    "i2",
    "u8",
    *(pytest.param(c, marks=pytest.mark.nightly) for c in ["i1", "u1", "u2", "i4", "u4", "i8"]),
]


@pytest.mark.parametrize("code", CODES)
def test_integers(code):
    top = np.iinfo(code).max
    values = [np.full(2 + r, top, code) for r in range(2)]
    means = reduced(2, "MEAN", lambda r: values[r], 0)
    sums = reduced(2, "SUM", lambda r: values[r], 0)
    with np.errstate(all="ignore"):
        wrapped = np.concatenate(values).sum(dtype=code)
    for mean, total in zip(means, sums, strict=True):
        assert mean == np.dtype("f8" if np.dtype(code).itemsize > 2 else "f4").type(top)
        assert mean.dtype == ("f8" if np.dtype(code).itemsize > 2 else "f4")
        assert total.dtype == code
        assert total == wrapped


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_half_precision_is_folded_in_float32(dtype):
    """In half precision itself the sum would stop growing."""
    values = np.full(5000, 1.0).astype(dtype)
    for got in reduced(2, "MEAN", lambda r: values, 0):
        assert got == 1
        assert got.dtype == dtype
    for got in reduced(2, "SUM", lambda r: values[: 1024 * (r + 1)], 0):
        assert float(got) == 3072


@pytest.mark.parametrize("op", FOLD)
def test_nan_spreads(op):
    values = [np.array([1.0, 2.0]), np.array([np.nan, 3.0, 4.0])]
    for got in reduced(2, op, lambda r: values[r], 0):
        assert np.isnan(got)


@pytest.mark.parametrize(
    ("shape", "axis", "error"),
    [
        ((2, 2), 2, ms.AxisError),
        ((2, 2), -3, ms.AxisError),
        ((), 0, ms.AxisError),
        ((2, 2), (0, 0), ms.AxisError),
        ((2, 2), (0, -2), ms.AxisError),
        ((2, 2), "0", TypeError),
        ((2, 2), 0.0, TypeError),
        ((2, 2), True, TypeError),
        ((2, 2), (0, None), TypeError),
    ],
    ids=str,
)
def test_axes_that_are_none(shape, axis, error):
    def rank(comm):
        s = ms.MirroredStrategy()
        with pytest.raises(error):
            s.reduce("SUM", ms.PerReplica(np.ones(shape)), axis=axis)
        with pytest.raises(ValueError if error is ms.AxisError else error):
            mine = (np.ones(shape), axis) if comm.rank else (np.ones((2, 2)), 0)
            s.reduce("SUM", ms.PerReplica(mine[0]), axis=mine[1])
        return float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_what_is_left_must_fit():
    def rank(comm):
        with pytest.raises(ms.LockstepError):
            ms.MirroredStrategy().reduce("SUM", ms.PerReplica(np.ones((2, 2 + comm.rank))), axis=0)

    run_ranks(rank, 2)


def test_trees_layouts_and_plain_values():
    """A plain value counts once per replica; ranks differ in layout and byte order."""

    def rank(comm):
        a = np.arange(12.0).reshape(4, 3)[comm.rank * 2 : comm.rank * 4]
        a = np.asfortranarray(a) if comm.rank else a.astype(">f8")
        tree = {
            "a": ms.PerReplica(a),
            "b": [np.array([1.0, 2.0, 6.0])],
            "c": ms.Mirrored(np.ones(2)),
        }
        got = ms.MirroredStrategy().reduce("SUM", tree, axis=0)
        return got["a"].tolist(), float(got["b"][0]), float(got["c"])

    want = np.concatenate([np.arange(12.0).reshape(4, 3)[:0], np.arange(12.0).reshape(4, 3)[2:4]])
    assert run_ranks(rank, 2) == [(want.sum(axis=0).tolist(), 18.0, 4.0)] * 2


@pytest.mark.parametrize("count", (28, 29, 100))
@pytest.mark.parametrize("n", (2, 3))
def test_trees_of_more_leaves_than_weights_ride_in_a_handshake(n, count):
    """Each leaf of a `PerReplica` has a weight of its own, and a handshake has room for 28."""

    def rank(comm):
        strategy = ms.MirroredStrategy()
        one = strategy.run(lambda: [np.full(30, comm.rank + i, "f4") for i in range(count)])
        found = [strategy.reduce("mean", one, axis=None) for _ in range(3)]  # remembered, too
        return [[float(leaf[-1]) for leaf in total] for total in found]

    assert run_ranks(rank, n) == [[[(n - 1) / 2 + i for i in range(count)]] * 3] * n
