"""What a strategy does with each rank's own values, in cross-replica code."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

MANY = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]
SIZES = [1, 2, 3, 4]


def reversed_order():
    topology = ms.Topology.read()
    order = list(range(topology.num_ranks))[::-1]
    return ms.TPUStrategy(experimental_device_assignment=ms.DeviceAssignment(topology, order))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [*MANY, reversed_order])
def test_the_rank_is_the_id_of_the_replica(make, size):
    def rank(comm):
        strategy = make()
        inside = []
        strategy.run(lambda: inside.append(ms.get_replica_context().replica_id_in_sync_group))
        with strategy.scope():
            found = {strategy.rank, *inside}
        return found, ms.OneDeviceStrategy("cpu").rank, ms.get_strategy().rank

    expected = range(size)[::-1] if make is reversed_order else range(size)
    assert run_ranks(rank, size) == [({i}, 0, 0) for i in expected]


def own(rank):
    """Each rank's own values: a tree with numbers, small and large arrays, and any layout."""
    return {
        "count": rank + 1,
        "loss": 0.5 * rank,
        "small": np.arange(6, dtype=np.int32).reshape(2, 3).T + rank,
        "large": np.full(40_000, 2.0**rank),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", MANY)
@pytest.mark.parametrize("within", ["scope", "top"])
def test_values_of_all_ranks_are_folded(make, size, within):
    def rank(comm):
        strategy = make()
        with strategy.scope() if within == "scope" else nullcontext():
            mine = own(comm.rank)
            total = [strategy.all_reduce("sum", mine) for _ in range(3)]  # as a plan, too
            weighted = strategy.all_reduce("mean", float(comm.rank), weight=comm.rank + 1)
            room = {"x": np.empty(2)}
            assert strategy.all_reduce("max", {"x": np.full(2, 1.0 * comm.rank)}, out=room) is room
        return total, weighted, room["x"].tolist()

    values = [own(i) for i in range(size)]
    weights = [i + 1 for i in range(size)]
    for totals, weighted, room in run_ranks(rank, size):
        for total in totals:
            for name, found in total.items():
                expected = np.sum([value[name] for value in values], axis=0)
                np.testing.assert_array_equal(found, expected)
                assert isinstance(found, np.ndarray if np.ndim(expected) else np.generic)
            assert total["small"].dtype == np.int32
        assert weighted == np.average(range(size), weights=weights)
        assert room == [size - 1.0] * 2


@pytest.mark.parametrize("make", MANY)
def test_what_a_program_calls_a_value_is_this_ranks_component(make):
    def rank(comm):
        strategy = make()
        with strategy.scope():
            w = ms.Variable(2.0)
            seen = ms.Variable(
                0.0,
                synchronization=ms.VariableSynchronization.ON_READ,
                aggregation=ms.VariableAggregation.MEAN,
            )
        strategy.run(lambda: seen.assign(float(comm.rank)))
        per = strategy.run(lambda: np.float64(comm.rank))
        tree = [per, w, seen, ms.Mirrored(3.0)]
        # The same as in replica code, which has one way to fold values.
        inside = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", tree[1:]))
        inside = strategy.experimental_local_results(inside)[0]
        return [float(x) for x in strategy.all_reduce("sum", tree)], [float(x) for x in inside]

    assert run_ranks(rank, 3) == [([3.0, 6.0, 3.0, 9.0], [6.0, 3.0, 9.0])] * 3


def test_what_is_wrong_on_one_rank_is_an_error_on_all():
    def rank(comm):
        one, two = ms.MirroredStrategy(), ms.OneDeviceStrategy("cpu")
        of_one = one.run(lambda: np.float64(1))
        wrong = {
            TypeError: lambda: one.all_reduce("sum", "text" if comm.rank else 1.0),
            ValueError: lambda: one.all_reduce("sum", 1.0, weight=2.0 if comm.rank else None),
            ms.LockstepError: lambda: one.all_reduce("sum", np.ones(1 + comm.rank)),
            ms.StrategyError: lambda: two.all_reduce("sum", of_one),
        }
        for kind, call in wrong.items():
            with pytest.raises(kind):
                call()
        return float(one.all_reduce("sum", 1.0))  # the job continues

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_one_replica_keeps_its_own():
    def rank(comm):
        default, alone = ms.get_strategy(), ms.OneDeviceStrategy("cpu")
        with pytest.raises(ms.ContextError, match="no strategy is in scope"):
            default.all_reduce("sum", comm.rank)
        with default.scope():  # it was chosen
            mine = float(default.all_reduce("sum", comm.rank))
        return [mine, float(alone.all_reduce("sum", comm.rank))]

    assert run_ranks(rank, 2) == [[0.0, 0.0], [1.0, 1.0]]
