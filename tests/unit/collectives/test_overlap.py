"""All-reduces that continue while the program computes: same results, any order, nothing left."""

from __future__ import annotations

import copy
import sys
import threading
import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.collectives import node as node_module
from mpistrat.collectives import overlap
from mpistrat.testing import run_ranks
from mpistrat.testing.ranks import RanksFailed

# Ranks, and how many of them are one node; 0 lets all be one.
LAYOUTS = [(1, 0), (2, 0), (2, 1), (3, 2), (4, 2)]


@pytest.fixture(params=LAYOUTS, ids=str)
def size(request, monkeypatch):
    ranks, per_node = request.param
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    return ranks


@pytest.fixture
def apart(monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "1")


def tree(rank, seed=0, dtype="f4", rows=700):
    rng = np.random.default_rng([rank, seed])
    values = rng.standard_normal((rows, 5)) * 2.0 ** rng.integers(-9, 9, (rows, 5))
    return {
        "a": values.astype(dtype),
        "none": np.zeros((0, 3), dtype),
        "turned": values.T.astype("f8"),
        "number": 1.5 * rank,
    }


def bits(found):
    return [np.asarray(leaf).tobytes() for leaf in ms.pytree.flatten(found)[0]]


def in_run(comm, fn, strategy=None):
    strategy = strategy or ms.MultiWorkerMirroredStrategy(comm=comm)
    return strategy.run(lambda: fn(strategy, ms.get_replica_context()))


CALLS = [
    ("SUM", "f4", {}),
    ("MEAN", "f2", {}),
    ("MEAN", "f4", {"weight": 3}),
    ("MAX", "f8", {}),
    ("PROD", "c8", {}),
    ("MEAN", "i4", {}),
]


def test_results_have_the_bits_of_the_blocking_call(size):
    def rank(comm):
        def fn(strategy, ctx):
            for number, (op, dtype, given) in enumerate(CALLS):
                value = tree(comm.rank, number, dtype)
                if given:
                    given = {"weight": given["weight"] * comm.rank}
                handle = ctx.all_reduce_start(op, value, **given)
                found = handle.wait()
                assert bits(found) == bits(ctx.all_reduce(op, value, **given)), op
                assert handle.wait() is found

        in_run(comm, fn)

    run_ranks(rank, size)


def test_buffers_and_other_places_are_written_to(size):
    def rank(comm):
        given = [tree(comm.rank, 1)["a"], tree(comm.rank, 2, "f8")["a"], np.ones(3, "f4")]
        strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
        places = strategy.buffers(given)

        def fn(strategy, ctx):
            want = ctx.all_reduce("MEAN", given, weight=comm.rank + 1)
            others = [np.empty_like(x) for x in given]
            for _ in range(3):
                for place, value in zip(places, given, strict=True):
                    place[...] = value
                one = ctx.all_reduce_start("MEAN", places, weight=comm.rank + 1, out=places)
                two = ctx.all_reduce_start("MEAN", given, weight=comm.rank + 1, out=others)
                assert two.wait() is others
                assert one.wait() is places
                assert bits(places) == bits(want) == bits(others)
            three = ctx.all_reduce_start("MEAN", given, weight=comm.rank + 1, out=given)
            assert bits(three.wait()) == bits(want) == bits(given)

        in_run(comm, fn, strategy)

    run_ranks(rank, size)


def test_packs_of_more_than_one_piece(apart):
    def rank(comm):
        def fn(strategy, ctx):
            value = np.full(2_200_000, comm.rank + 2.0, np.float32)
            out = ctx.all_reduce_start("PROD", value).wait()
            assert out.shape == value.shape
            assert (out == 6).all()

        in_run(comm, fn)

    run_ranks(rank, 2)


def test_several_are_open_and_ranks_wait_for_them_in_other_orders(size):
    def rank(comm):
        def fn(strategy, ctx):
            for step in range(4):
                given = [tree(comm.rank, 10 * step + i) for i in range(4)]
                handles = [ctx.all_reduce_start("SUM", value) for value in given]
                between = ctx.all_reduce("SUM", given[0])  # other calls continue meanwhile
                order = np.random.default_rng([comm.rank, step]).permutation(4)
                found = {int(i): handles[i].wait() for i in order}
                assert bits(found[0]) == bits(between)
                for i, value in enumerate(given):
                    assert bits(found[i]) == bits(ctx.all_reduce("SUM", value))

        in_run(comm, fn)

    run_ranks(rank, size)


