"""IndexedSlices: what they are, and what collectives do with them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.config import Options
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context
VIEWS = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]


def local(value):
    return value.local if isinstance(value, ms.PerReplica) else value


def test_dense_adds_rows_that_come_twice():
    s = ms.IndexedSlices(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), [1, 1], (3, 2))
    assert np.asarray(s).tolist() == [[0, 0], [4, 6], [0, 0]]
    assert np.asarray(s, np.float64).dtype == np.float64
    assert (s.dtype, s.ndim, s.dense_shape, s.shape) == (np.float32, 2, (3, 2), (3, 2))
    assert np.asarray(-s).tolist() == [[0, 0], [-4, -6], [0, 0]]
    assert "IndexedSlices" in repr(s)
    assert np.asarray(ms.IndexedSlices(np.zeros((0, 2)), [], (3, 2))).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (([1.0], [0, 1]), ValueError),
        ((1.0, 0), ValueError),
        (([[1.0]], [[0]]), ValueError),
        (([[1.0]], [0], (5,)), ValueError),
        (([1.0], [0.5]), TypeError),
        (([1.0], [True]), TypeError),
        ((["a"], [0]), TypeError),
    ],
    ids=str,
)
def test_what_is_none(args, error):
    with pytest.raises(error):
        ms.IndexedSlices(*args)


def test_what_cannot_be_made_dense():
    with pytest.raises(ValueError, match="dense_shape"):
        np.asarray(ms.IndexedSlices([1.0], [0]))
    for index in (-1, 3):
        text = rf"IndexedSlices: index {index} is out of range for a whole of shape .3,."
        with pytest.raises(IndexError, match=text):
            np.asarray(ms.IndexedSlices([1.0], [index], (3,)))


def rows(rank, dtype=np.float64, base=1):
    """Rank r gives r rows, of which some come on other ranks too; rank 0 none."""
    values = np.arange(rank * 2).reshape(rank, 2).astype(dtype) + np.array(base + rank, dtype)
    return ms.IndexedSlices(values, np.arange(rank), (5, 2))


@pytest.mark.parametrize("make", VIEWS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_all_reduce_is_that_of_the_dense_arrays(make, n, op):
    def rank(comm):
        tree = {"a": rows(comm.rank), "b": [np.full(3, comm.rank + 1.0), rows(comm.rank + 1)]}
        got = {}
        make().run(lambda: got.update(ctx().all_reduce(op, tree)) or None)
        assert got["b"][1].indices.tolist() == [i for r in range(n) for i in range(r + 1)]
        return np.asarray(got["a"]), got["b"][0], np.asarray(got["b"][1])

    dense = [[np.asarray(rows(r)), np.full(3, r + 1.0), np.asarray(rows(r + 1))] for r in range(n)]
    for found in run_ranks(rank, n):
        for got, *each in zip(found, *dense, strict=True):
            assert np.allclose(got, sum(each) / (n if op == "MEAN" else 1), rtol=1e-14)


@pytest.mark.parametrize(
    ("code", "mean"),
    [
        ("f2", "f2"),
        ("f4", "f4"),
        ("c8", "c8"),
        ("i4", "f8"),
        ("u1", "f4"),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ],
    ids=str,
)
def test_dtypes(code, mean):
    dtype = np.dtype(code)

    def rank(comm):
        s = ms.MirroredStrategy()
        value = s.run(lambda: rows(2, dtype))
        results = [s.reduce(op, value, None) for op in ("SUM", "MEAN")]
        bools = s.run(lambda: ms.IndexedSlices([True], [0]))
        with pytest.raises(TypeError):
            s.reduce("SUM", bools, None)
        return [(r.dtype, r.values.tolist()) for r in results]

    want = rows(2, dtype).values
    whole = np.concatenate([want, want])
    half = (whole.astype(complex if dtype.kind == "c" else float) / 2).astype(mean)
    wanted = [(dtype, whole.tolist()), (np.dtype(mean), half.tolist())]
    assert run_ranks(rank, 2) == [wanted, wanted]


def test_means_by_weight_never_read_what_weighs_nothing():
    def rank(comm):
        weight = [3.0, 0.0, 1.0][comm.rank]
        value = np.nan if comm.rank == 1 else comm.rank + 1.0
        given = ms.IndexedSlices([[value]] * (comm.rank + 1), np.arange(comm.rank + 1), (4, 1))

        def fn():
            context = ctx()
            one = context.all_reduce("MEAN", [given, np.array(1.0)], weight=weight)[0]
            none = context.all_reduce("MEAN", given, weight=0.0)
            return np.asarray(one)[:, 0].tolist(), bool(np.isnan(none.values).all())

        return local(ms.MultiWorkerMirroredStrategy().run(fn))

    want = [3 / 4 * 1.0 + 1 / 4 * 3.0, 1 / 4 * 3.0, 1 / 4 * 3.0, 0.0]
    for got, nothing in run_ranks(rank, 3):
        assert got == pytest.approx(want)
        assert nothing


@pytest.mark.parametrize("make", [ms.get_strategy, lambda: ms.OneDeviceStrategy("cpu")])
def test_alone_they_stay_what_they_are(make):
    s = make()
    got = s.run(lambda: ctx().all_reduce("MEAN", ms.IndexedSlices([3, 5], [0, 2], (3,))))
    assert (got.dtype.kind, np.asarray(got).tolist()) == ("i", [3, 0, 5])
    zero = s.run(lambda: ctx().all_reduce("MEAN", ms.IndexedSlices([3.0], [0]), weight=0))
    assert np.isnan(zero.values).all()
    assert s.reduce("SUM", got, None) is got


@pytest.mark.parametrize("make", VIEWS)
def test_reductions_in_cross_replica_code(make):
    def rank(comm):
        s = make()
        with s.scope():
            v = ms.Variable(np.zeros((5, 2)))
        value = s.run(lambda: rows(comm.rank + 1))
        total = s.extended.reduce_to("SUM", value, v)
        pair = s.extended.batch_reduce_to("MEAN", [(value, v), (value, "cpu:0")])
        plain = getattr(total, "local", total)
        by_axis = s.reduce("SUM", value, 0)
        s.extended.update(v, lambda var, d: var.scatter_sub(d), args=(total,))
        v.scatter_add(total)
        return np.asarray(plain), np.asarray(pair[1]), by_axis, v.numpy(), type(total).__name__

    want = np.asarray(rows(1)) + np.asarray(rows(2))
    for total, mean, by_axis, v, kind in run_ranks(rank, 2):
        assert np.array_equal(total, want)
        assert np.array_equal(mean, want / 2)
        assert np.array_equal(by_axis, want.sum(axis=0))
        assert not v.any()
        assert kind == ("Mirrored" if make is ms.MirroredStrategy else "IndexedSlices")


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("where", ["replica", "cross", "plain", "beside"])
def test_gathers_refuse_them_on_every_rank(where, make):
    def rank(comm):
        s = make()
        mine = rows(1) if comm.rank or where == "plain" else np.ones((1, 2))
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            if where == "replica":
                s.run(lambda: ctx().all_gather([mine], 0))
            elif where == "cross":
                s.gather(ms.PerReplica(mine), 0)
            elif where == "plain":
                s.gather(mine, 0)
            else:
                s.gather([ms.PerReplica(np.ones(2)), {"k": mine}], 0)
        return float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 3) == [3.0] * 3


def test_a_gather_of_one_device_refuses_them():
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        ms.OneDeviceStrategy("cpu").gather(rows(1), 0)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda r: (rows(1), "SUM") if r else (np.ones((5, 2)), "SUM"), ms.LockstepError),
        (lambda r: (rows(1, [np.float32, np.float64][r]), "SUM"), ms.LockstepError),
        (lambda r: (ms.IndexedSlices([1.0], [0], (5 + r,)), "SUM"), ms.LockstepError),
        (lambda r: (ms.IndexedSlices(np.ones((1, 1 + r)), [0]), "SUM"), ms.LockstepError),
        (
            lambda r: (ms.IndexedSlices([1.0], np.zeros(1, [int, np.int32][r])), "SUM"),
            ms.LockstepError,
        ),
        (lambda r: (rows(1), "MAX"), ValueError),
        (lambda r: (rows(1), "PROD" if r else "SUM"), ValueError),
        (lambda r: ([rows(1), None if r else 1.0], "SUM"), TypeError),
    ],
    ids=["dense", "dtype", "shape", "rows", "index dtype", "max", "prod", "other leaf"],
)
def test_what_does_not_fit_fails_on_every_rank_and_the_next_works(make, error):
    def rank(comm):
        s = ms.MirroredStrategy()
        value, op = make(comm.rank)
        with pytest.raises(error):
            s.run(lambda: ctx().all_reduce(op, value))
        return float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_a_nan_in_them_is_told():
    def rank(comm):
        s = ms.MirroredStrategy()
        s._replicas.lockstep.session.options = Options(nan="raise")
        bad = ms.IndexedSlices([[1.0, np.nan if comm.rank == 1 else 2.0]], [3], (5, 2))
        with pytest.raises(ms.NonFiniteError, match="rank 1"):
            s.run(lambda: ctx().all_reduce("SUM", {"grad": bad}))

    run_ranks(rank, 2)


def test_they_move_when_they_are_asked_for_and_are_not_pickled(monkeypatch):
    def refuse(value):
        raise AssertionError(f"{value!r} was pickled")

    monkeypatch.setattr("pickle.dumps", refuse)

    def rank(comm):
        s = ms.MirroredStrategy()
        value = s.run(lambda: rows(comm.rank + 1))
        assert "<on rank" in repr(value)
        every = s.experimental_local_results(value)
        bare = s.run(lambda: ms.IndexedSlices(np.ones((1, 2), ml_dtypes.bfloat16), [comm.rank]))
        found = [(e.indices.tolist(), e.dense_shape) for e in s.unwrap(bare)]
        assert found == [([0], None), ([1], None)]
        merged = s.run(lambda: ctx().merge_call(lambda s, x: x, args=(rows(comm.rank),)))
        return [np.asarray(e).tolist() for e in every], len(merged.local.indices)

    want = [np.asarray(rows(r + 1)).tolist() for r in range(2)]
    assert run_ranks(rank, 2) == [(want, 0), (want, 1)]


def test_slices_that_were_written_to_after_their_reduction_are_told_apart():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(np.zeros((5, 2)))
        total = s.extended.reduce_to("SUM", s.run(lambda: rows(2)), v)
        if comm.rank == 1:
            total.local.values[0] = 7
        for write in (v.assign, v.assign_add, v.scatter_add):
            with pytest.raises(ms.LockstepError):
                write(total)
        with pytest.raises(ms.LockstepError):
            s.extended.update(v, lambda var, d: None, args=(total,))
        return bool(v.numpy().any())

    assert run_ranks(rank, 2) == [False, False]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_one_row_of_16_bit_that_comes_often_adds_up(dtype):
    rows = ms.IndexedSlices(np.ones((4000, 1), dtype), np.zeros(4000, int), (2, 1))
    assert np.asarray(rows).dtype == dtype
    np.testing.assert_allclose(np.asarray(rows, np.float64), [[4000], [0]], rtol=4e-3)
