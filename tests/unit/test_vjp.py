"""Gradients through collectives, against differences of losses that NumPy computes alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

SIZES = pytest.mark.parametrize("n", [1, 2, 3, 4])
SHAPE = (2, 3)


def values(n, rows=None):
    """What each replica holds; `rows` says how many rows each has."""
    draw = np.random.default_rng(7)
    return [draw.normal(size=(SHAPE[0] if rows is None else rows[i], SHAPE[1])) for i in range(n)]


def factors(n, size):
    """The loss of replica i is ``sum(factors[i] * result**3)``."""
    return np.random.default_rng(8).normal(size=(n, size, SHAPE[1]))


def total_loss(held, fold):
    """The sum of the losses of all replicas."""
    result = fold(held)
    return float((factors(len(held), len(result)) * result**3).sum())


def differences(held, fold, step=1e-6):
    """The gradient of the total loss by every replica's value, by central differences."""
    gradients = [np.zeros_like(value) for value in held]
    for value, gradient in zip(held, gradients, strict=True):
        for at in np.ndindex(value.shape):
            kept = value[at]
            value[at] = kept + step
            above = total_loss(held, fold)
            value[at] = kept - step
            gradient[at] = (above - total_loss(held, fold)) / (2 * step)
            value[at] = kept
    return gradients


def through(call, n, rows=None):
    """Each rank's gradient of its value, with `call` as the collective."""

    def program(comm):
        def replica():
            ctx = ms.get_replica_context()
            me = ctx.replica_id_in_sync_group
            result, pull = call(me, values(n, rows)[me])
            return pull(3 * factors(n, len(result))[me] * result**2)

        strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
        return strategy.run(replica)

    return run_ranks(program, n)


def weighted(weights):
    def fold(held):
        pairs = zip(weights, held, strict=True)
        return sum(w * v for w, v in pairs if w) / sum(weights)

    return fold


@SIZES
@pytest.mark.parametrize(
    ("op", "fold"), [("SUM", sum), ("mean", lambda held: sum(held) / len(held))]
)
def test_all_reduce(n, op, fold):
    got = through(lambda me, value: ms.vjp.all_reduce(op, value), n)
    for mine, want in zip(got, differences(values(n), fold), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-5, atol=1e-7)


@SIZES
@pytest.mark.parametrize("weights", [(4, 2, 0, 1), (0.5, 0.25, 3, 0)])
def test_weighted_means(n, weights):
    weights = weights[:n]
    got = through(lambda me, value: ms.vjp.all_reduce("MEAN", value, weight=weights[me]), n)
    for mine, want in zip(got, differences(values(n), weighted(weights)), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weights", [(2, 0), (0, 0)])
def test_a_value_that_was_never_read_has_no_gradient_even_by_an_infinite_one(weights):
    def program(comm):
        def replica():
            me = ms.get_replica_context().replica_id_in_sync_group
            _, pull = ms.vjp.all_reduce("MEAN", np.ones(2), weight=weights[me])
            return pull(np.array([np.inf, 1.0]))

        return ms.MultiWorkerMirroredStrategy(comm=comm).run(replica)

    got = run_ranks(program, 2)
    if sum(weights):
        assert got[0].tolist() == [np.inf, 2.0]
        assert got[1].tolist() == [0.0, 0.0]
    else:
        assert np.isnan(got).all()


@SIZES
@pytest.mark.parametrize("rows", [(2, 2, 2, 2), (1, 3, 0, 2), (0, 1, 1, 0)])
def test_all_gather(n, rows):
    rows = rows[:n]
    got = through(lambda me, value: ms.vjp.all_gather(value, 0), n, rows)
    for mine, want in zip(got, differences(values(n, rows), np.concatenate), strict=True):
        assert mine.shape == want.shape
        np.testing.assert_allclose(mine, want, rtol=1e-5, atol=1e-7)


@SIZES
def test_all_gather_of_a_tree_along_the_last_axis(n):
    def program(comm):
        def replica():
            ctx = ms.get_replica_context()
            me = ctx.replica_id_in_sync_group
            tree = {"a": np.full((2, me + 1), 1.0), "b": [np.full(2, 2.0, np.float32)]}
            result, pull = ms.vjp.all_gather(tree, axis=-1)
            counted = {
                "a": np.arange(result["a"].size, dtype=float).reshape(2, -1),
                "b": [np.arange(result["b"][0].size, dtype=np.float32)],
            }
            return pull(counted)

        return ms.MultiWorkerMirroredStrategy(comm=comm).run(replica)

    wide = n * (n + 1) // 2
    whole = n * np.arange(2.0 * wide).reshape(2, wide)
    for me, got in enumerate(run_ranks(program, n)):
        start = me * (me + 1) // 2
        np.testing.assert_array_equal(got["a"], whole[:, start : start + me + 1])
        np.testing.assert_array_equal(got["b"][0], n * np.arange(2.0 * me, 2 * me + 2))
        assert got["b"][0].dtype == np.float32
        assert got["a"].base is None  # the caller's own


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.complex128])
def test_dtypes_are_kept_and_numbers_stay_numbers(dtype):
    def program(comm):
        def replica():
            me = ms.get_replica_context().replica_id_in_sync_group
            tree = (np.ones(3, dtype), dtype(2), ms.Variable(np.ones(1, dtype)))
            found = []
            for weight in (None, 1 + me):
                result, pull = ms.vjp.all_reduce("MEAN", tree, weight=weight)
                found.append(pull(result))
            return found

        with ms.MultiWorkerMirroredStrategy(comm=comm).scope() as strategy:
            return strategy.run(replica)

    for me, (plain, shared) in enumerate(run_ranks(program, 2)):
        for gradient, share in ((plain, 1.0), (shared, 2 * (1 + me) / 3)):
            assert [leaf.dtype for leaf in gradient] == [np.dtype(dtype)] * 3
            assert isinstance(gradient[1], np.generic)
            wide = [np.asarray(leaf, np.complex128) for leaf in gradient]
            np.testing.assert_allclose(wide[0], np.full(3, share), rtol=1e-2)
            np.testing.assert_allclose(wide[1], 2 * share, rtol=1e-2)


