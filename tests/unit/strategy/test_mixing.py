"""Several strategies in one program: whose call it is, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.session import make_single_rank_comm
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context


class Noted(ms.CrossDeviceOps):
    """Folds by hand, and notes whose scope it is called in."""

    def __init__(self):
        self.ruled = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.ruled.append(ms.get_strategy())
        return sum(ms.get_strategy().experimental_local_results(per_replica_value))


def test_a_class_of_the_program_is_called_in_the_scope_of_its_strategy():
    def rank(comm):
        ops = Noted()
        s = ms.MirroredStrategy(cross_device_ops=ops)
        with s.scope():
            v = ms.Variable(
                0.0,
                synchronization=ms.VariableSynchronization.ON_READ,
                aggregation=ms.VariableAggregation.SUM,
            )
        s.run(lambda: v.assign(comm.rank + 1.0))
        read = float(v.read_value())
        s.reduce("SUM", s.run(lambda: 1.0), axis=None)
        s.run(lambda: ctx().all_reduce("SUM", 1.0))
        return read, [ruled is s for ruled in ops.ruled]

    assert run_ranks(rank, 2) == [(3.0, [True] * 3)] * 2


@pytest.mark.parametrize(
    "ops",
    [
        ms.NcclAllReduce(),
        ms.HierarchicalCopyAllReduce(),
        ms.ReductionToOneDevice(),
        Noted(),
    ],
    ids=lambda ops: type(ops).__name__,
)
def test_a_way_to_move_values_that_stands_alone_wants_their_scope(ops):
    def rank(comm):
        s = ms.MirroredStrategy()
        p = s.run(lambda: comm.rank + 1.0)
        for call in (
            lambda: ops.reduce("SUM", p, "rank:0"),
            lambda: ops.reduce("SUM", p, p),
            lambda: ops.batch_reduce("SUM", [(p, "rank:0"), (p, p)]),
            lambda: ops.broadcast(1.0, p),
        ):
            with pytest.raises(ms.StrategyError, match="in the scope of the strategy that made"):
                call()
        with s.scope():
            return float(np.asarray(ops.reduce("SUM", p, "rank:0")))

    assert run_ranks(rank, 2) == [3.0, 3.0]


def test_update_of_a_variable_that_each_replica_owns_gives_a_value_per_replica():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(1.0, synchronization=ms.VariableSynchronization.ON_READ)
        given = ms.PerReplica(float(comm.rank))
        add = lambda v, x: v.assign_add(x).handle.item()  # noqa: E731
        one = s.extended.update(v, add, args=(given,))
        assert isinstance(one, ms.PerReplica)
        assert one.local == 1.0 + comm.rank
        apart = s.extended.update(v, add, args=(given,), group=False)
        inside = s.run(lambda: s.extended.update(v, add, args=(given,)))
        return s.experimental_local_results(one), apart, inside.local

    assert run_ranks(rank, 2) == [((1.0, 2.0), (1.0, 3.0), 1.0), ((1.0, 2.0), (1.0, 3.0), 4.0)]


def test_a_variable_of_another_strategy_is_refused_wherever_it_is_used():
    def rank(comm):
        s, t = ms.MirroredStrategy(), ms.MirroredStrategy()
        with t.scope():
            v = ms.Variable(1.0, aggregation=ms.VariableAggregation.SUM)
            own = ms.Variable([1.0], synchronization=ms.VariableSynchronization.ON_READ)
        per = ms.PerReplica(np.ones(1))
        for x in (v, own):
            for call in (
                lambda x: s.reduce("MEAN", x, axis=None),
                lambda x: s.reduce("MEAN", x, axis=()),
                lambda x: s.gather(x, 0),
                lambda x: s.experimental_local_results([x]),
                lambda x: s.extended.reduce_to("SUM", per, x),
                lambda x: s.extended.batch_reduce_to("SUM", [(per, x)]),
                lambda x: s.extended.broadcast_to(x, "rank:0"),
                lambda x: s.extended.broadcast_to(1.0, x),
                lambda x: s.run(lambda: t.extended.update(x, lambda v: None)),
                lambda x: s.run(lambda: ctx().all_reduce("SUM", x)),
                lambda x: s.run(lambda: ctx().all_gather(x, 0)),
            ):
                with s.scope(), pytest.raises(RuntimeError, match="Mixing different strategies"):
                    call(x)
        return float(v.numpy()), float(s.reduce("SUM", per, axis=0))

    assert run_ranks(rank, 2) == [(1.0, 2.0)] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("owner", [ms.get_strategy, lambda: ms.OneDeviceStrategy("cpu")])
def test_a_variable_of_this_rank_alone_is_read_by_all_code(owner, kind, size):
    def rank(comm):
        s = kind()
        with owner().scope():
            w = ms.Variable([comm.rank + 1.0], name="w")
            rows = ms.IndexedSlices([1.0], [0])
        with s.scope():
            v = ms.Variable([0.0], aggregation=ms.VariableAggregation.SUM)
            seen = [float(w[0]), float((w * 10)[0]), float(np.sin(w)[0]), float(w.numpy()[0])]
        assert seen == [comm.rank + 1.0, comm.rank * 10 + 10.0, np.sin(comm.rank + 1.0), seen[0]]
        s.run(lambda x: v.assign_add(w + x), args=(w,))
        total = size * (size + 1) / 2
        assert v.numpy() == 2 * total
        summed, parts = s.run(lambda: (ctx().all_reduce("SUM", w), ctx().all_gather(w, 0)))
        assert s.experimental_local_results(summed)[0] == total
        assert list(s.experimental_local_results(parts)[0]) == list(range(1, size + 1))
        with s.scope():
            v.assign([4.0])
            assert w.assign(v) is w
            w.assign_add([3.0])
            w.assign_sub([1.0])
            w.scatter_add(rows)
            made, copied = ms.Variable(w), copy.deepcopy(w)
        assert made.strategy is s
        assert copied.strategy is w.strategy is not s
        copied.assign([0.0])
        s.run(lambda: ctx().merge_call(lambda _: w.assign_add([1.0])))
        return float(w.numpy()[0]), float(made.numpy()[0])

    assert run_ranks(rank, size) == [(8.0, 7.0)] * size


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("owner", [ms.get_strategy, lambda: ms.OneDeviceStrategy("cpu")])
def test_a_variable_of_this_rank_alone_is_not_written_to_by_replicas(owner, kind, size):
    def rank(comm):
        s = kind()
        with owner().scope():
            w = ms.Variable([1.0], name="w")
        with s.scope():
            v = ms.Variable([1.0])
        for write in (
            lambda: w.assign(v),
            lambda: w.assign_add([1.0]),
            lambda: w.scatter_update(ms.IndexedSlices([5.0], [0])),
        ):
            wanted = "'w:0' in replica code .* Create it in the scope of the strategy"
            with pytest.raises(ms.StrategyError, match=wanted):
                s.run(write)
            with pytest.raises(ms.StrategyError, match="'w:0' in the function of update"):
                s.extended.update(v, lambda _, write=write: write())
        for call in (
            lambda: s.reduce("MEAN", w, axis=None),
            lambda: s.gather(w, 0),
            lambda: s.broadcast(w),
            lambda: s.experimental_local_results(w),
        ):
            with pytest.raises(ms.StrategyError, match=r"each rank has one.*v\.read_value\(\)"):
                call()
        return float(w.numpy()[0]), float(v.numpy()[0])

    assert run_ranks(rank, size) == [(1.0, 1.0)] * size


def test_one_replica_writes_to_ordinary_variables():
    def rank(comm):
        w = ms.Variable(1.0)
        ms.OneDeviceStrategy("cpu").run(lambda: w.assign_add(1.0))
        return float(w.numpy())

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_outside_of_scopes_local_results_are_those_of_the_own_strategy():
    def rank(comm):
        world, one = ms.MirroredStrategy(), ms.MirroredStrategy(comm=make_single_rank_comm())
        with world.scope():
            v = ms.Variable(float(comm.rank), name="v")
        assert world.experimental_local_results(v)[1] == 0.0
        with pytest.raises(ms.StrategyError, match="another strategy"):
            one.experimental_local_results(v)
        return True

    assert all(run_ranks(rank, 2))


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i4", "?"])
@pytest.mark.parametrize("ops", [None, Noted])
def test_a_number_of_numpy_is_broadcast_as_an_array(dtype, ops):
    def rank(comm):
        s = ms.MirroredStrategy(cross_device_ops=ops and ops())
        number = np.dtype(dtype).type(not comm.rank)
        sent = s.extended.broadcast_to(number, ms.PerReplica(0))
        assert type(s.extended.broadcast_to(float(number), ms.PerReplica(0))) is float
        return type(sent), sent.dtype, bool(sent)

    assert run_ranks(rank, 2) == [(ms.Mirrored, np.dtype(dtype), True)] * 2


@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize(
    ("label", "good"),
    [
        ("rank:0", True),
        ("rank:1", True),
        ("/cpu:0", True),
        ("GPU:1", True),
        ("/job:worker/replica:0/task:0/device:CPU:0", True),
        ("rank:2", False),
        ("no such device", False),
        ("x", False),
    ],
)
def test_destinations_are_devices(kind, label, good):
    def rank(comm):
        s = kind()
        per = s.experimental_distribute_values_from_function(lambda c: np.ones(2))
        for call in (
            lambda: s.extended.reduce_to("SUM", per, label),
            lambda: s.extended.batch_reduce_to("SUM", [(per, label)]),
            lambda: s.extended.broadcast_to(np.ones(2), label),
        ):
            if good:
                call()
                continue
            with pytest.raises(ms.StructureError, match=r"the devices of .*rank:1"):
                call()
        return float(s.reduce("SUM", per, axis=None)[0])

    assert run_ranks(rank, 2) == [2.0, 2.0]