def test_memory_is_used_again_once_all_ranks_have_waited(apart):
    def rank(comm):
        def fn(strategy, ctx):
            kept = []
            for step in range(12):
                handle = ctx.all_reduce_start("SUM", tree(comm.rank, step))
                kept.append(handle)
                if len(kept) == 2 + comm.rank:  # ranks wait for another one
                    kept.pop(0).wait()
            for handle in kept:
                handle.wait()
            (rooms,) = overlap.Overlap.lookup_overlap(
                strategy._replicas.reducer
            )._row_buffers.values()
            return len(rooms)

        return in_run(comm, fn)

    assert run_ranks(rank, 2) == [3, 3]


def test_transfer_goes_on_while_the_program_computes(apart, monkeypatch):
    moved = [threading.Event() for _ in range(2)]
    fold = node_module.reduce_columns_between_nodes

    def told(lane, *args, **kwargs):
        fold(lane, *args, **kwargs)
        moved[lane.comm.rank].set()

    monkeypatch.setattr(node_module, "reduce_columns_between_nodes", told)

    def rank(comm):
        def fn(strategy, ctx):
            handle = ctx.all_reduce_start("SUM", tree(comm.rank))
            assert all(event.wait(200) for event in moved)  # nobody has called wait() yet
            handle.wait()

        in_run(comm, fn)

    run_ranks(rank, 2)


@pytest.mark.parametrize("guilty", [0, 1, None])
def test_handle_that_nobody_waits_for_is_an_error_on_every_rank(size, guilty):
    if guilty is not None and guilty >= size:
        pytest.skip("no such rank")

    def rank(comm):
        def fn(strategy, ctx):
            handle = ctx.all_reduce_start("SUM", tree(comm.rank)["a"])
            line = sys._getframe().f_lineno - 1
            if guilty is not None and comm.rank != guilty:
                handle.wait()
            return handle, line

        lines = []

        def noted(strategy, ctx):
            handle, line = fn(strategy, ctx)
            lines.append((handle, line))

        with pytest.raises(ms.errors.MpistratError) as caught:
            in_run(comm, noted)
        ((handle, line),) = lines
        assert isinstance(caught.value, ms.errors.ContextError)
        text = str(caught.value)
        assert f"test_overlap.py:{line}" in text
        assert "all_reduce_start(SUM" in text
        if guilty in (None, comm.rank):
            with pytest.raises(ms.errors.ContextError, match="has ended"):
                handle.wait()
        # And all continues.
        return in_run(comm, lambda s, ctx: ctx.all_reduce_start("SUM", np.ones(99)).wait()[0])

    assert run_ranks(rank, size) == [size] * size


@pytest.mark.parametrize("way", [KeyError, SystemExit, None])
def test_ways_out_between_start_and_wait(size, way):
    """None: a call fails on all ranks meanwhile."""

    def rank(comm):
        out = np.zeros(900)

        def fn(strategy, ctx):
            handle = ctx.all_reduce_start("SUM", np.ones(900), out=out)
            if way is None:
                ctx.all_reduce("no such operation", 1.0)
            elif comm.rank == size - 1:
                raise way("on the way")
            handle.wait()

        with pytest.raises((Exception, SystemExit)) as caught:
            in_run(comm, fn)
        assert "wait() was not called" not in str(caught.value)
        assert (out == size).all()  # nothing moves any more
        return in_run(comm, lambda s, ctx: ctx.all_reduce_start("SUM", np.ones(99)).wait()[0])

    assert run_ranks(rank, size) == [size] * size