def test_the_default_strategy_gives_back_what_it_gets():
    result, pull = ms.vjp.all_reduce("SUM", [1.5, np.ones(2)])
    assert result[0] == 1.5
    assert [np.asarray(leaf).tolist() for leaf in pull([2.0, np.arange(2)])] == [2.0, [0.0, 1.0]]
    result, pull = ms.vjp.all_gather([], axis=0)
    assert pull(result) == []


def slices():
    return ms.IndexedSlices(np.ones((1, 2)), [0], (3, 2))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ms.vjp.all_reduce("MAX", 1.0), ValueError, "SUM and MEAN, not for MAX"),
        (lambda: ms.vjp.all_reduce("SUM", {"a": 1}), ms.LeafTypeError, "'a' is int64.*gradient"),
        (lambda: ms.vjp.all_gather(np.ones(2, bool), 0), ms.LeafTypeError, "bool"),
        (lambda: ms.vjp.all_reduce("SUM", slices()), ms.LeafTypeError, "IndexedSlices"),
        (lambda: ms.vjp.all_reduce("SUM", 1.0, weight=1.0), ValueError, "weight is for MEAN"),
        (lambda: ms.vjp.all_gather(np.ones(2), 1), ms.AxisError, "no axis 1"),
        (lambda: ms.vjp.all_reduce("SUM", 1.0)[1]([1.0]), ms.StructureError, "structure"),
        (lambda: ms.vjp.all_reduce("SUM", 1.0)[1](np.ones(1)), ms.StructureError, "shape"),
        (lambda: ms.vjp.all_reduce("SUM", 1.0)[1](1j), ms.LeafTypeError, "complex128"),
    ],
)
def test_what_is_wrong_on_one_rank_is_told_on_all(call, error, words):
    def program(comm):
        def replica():
            if ms.get_replica_context().replica_id_in_sync_group == 1:
                call()
            else:
                ms.vjp.all_reduce("SUM", 1.0)[1](1.0)

        strategy = ms.MirroredStrategy(comm=comm)
        with pytest.raises(error, match=words) as raised:
            strategy.run(replica)
        return type(raised.value) is error, float(strategy.reduce("SUM", strategy.run(float), None))

    assert run_ranks(program, 2) == [(False, 0.0), (True, 0.0)]


def test_it_belongs_to_replica_code_and_to_its_run():
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope(), pytest.raises(ms.ContextError, match="cross-replica"):
            ms.vjp.all_reduce("SUM", 1.0)
        kept = []
        strategy.run(lambda: kept.append(ms.vjp.all_reduce("SUM", 1.0)[1]))
        with pytest.raises(ms.ContextError, match="outside run"):
            kept[0](1.0)

    run_ranks(program, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_share_that_the_dtype_holds_comes_back_though_the_sum_would_not_fit(dtype):
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    large = 60000.0 if dtype == "float16" else 3e38 if dtype == "bfloat16" else 1e38

    def rank(comm):
        def fn():
            _, pull = ms.vjp.all_reduce("MEAN", np.ones(2, kind), weight=1)
            return pull(np.array([large, 0.5], kind))

        return ms.MirroredStrategy().run(fn).local

    for got in run_ranks(rank, 2):
        assert got.dtype == kind
        want = np.array([large, 0.5], kind).astype(np.float64)
        if dtype == "bfloat16":  # whose sum float32 does not hold either
            want[0] = np.inf
        np.testing.assert_array_equal(got.astype(np.float64), want)
