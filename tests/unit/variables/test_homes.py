"""Whose value a value is: what another strategy makes of it, and what handshakes say of it."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.session import make_single_rank_comm
from mpistrat.testing import run_ranks


def self_strategy():
    """Return a strategy over this rank alone, as one over MPI.COMM_SELF is."""
    return ms.MirroredStrategy(comm=make_single_rank_comm())


def placed(comm, ranks):
    """Return a strategy over all ranks whose replica i is on rank ``ranks[i]``."""
    return ms.TPUStrategy(None, ms.DeviceAssignment(ms.Topology((0,) * comm.size), ranks))


def test_what_one_strategy_has_proved_is_compared_by_another():
    def rank(comm):
        one, world = self_strategy(), ms.MirroredStrategy()
        m = one.extended.reduce_to("SUM", ms.PerReplica(float(comm.rank)), ms.PerReplica(0.0))
        with world.scope():
            v = ms.Variable(-1.0)
        for call in (
            lambda: v.assign(m),
            lambda: v.assign_add(m),
            lambda: world.reduce("MEAN", m, axis=None),
            lambda: world.extended.update(v, lambda v, x: v.assign(x), args=(m,)),
        ):
            with pytest.raises(ms.LockstepError):
                call()
        same = one.extended.reduce_to("SUM", ms.PerReplica(7.0), ms.PerReplica(0.0))
        v.assign(same)
        return float(v.numpy()), float(world.reduce("MEAN", same, axis=None))

    assert run_ranks(rank, 3) == [(7.0, 7.0)] * 3


def test_two_proved_values_are_not_one_argument():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(0.0)
        a, b = (s.extended.reduce_to("SUM", ms.PerReplica(x), v) for x in (1.0, 2.0))
        with pytest.raises(ms.LockstepError):
            s.extended.update(v, lambda v, x: None, args=(b if comm.rank else a,))
        return float(v.numpy())

    assert run_ranks(rank, 2) == [0.0, 0.0]


@pytest.mark.parametrize("more", [0, 40], ids=["in the handshake", "beside it"])
def test_what_only_calls_itself_mirrored_comes_back_per_replica(more):
    def rank(comm):
        s = ms.MirroredStrategy()

        def fn():
            big = [np.ones(9) for _ in range(more)]
            return ms.Mirrored(float(comm.rank), 2), ms.Mirrored(5.0, 2), big

        differing, same, _ = s.run(fn)
        assert isinstance(same, ms.Mirrored)
        assert isinstance(differing, ms.PerReplica)
        assert differing.local == comm.rank
        return s.experimental_local_results(differing)

    assert run_ranks(rank, 2) == [(0.0, 1.0)] * 2


@pytest.mark.parametrize("more", [0, 40], ids=["in the handshake", "beside it"])
def test_another_variable_in_the_same_place_is_an_error_whatever_stands_beside_it(more):
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            pair = [ms.Variable(0.0), ms.Variable(1.0)]
        with pytest.raises(ms.LockstepError, match=r"no\. 1 on rank 0, no\. 2 on rank 1"):
            s.run(lambda: (pair[comm.rank], [np.ones(9) for _ in range(more)]))

    run_ranks(rank, 2)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 99], ids=["known", "elsewhere"])
def test_another_order_of_the_same_ranks_sees_every_value_in_its_own(size, length):
    def rank(comm):
        s, order = ms.MirroredStrategy(), (*range(1, comm.size), 0)
        t = placed(comm, order)
        value = s.run(lambda: np.full(length, comm.rank))
        mine = ms.get_replica_context
        there = t.run(lambda: (mine().replica_id_in_sync_group, np.full(length, comm.rank)))[1]
        seen = [x[0] for x in t.experimental_local_results(value)]
        assert seen == list(order)
        assert [x[0] for x in s.experimental_local_results(value)] == list(range(comm.size))
        assert [x[0] for x in s.experimental_local_results(there)] == list(range(comm.size))
        assert [x[0] for x in t.experimental_local_results(there)] == list(order)
        assert value.local[0] == comm.rank
        assert t.gather(value, 0).tolist() == np.repeat(order, length).tolist()
        got = t.run(lambda x: (mine().replica_id_in_sync_group, x), args=(value,))
        assert got[1].local[0] == comm.rank
        return t.reduce("SUM", value, axis=None)[0]

    assert set(run_ranks(rank, size)) == {sum(range(size))}


def test_a_value_of_other_ranks_is_refused_by_all():
    def rank(comm):
        one, world, device = self_strategy(), ms.MirroredStrategy(), ms.OneDeviceStrategy("cpu")
        of_one, of_all = one.run(lambda: np.ones(3)), world.run(lambda: np.ones(3))
        small = one.run(lambda: 1.0)
        for strategy, value in (
            (world, of_one),
            (world, small),
            (one, of_all),
            (device, of_all),
            (ms.get_strategy(), of_all),
        ):
            for call in (
                lambda s, x: s.experimental_local_results(x),
                lambda s, x: s.reduce("SUM", x, axis=None),
                lambda s, x: s.reduce("MEAN", [x], axis=0),
                lambda s, x: s.gather({"a": x}, 0),
                lambda s, x: s.extended.reduce_to("SUM", x, "rank:0"),
                lambda s, x: s.extended.batch_reduce_to("SUM", [(x, x)]),
            ):
                with pytest.raises(ms.StrategyError, match="value of another strategy"):
                    call(strategy, value)
        assert world.run(lambda x: float(x.sum()), args=(of_one,)).local == 3.0
        return float(world.reduce("SUM", of_all, axis=None).sum())

    assert run_ranks(rank, 2) == [6.0, 6.0]


def test_a_value_of_the_local_view_is_fetched_by_the_global_one():
    def rank(comm):
        local, world = ms.MultiWorkerMirroredStrategy(), ms.MirroredStrategy()
        value = local.experimental_distribute_values_from_function(lambda ctx: comm.rank + 0.5)
        assert local.experimental_local_results(value) == (comm.rank + 0.5,)
        seen = world.experimental_local_results(value)
        assert local.experimental_local_results(value) == (comm.rank + 0.5,)
        return seen, float(world.reduce("SUM", value, axis=None))

    assert run_ranks(rank, 2) == [((0.5, 1.5), 2.0)] * 2


CALLS = {
    "reduce": lambda s, x: s.reduce("MEAN", x, axis=None),
    "reduce over an axis": lambda s, x: s.reduce("MEAN", x, axis=0),
    "gather": lambda s, x: s.gather(x, 0),
    "reduce_to": lambda s, x: s.extended.reduce_to("SUM", x, "rank:0"),
    "local results": lambda s, x: s.experimental_local_results(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("where", ["run", "merge_call", "inputs"])
def test_another_leaf_on_another_rank_is_told_by_name(call, where):
    def rank(comm):
        s = ms.MirroredStrategy()

        def made(*_):
            return {"loss": np.ones(40), "norm": np.ones(40)}

        def merge(s, tree):
            for name in ("loss", "norm")[:: -1 if comm.rank else 1]:
                call(s, tree[name])

        if where == "merge_call":
            with pytest.raises(ms.LockstepError, match=r"(?s)leaf '\S*loss'.*leaf '\S*norm'"):
                s.run(lambda: ms.get_replica_context().merge_call(merge, args=(made(),)))
            return
        by = s.experimental_distribute_values_from_function
        tree = s.run(made) if where == "run" else by(made)
        tree = {"a": tree, "b": 1}["a"]
        with pytest.raises(ms.LockstepError, match=r"(?s)leaf '\S*loss'.*leaf '\S*norm'"):
            merge(s, tree)

    run_ranks(rank, 2)


def test_the_same_leaf_of_another_step_is_told():
    def rank(comm):
        s = ms.MirroredStrategy()
        first, second = s.run(lambda: 1.0), s.run(lambda: 2.0)
        with pytest.raises(ms.LockstepError, match=r"of call \d+"):
            s.reduce("SUM", second if comm.rank else first, axis=None)
        return float(s.reduce("SUM", second, axis=None))

    assert run_ranks(rank, 2) == [4.0, 4.0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_what_merge_fn_returns_meets_variables_by_position(kind, size):
    def rank(comm):
        s = kind()
        with s.scope():
            variables = {"w": ms.Variable(0.0), "b": ms.Variable(0.0)}

        def sums(strategy, gradients):
            return {name: strategy.reduce("SUM", g, axis=None) for name, g in gradients.items()}

        def step():
            reduced = ms.get_replica_context().merge_call(sums, ({"w": 1.0, "b": 10.0},))
            for gradient, v in zip(reduced.values(), variables.values(), strict=True):
                v.assign_add(gradient)

        s.run(step)
        return [float(v.numpy()) for v in variables.values()]

    assert run_ranks(rank, size) == [[size, size * 10.0]] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mirrored_value_is_gathered_as_a_variable_is(size):
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable([1.0, 2.0])
        m = s.extended.reduce_to("MEAN", s.run(lambda: np.array([1.0, 2.0])), v)
        found = s.gather({"m": m, "v": v, "plain": np.array([5.0])}, axis=0)
        return {name: value.tolist() for name, value in found.items()}

    both = [1.0, 2.0] * size
    assert run_ranks(rank, size) == [{"m": both, "v": both, "plain": [5.0]}] * size


@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_dicts_come_back_in_one_order(kind):
    def rank(comm):
        s = kind()

        def made():
            names = "ba" if comm.rank else "ab"
            return {name: [{name: 0.0 for name in names + "c"}, ord(name)] for name in names}

        def merge(s, tree):
            if kind is ms.MirroredStrategy:
                assert list(tree) == ["a", "b"]
            return made()

        def fn():
            merged = ms.get_replica_context().merge_call(merge, args=(made(),))
            assert [*merged, *merged["a"][0]] == [*made(), *made()["a"][0]]  # merge_fn's own order
            return made()

        given = s.experimental_distribute_values_from_function(lambda ctx: made())
        s.run(lambda tree: None, args=(given,))
        if kind is ms.MirroredStrategy:
            assert list(given) == ["a", "b"]
        out = s.run(fn)
        assert [list(one[0]) for one in out.values()] == [["a", "b", "c"]] * 2
        assert list(s.run(lambda: {"z": 0, "y": 1})) == ["z", "y"]
        return [float(s.reduce("MEAN", out[name][1], axis=None)) for name in out]

    assert run_ranks(rank, 2) == [[97.0, 98.0]] * 2
