"""Weighted means: sums of weight times value over the sum of weights, whatever else is in there."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.collectives.weights import (
    as_weight,
    compute_equal_scales,
    compute_scales,
    sum_equal,
)
from mpistrat.testing import run_ranks


def mean(strategy_on, size, values, weights, op="MEAN"):
    """Return what every rank got."""

    def rank(comm):
        def fn():
            ctx = ms.get_replica_context()
            return ctx.all_reduce(op, values[comm.rank], weight=weights[comm.rank])

        return strategy_on(comm).run(fn).local

    return run_ranks(rank, size)


@every("count", [3, 300])
@every("code", ["f8", "f4", "f2", "g", "c16", "i4", "u1", "bfloat16"])
@every("weights", [[1, 2, 5], [0, 3, 1], [4, 0, 0], [0.5, 0.25, 0.25]])
def test_means_are_weighted(strategy_on, count, code, weights):
    dtype = np.dtype(ml_dtypes.bfloat16 if code == "bfloat16" else code)
    values = [((np.arange(count) * (r + 1)) % 16).astype(dtype) for r in range(3)]
    exact = sum(v.astype("c16") * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    for got in mean(strategy_on, 3, values, weights):
        shown = got.astype("c16")
        tolerance = {"f2": 1e-3, "bfloat16": 8e-3}.get(code, 2e-7)
        assert np.allclose(shown, exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("count", [2, 500])
def test_a_value_of_weight_zero_is_never_read(strategy_on, count):
    values = [np.full(count, np.nan), np.full(count, 3.0), np.full(count, 5.0)]
    for got in mean(strategy_on, 3, values, [0, 1, 3]):
        assert got.tolist() == [4.5] * count


@pytest.mark.parametrize("count", [2, 500])
@pytest.mark.parametrize("size", [1, 2])
def test_all_weights_zero_gives_nan_everywhere(strategy_on, count, size):
    for got in mean(strategy_on, size, [np.ones(count, np.float32)] * size, [0] * size):
        assert got.dtype == np.float32
        assert np.isnan(got).all()


@pytest.mark.parametrize(
    "tree", [1.5, np.float32(1.5), np.ones(3), [2.0, np.ones((2, 3), "f4")]], ids=repr
)
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("forgetful", [False, True])  # the first rank takes the general path
def test_small_means_that_were_made_before(tree, into, forgetful):
    """With weights of all kinds one after the other, which the plan has not been made with."""
    steps = [(3, 5, 1), (4, 4, 4), (0, 2, 1), (0, 0, 0), (0.5, 0.25, 8), (2.0**53, 2, 1), (1, 0, 0)]

    def program(comm):
        strategy = ms.MirroredStrategy()
        calls, found = strategy._replicas.plans, []

        def fn(weight):
            if forgetful and comm.rank == 0:
                calls.clear()
            scale = np.float32(0.1 + comm.rank) if weight else np.float32(np.nan)  # never read
            value = ms.pytree.map(lambda leaf: leaf * leaf.dtype.type(scale), arrays)
            out = ms.pytree.map(np.empty_like, value) if into else None
            total = ms.get_replica_context().all_reduce("MEAN", value, weight=weight, out=out)
            found.append(
                b"".join(np.asarray(leaf).tobytes() for leaf in ms.pytree.flatten(total)[0])
            )

        arrays = ms.pytree.map(lambda x: np.asarray(x) if into else np.asarray(x)[()], tree)
        for weights in steps:
            strategy.run(fn, args=(weights[comm.rank],))
        return found, len(calls) > 0

    leaves = [np.asarray(leaf) for leaf in ms.pytree.flatten(tree)[0]]
    ranks = run_ranks(program, 3)
    assert all(made for _, made in ranks)
    for step, weights in enumerate(steps):
        whole = all(w == int(w) <= 2**24 for w in weights)
        factors = [float(w) if whole else w / max(weights) for w in weights]
        if len(set(weights)) == 1 and weights[0]:
            factors = [1.0] * 3
        want = b""
        for leaf in leaves:
            kind = leaf.dtype.type
            values = [
                leaf * kind(np.float32(0.1 + r)) if weights[r] else leaf * 0 for r in range(3)
            ]
            with np.errstate(all="ignore"):
                terms = [v if f == 1 else v * kind(f) for v, f in zip(values, factors, strict=True)]
                want += np.asarray(functools.reduce(np.add, terms) / kind(sum(factors))).tobytes()
        for found, _ in ranks:
            assert found[step] == want


def test_the_sum_of_weights_is_exact(strategy_on):
    """In any order of plain additions the small one would be lost."""
    values = [np.zeros(1), np.ones(1), np.zeros(1)]
    for got in mean(strategy_on, 3, values, [2.0**53, 2.0, 2.0**53]):
        assert got[0] == 2.0 / (2.0**54 + 2.0)


@pytest.mark.parametrize("count", [3, 300_000])
def test_weights_that_are_1_together_let_no_mean_overflow(strategy_on, count):
    """In float32 the largest number times each of them, added up, is more than it."""
    top = np.full(count, np.finfo("f4").max)
    for got in mean(strategy_on, 3, [top] * 3, [0.558, 0.012, 0.42999999999909044]):
        assert np.isfinite(got).all()


@pytest.mark.parametrize("weight", [1e-60, 1e-30, 1e30, 1e60])
def test_only_the_ratio_of_weights_matters(strategy_on, weight):
    values = [np.full(3, 2.0, np.float32), np.full(3, 4.0, np.float32)]
    for got in mean(strategy_on, 2, values, [weight, weight]):
        assert got == pytest.approx(3.0, rel=1e-6)


@every("size", [1, 3])
@every("count", [3, 300, 50_000, 300_000])
@every("weight", [3, 0.3, 2.0**60])
@every("into", ["fresh", "out", "in place"])
def test_weights_that_are_alike_are_none(size, count, weight, into):
    """Bit for bit: a mean over one rank is the value, over three their sum divided once."""
    rng = np.random.default_rng(count)
    values = rng.standard_normal((size, count)).astype(np.float32)

    def rank(comm):
        strategy = ms.MirroredStrategy()
        buffers = strategy.buffers([np.empty(count, np.float32)])
        found = []

        def fn():
            for _ in range(3):  # the first finds out how, the others know
                buffers[0][:] = values[comm.rank]
                value = buffers if into == "in place" else [values[comm.rank].copy()]
                out = {"fresh": None, "out": [np.empty(count, np.float32)], "in place": value}[into]
                total = ms.get_replica_context().all_reduce("MEAN", value, weight=weight, out=out)
                found.append(total[0].tobytes())

        strategy.run(fn)
        return found

    want = functools.reduce(np.add, values) / np.float32(size)
    assert run_ranks(rank, size) == [[want.tobytes()] * 3] * size


@every("weights", [(32, 7), (32.5, 7.0), (2.0**25, 7), (3, 2), (1e300, 1e-3)])
@every("count", [3, 300, 300_000])
def test_a_mean_overflows_only_where_its_values_do(strategy_on, weights, count):
    values = [np.full(count, 3e37, np.float32)] * 2
    for got in mean(strategy_on, 2, values, weights):
        np.testing.assert_allclose(got, np.float32(3e37), rtol=3e-7)


@pytest.mark.parametrize("count", [5, 3000, 600_000])
@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_a_weight_that_is_not_zero_is_read_however_small(strategy_on, count, odd):
    """In float32 its part is none; what it belongs to must not depend on the size of the array."""
    values = [np.ones(count, np.float32), np.full(count, odd, np.float32)]
    for weights in ([1.0, 1e-46], [1e200, 1e-200]):
        for got in mean(strategy_on, 2, values, weights):
            np.testing.assert_array_equal(got, values[1])
    values = [value.astype(np.float64) for value in values]
    for got in mean(strategy_on, 2, values, [1e200, 1e-200]):
        np.testing.assert_array_equal(got, values[1])


@pytest.mark.parametrize("weights", [(1, 1), (1e308, 1e308), (3, 5), (1e308, 1e307)])
@pytest.mark.parametrize("dtype", ["c8", "c16", "f4"])
def test_rows_have_the_mean_of_dense_values(weights, dtype):
    """Infinities of complex numbers, and weights whose sum is none, included."""
    odd = np.array([[1, np.inf], [2, 3]], dtype)
    if np.dtype(dtype).kind == "c":
        odd = odd + odd.dtype.type(1j)

    def program(comm):
        def fn():
            ctx = ms.get_replica_context()
            rows = ms.IndexedSlices(odd, np.array([2 * comm.rank, 2 * comm.rank + 1]), (4, 2))
            found = ctx.all_reduce("MEAN", rows, weight=weights[comm.rank])
            plain = np.zeros((4, 2), dtype)
            plain[2 * comm.rank : 2 * comm.rank + 2] = odd
            return found, ctx.all_reduce("MEAN", plain, weight=weights[comm.rank])

        found, dense = ms.MirroredStrategy().run(fn)
        return found.local, dense.local

    for found, dense in run_ranks(program, 2):
        assert found.indices.tolist() == [0, 1, 2, 3]
        for one, two in ((found.values.real, dense.real), (found.values.imag, dense.imag)):
            np.testing.assert_allclose(one, two, rtol=1e-6)


def test_copies_of_longdouble_are_compared_by_value(monkeypatch):
    """Their bytes hold padding, with whatever was there before."""
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "1")

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            kinds = [np.longdouble, np.clongdouble]
            copies = [ms.Variable(np.zeros(301, kind)) for kind in kinds]

        def fn():
            for copy in copies:
                copy._storage.array.view(np.uint8).reshape(-1, 16)[:, 10:] = comm.rank + 1

        strategy.run(fn)
        for _ in range(4):
            strategy.run(lambda: None)

    run_ranks(program, 2)


@pytest.mark.parametrize(
    "weight", [3, 2.5, np.float16(2), ml_dtypes.bfloat16(2), np.array(3, "u1"), 2**70, 5e-324]
)
def test_any_real_number_is_a_weight(weight):
    assert as_weight(weight) == float(weight)


@pytest.mark.parametrize(
    "weight",
    [-1, np.nan, np.inf, "3", 1j, [1], None.__class__, True, np.ma.masked, 10**400],
    ids=lambda w: repr(w)[:20],
)
def test_a_weight_that_is_none_is_refused_on_every_rank(weight):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises((ValueError, TypeError)) as caught:
            strategy.run(
                lambda: ms.get_replica_context().all_reduce(
                    "MEAN", np.ones(2), weight=weight if comm.rank == 1 else 1
                )
            )
        again = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1))
        return isinstance(caught.value, ms.RemoteError), int(again.local)

    assert run_ranks(rank, 2) == [(True, 2), (False, 2)]


@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN", "PROD"])
def test_only_means_have_weights(strategy_on, op):
    def rank(comm):
        strategy = strategy_on(comm)
        with pytest.raises(ValueError, match="MEAN"):
            strategy.run(lambda: ms.get_replica_context().all_reduce(op, 1.0, weight=1))

    run_ranks(rank, 2)


def test_a_weight_on_some_ranks_only_is_a_difference(strategy_on):
    def rank(comm):
        weight = 1 if comm.rank else None
        strategy = strategy_on(comm)
        with pytest.raises(ms.LockstepError):
            strategy.run(lambda: ms.get_replica_context().all_reduce("MEAN", 1.0, weight=weight))

    run_ranks(rank, 2)


def test_many_leaves_have_their_weights_too(strategy_on):
    """More weights than a frame has room for."""
    values = [[np.full(2, float(r * 100 + i)) for i in range(60)] for r in range(2)]

    def rank(comm):
        ctx_weight = 1 + 2 * comm.rank
        fn = lambda: ms.get_replica_context().all_reduce(  # noqa: E731
            "MEAN", values[comm.rank], weight=ctx_weight
        )
        return [leaf.local for leaf in strategy_on(comm).run(fn)]

    for got in run_ranks(rank, 2):
        for i, leaf in enumerate(got):
            assert leaf.tolist() == [(i + 3 * (100 + i)) / 4] * 2


@every("weights", [[1.0], [3.0, 0.0], [0.0], [0.1], [2.0**40, 0.3], [5.0, 7.0]])
@every("size", [1, 3, 66, 4099])
@every("is_weighting", [True, False])
def test_equal_weights_have_the_scales_of_their_table(weights, size, is_weighting):
    table = np.full((size, len(weights)), weights)
    got = compute_equal_scales(weights, size, is_weighting)
    want = compute_scales(table, is_weighting)
    assert (got.table is None) == (want.table is None)
    assert want.table is None or np.array_equal(got.table, want.table)
    assert [*got.divisors] == [*want.divisors]
    column = np.broadcast_to(np.array(weights), table.shape)[:, 0]
    assert sum_equal(column) == math.fsum(table[:, 0].tolist())
