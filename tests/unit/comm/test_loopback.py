"""Ranks as threads: strict about what meets what, and never waiting forever."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mpistrat.testing import RanksFailed, run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_gathers_reductions_and_broadcasts(size):
    def rank(comm):
        mine = np.full((2,), comm.rank, np.int32)
        all_ = np.empty((size, 2), np.int32)
        comm.allgather(mine, all_)
        total = np.empty_like(mine)
        comm.allreduce(mine, total, "SUM")
        counts = list(range(size))
        everyones = np.empty(sum(counts), np.uint8)
        comm.allgatherv(np.full(comm.rank, comm.rank, np.uint8), everyones, counts)
        root = np.array([comm.rank * 10.0])
        comm.bcast(root, size - 1)
        return all_.tolist(), total.tolist(), everyones.tolist(), float(root[0])

    wanted = (
        [[r, r] for r in range(size)],
        [sum(range(size))] * 2,
        [r for r in range(size) for _ in range(r)],
        10.0 * (size - 1),
    )
    assert run_ranks(rank, size) == [wanted] * size


def test_ranks_that_meet_for_different_things_are_told():
    def rank(comm):
        buffer = np.zeros(2)
        if comm.rank == 0:
            comm.bcast(buffer, 0)
        else:
            comm.allreduce(buffer, buffer.copy(), "SUM")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 2)
    assert set(caught.value.errors) == {0, 1}
    assert all("bcast" in str(error) for error in caught.value.errors.values())


def test_a_rank_that_left_is_not_waited_for():
    def rank(comm):
        if comm.rank:
            comm.bcast(np.zeros(1), 0)

    with pytest.raises(RanksFailed, match=r"ranks \[0\] have left"):
        run_ranks(rank, 3)


def test_patience_ends():
    gate = threading.Event()

    def rank(comm):
        if comm.rank:
            try:
                comm.bcast(np.zeros(1), 0)
            finally:
                gate.set()
        else:
            gate.wait(240)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 2, timeout=0.2)
    while 1 not in caught.value.errors:  # a machine that stands still may be late for the report
        time.sleep(0.001)
    assert isinstance(caught.value.errors[1], TimeoutError)


def test_the_sender_may_write_to_its_buffer_at_once():
    def rank(comm):
        mine = np.full(1000, float(comm.rank))
        total = np.empty_like(mine)
        for _ in range(20):
            comm.allreduce(mine, total, "SUM")
            mine[:] = -1
            mine[:] = comm.rank
        return float(total[0])

    assert run_ranks(rank, 3) == [3.0] * 3
