"""The older calls of strategies and of `extended`, and copies of strategies and variables."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

# On copies of each rank, and on copies that a node has in common.
pytestmark = pytest.mark.usefixtures("kept")

Agg, Sync = ms.VariableAggregation, ms.VariableSynchronization
VIEWS = {"global": ms.MirroredStrategy, "local": ms.MultiWorkerMirroredStrategy}


def made(strategy, *args, **kwargs):
    with strategy.scope():
        return ms.Variable(*args, **kwargs)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_devices_and_facts(view, n):
    def rank(comm):
        s = VIEWS[view]()
        e = s.extended
        v = made(s, 1.0)
        assert e.worker_devices == e.parameter_devices == e.non_slot_devices([v])
        assert v.device == f"rank:{comm.rank}"
        assert not e.experimental_require_static_shapes
        assert e.experimental_should_init
        return e.worker_devices, e.experimental_between_graph, e.should_checkpoint

    for r, found in enumerate(run_ranks(rank, n)):
        devices = tuple(f"rank:{i}" for i in range(n)) if view == "global" else (f"rank:{r}",)
        assert found == (devices, view == "local", r == 0)


def test_the_default_strategy_has_no_devices_and_keeps_slots_with_variables():
    e = ms.get_strategy().extended
    b, a = ms.Variable(1.0, name="b"), ms.Variable(1.0, name="a")
    assert e.non_slot_devices([b, a]) is a
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError):
            getattr(e, name)
    assert e.update_non_slot(a, lambda x: x + 1, args=(2,)) == 3
    assert ms.OneDeviceStrategy("cpu").extended.parameter_devices == ("cpu",)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_update_non_slot(view, n):
    def rank(comm):
        s = VIEWS[view]()
        e = s.extended
        devices = e.non_slot_devices([])
        each = s.run(lambda: np.array([float(comm.rank)]))
        assert e.update_non_slot(devices, lambda: None) is None
        same = e.update_non_slot(devices, lambda x: x * 2, args=(np.ones(1),))
        tuples = e.update_non_slot(devices, lambda x: x * 2, kwargs={"x": 2.0}, group=False)
        if view == "global":
            own = e.update_non_slot(devices, lambda x: {"y": x + 1}, args=(each,))
            every = e.update_non_slot(devices, lambda x: x + 1, args=(each,), group=False)
            assert own["y"].local.tolist() == [comm.rank + 1]
            assert isinstance(same, ms.Mirrored)
        else:
            every = e.update_non_slot(
                devices, lambda x: x + 1, args=(ms.PerReplica(each),), group=False
            )
        return np.asarray(same).tolist(), tuples, [x.tolist() for x in every]

    for r, found in enumerate(run_ranks(rank, n)):
        shown = range(n) if view == "global" else [r]
        assert found == ([2.0], (4.0,) * len(shown), [[i + 1.0] for i in shown])


@pytest.mark.parametrize("what", ["argument", "result", "raises", "devices", "exits", "inside run"])
def test_update_non_slot_fails_on_every_rank(what):
    def rank(comm):
        s = ms.MirroredStrategy()
        e = s.extended
        devices = e.non_slot_devices([])

        def fn(x):
            if what == "raises" and comm.rank == 1:
                raise KeyError("mine")
            if what == "exits" and comm.rank == 1:
                raise SystemExit(3)
            return comm.rank if what == "result" else None

        def call():
            given = comm.rank if what == "argument" else 1
            place = "cpu:0" if what == "devices" else devices
            return e.update_non_slot(place, fn, args=(given,))

        with pytest.raises((Exception, SystemExit)) as caught:
            s.run(call) if what == "inside run" else call()
        assert float(s.reduce("SUM", ms.PerReplica(1.0), None)) == comm.size
        return caught.type.__name__, isinstance(caught.value, KeyError)

    kind = {
        "argument": "LockstepError",
        "result": "LockstepError",
        "devices": "StructureError",
        "inside run": "ContextError",
    }.get(what, "RemoteError")
    found = run_ranks(rank, 3)
    own = {"raises": ("KeyError", True), "exits": ("SystemExit", False)}.get(what, (kind, False))
    others = (kind, what == "raises")
    assert found == [others, own, others]


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["cross", "replica"])
def test_an_update_that_leaves_is_undone_on_every_rank(leave, where):
    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.zeros(3))

        def fn(var):
            var.assign([1.0, 2.0, 3.0])
            var.scatter_add(ms.IndexedSlices([5.0], [0]))
            if comm.rank == 1:
                raise leave("on the way out")

        def call():
            s.extended.update(v, fn)

        with pytest.raises(leave if comm.rank == 1 else RuntimeError):
            s.run(call) if where == "replica" else call()
        before = v.numpy().tolist()
        s.extended.update(v, lambda var: var.assign_add(np.ones(3)))
        return before, v.numpy().tolist()

    assert run_ranks(rank, 3) == [([0, 0, 0], [1, 1, 1])] * 3


@pytest.mark.parametrize("differ", ["argument", "result"])
def test_slices_of_an_update_are_in_its_proof(differ):
    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.zeros(3))
        same = ms.IndexedSlices([1.0], [0])
        other = ms.IndexedSlices([1.0], [comm.rank])
        given = (other if differ == "argument" else same,)
        with pytest.raises(ms.LockstepError):
            s.extended.update(
                v,
                lambda var, d: (var.scatter_add(same), other if differ == "result" else None),
                given,
            )
        return v.numpy().tolist()

    assert run_ranks(rank, 2) == [[0, 0, 0]] * 2


@pytest.mark.parametrize("view", VIEWS)
def test_read_var_and_value_container(view):
    def rank(comm):
        s = VIEWS[view]()
        v = made(s, [1.0, 2.0])
        w = made(s, 1.0, synchronization=Sync.ON_READ, aggregation=Agg.SUM)
        e = s.extended
        inside = s.run(lambda: e.read_var(v) * 1)
        inside = inside.local if view == "global" else inside
        with pytest.raises(ms.ContextError):
            s.run(lambda: e.read_var(w))
        for bad in (3, ms.Variable(1.0)):
            with pytest.raises(ms.StrategyError):
                e.read_var(bad)
        assert e.value_container(v.values[-1]) is v
        assert e.value_container(np.asarray(v)) is v
        assert e.value_container(w._component()) is w
        for plain in (3, None, np.ones(2), np.ones(2)[:1], v.numpy(), v):
            assert e.value_container(plain) is plain
        return inside.tolist(), e.read_var(v).tolist(), float(e.read_var(w))

    assert run_ranks(rank, 2) == [([1, 2], [1, 2], 2.0)] * 2


def test_whose_variable_it_is():
    def rank(comm):
        s, other = ms.MirroredStrategy(), ms.MirroredStrategy()
        v, outside = made(s, 1.0), ms.Variable(1.0)
        created = s.extended.variable_created_in_scope
        assert [created(x) for x in (v, outside, made(other, 1.0), 3)] == [
            True,
            False,
            False,
            False,
        ]
        default = ms.get_strategy()
        assert default.extended.variable_created_in_scope(outside)
        with default.extended.colocate_vars_with(outside):
            pass
        with pytest.raises(ms.ContextError, match="scope"):
            s.colocate_vars_with(v)
        with s.scope():
            with s.colocate_vars_with(v):
                assert s.extended.variable_created_in_scope(ms.Variable(1.0))
            for bad in (outside, 3):
                with pytest.raises(ValueError, match="expected a variable"):
                    s.extended.colocate_vars_with(bad)
            with pytest.raises(ms.StrategyError):
                other.colocate_vars_with(v)

    run_ranks(rank, 2)


@pytest.mark.parametrize("view", VIEWS)
def test_older_methods(view):
    def rank(comm):
        s = VIEWS[view]()
        value = s.run(lambda: comm.rank)
        config = {"a": [1]}
        copied = s.update_config_proto(config)
        assert copied == config
        assert copied["a"] is not config["a"]
        assert s.configure(session_config=config, task_id=comm.rank) is None
        assert s.group(value) is None
        with pytest.raises(ms.LockstepError):
            s.group(value) if comm.rank else s.reduce("SUM", ms.PerReplica(1.0), None)
        rows = list(s.extended.experimental_make_numpy_dataset(np.arange(2)))
        return s.unwrap(value), rows

    for r, found in enumerate(run_ranks(rank, 2)):
        assert found == ((0, 1) if view == "global" else (r,), [0, 1])


def test_copies_of_strategies():
    def rank(comm):
        for s in (ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy(), ms.get_strategy()):
            with pytest.raises(RuntimeError, match="deep"):
                copy.copy(s)
        with pytest.raises(ValueError, match="cannot be copied"):
            copy.deepcopy(ms.MultiWorkerMirroredStrategy())
        s = ms.MirroredStrategy()
        t = copy.deepcopy({"a": s, "b": [s]})["b"][0]
        assert t is not s
        v = made(s, 1.0)
        with t.scope(), pytest.raises(ms.StrategyError):
            v.assign(2.0)
        return t.num_replicas_in_sync, float(t.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [(2, 2.0)] * 2


def test_strategies_are_not_pickled():
    def rank(comm):
        for s in (ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy(), ms.get_strategy()):
            for value in (s, {"s": [s]}, s.extended, s.scope(), ms.ReplicaContext(s, None)):
                for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                    with pytest.raises(
                        TypeError, match=r"Strategy.*cannot be pickled.*Give .* arrays"
                    ):
                        pickle.dumps(value, protocol)
        return True

    assert all(run_ranks(rank, 2))


def test_values_of_a_strategy_are_copied_and_the_same_values_pickled():
    def rank(comm):
        s = ms.MirroredStrategy()
        value = s.run(lambda: np.arange(99.0) + comm.rank)
        with pytest.raises(TypeError, match=r"PerReplica .*cannot be pickled.*value\.local"):
            pickle.dumps([value])
        shallow, deep = copy.copy(value), copy.deepcopy({"v": value})["v"]
        assert shallow.local is value.local
        assert deep.local is not value.local
        assert pickle.loads(pickle.dumps(ms.PerReplica(2.5))).local == 2.5
        deep.local[0] = -1  # the copy's alone
        total = s.extended.reduce_to("SUM", value, value)
        again = [copy.deepcopy(total), pickle.loads(pickle.dumps(total)), copy.copy(total)]
        with s.scope():
            v = ms.Variable(np.zeros(99))
        for one in again:
            assert (one.numpy() == total.numpy()).all()
            v.assign(one)
        again[0].local[0] = comm.rank
        with pytest.raises(ms.LockstepError):  # the copy has not been checked to be the same on all
            v.assign(again[0])
        return [float(s.reduce("SUM", x, None)[0]) for x in (value, shallow, deep)]

    assert run_ranks(rank, 2) == [[1.0, 1.0, -2.0]] * 2


def test_deep_copies_of_variables_are_variables_of_their_own():
    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, [1.0, 2.0], name="v", aggregation=Agg.MEAN, trainable=False)
        w = made(s, 0.0, synchronization=Sync.ON_READ, aggregation=Agg.SUM)
        s.run(lambda: w.assign(comm.rank + 1.0))
        both = {"v": v, "again": v, "w": w}
        copies = copy.deepcopy(both)
        t = copies["v"]
        assert copies["again"] is t
        t.assign([5.0, 6.0])
        facts = ("name", "aggregation", "synchronization", "trainable", "strategy")
        assert [getattr(t, f) for f in facts] == [getattr(v, f) for f in facts]
        assert s.extended.value_container(np.asarray(t)) is t
        assert len({v._number, w._number, t._number, copies["w"]._number}) == 4
        with ms.OneDeviceStrategy("cpu").scope(), pytest.raises(ms.StrategyError):
            copy.deepcopy(v)
        with pytest.raises(ms.LockstepError):
            copy.deepcopy(v if comm.rank else w)
        assert made(s, 1.0)._number == copies["w"]._number + 1
        return v.numpy().tolist(), float(copies["w"].numpy()), float(copies["w"]._component())

    assert run_ranks(rank, 2) == [([1, 2], 3.0, r + 1.0) for r in range(2)]


def test_a_strategy_for_the_rest_of_the_program():
    def rank(comm):
        s, t = ms.MirroredStrategy(), ms.MirroredStrategy()
        ms.experimental_set_strategy(s)
        assert (ms.get_strategy(), ms.has_strategy(), ms.in_cross_replica_context()) == (
            s,
            True,
            True,
        )
        assert ms.get_replica_context() is None
        assert ms.Variable(1.0).strategy is s
        with s.scope():
            assert ms.get_strategy() is s
            with pytest.raises(ms.ContextError, match="inside a scope"):
                ms.experimental_set_strategy(t)
        with pytest.raises(ms.ContextError, match="inside a scope"):
            s.run(lambda: ms.experimental_set_strategy(None))
        with pytest.raises(ms.StrategyError):
            t.run(lambda: None)
        ms.experimental_set_strategy(t)
        assert ms.get_strategy() is t
        with pytest.raises(TypeError):
            ms.experimental_set_strategy("t")
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(ms.has_strategy()))
        thread.start()
        thread.join()
        total = float(t.reduce("SUM", ms.PerReplica(1.0), None))
        ms.experimental_set_strategy(None)
        ms.experimental_set_strategy(ms.get_strategy())
        return ms.has_strategy(), ms.in_cross_replica_context(), elsewhere, total

    assert run_ranks(rank, 2) == [(False, False, [False], 2.0)] * 2


def test_what_else_a_variable_can_tell():
    def rank(comm):
        s = ms.MirroredStrategy()
        v, w = made(s, [3.0, 4.0]), made(s, 2)
        assert v.is_initialized()
        assert v.initializer is None
        with s.scope(), pytest.raises(ms.ContextError, match="handle"):
            v.handle  # noqa: B018
        seen = []
        s.extended.update(v, lambda var: seen.append(var.handle.tolist()))
        s.run(lambda: seen.append(v.handle.tolist()))
        assert seen == [[3, 4]] * 2 == [v.handle.tolist()] * 2
        assert (len(v), list(v), 4.0 in v, [5, 6, 7][w], complex(w)) == (2, [3, 4], True, 7, 2 + 0j)
        for wrong in (lambda: len(w), lambda: list(w), lambda: [1][v]):
            with pytest.raises(TypeError):
                wrong()

    run_ranks(rank, 2)


@pytest.mark.parametrize("sync", [Sync.AUTO, Sync.ON_WRITE, Sync.ON_READ])
def test_what_replicas_own_is_not_trained_unless_asked(sync):
    v = ms.Variable(1.0, synchronization=sync, aggregation=Agg.SUM)
    assert v.trainable == (sync is not Sync.ON_READ)
    assert ms.Variable(1.0, True, synchronization=sync).trainable
    assert not ms.Variable(1.0, False, synchronization=sync).trainable


@every("dtype", [np.int8, np.int64, np.uint64])
@every("value", [7, 100, 2**62 + 3, 2**63 + 1, -7, -(2**62) - 3])
def test_shares_of_integers_lose_only_the_rest(dtype, value):
    info = np.iinfo(dtype)
    if not info.min <= value <= info.max:
        with pytest.raises(TypeError):
            ms.Variable(np.zeros((), dtype)).assign(value)
        return

    def rank(comm):
        kind = {"synchronization": Sync.ON_READ, "aggregation": Agg.SUM}
        v = made(ms.MirroredStrategy(), np.zeros((), dtype), **kind)
        v.assign(value)
        return int(v._component())

    assert run_ranks(rank, 3) == [int(abs(value) // 3 * (1 if value > 0 else -1))] * 3


def test_the_default_strategy_broadcasts_nothing():
    extended = ms.get_strategy().extended
    with pytest.raises(NotImplementedError, match="broadcast_to"):
        extended.broadcast_to(1.0, "/cpu:0")
    with pytest.raises(ms.StructureError):
        extended.broadcast_to(1.0, None)
