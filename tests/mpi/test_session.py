"""One duplicate for all strategies on a communicator; no interference with the program's own."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.testing import same

pytestmark = pytest.mark.mpi


def total(strategy, value=1.0):
    return float(strategy.reduce("SUM", ms.PerReplica(value), None))


def test_more_strategies_than_communicators(world):
    """MPICH runs out of communicators after 2,046, of each process; more ranks take longer only."""
    if world.size > 2:
        pytest.skip("as on two ranks")
    for i in range(2100):
        make = ms.MirroredStrategy if i % 2 else ms.MultiWorkerMirroredStrategy
        strategy = make()
        if i % 500 == 0:
            same(world, total(strategy), float(world.size))
    same(world, total(strategy), float(world.size))


def test_strategies_take_turns_in_any_order(world):
    one, two, three = ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy(), ms.MirroredStrategy()
    assert one._replicas.lockstep.session is two._replicas.lockstep.session
    for strategy in (three, one, two, one, three, two):
        same(world, total(strategy, float(world.rank)), world.size * (world.size - 1) / 2)
    del two
    same(world, total(one), float(world.size))


def test_traffic_of_the_program_itself_is_undisturbed(world):
    """Wildcard receives and a collective of its own, between and around our calls."""
    rank, size = world.rank, world.size
    strategy = ms.MirroredStrategy()
    got = []
    for step in range(20):
        inbox = np.full(1, -1)
        receive = world.Irecv(inbox, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
        same(world, strategy.run(
            lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3000))
        ).local, np.full(3000, float(size)))  # fmt: skip
        send = world.Isend(np.full(1, rank * 100 + step), dest=(rank + 1) % size, tag=step)
        assert total(strategy) == size
        receive.Wait()
        send.Wait()
        got.append(int(inbox[0]))
        own = np.empty(1)
        world.Allreduce(np.ones(1), own)
        assert own[0] == size
    assert got == [(rank - 1) % size * 100 + step for step in range(20)]


def test_a_parent_that_the_program_frees(world):
    for _ in range(10):
        parent = world.Dup()
        strategy = ms.MirroredStrategy(comm=parent)
        assert total(strategy) == world.size
        assert (
            strategy._replicas.lockstep.session
            is not ms.MirroredStrategy()._replicas.lockstep.session
        )
        parent.Free()
        failed = 0
        try:
            total(strategy)
        except Exception:
            failed = 1
        assert world.allreduce(failed) == world.size
    same(world, total(ms.MirroredStrategy()), float(world.size))


def test_groups_of_ranks_live_side_by_side(world):
    part = world.Split(world.rank % 2, key=-world.rank)
    inner, outer = ms.MirroredStrategy(comm=part), ms.MirroredStrategy()
    assert inner.num_replicas_in_sync == part.size
    ids = inner.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
    assert ids.local == part.rank
    for _ in range(world.rank % 2 + 1):  # another number of calls in each group
        assert total(inner) == part.size
    same(world, total(outer), float(world.size))
    # In one replica code there is one strategy.
    with inner.scope(), pytest.raises(ms.StrategyError):
        total(outer)
    part.Free()


def test_a_group_of_one_rank_and_a_cartesian_one(world):
    single = ms.MirroredStrategy(comm=MPI.COMM_SELF)
    for _ in range(world.rank + 1):
        assert total(single, 5.0) == 5.0
    grid = world.Create_cart([world.size])
    assert total(ms.MirroredStrategy(comm=grid)) == world.size
    grid.Free()


@pytest.mark.parametrize("wrong", [None, 3, "COMM_WORLD"])
def test_what_is_no_communicator(world, wrong):
    if wrong is None:
        assert ms.MirroredStrategy(comm=None).num_replicas_in_sync == world.size
        return
    with pytest.raises(TypeError, match="intracommunicator"):
        ms.MirroredStrategy(comm=wrong)


def test_another_thread_sends_nothing(world):
    strategy = ms.MirroredStrategy()
    found = []

    def stranger():
        for _ in range(200):
            try:
                total(strategy)
            except ms.StrategyError:
                found.append(1)

    thread = threading.Thread(target=stranger)
    thread.start()
    sums = [total(strategy) for _ in range(200)]
    thread.join()
    ok = len(found) == 200 and sums == [float(world.size)] * 200
    same(world, np.int8(ok), np.int8(1))


def test_values_of_all_kinds_reach_all_ranks(world):
    strategy = ms.MirroredStrategy()
    kinds = [None, "text", 1.5, np.ones(500), np.int8(3), {"set"}]
    got = strategy.run(lambda: {"v": kinds[world.rank % 6]})["v"]
    values = strategy.experimental_local_results(got)
    ok = len(values) == world.size and all(
        np.array_equal(value, kinds[r % 6]) and type(value) is type(kinds[r % 6])
        for r, value in enumerate(values)
    )
    same(world, np.int8(ok), np.int8(1))


def test_what_was_freed_leaves_nothing_open(world):
    """Neither descriptors of its memory, nor the memory."""

    def life():
        comm = world.Dup()
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            variable = ms.Variable(np.zeros(50_000))
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(300_000)))
        del strategy, variable
        comm.Free()
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), shared()

    def shared():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))

    life()
    files, kib = life()
    for _ in range(8):
        now, held = life()
    # Each kept one descriptor and more, and 4 MB; others come and go by one or two meanwhile.
    assert now < files + 6
    assert held < kib + 16_000


def test_a_strategy_whose_communicator_was_freed_says_so(world):
    comm = world.Dup()
    strategy = ms.MirroredStrategy(comm=comm)
    comm.Free()
    with pytest.raises(ms.StrategyError, match=rf"^rank {world.rank}: .*freed the comm.*another"):
        strategy.run(lambda: 1)


def test_time_spent_tells_who_waited(world):
    strategy = ms.MirroredStrategy()
    for _ in range(20):  # so that it is known what a handshake takes
        total(strategy)
    before, start = np.array(strategy.time_spent()), time.perf_counter()
    if world.rank == world.size - 1:
        while time.perf_counter() - start < 0.05:
            pass
    total(strategy)
    took = time.perf_counter() - start
    waited, communicated = strategy.time_spent() - before
    assert min(waited, communicated) >= 0
    assert waited + communicated < took
    if world.size == 1:
        assert strategy.time_spent() == (0, 0)
    elif world.rank < world.size - 1:
        assert waited > 0.02
