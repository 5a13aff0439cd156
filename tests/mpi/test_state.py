"""Each rank's own values on real ranks: folded, given to all, proved the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import same

pytestmark = pytest.mark.mpi

DTYPES = [np.dtype(code) for code in "?bBhHilqQefdgFDG"] + [np.dtype(ml_dtypes.bfloat16)]


def own(rank):
    tree = {dtype.name: np.full((3, 2), rank + 1).astype(dtype).T for dtype in DTYPES}
    return tree | {
        "large": np.full(40_000, 1.0 * rank),
        "empty": np.ones(0),
        "number": 10**30 + rank,
    }


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_replica_0s_values_on_all_ranks(world, make):
    strategy = make()
    assert strategy.rank == world.rank
    for found in (strategy.broadcast(own(world.rank)), own(0)):
        strategy.check_same(found)
        for name, value in own(0).items():
            assert np.array_equal(found[name], value)
    mine = np.full(40_000, 1.0 * world.rank)
    assert strategy.broadcast([mine], out=[mine])[0] is mine
    assert not mine.any()


def test_a_difference_is_named_on_every_rank(world):
    strategy = ms.MirroredStrategy()
    odd = world.size - 1
    weights = np.zeros((1000, 1200))  # more than is compared at once
    weights[999, 7] = world.rank == odd
    if world.size == 1:
        strategy.check_same([weights])
        return
    with pytest.raises(ms.DivergenceError, match=rf"'0' .* \(999, 7\): 1.0 on rank {odd}, 0.0 on"):
        strategy.check_same([weights])
    strategy.check_same(strategy.broadcast([weights]))


def test_own_values_are_folded(world):
    strategy = ms.MirroredStrategy()
    mine = {"n": world.rank + 1, "large": np.full(40_000, 2.0**world.rank)}
    found = strategy.all_reduce("sum", mine)
    large = np.full(40_000, 2.0**world.size - 1)
    same(world, found, {"n": np.int64(world.size * (world.size + 1) // 2), "large": large})


def test_a_replica_context_of_no_strategy_is_refused(world):
    call = lambda: ms.get_replica_context().all_reduce("sum", 1.0)  # noqa: E731
    if world.size == 1:
        assert call() == 1.0
        return
    with pytest.raises(ms.ContextError, match=f"in a job of {world.size} ranks"):
        call()
    assert ms.get_strategy().run(call) == ms.OneDeviceStrategy("cpu").run(call) == 1.0


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_a_variable_of_this_rank_alone_is_read_by_all_code(world, make):
    strategy = make()
    alone = ms.Variable(world.rank + 1.0)
    with strategy.scope():
        v = ms.Variable(0.0, aggregation=ms.VariableAggregation.SUM)
        assert alone + 1 == world.rank + 2.0
    strategy.run(lambda: v.assign_add(alone))
    assert v.numpy() == sum(range(1, world.size + 1))
    with strategy.scope():
        alone.assign(v)
    with pytest.raises(ms.StrategyError, match="in replica code"):
        strategy.run(lambda: alone.assign_add(1.0))
    assert alone.numpy() == sum(range(1, world.size + 1))
