"""Who rules where: the states, how they are entered, and what is refused in which."""

from __future__ import annotations

import threading
import warnings
from functools import partial

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm import session
from mpistrat.testing import run_ranks


def state():
    """What the four questions answer, with the strategy's type name for the strategy."""
    context = ms.get_replica_context()
    return (
        None if context is None else context.replica_id_in_sync_group,
        ms.in_cross_replica_context(),
        type(ms.get_strategy()).__name__,
        ms.has_strategy(),
    )


def test_the_default_state():
    assert state() == (0, False, "DefaultStrategy", False)
    assert ms.get_strategy().num_replicas_in_sync == 1
    assert ms.get_strategy() is ms.get_strategy()
    context = ms.get_replica_context()
    assert context.strategy is ms.get_strategy()
    assert context.merge_call(lambda s: state()) == (None, True, "DefaultStrategy", False)
    assert ms.get_strategy().run(state) == (0, False, "DefaultStrategy", False)


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_the_states_of_a_strategy(make):
    def rank(comm):
        strategy = make()
        name = type(strategy).__name__
        cross, own = (None, True, name, True), (comm.rank, False, name, True)
        seen = []

        def fn():
            seen.append(state() == own)
            assert ms.get_replica_context() is ms.get_replica_context()
            ms.get_replica_context().merge_call(lambda s: seen.append((state(), s is strategy)))
            seen.append(state() == own)

        with strategy.scope() as entered:
            assert entered is strategy
            assert state() == cross
            with strategy.scope():
                strategy.run(fn)
            assert state() == cross
        strategy.run(fn)
        assert state() == (0, False, "DefaultStrategy", False)
        with strategy.scope():
            variable = ms.Variable(1.0)
        strategy.extended.update(variable, lambda v: seen.append(state() == cross))
        return seen == [True, (cross, True), True] * 2 + [True]

    assert run_ranks(rank, 2) == [True, True]