def test_calls_that_differ_are_told_apart(size):
    if size == 1:
        pytest.skip("one rank has no others")

    def rank(comm):
        def fn(strategy, ctx):
            call = ctx.all_reduce if comm.rank else ctx.all_reduce_start
            call("SUM", np.ones(1000))

        with pytest.raises(ms.errors.LockstepError):
            in_run(comm, fn)
        with pytest.raises(ms.errors.LeafTypeError):
            in_run(comm, lambda s, ctx: ctx.all_reduce_start("SUM", np.ones(9, object)))

    run_ranks(rank, size)


def test_other_threads_cannot_wait(size):
    def rank(comm):
        def fn(strategy, ctx):
            handle, caught = ctx.all_reduce_start("SUM", tree(comm.rank)), []

            def other():
                try:
                    handle.wait()
                except Exception as error:
                    caught.append(error)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            handle.wait()
            return [type(error) for error in caught]

        return in_run(comm, fn)

    assert run_ranks(rank, size) == [[ms.errors.StrategyError]] * size


def test_slices_weights_of_nothing_and_cross_replica_code(size):
    def rank(comm):
        strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
        value = np.full(2000, np.nan if comm.rank == 0 and size > 1 else 2.0)
        handle = strategy.all_reduce_start("MEAN", value, weight=int(comm.rank > 0 or size == 1))
        slices = ms.IndexedSlices(np.ones((2, 3)), np.array([0, comm.rank]), (9, 3))
        both = strategy.all_reduce_start("SUM", {"dense": np.ones(400), "rows": slices})
        strategy.run(lambda: None)  # it may stay open: it is of no run
        assert (handle.wait() == 2.0).all()
        found = both.wait()
        assert (found["dense"] == size).all()
        assert found["rows"].values.shape == (2 * size, 3)
        assert strategy.all_reduce_start("SUM", {}).wait() == {}

    run_ranks(rank, size)


def test_rank_that_waits_is_shown_in_the_call(apart):
    def rank(comm):
        strategy, seen = ms.MultiWorkerMirroredStrategy(comm=comm), []
        handle = strategy.all_reduce_start("SUM", np.ones(1000))
        strategy._replicas.lockstep.session.board.enter = lambda number, text: seen.append(text)
        handle.wait()
        handle.wait()
        return list(seen)

    for (text,) in run_ranks(rank, 2):
        assert text.startswith("all_reduce_start(SUM")
        assert text.endswith(".wait")


def test_handle_of_no_run_that_is_dropped_keeps_no_memory(apart):
    def rank(comm):
        strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
        for _ in range(6):
            strategy.all_reduce_start("SUM", np.ones(1000))
            overlap.Overlap.lookup_overlap(strategy._replicas.reducer)._transfers.drain()
        (rooms,) = overlap.Overlap.lookup_overlap(strategy._replicas.reducer)._row_buffers.values()
        return len(rooms)

    with pytest.warns(ResourceWarning, match=r"wait\(\) was not called"):
        found = run_ranks(rank, 2)
    assert max(found) <= 2


def test_what_fails_in_the_thread_is_raised_where_it_is_waited_for(apart, monkeypatch):
    fold = node_module.reduce_columns_between_nodes

    def fails(lane, *args, **kwargs):
        if lane.comm.rank == 1:
            raise MemoryError("no memory here")
        fold(lane, *args, **kwargs)

    monkeypatch.setattr(node_module, "reduce_columns_between_nodes", fails)

    def rank(comm):
        in_run(comm, lambda s, ctx: ctx.all_reduce_start("SUM", tree(comm.rank)).wait())

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 2)
    assert isinstance(caught.value.errors[1], MemoryError)


@pytest.mark.parametrize("reason", ["threads", "yielding"])
def test_a_library_that_cannot_says_so_once(apart, monkeypatch, reason):
    monkeypatch.setattr(overlap, "MPIComm", object)  # what asks the library
    monkeypatch.setattr(overlap, "_make_patient", lambda comm: comm)
    monkeypatch.setattr(overlap, "has_thread_multiple", lambda: reason != "threads")
    monkeypatch.setattr(overlap, "needs_yielding", lambda: True)
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)

    def rank(comm):
        def fn(strategy, ctx):
            for step in range(3):
                value = tree(comm.rank, step)
                assert bits(ctx.all_reduce_start("SUM", value).wait()) == bits(
                    ctx.all_reduce("SUM", value)
                )

        in_run(comm, fn)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(rank, 2)
    (text,) = [str(w.message) for w in caught if "at once" in str(w.message)]
    assert {"threads": "THREAD_MULTIPLE", "yielding": "mpi_yield_when_idle"}[reason] in text


