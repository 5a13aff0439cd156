"""All-reduces that continue in a thread, on MPI; every rank, or every two, are taken as a node."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.mpi import MPIComm

pytestmark = pytest.mark.mpi


@pytest.fixture(params=[1, 2])
def strategy(world, request, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(request.param))
    made = world.Dup()
    yield ms.MultiWorkerMirroredStrategy(comm=made)
    made.Free()


def tree(rank, seed, rows=6_000):
    rng = np.random.default_rng([rank, seed])
    values = rng.standard_normal((rows, 5)) * 2.0 ** rng.integers(-9, 9, (rows, 5))
    return {"a": values.astype("f4"), "none": np.zeros((0, 3)), "few": values[:7], "one": 1.5}


def bits(found):
    return [np.asarray(leaf).tobytes() for leaf in ms.pytree.flatten(found)[0]]


def test_results_have_the_bits_of_the_blocking_call(world, strategy):
    buffers = strategy.buffers([np.zeros(40_000, "f4"), np.zeros(9)])

    def in_order():
        ctx = ms.get_replica_context()
        for seed, op in enumerate(["SUM", "MEAN", "MIN", "PROD"]):
            given = [tree(world.rank, 10 * seed + i) for i in range(3)]
            weight = {"weight": world.rank + 1} if op == "MEAN" else {}
            handles = [ctx.all_reduce_start(op, value, **weight) for value in given]
            for buffer in buffers:
                buffer[:] = np.random.default_rng(world.rank).standard_normal(buffer.size)
            before = [buffer.copy() for buffer in buffers]
            place = ctx.all_reduce_start(op, buffers, out=buffers)
            want = [ctx.all_reduce(op, value, **weight) for value in given]
            for i in np.random.default_rng([world.rank, seed]).permutation(3):
                assert bits(handles[i].wait()) == bits(want[i])
            assert place.wait() is buffers
            assert bits(buffers) == bits(ctx.all_reduce(op, before))

    strategy.run(in_order)


def test_thread_moves_what_the_program_does_not_wait_for(world, strategy):
    value = np.full(200_000, world.rank + 1.0)

    def fn():
        handle = ms.get_replica_context().all_reduce_start("SUM", value)
        for thread in threading.enumerate():
            if thread.name == "mpistrat overlap":
                thread.join(150)  # it ends by itself, and with it the transfer
                assert not thread.is_alive()
        found = handle.wait()
        assert (found == world.size * (world.size + 1) / 2).all()

    strategy.run(fn)


def test_handle_that_nobody_waits_for(world, strategy):
    def fn():
        ms.get_replica_context().all_reduce_start("SUM", np.ones(50_000))

    with pytest.raises(ms.errors.ContextError, match=r"wait\(\) was not called .*test_overlap\.py"):
        strategy.run(fn)

    def leaves():
        handle = ms.get_replica_context().all_reduce_start("SUM", np.ones(50_000))
        if world.rank == world.size - 1:
            raise KeyError("between")
        handle.wait()

    with pytest.raises(KeyError):
        strategy.run(leaves)
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1))
    assert total == world.size


def test_group_may_be_freed_and_made_again(world, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "1")
    for _ in range(3):
        made = world.Dup()
        strategy = ms.MirroredStrategy(comm=made)
        handle = strategy.all_reduce_start("SUM", np.ones(50_000))
        with pytest.warns(ResourceWarning, match=r"wait\(\) was not called"):
            del handle
        made.Free()


def test_patient_calls_have_the_bits_of_the_others(world):
    comm = MPIComm(world)
    patient = comm.make_interruptible()
    for size in (3, 1000, 5000, 20_000, 200_000):
        send = np.random.default_rng([world.rank, size]).standard_normal(size)
        one, two = np.empty_like(send), np.empty_like(send)
        comm.allreduce(send, one, "SUM")
        patient.allreduce(send, two, "SUM")
        assert one.tobytes() == two.tobytes()
    every = np.empty((world.size, 8))
    patient.allgather(np.full(8, world.rank + 0.5), every)
    assert every[:, 0].tolist() == [rank + 0.5 for rank in range(world.size)]
    patient.barrier()
    comm.free()