def test_states_are_left_after_errors():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ZeroDivisionError), strategy.scope():
            strategy.run(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            strategy.run(lambda: ms.get_replica_context().merge_call(lambda s: 1 / 0))
        return state()

    assert run_ranks(rank, 2) == [(0, False, "DefaultStrategy", False)] * 2


CROSS = {
    "run": lambda s: s.run(lambda: 1),
    "reduce": lambda s: s.reduce("SUM", ms.PerReplica(1.0), None),
    "all_reduce": lambda s: s.all_reduce("SUM", 1.0),
    "broadcast": lambda s: s.broadcast(1.0),
    "check_same": lambda s: s.check_same(1.0),
    "gather": lambda s: s.gather(ms.PerReplica(np.ones(1)), 0),
    "scope": lambda s: s.scope().__enter__(),
    "experimental_make_numpy_dataset": lambda s: s.experimental_make_numpy_dataset(np.ones(2)),
    "reduce_to": lambda s: s.extended.reduce_to("SUM", ms.PerReplica(1.0), "cpu"),
    "batch_reduce_to": lambda s: s.extended.batch_reduce_to("SUM", [(ms.PerReplica(1.0), "cpu")]),
    "broadcast_to": lambda s: s.extended.broadcast_to(np.ones(1), "cpu"),
}
INSTEAD = {name: "all_reduce" for name in ("reduce", "all_reduce", "reduce_to")}
INSTEAD["gather"] = "all_gather"


@pytest.mark.parametrize("call", CROSS)
@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_cross_replica_calls_in_replica_code(call, make):
    def rank(comm):
        strategy = make()
        with pytest.raises(ms.ContextError) as caught:
            strategy.run(lambda: CROSS[call](strategy))
        assert isinstance(caught.value, RuntimeError)
        return str(caught.value)

    for at, text in enumerate(run_ranks(rank, 3)):
        assert f".{call}() is cross-replica code" in text
        assert f"replica {at} of 3" in text
        assert INSTEAD.get(call, "merge_call") in text


@pytest.mark.parametrize(
    ("made_in", "said"),
    [
        (ms.MirroredStrategy, r"scope of another Mirrored.*Make one strategy and use it every"),
        (ms.get_strategy, r"scope of Mirrored.*default strategy's: create it in `with strategy.s"),
    ],
)
def test_what_another_strategy_made_says_what_to_do(made_in, said):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with made_in().scope():
            w, loss = ms.Variable(1.0), ms.metrics.Mean("loss")
        for call in (
            lambda: loss.update_state(1.0),
            lambda: ms.optim.SGD(0.1).apply_gradients([(1.0, w)]),
        ):
            with pytest.raises(ms.StrategyError, match=said):
                strategy.run(call)

    run_ranks(rank, 2)


@pytest.mark.parametrize("call", CROSS)
def test_calls_of_another_strategy(call):
    def rank(comm):
        one, two = ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy()
        with one.scope(), pytest.raises(ms.StrategyError, match="Mixing different"):
            CROSS[call](two)
        with pytest.raises(ms.StrategyError, match="Mixing different"):
            one.run(lambda: CROSS[call](two))
        with one.scope(), pytest.raises(ms.StrategyError):
            CROSS[call](ms.OneDeviceStrategy("cpu"))
        return float(two.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_variables_and_data_of_another_strategy():
    def rank(comm):
        one, two = ms.MirroredStrategy(), ms.MirroredStrategy()
        with one.scope():
            variable = ms.Variable(1.0)
        data = one.experimental_distribute_dataset(ms.Dataset.range(4).batch(2))
        with two.scope():
            for call in (
                lambda: variable.assign(2.0),
                lambda: variable.read_value(),
                lambda: iter(data),
                lambda: two.extended.update(variable, lambda v: None),
            ):
                with pytest.raises(ms.StrategyError):
                    call()
        return float(variable.numpy())

    assert run_ranks(rank, 2) == [1.0, 1.0]


def test_a_context_is_of_use_in_its_run_only():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        kept = []
        strategy.run(lambda: kept.append(ms.get_replica_context()))
        (old,) = kept
        for call in (
            lambda: old.all_reduce("SUM", 1.0),
            lambda: old.all_gather(np.ones(1), 0),
            lambda: old.merge_call(lambda s: 1),
        ):
            with pytest.raises(ms.ContextError, match="outside run"):
                call()
            with pytest.raises(ms.ContextError, match="another run"):
                strategy.run(call)
            with strategy.scope(), pytest.raises(ms.ContextError, match="cross-replica"):
                call()

        def inside():
            mine = ms.get_replica_context()
            mine.merge_call(lambda s: mine.merge_call(lambda s: 1))

        with pytest.raises(ms.ContextError, match="cross-replica"):
            strategy.run(inside)
        return float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_what_a_context_says_of_itself():
    def rank(comm):
        strategy = ms.MirroredStrategy(["a", "b"])

        def fn():
            c = ms.get_replica_context()
            return c.strategy is strategy, c.num_replicas_in_sync, c.devices, repr(c)

        same, count, devices, text = strategy.run(fn)
        return same.local, count.local, devices[0].local, text.local

    for at, (same, count, device, text) in enumerate(run_ranks(rank, 2)):
        assert same is True
        assert count == 2
        assert device == "ab"[at]
        assert f"{at} of 2" in text
    with pytest.raises(ValueError, match="integer"):
        ms.ReplicaContext(ms.get_strategy(), "0")


CALLS = {
    "all_reduce": lambda c: c.all_reduce("SUM", 2.0),
    "all_gather": lambda c: c.all_gather(np.ones(1), 0),
    "merge_call": lambda c: c.merge_call(lambda s: 2.0),
    "Strategy.all_reduce": lambda c: ms.get_strategy().all_reduce("SUM", 1.0),
    "Strategy.broadcast": lambda c: ms.get_strategy().broadcast(1.0),
    "Strategy.check_same": lambda c: ms.get_strategy().check_same(1.0) or 1,
    "CrossDeviceOps.reduce": lambda c: ms.NcclAllReduce().reduce("SUM", 2.0, "cpu"),
}
NOWHERE = "was called where no strategy is in scope, in a job of {} ranks"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_of_replicas_where_no_strategy_rules(size, call):
    def rank(comm):
        if size == 1:
            return CALLS[call](ms.get_replica_context()) is not None
        with pytest.raises(ms.ContextError, match=NOWHERE.format(size)):
            CALLS[call](ms.get_replica_context())
        strategy = ms.MirroredStrategy()
        strategy.run(lambda: 1)
        with pytest.raises(ms.ContextError, match=NOWHERE.format(size)):
            CALLS[call](ms.get_replica_context())
        return strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1)).local == size

    assert run_ranks(rank, size) == [True] * size


def test_one_replica_that_was_chosen_is_silent():
    def rank(comm):
        default, one = ms.get_strategy(), ms.OneDeviceStrategy("cpu")
        call = lambda: ms.get_replica_context().all_reduce("SUM", 2.0)  # noqa: E731
        found = [default.run(call), one.run(call)]
        with default.scope():
            found.append(call())
            found.append(default.all_reduce("SUM", 2.0))
        with ms.ReplicaContext(default, 0), default.scope():
            found.append(call())
        with pytest.raises(ms.ContextError, match=NOWHERE.format(2)):
            call()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_ranks(rank, 2) == [[2.0] * 5] * 2


