"""All-reduces through memory that processes really share: the bits of a fold in rank order.

The oracle is NumPy's fold of what every rank gave, which each rank makes for itself from seeds; so
equal bits here are equal bits on every rank, in every run, and under every MPI library.
"""

from __future__ import annotations

import functools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms

pytestmark = pytest.mark.mpi

SHAPES = [(1000,), (0, 3), (17, 33), (), (200_000,)]


def values(rank, dtype="f4"):
    """Leaves with exponents over 2**±40, and NaN, infinities and zeros of both signs."""
    rng = np.random.default_rng(rank)
    leaves = [rng.standard_normal(s) * 2.0 ** rng.integers(-40, 40, s) for s in SHAPES]
    leaves[0][:6] = rng.permutation([np.nan, np.inf, -np.inf, 0.0, -0.0, -0.0])
    return [np.asarray(leaf, dtype) for leaf in leaves]


@functools.cache
def folded(size, dtype="f4"):
    with np.errstate(all="ignore"):
        return [
            functools.reduce(np.add, leaf)
            for leaf in zip(*(values(r, dtype) for r in range(size)), strict=True)
        ]


def bits(leaves):
    return [np.asarray(leaf).tobytes() for leaf in leaves]


@pytest.fixture
def strategy():
    return ms.MirroredStrategy()


def quiet(leaves):
    """NaN keep their payload or not, by processor; where they are is what counts."""
    return bits(np.where(np.isnan(leaf), np.float32(1e30), leaf) for leaf in leaves)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("how", ["fresh", "out", "in place"])
def test_same_bits_as_a_fold_in_rank_order(strategy, how, dtype):
    size, rank = strategy.num_replicas_in_sync, strategy._replicas.lockstep.comm.rank
    given = values(rank, dtype)
    places = strategy.buffers(given) if how == "in place" else [np.empty_like(v) for v in given]

    def fn():
        ctx = ms.get_replica_context()
        for _ in range(3):
            for place, value in zip(places, given, strict=True):
                place[...] = value
            if how == "fresh":
                found = ctx.all_reduce("SUM", given)
            else:
                found = ctx.all_reduce("SUM", places if how == "in place" else given, out=places)
            assert quiet(found) == quiet(folded(size, dtype))
        return True

    assert strategy.run(fn).local
    node = strategy._replicas.reducer.node
    assert size == 1 or (node.can_share_memory and node.arena.nodes().node_count == 1), (
        "not the path to test"
    )


def test_a_mean_with_weights_in_place(strategy):
    comm = strategy._replicas.lockstep.comm
    weights = [3.0, 0.0, 5.0, 1.0, 2.0, 7.0, 1.0, 1.0]
    sizes = [(50_000,), (3,)]
    everyones = [
        [np.random.default_rng([r, i]).random(s) for i, s in enumerate(sizes)]
        for r in range(comm.size)
    ]
    buffers = strategy.buffers(everyones[0])
    for buffer, value in zip(buffers, everyones[comm.rank], strict=True):
        buffer[:] = value if weights[comm.rank] else np.nan
    strategy.run(
        lambda: ms.get_replica_context().all_reduce(
            "MEAN", buffers, weight=weights[comm.rank], out=buffers
        )
    )
    for i, buffer in enumerate(buffers):
        total = functools.reduce(
            np.add,
            [w * v[i] if w else 0 * v[i] for w, v in zip(weights, everyones, strict=False)],
        )
        # A weight that all ranks have alike, as one rank has, multiplies nothing.
        want = total / sum(weights[: comm.size]) if comm.size > 1 else everyones[0][i]
        np.testing.assert_array_equal(buffer, want)


