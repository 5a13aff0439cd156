"""What differs between the strategies: the global view, the local one, and one replica alone."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context


def test_results_of_run():
    def rank(comm):
        fn = lambda: {"a": comm.rank, "b": None}  # noqa: E731
        every = ms.MirroredStrategy().run(fn)
        local = ms.MultiWorkerMirroredStrategy().run(fn)
        alone = ms.OneDeviceStrategy("cpu").run(fn)
        default = ms.get_strategy().run(fn)
        return every["a"].values, every["b"], local, alone, default

    for at, got in enumerate(run_ranks(rank, 3)):
        plain = {"a": at, "b": None}
        assert got == ((0, 1, 2), None, plain, plain, plain)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_merge_fn_and_local_results(size):
    def rank(comm):
        def fn(three):
            x = three + ctx().replica_id_in_sync_group
            s = ctx().merge_call(lambda d, v: sum(d.experimental_local_results(v)), args=(x,))
            return s + x

        out = []
        for strategy in (ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy()):
            result = strategy.run(fn, args=[3])
            out.append([int(x) for x in strategy.experimental_local_results(result)])
        return out

    for at, (every, local) in enumerate(run_ranks(rank, size)):
        total = sum(3 + r for r in range(size))
        assert every == [total + 3 + r for r in range(size)]
        assert local == [2 * (3 + at)]


def test_an_unchanged_plain_argument_is_wrapped_in_the_global_view():
    """Three on each replica is 3n in the sum: identity cannot be seen across processes."""

    def rank(comm):
        def fn():
            return ctx().merge_call(lambda d, v: sum(d.experimental_local_results(v)), args=(3,))

        return ms.MirroredStrategy().run(fn).local, ms.MultiWorkerMirroredStrategy().run(fn)

    assert run_ranks(rank, 4) == [(12, 3)] * 4


def test_merge_call_hands_back_the_own_component():
    def rank(comm):
        def merge(strategy, a, b=None):
            assert b.values == (10, 11)
            return a, ms.Mirrored(5.0, 2), strategy.experimental_local_results(a), "x"

        def fn():
            got = ctx().merge_call(merge, args=(comm.rank,), kwargs={"b": comm.rank + 10})
            return str(got)

        return ms.MirroredStrategy().run(fn).local

    assert run_ranks(rank, 2) == ["(0, 5.0, (0, 1), 'x')", "(1, 5.0, (0, 1), 'x')"]


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "PROD"])
def test_reduce_of_a_plain_value(op):
    def rank(comm):
        every, local = ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy()
        alone = ms.OneDeviceStrategy("cpu")
        if op in ("SUM", "PROD"):
            with pytest.raises(ValueError, match="not a value per replica"):
                every.reduce(op, 2.5, None)
        else:
            assert every.reduce(op, 2.5, None) == 2.5
        assert alone.reduce(op, 2.5, None) == 2.5
        return float(local.reduce(op, 2.5, None))

    want = {"SUM": 7.5, "MEAN": 2.5, "MIN": 2.5, "PROD": 2.5**3}[op]
    assert run_ranks(rank, 3) == [want] * 3


def test_reduce_of_mirrored_values():
    def rank(comm):
        for strategy in (ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy()):
            mirrored = ms.Mirrored(np.ones(2), 2)
            with pytest.raises(ValueError, match="same on all replicas"):
                strategy.reduce("SUM", mirrored, None)
            assert strategy.reduce("MEAN", mirrored, None).tolist() == [1, 1]

    run_ranks(rank, 2)


def test_gather_of_a_plain_value():
    def rank(comm):
        every = ms.MirroredStrategy()
        mine, same = np.array([comm.rank]), np.array([7])
        # In tf.distribute a plain value is one, that of all replicas; here each rank has its own.
        with pytest.raises(ms.LockstepError, match="gather: what is not a value per replica diff"):
            every.gather(mine, 0)
        mixed = every.gather((every.run(lambda: mine), same, "text"), 0)
        reduced = every.extended.reduce_to("SUM", every.run(lambda: mine), "cpu")
        return (
            every.gather(same, 0).tolist(),
            [np.asarray(one).tolist() for one in mixed],
            every.gather(reduced, 0).tolist(),
            ms.MultiWorkerMirroredStrategy().gather(mine, 0).tolist(),
            ms.OneDeviceStrategy("cpu").gather(mine, 0).tolist(),
        )

    both = [7], [[0, 1], [7], "text"], [1], [0, 1]
    assert run_ranks(rank, 2) == [(*both, [0]), (*both, [1])]


@pytest.mark.parametrize("strategy", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_a_gather_of_nothing_is_a_call_as_well(strategy):
    def rank(comm):
        every = strategy()
        for call in (every.gather, lambda *given: every.run(lambda: ctx().all_gather(*given))):
            with pytest.raises(TypeError):
                call([], 0 if comm.rank else "0")
        assert every.gather({}, 0) == {}
        return every.run(lambda: ctx().all_gather([], 0))

    assert run_ranks(rank, 2) == [[], []]


def test_broadcast_to():
    def rank(comm):
        mine = np.full(3, comm.rank + 1.0)
        every, local = ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy()
        target = ms.PerReplica(1.0)
        got = every.extended.broadcast_to(mine, target)
        assert isinstance(got, ms.Mirrored)
        assert mine.tolist() == [comm.rank + 1.0] * 3
        label = every.extended.broadcast_to(mine, "cpu:0")
        number = every.extended.broadcast_to(comm.rank + 0.5, target)
        kept = local.extended.broadcast_to(mine, target)
        return np.asarray(got).tolist(), label.tolist(), number, kept is mine

    assert run_ranks(rank, 3) == [([1, 1, 1], [1, 1, 1], 0.5, True)] * 3


def test_reduce_to_and_batch_reduce_to():
    def rank(comm):
        out = []
        for strategy in (ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy()):
            with strategy.scope():
                variable = ms.Variable(0.0)
            value = ms.PerReplica(np.array([comm.rank + 1.0, 1.0]))
            ext = strategy.extended
            one = ext.reduce_to("SUM", value, variable)
            two = ext.batch_reduce_to("MEAN", [(value, variable), ({"k": value}, "cpu")])
            out.append((type(one).__name__, np.asarray(one).tolist()))
            out.append((type(two[0]).__name__, np.asarray(two[0]).tolist(), two[1]["k"].tolist()))
            for bad in (None, "", [], ["cpu"]):
                with pytest.raises(ValueError, match="destinations"):
                    ext.reduce_to("SUM", value, bad)
            with pytest.raises(ValueError, match="tuples"):
                ext.batch_reduce_to("SUM", [[value, "cpu"]])
            assert ext.batch_reduce_to("SUM", []) == []
        return out

    want = [
        ("Mirrored", [3, 2]),
        ("Mirrored", [1.5, 1], [1.5, 1]),
        ("ndarray", [3, 2]),
        ("ndarray", [1.5, 1], [1.5, 1]),
    ]
    assert run_ranks(rank, 2) == [want, want]


def test_values_from_a_function():
    def rank(comm):
        fn = lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)  # noqa: E731
        name = "experimental_distribute_values_from_function"
        every = getattr(ms.MirroredStrategy(), name)(fn)
        local = getattr(ms.MultiWorkerMirroredStrategy(), name)(fn)
        alone = getattr(ms.OneDeviceStrategy("cpu"), name)(fn)
        return every[0].values, local[0].values, alone

    assert run_ranks(rank, 2) == [((0, 1), (0,), (0, 1)), ((0, 1), (1,), (0, 1))]


@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_variables_from_a_function_stay_variables(kind):
    def rank(comm):
        s = kind()
        with s.scope():
            v, w = ms.Variable(1.0), ms.Variable(2.0)
        by = s.experimental_distribute_values_from_function
        given, number = by(lambda c: (v, c.replica_id_in_sync_group))
        assert given is v and isinstance(number, ms.PerReplica)
        if kind is ms.MirroredStrategy:  # which sees the variables of the others, too
            with pytest.raises(ms.LockstepError, match="hold different variables"):
                by(lambda c: (v, w)[c.replica_id_in_sync_group])

    run_ranks(rank, 2)


def test_one_device_and_default_never_communicate():
    """They work although the other ranks take no part."""

    def rank(comm):
        if comm.rank == 1:
            return None
        alone = ms.OneDeviceStrategy("cpu")
        with alone.scope():
            v = ms.Variable([1, 2], aggregation=ms.VariableAggregation.SUM)
        alone.run(lambda: v.assign_add([1, 1]))
        total = alone.run(lambda: ctx().all_gather(np.ones(2), 0)).sum()
        return v.numpy().tolist(), float(total), alone.run(lambda: ctx().devices)

    assert run_ranks(rank, 2)[0] == ([2, 3], 2.0, ("cpu",))