def in_thread(call):
    """What `call` raises in a thread of its own."""
    told = []

    def body():
        with pytest.raises(ms.ContextError) as caught:
            call()
        told.append(str(caught.value))

    thread = threading.Thread(target=body, name="helper")
    thread.start()
    thread.join()
    return told[0]


def test_calls_from_another_thread_say_so():
    def rank(comm):
        strategy, one = ms.MirroredStrategy(), ms.OneDeviceStrategy("cpu")

        def fn():
            mine = ms.get_replica_context()
            here = [in_thread(partial(CALLS[call], mine)) for call in list(CALLS)[:3]]
            # This thread is a rank of two, so one that asks for a context of its own is told.
            return here, in_thread(lambda: CALLS["all_reduce"](ms.get_replica_context()))

        texts, own = strategy.run(fn)
        alone, _ = one.run(fn)
        return [text.local for text in texts] + alone, own.local

    for texts, own in run_ranks(rank, 2):
        assert all("in another thread ('helper')" in text for text in texts)
        assert not any("outside run()" in text for text in texts)
        assert NOWHERE.format(2) in own
        assert "in the thread that calls run" in own


def test_what_the_launcher_says_is_enough(monkeypatch):
    monkeypatch.setattr(session, "is_mpi_running", lambda: False)
    monkeypatch.setenv("PMI_SIZE", "3")
    with pytest.raises(ms.ContextError, match=NOWHERE.format(3)):
        ms.get_replica_context().all_reduce("SUM", 2.0)
    monkeypatch.setenv("PMI_SIZE", "1")
    assert ms.get_replica_context().all_reduce("SUM", 2.0) == 2.0