@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_emulated_nodes(per_node, monkeypatch):
    """Between nodes MPI folds: every rank still has the same bits, and whole numbers are exact."""
    from mpi4py import MPI  # a group of its own: options are read once for each

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    group = MPI.COMM_WORLD.Dup()
    strategy = ms.MirroredStrategy(comm=group)
    whole = [
        np.random.default_rng([r]).integers(-999, 999, 30_000).astype("f4")
        for r in range(group.size)
    ]
    buffers = strategy.buffers([whole[0], whole[0][:7]])

    def fn():
        ctx = ms.get_replica_context()
        for op, fold in (("SUM", np.add), ("MAX", np.maximum)):
            buffers[0][:], buffers[1][:] = whole[group.rank], whole[group.rank][:7]
            want = functools.reduce(fold, whole)
            np.testing.assert_array_equal(ctx.all_reduce(op, whole[group.rank]), want)
            ctx.all_reduce(op, buffers, out=buffers)
            np.testing.assert_array_equal(buffers[0], want)
            np.testing.assert_array_equal(buffers[1], want[:7])
        spread = ctx.all_reduce("SUM", values(group.rank)[4])
        assert len(set(group.allgather(spread.tobytes()))) == 1
        np.testing.assert_allclose(spread, folded(group.size)[4], rtol=1e-3, atol=1e6)

    strategy.run(fn)
    nodes = strategy._replicas.reducer.node.arena.nodes()
    assert nodes.node_count == -(-group.size // per_node) or group.size == 1
    group.Free()


@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_bfloat16_between_emulated_nodes(per_node, monkeypatch):
    """As many elements as are worth a compiler: sums of nodes rounded, added, rounded once more."""
    from mpi4py import MPI

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    group = MPI.COMM_WORLD.Dup()
    strategy = ms.MultiWorkerMirroredStrategy(
        communication_options=ms.CommunicationOptions(wire="bfloat16"), comm=group
    )

    def rounded(value):
        return value.astype(ml_dtypes.bfloat16).astype("f4")

    given = [
        np.random.default_rng([r]).standard_normal(600_000).astype("f4") for r in range(group.size)
    ]
    nodes = [given[at : at + per_node] for at in range(0, group.size, per_node)]
    sums = [functools.reduce(np.add, node) for node in nodes]
    want = sums[0] if len(nodes) == 1 else rounded(functools.reduce(np.add, map(rounded, sums)))
    buffers = strategy.buffers([given[0]])

    def fn():
        ctx = ms.get_replica_context()
        np.testing.assert_array_equal(ctx.all_reduce("SUM", given[group.rank]), want)
        buffers[0][:] = given[group.rank]
        ctx.all_reduce("SUM", buffers, out=buffers)
        np.testing.assert_array_equal(buffers[0], want)

    strategy.run(fn)
    group.Free()


def test_nothing_has_a_name_in_shared_memory(strategy):
    kept = strategy.buffers([np.empty(100_000)])
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[5] for line in lines if "mpistrat-arena" in line]
    assert bool(mapped) == (strategy.num_replicas_in_sync > 1)
    assert all(name.startswith("/memfd:") for name in mapped), mapped
    assert kept[0].sum() == 0


def test_what_a_rank_writes_next_does_not_reach_who_is_late(strategy):
    """Thousands of calls with ranks out of step: rows and results are used again and again."""
    comm = strategy._replicas.lockstep.comm
    rng = np.random.default_rng(comm.rank)

    def fn():
        ctx = ms.get_replica_context()
        array = np.empty(300)
        buffers[0][:] = 0
        for number in range(400 if comm.size < 4 else 100):
            if rng.random() < 0.1:
                sum(range(int(rng.integers(20_000))))
            array.fill(comm.rank * 1000 + number)
            total = ctx.all_reduce("SUM", array)
            want = 1000 * comm.size * (comm.size - 1) / 2 + number * comm.size
            assert (total == want).all()
            array.fill(np.nan)
            buffers[0].fill(comm.rank + number)
            ctx.all_reduce("SUM", buffers, out=buffers)
            assert (buffers[0] == comm.size * (comm.size - 1) / 2 + number * comm.size).all()
        return True

    def direct():
        """One call after the other, with no barrier between them but the handshake."""
        ctx = ms.get_replica_context()
        array = np.empty(4000)
        for number in range(2000 if comm.size < 4 else 200):
            if number % 3 == comm.rank % 3:
                sum(range(int(rng.integers(3000))))
            array.fill(comm.rank + number)
            total = ctx.all_reduce("SUM", array)
            array.fill(np.nan)
            assert (total == comm.size * (comm.size - 1) / 2 + number * comm.size).all()
        return True

    assert strategy.run(direct).local

    buffers = strategy.buffers([np.empty(257)])
    assert strategy.run(fn).local


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_buffers_of_16_bits_are_added_in_float32(strategy, op, dtype):
    comm = strategy._replicas.lockstep.comm
    narrow = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    rng = [np.random.default_rng(rank) for rank in range(comm.size)]
    every = [r.standard_normal(300_000).astype(np.float32).astype(narrow) for r in rng]
    total = functools.reduce(np.add, [values.astype(np.float32) for values in every])
    want = (total / np.float32(comm.size if op == "mean" else 1)).astype(narrow)
    given = strategy.gradient_buffers(every[:1])
    for _ in range(2):
        given[0][:] = every[comm.rank]
        strategy.run(lambda: ms.get_replica_context().all_reduce(op, given, out=given))
        assert bits(given) == bits([want])
