"""Names of algorithms, and replicas in another order, on MPI itself."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import same

pytestmark = pytest.mark.mpi

OPS = {
    "native": lambda size: ms.NcclAllReduce(2),
    "function": lambda size: ms.ReductionToOneDevice(accumulation_fn=sum),
}


def values(rank):
    rng = np.random.default_rng(rank)
    return [rng.normal(size=(3, 5)), rng.normal(size=70_000), np.float32(rank), np.zeros((0, 2))]


@pytest.fixture(params=["shared memory", "messages"])
def strategy(world, request):
    """A strategy, whose ranks can share memory or not."""
    group = world.Dup()
    made = ms.MirroredStrategy(comm=group)
    made._replicas.reducer.node.arena.refused = request.param == "messages"
    yield made
    group.Free()


def check(world, reduced):
    size = world.size
    for op, fold in (("SUM", np.sum), ("MEAN", np.mean), ("MAX", np.max)):
        found = reduced(op, values(world.rank))
        for i, got in enumerate(found):
            want = fold(np.stack([np.asarray(values(r)[i]) for r in range(size)]), axis=0)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-9)
            same(world, got)


@pytest.mark.parametrize("name", OPS)
def test_cross_device_operations(world, name):
    strategy = ms.MirroredStrategy(cross_device_ops=OPS[name](world.size))

    def reduced(op, tree):
        found = strategy.run(lambda: ms.get_replica_context().all_reduce(op, tree))
        return [one.local for one in found]

    check(world, reduced)
    rows = np.full((world.rank, 40), world.rank)
    gathered = strategy.run(lambda: ms.get_replica_context().all_gather(rows, axis=0)).local
    want = np.concatenate([np.full((rank, 40), rank) for rank in range(world.size)])
    np.testing.assert_array_equal(gathered, want)


@pytest.mark.parametrize("implementation", ["AUTO", "RING", "NCCL"])
@pytest.mark.parametrize("nbytes", [0, 100])
def test_communication_options(world, implementation, nbytes):
    options = ms.CommunicationOptions(nbytes, 60.0, implementation)
    strategy = ms.MultiWorkerMirroredStrategy(communication_options=options)
    check(
        world,
        lambda op, tree: strategy.run(lambda: ms.get_replica_context().all_reduce(op, tree)),
    )


def test_replicas_in_another_order(world):
    order = list(reversed(range(world.size)))
    assignment = ms.DeviceAssignment(ms.Topology.read(), order)
    strategy = ms.TPUStrategy(None, assignment)
    replica = order.index(world.rank)
    assert strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group).local == replica
    for width in (1, 500):
        rows = ms.PerReplica(np.full((world.rank + 1, width), world.rank))
        want = np.concatenate([np.full((rank + 1, width), rank) for rank in order])
        np.testing.assert_array_equal(strategy.gather(rows, 0), want)

    def reduced(op, tree):
        found = strategy.run(lambda: ms.get_replica_context().all_reduce(op, tree))
        return [one.local for one in found]

    check(world, reduced)
    topology = ms.Topology.read(ranks_per_node=2)
    assert topology.nodes == tuple(rank // 2 for rank in range(world.size))


@pytest.mark.parametrize("code", ["f4", "f8", "c8", "c16"])
def test_what_is_not_a_number_has_the_same_bits_everywhere(world, strategy, code):
    rng = np.random.default_rng(world.rank)
    for op in ("SUM", "MEAN", "PROD"):
        for size in (5, 900, 20_000):
            x = rng.normal(size=size).astype(code)
            bits = x.view(x.real.dtype).view(f"u{x.real.itemsize}")
            where = rng.random(bits.size) < 0.3
            kind = np.array(np.nan, x.real.dtype).view(bits.dtype)
            signs = rng.integers(0, 2, bits.size).astype(bits.dtype) << (8 * bits.itemsize - 1)
            payload = rng.integers(1, 1000, bits.size).astype(bits.dtype)
            bits[where] = (kind | payload | signs)[where]
            found = strategy.run(lambda x=x, op=op: ms.get_replica_context().all_reduce(op, x))
            same(world, found.local.view(np.uint8))


def test_means_do_not_overflow(world, strategy):
    for code, top in (("f4", np.finfo("f4").max), ("f8", 1.7e308), ("c16", 1.7e308)):
        x = np.full(900, top, code)
        x[1] = np.inf if world.rank == 0 else top
        found = strategy.run(lambda x=x: ms.get_replica_context().all_reduce("mean", x)).local
        assert np.isinf(found[1].real)
        assert np.isfinite(np.delete(found, 1)).all()
        np.testing.assert_allclose(np.delete(found, 1).real, float(top), rtol=1e-6)
        same(world, found)


@pytest.mark.parametrize("per_node", [0, 1, 2])
def test_nor_do_they_in_place(world, per_node, monkeypatch):
    from mpi4py import MPI  # a group of its own: options are read once for each

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    group = MPI.COMM_WORLD.Dup()
    strategy = ms.MirroredStrategy(comm=group)
    for code in ("f4", "f8", "c8", "g"):
        kind = np.zeros(1, code).real.dtype
        x = np.full(9000, np.finfo(kind).max, code)
        x[1] = np.inf if world.rank == 0 else x[1]
        x[2] = np.finfo(kind).smallest_subnormal
        x[3] *= (-1) ** (world.rank // 2 % 2)
        (room,) = strategy.buffers([x])
        room[:] = x
        strategy.run(
            lambda b=room: (ms.get_replica_context().all_reduce("mean", b, out=b), None)[1]
        )
        signs = [(-1) ** (rank // 2 % 2) for rank in range(world.size)]
        want = x.real.copy()
        want[1], want[3] = np.inf, want[0] / world.size * sum(signs)
        np.testing.assert_allclose(room.real, want, rtol=4 * np.finfo(kind).eps)
        same(world, room)
    group.Free()