ASKED = {
    "all_reduce": ("strategy.all_reduce", lambda c: c.all_reduce("SUM", 1)),
    "all_gather": ("strategy.gather", lambda c: c.all_gather(np.ones(1), 0)),
    "merge_call": ("the function itself", lambda c: c.merge_call(lambda s: 1)),
    "replica_id_in_sync_group": ("strategy.rank", lambda c: c.replica_id_in_sync_group),
    "num_replicas_in_sync": ("num_replicas_in_sync", lambda c: c.num_replicas_in_sync),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_context_wanted_in_cross_replica_code_says_what_to_call(name):
    instead, ask = ASKED[name]
    call = lambda *_: ask(ms.get_replica_context())  # noqa: E731

    def rank(comm):
        strategy = ms.MirroredStrategy()
        told = []
        with strategy.scope():
            v = ms.Variable(1.0)
            assert ms.get_replica_context() is None
        with pytest.raises(AttributeError) as caught, strategy.scope():
            call()
        told.append(str(caught.value))
        with pytest.raises(AttributeError) as caught:
            strategy.run(lambda: ms.get_replica_context().merge_call(call))
        told.append(str(caught.value))
        with pytest.raises(AttributeError) as caught, strategy.scope():
            strategy.extended.update(v, call)
        told.append(str(caught.value))
        with pytest.raises(AttributeError) as caught, strategy.scope():
            None.unheard_of  # noqa: B018
        return told, str(caught.value)

    for told, other in run_ranks(rank, 2):
        for text in told:
            assert text.startswith(f"'NoneType' object has no attribute '{name}'")
            assert text.count("get_replica_context() is None in cross-replica code") == 1
            assert f"use {instead}" in text or f"use strategy.{instead}" in text
        assert other == "'NoneType' object has no attribute 'unheard_of'"


def test_next_in_replica_code():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        data = strategy.experimental_distribute_dataset(ms.Dataset.range(4).batch(2))
        iterator = iter(data)
        with pytest.raises(ms.ContextError, match="next"):
            strategy.run(lambda: next(iterator))
        with pytest.raises(ms.ContextError):
            strategy.run(lambda: iter(data))
        return [x.local.tolist() for x in iterator]

    assert run_ranks(rank, 2) == [[[0], [2]], [[1], [3]]]


def test_a_scope_can_be_entered_again_and_in_itself():
    s = ms.OneDeviceStrategy("cpu")
    scope = s.scope()
    for _ in range(2):
        with scope as first, scope as second:
            assert first is second is s is ms.get_strategy()
        assert not ms.has_strategy()
    with scope:
        with scope:
            pass
        assert ms.get_strategy() is s
    with pytest.raises(RuntimeError, match="had not been entered"):
        scope.__exit__(None, None, None)
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert not ms.has_strategy()


def test_the_scope_of_the_default_strategy_changes_nothing():
    default, other = ms.get_strategy(), ms.OneDeviceStrategy("cpu")
    with default.scope() as same, default.scope():
        assert same is default
        assert ms.get_replica_context() is not None
        assert not ms.in_cross_replica_context()
        with other.scope():
            assert ms.get_strategy() is other
    with other.scope(), pytest.raises(RuntimeError, match="Mixing"), default.scope():
        pass
    assert not ms.has_strategy()


def test_the_number_of_a_replica():
    s = ms.OneDeviceStrategy("cpu")
    made = ms.ReplicaContext(s, np.int32(0))
    assert (made.replica_id_in_sync_group, made.devices) == (0, ("cpu",))
    unknown = ms.ReplicaContext(s, None)
    assert (unknown.replica_id_in_sync_group, unknown.devices) == (None, ("cpu",))
    for wrong in ("0", 0.0, True, np.ones(2)):
        with pytest.raises(ValueError, match="must be an integer"):
            ms.ReplicaContext(s, wrong)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_the_body_of_a_context_is_replica_code(kind, size):
    def rank(comm):
        strategy = kind()
        with strategy.scope():
            v = ms.Variable(0.0, aggregation=ms.VariableAggregation.SUM)
        mine = ms.ReplicaContext(strategy, replica_id_in_sync_group=comm.rank)
        with mine as ctx:
            assert ctx is mine is ms.get_replica_context()
            assert not ms.in_cross_replica_context()
            assert ms.get_strategy() is strategy
            total = ctx.all_reduce("sum", comm.rank + 1.0)
            assert v.assign_add(ctx.replica_id_in_sync_group + 1.0) == total
            seen = ctx.merge_call(lambda s, x: s.reduce("SUM", x, None), args=(comm.rank + 1.0,))
            with pytest.raises(ms.ContextError, match="cross-replica"):
                strategy.reduce("SUM", 1.0, None)
            with (
                pytest.raises(ms.ContextError, match="cross-replica"),
                ms.ReplicaContext(strategy, 0),
            ):
                pass
            with ctx:  # the current one already
                assert ms.get_replica_context() is ctx
            assert ms.get_replica_context() is ctx
        assert ms.get_replica_context().strategy is not strategy
        with strategy.scope(), ms.ReplicaContext(strategy, None) as ctx:
            assert ctx.replica_id_in_sync_group is None
            again = ctx.all_reduce("sum", 1.0)
        with pytest.raises(ms.ContextError, match="outside run"):
            ctx.all_reduce("sum", 1.0)
        with pytest.raises(ms.ContextError, match="not entered"):
            ctx.__exit__(None, None, None)
        return float(total), float(v.numpy()), float(seen), float(again)

    total = size * (size + 1) / 2
    assert run_ranks(rank, size) == [(total, total, total, size)] * size


def test_what_fails_in_the_body_of_a_context_fails_on_all_ranks():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(0.0)
        told = []
        failing = pytest.raises(ValueError, match="only here")
        with failing as caught, ms.ReplicaContext(strategy, comm.rank):
            v.assign(3.0)
            if comm.rank == 1:
                raise ValueError("only here")
        told.append(type(caught.value) is ValueError)
        with pytest.raises(ms.LockstepError), ms.ReplicaContext(strategy, comm.rank) as ctx:
            ctx.all_reduce("sum" if comm.rank else "max", 1.0)
        failing = pytest.raises(ms.ContextError, match=r"is replica 1 of 2.*code of replica 0")
        with failing as caught, ms.ReplicaContext(strategy, 0):
            assert comm.rank == 0
        told.append(type(caught.value) is ms.ContextError)
        other = ms.MirroredStrategy()
        mixing = pytest.raises(ms.StrategyError, match="Mixing")
        with strategy.scope(), mixing, ms.ReplicaContext(other, comm.rank):
            raise AssertionError("the body must not run")
        return told, float(v.numpy()), float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [([False, False], 3.0, 2.0), ([True, True], 3.0, 2.0)]


def test_the_body_of_a_context_of_one_replica():
    for strategy in (ms.get_strategy(), ms.OneDeviceStrategy("cpu")):
        with ms.ReplicaContext(strategy, 0) as ctx:
            assert ms.get_replica_context() is ctx
            assert ctx.all_reduce("sum", 2.0) == 2.0
        with pytest.raises(KeyError), ms.ReplicaContext(strategy, None):
            raise KeyError
    with ms.get_replica_context() as ctx:
        assert ctx.replica_id_in_sync_group == 0
    assert not ms.in_cross_replica_context()


def test_call_for_each_replica_takes_any_arguments_that_come_one_by_one():
    s = ms.OneDeviceStrategy("cpu")
    add = lambda a, b: a + b  # noqa: E731
    assert s.extended.call_for_each_replica(add, iter([1, 2])) == 3
    assert s.extended.call_for_each_replica(add, {1: None, 2: None}) == 3
    with pytest.raises(ValueError, match="args must be"):
        s.extended.call_for_each_replica(add, 5)
    with pytest.raises(ValueError, match="args must be"):
        s.run(add, iter([1, 2]))
