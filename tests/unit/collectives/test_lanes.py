"""What goes between nodes in bfloat16: sums and means of float32, and nothing else."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.collectives import inter_node
from mpistrat.kernels.rows import from_bfloat16, to_bfloat16
from mpistrat.testing import run_ranks

WIRE = ms.CommunicationOptions(wire="bfloat16")
LAYOUTS = [(2, 1), (4, 2), (5, 2), (3, 1)]  # ranks, and how many of them are a node


def rounded(values):
    with np.errstate(all="ignore"):
        return values.astype(ml_dtypes.bfloat16).astype("f4")


def modelled(op, values, per_node, weights=None):
    """Fold float32 of all ranks as nodes and wire do, by NumPy."""
    weights = np.ones(len(values), "f4") if weights is None else np.array(weights, "f4")
    with np.errstate(all="ignore"):
        given = [value * weight for value, weight in zip(values, weights, strict=True)]
        nodes = [given[at : at + per_node] for at in range(0, len(given), per_node)]
        sums = [rounded(functools.reduce(np.add, node)) for node in nodes]
        total = functools.reduce(np.add, sums)
        return rounded(total / weights.sum(dtype="f4") if op == "MEAN" else total)


def values(rank, size=5000):
    found = np.random.default_rng(rank).standard_normal(size).astype("f4")
    found[7], found[11 + rank] = np.nan, np.inf
    found[12] = -np.inf  # and rank 1 has another infinity there
    return found


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout[0]} by {layout[1]}")
def layout(request, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(request.param[1]))
    return request.param


@pytest.mark.parametrize("pieces", [64, 1 << 20])
@pytest.mark.parametrize("way", ["fresh", "in place"])
def test_sums_of_nodes_are_rounded_and_added_in_float32(layout, way, pieces, monkeypatch):
    monkeypatch.setattr(inter_node, "MAX_EXCHANGE_ELEMENTS", pieces)
    size, per_node = layout
    weights = [3, 1, 2, 5, 4][:size]
    calls = [("SUM", None), ("MEAN", None), ("MEAN", weights)]

    def rank(comm):
        strategy, found = ms.MirroredStrategy(comm=comm), []
        places = strategy.buffers([values(0)])

        def fn():
            ctx = ms.get_replica_context()
            for op, by in calls:
                given, out = [values(comm.rank)], None
                if way == "in place":
                    places[0][:] = given[0]
                    given = out = places
                weight = None if by is None else by[comm.rank]
                total = ctx.all_reduce(op, given, WIRE, weight=weight, out=out)
                found.append(np.array(total[0]))

        strategy.run(fn)
        return found

    with np.errstate(all="ignore"):
        ranks = run_ranks(rank, size)
    for i, (op, by) in enumerate(calls):
        want = modelled(op, [values(rank) for rank in range(size)], per_node, by)
        for found in ranks:
            np.testing.assert_array_equal(found[i], want, strict=True)
            assert found[i].tobytes() == ranks[0][i].tobytes()


def test_strategies_have_a_wire_and_so_have_their_reductions(layout):
    size, per_node = layout
    given = [values(rank) for rank in range(size)]
    want = {op: modelled(op, given, per_node) for op in ("SUM", "MEAN")}

    def reduced(op):
        ctx = ms.get_replica_context()
        return ctx.all_reduce(op, values(ctx.replica_id_in_sync_group))

    def rank(comm):
        strategy = ms.MultiWorkerMirroredStrategy(communication_options=WIRE, comm=comm)
        mirrored = ms.MirroredStrategy(comm=comm)
        found = []
        for op in want:
            given = strategy.run(lambda: values(comm.rank))
            found.append((op, strategy.reduce(op, given, axis=None)))
            found.append((op, strategy.extended.reduce_to(op, given, given)))
            found += [(op, one) for one in strategy.extended.batch_reduce_to(op, [(given, given)])]
            found.append((op, strategy.run(reduced, args=(op,))))
            given = mirrored.run(lambda: values(comm.rank))
            found.append((op, mirrored.extended.reduce_to(op, given, given, WIRE)))
        return [(op, np.asarray(one.local if hasattr(one, "local") else one)) for op, one in found]

    for found in run_ranks(rank, size):
        assert len(found) == 10
        for op, one in found:
            np.testing.assert_array_equal(one, want[op], strict=True)


def test_nothing_else_is_rounded(monkeypatch):
    """Other dtypes and operations, one node, and what is sent with the handshake."""
    third = np.full(1000, 1 / 3)
    calls = {
        "float64": ("SUM", third),
        "complex": ("SUM", third.astype("c8")),
        "integers": ("SUM", np.full(1000, 123457)),
        "means of integers": ("MEAN", np.full(1000, 123457)),
        "the largest": ("MAX", third.astype("f4")),
        "products": ("PROD", third.astype("f4")),
        "small": ("SUM", third[:9].astype("f4")),
    }

    def rank(comm, per_node):
        strategy = ms.MirroredStrategy(comm=comm)
        more = {"float32": ("SUM", third.astype("f4"))} if per_node != 1 else {}
        found = []

        def fn():
            ctx = ms.get_replica_context()
            for op, value in (calls | more).values():
                found.append([ctx.all_reduce(op, value, how).tobytes() for how in (None, WIRE)])

        strategy.run(fn)
        return found

    for per_node in (1, 2):
        monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
        for found in run_ranks(rank, 2, per_node):
            assert all(plain == wired for plain, wired in found)


@pytest.mark.parametrize(("size", "barriers"), [(4, [1] * 4), (5, [1, 1, 3, 3, 3])])
def test_a_rank_with_a_lane_of_its_own_waits_only_at_the_end(size, barriers, monkeypatch):
    """Nodes of 2 and 2; and of 3 and 2, where slices of the larger node are cut again."""
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2" if size == 4 else "3")
    counts = [0] * size

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        places = strategy.buffers([values(0)])
        node = strategy._replicas.reducer.node.arena.nodes().node
        waited = node.barrier

        def barrier():
            counts[comm.rank] += 1
            waited()

        def fn():
            node.barrier = barrier
            ms.get_replica_context().all_reduce("SUM", places, out=places)
            node.barrier = waited

        strategy.run(fn)

    run_ranks(rank, size)
    assert sorted(counts) == barriers


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16])
def test_what_is_added_in_float32_travels_so_too(dtype, layout):
    size, per_node = layout
    given = [values(rank).astype(dtype) for rank in range(size)]

    def rank(comm):
        strategy, found = ms.MirroredStrategy(comm=comm), []
        strategy.run(
            lambda: found.append(ms.get_replica_context().all_reduce("SUM", given[comm.rank], WIRE))
        )
        return found[0]

    with np.errstate(all="ignore"):
        want = modelled("SUM", [value.astype("f4") for value in given], per_node).astype(dtype)
        for found in run_ranks(rank, size):
            assert found.dtype == want.dtype
            np.testing.assert_array_equal(found.astype("f4"), want.astype("f4"))


def test_no_mean_overflows_whose_values_do_not(layout):
    size, _ = layout
    large = np.float32(3.3e38)

    def rank(comm):
        strategy, found = ms.MirroredStrategy(comm=comm), []
        given = np.full(3000, large)
        given[0] = np.nan if comm.rank else 1
        given[1] = np.inf
        strategy.run(lambda: found.append(ms.get_replica_context().all_reduce("MEAN", given, WIRE)))
        return found[0]

    for found in run_ranks(rank, size):
        assert np.isnan(found[0])
        assert found[1] == np.inf
        np.testing.assert_allclose(found[2:], large, 2**-7)


@pytest.mark.parametrize("per_node", ["1", "2"])
def test_ranks_that_differ_in_the_wire_are_told(per_node, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", per_node)

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        how = WIRE if comm.rank else None
        with pytest.raises(ms.LockstepError, match="bfloat16 between nodes"):
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3), how))

    run_ranks(rank, 2)


def test_wires():
    with pytest.raises(ValueError, match="wire must be one of float32, bfloat16, got 'float16'"):
        ms.CommunicationOptions(wire="float16")
    for other in ({"implementation": "NCCL"}, {"bytes_per_pack": 100}):
        assert WIRE.merge(ms.CommunicationOptions(**other)).wire == "bfloat16"
    assert ms.CommunicationOptions(timeout_seconds=3).merge(WIRE).wire == "bfloat16"
    assert WIRE.merge(ms.CommunicationOptions(timeout_seconds=3)).wire == "bfloat16"
    assert str(WIRE).endswith(", wire=bfloat16)")


@pytest.mark.parametrize("form", ["loop", "twin"])
def test_casts_are_those_of_ml_dtypes(form):
    narrow, widen = (k if form == "loop" else k.reference for k in (to_bfloat16, from_bfloat16))
    given = np.random.default_rng(0).integers(0, 2**32, 1 << 17, np.uint32).view("f4")
    bits, wide = np.empty(given.size, np.uint16), np.empty(given.size, "f4")
    with np.errstate(all="ignore"):
        narrow(given, np.float32(1), bits)
        want = given.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits, want.view(np.uint16))
    widen(bits, wide)
    np.testing.assert_array_equal(wide, want.astype("f4"))
    narrow(given[:9], np.float32(0.5), bits[:9])
    np.testing.assert_array_equal(bits[:9], (given[:9] / 2).astype(ml_dtypes.bfloat16).view("u2"))
