"""Ways in which replicas could come to differ without anybody saying so."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

# On copies of each rank, and on copies that a node has in common.
pytestmark = pytest.mark.usefixtures("kept")

ctx = ms.get_replica_context


def made(strategy, count, **kwargs):
    with strategy.scope():
        return [ms.Variable(0.0, **kwargs) for _ in range(count)]


def test_unnamed_variables_are_told_apart():
    def rank(comm):
        s = ms.MirroredStrategy()
        pair = made(s, 2)
        mine = pair[comm.rank]
        for call in (
            lambda: mine.assign(1.0),
            lambda: s.extended.update(mine, lambda v: v.assign(1.0)),
            lambda: s.run(lambda: mine.assign(1.0)),
        ):
            with pytest.raises(ms.LockstepError):
                call()
        return [float(v.numpy()) for v in pair]

    assert run_ranks(rank, 2) == [[0, 0], [0, 0]]


def test_variables_that_replicas_own_are_told_apart_when_read():
    def rank(comm):
        s = ms.MirroredStrategy()
        how = {
            "synchronization": ms.VariableSynchronization.ON_READ,
            "aggregation": ms.VariableAggregation.SUM,
        }
        mine = made(s, 2, **how)[comm.rank]
        with pytest.raises(ms.LockstepError):
            mine.read_value()

    run_ranks(rank, 2)


def test_datasets_are_told_apart():
    def rank(comm):
        s = ms.MirroredStrategy()
        pair = [s.experimental_distribute_dataset(ms.Dataset.range(4).batch(2)) for _ in "ab"]
        with pytest.raises(ms.LockstepError):
            iter(pair[comm.rank])
        iterators = [iter(one) for one in pair]
        with pytest.raises(ms.LockstepError):
            next(iterators[comm.rank])
        return float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_what_update_returns_is_mirrored_only_if_it_is():
    def rank(comm):
        s = ms.MirroredStrategy()
        (v,) = made(s, 1)
        try:
            got = s.extended.update(v, lambda var: np.array(float(comm.rank)))
        except ms.LockstepError:
            return "refused"
        return type(got).__name__

    assert set(run_ranks(rank, 2)) <= {"refused", "PerReplica"}


def test_a_mirrored_value_that_is_none_does_not_get_into_a_variable():
    def rank(comm):
        s = ms.MirroredStrategy()
        (v,) = made(s, 1)
        with contextlib.suppress(ms.LockstepError):
            v.assign(ms.Mirrored(float(comm.rank)))
        return float(v.numpy())

    zero, one = run_ranks(rank, 2)
    assert zero == one


def test_scopes_closed_out_of_order_do_not_stay_open():
    one = ms.OneDeviceStrategy("cpu")
    first, second = one.scope(), one.scope()
    first.__enter__()
    second.__enter__()
    with contextlib.suppress(RuntimeError):
        first.__exit__(None, None, None)
    with contextlib.suppress(RuntimeError):
        second.__exit__(None, None, None)
    assert not ms.has_strategy()


def test_the_error_of_a_call_inside_update_is_the_one_raised():
    def rank(comm):
        s = ms.MirroredStrategy()
        (v,) = made(s, 1)

        def fn(var):
            s.reduce("SUM", ms.PerReplica(np.ones(1 + comm.rank)), None)

        with pytest.raises(ms.LockstepError):
            s.extended.update(v, fn)
        with pytest.raises(ms.LockstepError):
            s.run(lambda: ctx().merge_call(lambda d: d.extended.update(v, fn)))
        with pytest.raises(ms.LockstepError):
            s.run(lambda: ms.Variable(lambda: ctx().all_reduce("SUM", np.ones(1 + comm.rank))))
        return float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2, timeout=10) == [2.0, 2.0]


def test_a_variable_written_while_another_is_updated_stays_the_same_everywhere():
    def rank(comm):
        s = ms.MirroredStrategy()
        v, w = made(s, 2)
        with contextlib.suppress(ms.LockstepError, RuntimeError):
            s.extended.update(v, lambda var: w.assign(float(comm.rank)))
        return float(w.numpy())

    zero, one = run_ranks(rank, 2, timeout=10)
    assert zero == one


def test_arguments_of_run_by_name_and_in_trees():
    def rank(comm):
        s = ms.MirroredStrategy()
        value = s.run(lambda: comm.rank + 1)
        fn = lambda tree, k: (tree["a"][0], k, type(tree["m"]).__name__)  # noqa: E731
        tree = {"a": [value], "m": ms.Mirrored(2.0, comm.size)}
        got = s.run(fn, args=(tree,), kwargs={"k": value})
        with pytest.raises(ValueError, match="list or tuple"):
            s.run(fn, args=5)
        return [x.local for x in got]

    assert run_ranks(rank, 2) == [[1, 1, "float"], [2, 2, "float"]]


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.OneDeviceStrategy])
def test_results_are_fresh_and_checked_in_every_strategy(make):
    def rank(comm):
        s = make("cpu") if make is ms.OneDeviceStrategy else make()
        mine = np.ones(3)
        got = s.run(lambda: ctx().all_reduce("SUM", mine))
        got = got.local if isinstance(got, ms.PerReplica) else got
        assert not np.shares_memory(got, mine)
        for bad in ("text", np.array(["a"]), np.ma.ones(2)):
            with pytest.raises(TypeError):
                s.run(lambda b=bad: ctx().all_reduce("SUM", b))

    run_ranks(rank, 1)
