"""One life in the job: one session for each parent, one owning thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.session import Session
from mpistrat.testing import run_ranks


def test_all_strategies_on_one_parent_share_a_session():
    def rank(comm):
        one, two = ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy(comm=comm)
        return (
            one.replicas.lockstep.session
            is two.replicas.lockstep.session
            is Session.of_parent(comm)
        )

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.parametrize("parent", [None, 3, "world"])
def test_a_parent_of_another_kind_is_refused(parent):
    with pytest.raises(TypeError, match="intracommunicator"):
        Session.of_parent(parent)


def _in_thread(fn):
    found = []

    def body():
        try:
            found.append(fn())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body, name="stranger")
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_gets_an_error_at_once_and_the_owner_goes_on():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            variable = ms.Variable(np.zeros(2))
        dataset = strategy.experimental_distribute_dataset(ms.Dataset.range(4).batch(2))
        iterator = iter(dataset)
        calls = [
            lambda: strategy.reduce("sum", ms.PerReplica(1.0), None),
            lambda: strategy.run(lambda: 1),
            lambda: strategy.gather(ms.PerReplica(np.ones(1)), 0),
            lambda: strategy.experimental_local_results(ms.PerReplica(1.0)),
            lambda: variable.assign([1.0, 1.0]),
            lambda: next(iterator),
            lambda: iter(dataset),
            lambda: ms.MirroredStrategy(comm=comm).run(lambda: 1),
        ]
        before = strategy._replicas.lockstep.session.calls
        errors = [_in_thread(call) for call in calls]
        kinds = {type(error).__name__ for error in errors}
        silent = strategy._replicas.lockstep.session.calls == before
        batches = [x.local.tolist() for x in iterator]
        return kinds, silent, str(errors[0]), variable.numpy().tolist(), batches

    for rank_, found in enumerate(run_ranks(rank, 2)):
        kinds, silent, text, value, batches = found
        assert kinds == {"StrategyError"}
        assert silent
        assert "stranger" in text
        assert f"rank {rank_}" in text
        assert value == [0, 0]
        assert batches == [[rank_], [2 + rank_]]  # nothing was lost to the other thread


def test_only_the_thread_that_may_call_can_do_so_after_many_tries():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        total = 0.0
        for _ in range(30):
            assert isinstance(_in_thread(lambda: strategy.run(lambda: 1)), ms.StrategyError)
            total += strategy.reduce("sum", ms.PerReplica(1.0), None)
        return float(total)

    assert run_ranks(rank, 2) == [60.0, 60.0]


def test_the_default_strategy_works_in_every_thread():
    assert _in_thread(lambda: ms.get_strategy().run(lambda: 7)) == 7
