"""Logical reductions: MAX and ANY of bool are "or", MIN and ALL are "and"."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context
OPS = {
    "MAX": np.logical_or, "any": np.logical_or, "MIN": np.logical_and, "all": np.logical_and,
}  # fmt: skip


def drawn(rank, shape):
    return np.random.default_rng(rank).random(shape) < 0.6


@every("ranks", [1, 2, 3, 4])
@every("shape", [(), (0,), (3,), (2, 5), (5000,), (200_000,)])
def test_arrays(strategy_on, ranks, shape):
    """In the frame, in shared rows, and in several buckets with numbers beside."""
    want = {op: ufunc.reduce([drawn(r, shape) for r in range(ranks)]) for op, ufunc in OPS.items()}

    def rank(comm):
        strategy = strategy_on(comm)
        mine = drawn(comm.rank, shape)
        for _ in range(2):  # as compiled, and as remembered
            got = strategy.run(lambda: {op: ctx().all_reduce(op, mine) for op in OPS})
        out = np.empty(shape, bool)
        strategy.run(lambda: ctx().all_reduce("any", mine, out=out) is out and None)
        return {op: got[op].local for op in OPS}, out

    for got, out in run_ranks(rank, ranks):
        assert np.array_equal(out, want["any"])
        for op in OPS:
            assert got[op].dtype == bool
            assert got[op].shape == shape
            assert np.array_equal(got[op], want[op])


@every("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@every("kind", [bool, np.bool_, np.array])
def test_numbers_in_every_call(make, kind):
    def rank(comm):
        strategy = make()
        mine = kind(comm.rank == 1)
        each = strategy.run(lambda: mine)
        handle = strategy.all_reduce_start("any", mine)
        return [
            *(strategy.all_reduce(op, mine) for op in OPS),
            *(strategy.reduce(op, each, axis=None) for op in OPS),
            handle.wait(),
            strategy.all_reduce("max", {"a": mine, "b": 2.5})["a"],
        ]

    for got in run_ranks(rank, 2):
        assert [bool(each) for each in got] == [True, True, False, False] * 2 + [True, True]
        assert {np.asarray(each).dtype for each in got} == {np.dtype(bool)}


def test_over_an_axis_with_parts_that_are_empty():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        rows = strategy.run(lambda: np.array([True, False])[: 2 * (comm.rank == 0)])
        return [bool(strategy.reduce(op, rows, axis=0)) for op in OPS]

    assert run_ranks(rank, 3) == [[True, True, False, False]] * 3


def test_one_device_and_buffers_and_a_hierarchy():
    single = ms.OneDeviceStrategy("cpu")
    assert single.run(lambda: ctx().all_reduce("any", np.array([True, False]))).tolist() == [1, 0]

    def rank(comm):
        strategy = ms.MirroredStrategy(cross_device_ops=ms.HierarchicalCopyAllReduce())
        b = strategy.buffers(np.empty(40_000, bool))
        b[:] = comm.rank == 2
        strategy.run(lambda: ctx().all_reduce("max", b, out=b) is b and None)
        return b.all(), strategy.all_reduce("min", b).all()

    assert run_ranks(rank, 3) == [(True, True)] * 3


@every("op", ["SUM", "MEAN", "PROD"])
@every("value", [True, np.bool_(True), np.ones(2, bool)])
def test_what_is_ambiguous_is_refused_on_every_rank(op, value):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(TypeError, match=rf"{op}: the value is bool.*MAX of bool"):
            strategy.all_reduce(op, value)
        return True

    assert all(run_ranks(rank, 2))


@every("op", ["any", "ALL"])
@every("value", [1, 0.5, np.ones(2, "u1"), np.ones(2, "c8")])
def test_what_is_no_bool_has_no_any(op, value):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(TypeError, match=rf"{op.upper()} is for bool.*value > 0"):
            strategy.all_reduce(op, value)
        with pytest.raises(ms.LockstepError):
            strategy.all_reduce("max" if comm.rank else "any", True)
        return True

    assert all(run_ranks(rank, 2))