@pytest.mark.parametrize("again", ["all_reduce", "all_reduce_start", "apply_gradients"])
def test_buffers_that_are_on_their_way_are_given_to_no_other_call(apart, again):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            w = ms.Variable(np.zeros(20_000, np.float32))
        (buffer,) = strategy.gradient_buffers([w])
        optimizer = ms.optim.SGD(0.5)

        def fn():
            ctx = ms.get_replica_context()
            for _ in range(3):  # so that the quick ways are known
                buffer.fill(1)
                optimizer.apply_gradients([(buffer, w)])
                ctx.all_reduce("SUM", [buffer], out=[buffer])
            buffer.fill(1)
            handle = ctx.all_reduce_start("SUM", [buffer], out=[buffer])
            with pytest.raises(ms.ContextError, match=r"array 0, .*20000.*still in use"):
                if again == "apply_gradients":
                    optimizer.apply_gradients([(buffer, w)])
                else:
                    getattr(ctx, again)("SUM", [buffer], out=[buffer])
            return handle

        with pytest.raises(ms.ContextError):  # a call has failed in it
            strategy.run(lambda: fn().wait())
        buffer.fill(1)
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", [buffer], out=[buffer]))
        assert (buffer == 2).all()

    run_ranks(rank, 2)


def test_wait_that_was_interrupted_may_be_called_again(apart, monkeypatch):
    class Stop(Exception):
        pass

    def rank(comm):
        def fn(strategy, ctx):
            value = tree(comm.rank)
            handle = ctx.all_reduce_start("SUM", value)
            ended = handle._fetch_results

            def interrupted():
                handle._fetch_results = ended
                raise Stop

            handle._fetch_results = interrupted
            with pytest.raises(Stop):
                handle.wait()
            assert bits(handle.wait()) == bits(ctx.all_reduce("SUM", value))

        in_run(comm, fn)

    run_ranks(rank, 2)


@pytest.mark.parametrize("per_node", [0, 1])
def test_buffers_are_refused_until_they_are_waited_for_on_one_node_too(monkeypatch, per_node):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        buffers = strategy.buffers([np.ones(20_000, np.float32)])

        def fn(early):
            ctx = ms.get_replica_context()
            handle = ctx.all_reduce_start("SUM", buffers, out=buffers)
            if not early:
                handle.wait()
            ctx.all_reduce("SUM", buffers, out=buffers)

        with pytest.raises(ms.ContextError, match="still in use"):
            strategy.run(fn, (True,))
        buffers[0].fill(1)
        strategy.run(fn, (False,))
        assert (buffers[0] == 4).all()

    run_ranks(rank, 2)


def test_a_handle_cannot_be_copied(apart):
    def rank(comm):
        def fn(strategy, ctx):
            handle = ctx.all_reduce_start("SUM", tree(comm.rank))
            with pytest.raises(TypeError, match="cannot be copied"):
                copy.deepcopy(handle)
            handle.wait()

        in_run(comm, fn)

    run_ranks(rank, 2)


@pytest.mark.parametrize("known", [False, True])
def test_an_array_on_its_way_is_refused_alone_too(known, apart):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        large, tiny = strategy.buffers([np.zeros(300_000, "f4"), np.zeros(4, "f4")])

        def program(strategy, context):
            for _ in range(2 if known else 0):
                context.all_reduce("sum", tiny)
            handle = context.all_reduce_start("sum", [large, tiny], out=[large, tiny])
            try:
                with pytest.raises(ms.ContextError, match=r"on (its|their) way"):
                    context.all_reduce("sum", tiny)
            finally:
                handle.wait()

        with pytest.raises(ms.ContextError):
            in_run(comm, program, strategy)

    run_ranks(rank, 2)
