"""Seeded schedules: one rank at a time, the same again for the same seed, deadlocks at once."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.loopback import LoopbackComm
from mpistrat.testing import RanksFailed, run_ranks


def _program(comm, seen=None):
    strategy = ms.MirroredStrategy()
    for step in range(3):
        if seen is not None:
            seen.append((comm.rank, step))
        strategy.run(lambda step=step: ms.get_replica_context().all_reduce("sum", {f"s{step}": 1}))
    return comm.world


def _trace(seed, size=3):
    seen = []
    return run_ranks(_program, size, seen, seed=seed)[0].trace, seen


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_a_seed_plays_the_same_schedule_again(seed):
    first = _trace(seed)
    assert len(first[0]) > 50
    assert all(_trace(seed) == first for _ in range(20))


def test_seeds_differ():
    traces = [tuple(_trace(seed)[0]) for seed in range(20)]
    assert len(set(traces)) == 20


def test_every_order_of_the_ranks_between_two_calls_comes():
    orders = set()
    for seed in range(200):
        _, seen = _trace(seed)
        orders |= {tuple(r for r, s in seen if s == step) for step in range(3)}
    assert len(orders) == 6


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_one_rank_runs_at_a_time(size):
    running, most = [0], [0]

    def rank(comm):
        for number in range(10):
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.0005)
            running[0] -= 1
            total = np.empty(1, np.int64)
            comm.allreduce(np.array([number], np.int64), total, "SUM")
        return int(total[0])

    assert run_ranks(rank, size, seed=size) == [9 * size] * size
    assert most == [1]


def test_without_a_seed_there_is_no_trace():
    assert run_ranks(lambda comm: comm.world.trace, 2) == [[], []]


def test_the_trace_says_who_came_where():
    def rank(comm):
        comm.bcast(np.zeros(2), 1)
        return comm.world

    trace = run_ranks(rank, 2, seed=3)[0].trace
    for r in range(2):
        mine = [what for who, what in trace if who == r]
        assert mine == ["begins", "bcast of 16 bytes from 1 no. 1", "continues", "leaves", "ends"]


def test_a_deadlock_is_found_at_once_and_says_who_waits_in_what():
    def rank(comm):
        total = np.empty(1)
        for _ in range(2):
            comm.allreduce(np.ones(1), total, "SUM")
        # A second communicator of one rank counts its calls from one again.
        late = LoopbackComm(comm.world, 0) if comm.rank == 0 else comm
        late.bcast(total, 0)

    with pytest.raises(RanksFailed, match="in the schedule of seed 7") as caught:
        run_ranks(rank, 3, seed=7)
    assert set(caught.value.errors) == {0, 1, 2}
    text = str(caught.value.errors[2])
    assert "deadlock in the schedule of seed 7" in text
    assert "rank 0 waits in bcast of 8 bytes from 0 no. 1" in text
    assert "rank 1 waits in bcast of 8 bytes from 0 no. 3" in text
    assert caught.value.trace


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_left_is_not_waited_for(seed):
    def rank(comm):
        if comm.rank:
            comm.bcast(np.zeros(1), 0)

    with pytest.raises(RanksFailed, match=r"ranks \[0\] have left") as caught:
        run_ranks(rank, 3, seed=seed)
    assert set(caught.value.errors) == {1, 2}


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_raises_reaches_the_others(seed):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        strategy.run(lambda: None)
        if comm.rank == 1:
            raise KeyError("lost")
        strategy.run(lambda: None)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 3, seed=seed)
    assert type(caught.value.errors[1]) is KeyError
    assert isinstance(caught.value.errors[0], ms.RemoteError)
    assert isinstance(caught.value.errors[2], ms.RemoteError)


def test_a_rank_that_keeps_its_turn_is_reported_by_the_others():
    gate = threading.Event()

    def rank(comm):
        if comm.rank == 0:
            gate.wait(240)
        comm.bcast(np.zeros(1), 0)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 2, seed=1, timeout=0.2)
    while 1 not in caught.value.errors:  # a machine that stands still may be late for the report
        time.sleep(0.001)
    gate.set()
    assert isinstance(caught.value.errors[1], TimeoutError)
    assert "did not get its turn" in str(caught.value.errors[1])


def test_ranks_that_call_different_things_are_told():
    def rank(comm):
        buffer = np.zeros(2)
        if comm.rank == 0:
            comm.bcast(buffer, 0)
        else:
            comm.allreduce(buffer, buffer.copy(), "SUM")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 2, seed=0)
    assert set(caught.value.errors) == {0, 1}
    assert all("bcast" in str(error) for error in caught.value.errors.values())


def test_a_call_out_of_turn_is_refused():
    def rank(comm):
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match="rank 1 called out of its turn"):
                LoopbackComm(comm.world, 1).bcast(np.zeros(1), 0)
        comm.bcast(np.zeros(1), 0)

    run_ranks(rank, 2, seed=0)
