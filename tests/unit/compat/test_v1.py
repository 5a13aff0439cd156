"""tf.compat.v1.distribute: the older signatures, and older programs."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.compat.v1 import distribute as v1
from mpistrat.testing import run_ranks

RANKS = pytest.mark.parametrize("n", [1, 2, 3, 4])
PER_WORKER = ms.InputReplicationMode.PER_WORKER
REQUIRED = inspect.Parameter.empty

# The older signatures, except for self; further parameters of ours may follow.
SIGNATURES = {
    "Strategy.experimental_run": {"fn": REQUIRED, "input_iterator": None},
    "Strategy.experimental_run_v2": {"fn": REQUIRED, "args": (), "kwargs": None},
    "Strategy.run": {"fn": REQUIRED, "args": (), "kwargs": None, "options": None},
    "Strategy.reduce": {"reduce_op": REQUIRED, "value": REQUIRED, "axis": None},
    "Strategy.make_dataset_iterator": {"dataset": REQUIRED},
    "Strategy.make_input_fn_iterator": {"input_fn": REQUIRED, "replication_mode": PER_WORKER},
    "Strategy.experimental_make_numpy_dataset": {"numpy_input": REQUIRED, "session": None},
    "Strategy.experimental_distribute_dataset": {"dataset": REQUIRED, "options": None},
    "Strategy.distribute_datasets_from_function": {"dataset_fn": REQUIRED, "options": None},
    "Strategy.experimental_distribute_datasets_from_function": {
        "dataset_fn": REQUIRED,
        "options": None,
    },
    "Strategy.experimental_local_results": {"value": REQUIRED},
    "Strategy.unwrap": {"value": REQUIRED},
    "Strategy.group": {"value": REQUIRED, "name": None},
    "Strategy.configure": dict.fromkeys(("session_config", "cluster_spec", "task_type", "task_id")),
    "Strategy.update_config_proto": {"config_proto": REQUIRED},
    "Strategy.colocate_vars_with": {"colocate_with_variable": REQUIRED},
    "Strategy.scope": {},
    "MirroredStrategy": {"devices": None, "cross_device_ops": None},
    "experimental.CentralStorageStrategy": {"compute_devices": None, "parameter_device": None},
    "experimental.MultiWorkerMirroredStrategy": {
        "communication": ms.experimental.CommunicationImplementation.AUTO,
        "cluster_resolver": None,
    },
    "experimental.TPUStrategy": {
        "tpu_cluster_resolver": None,
        "steps_per_run": None,
        "device_assignment": None,
    },
    "OneDeviceStrategy": {"device": REQUIRED},
    "StrategyExtended.call_for_each_replica": {"fn": REQUIRED, "args": (), "kwargs": None},
    "StrategyExtended.reduce_to": {
        "reduce_op": REQUIRED,
        "value": REQUIRED,
        "destinations": REQUIRED,
    },
    "StrategyExtended.batch_reduce_to": {
        "reduce_op": REQUIRED,
        "value_destination_pairs": REQUIRED,
    },
    "StrategyExtended.broadcast_to": {"tensor": REQUIRED, "destinations": REQUIRED},
    "StrategyExtended.update": {
        "var": REQUIRED,
        "fn": REQUIRED,
        "args": (),
        "kwargs": None,
        "group": True,
    },
    "StrategyExtended.update_non_slot": {
        "colocate_with": REQUIRED,
        "fn": REQUIRED,
        "args": (),
        "kwargs": None,
        "group": True,
    },
    "StrategyExtended.non_slot_devices": {"var_list": REQUIRED},
    "StrategyExtended.read_var": {"v": REQUIRED},
    "StrategyExtended.value_container": {"value": REQUIRED},
    "StrategyExtended.variable_created_in_scope": {"v": REQUIRED},
    "StrategyExtended.colocate_vars_with": {"colocate_with_variable": REQUIRED},
    "StrategyExtended.experimental_make_numpy_dataset": {"numpy_input": REQUIRED, "session": None},
    "get_loss_reduction": {},
}
PROPERTIES = (
    *("worker_devices", "parameter_devices", "experimental_between_graph"),
    *("experimental_should_init", "experimental_require_static_shapes"),
    *("should_checkpoint", "should_save_summary"),
)


@every("path", SIGNATURES)
def test_signature(path):
    first, *rest = path.split(".")
    found = getattr(v1, first)
    found = getattr(found, rest[0]) if rest else found
    parameters = dict(inspect.signature(found).parameters)
    parameters.pop("self", None)
    wanted = SIGNATURES[path]
    given = [(name, p.default) for name, p in parameters.items()]
    assert given[: len(wanted)] == list(wanted.items())
    assert all(p.default is not REQUIRED for name, p in parameters.items() if name not in wanted)


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_of_extended(name):
    getattr(v1.OneDeviceStrategy("cpu").extended, name)


@RANKS
def test_an_older_loop(n):
    """Counts what it reads; the data end in a batch that leaves ranks without rows."""

    def program(comm):
        strategy = v1.MirroredStrategy(comm=comm)
        data = np.arange(9.0, dtype=np.float32)
        iterator = strategy.make_dataset_iterator(
            strategy.experimental_make_numpy_dataset(data, session=None).batch(4)
        )
        totals = []
        for _ in range(2):  # epochs
            iterator.initialize()
            for _ in range(3):
                sums = strategy.experimental_run(lambda x: (x.sum(), len(x)), iterator)
                totals.append([float(strategy.reduce("SUM", one)) for one in sums])
            with pytest.raises(ms.OutOfRangeError):
                iterator.get_next()
        assert strategy.group(strategy.unwrap(sums)) is None
        return totals

    epoch = [[6.0, 4.0], [22.0, 4.0], [8.0, 1.0]]
    assert run_ranks(program, n) == [epoch * 2] * n


@RANKS
def test_variables_and_extended(n):
    def program(comm):
        strategy = v1.MirroredStrategy(comm=comm)
        with strategy.scope():
            v = ms.Variable(1.0)
            assert v1.get_strategy() is strategy
        extended = strategy.extended
        assert extended.variable_created_in_scope(v)

        def replica(add):
            me = v1.get_replica_context().replica_id_in_sync_group + add
            return v1.get_replica_context().merge_call(
                lambda s, x: s.extended.update(
                    v,
                    lambda var, total: var.assign(total),
                    args=(s.extended.reduce_to("SUM", x, v),),
                ),
                args=(me,),
            )

        strategy.experimental_run_v2(replica, args=(1,))
        return float(extended.read_var(v)), len(strategy.experimental_local_results(v))

    assert run_ranks(program, n) == [(n * (n + 1) / 2, n)] * n


def test_workers_see_themselves():
    def program(comm):
        strategy = v1.experimental.MultiWorkerMirroredStrategy(comm=comm)
        assert strategy.extended.experimental_between_graph
        return (
            strategy.run(lambda: v1.get_replica_context().replica_id_in_sync_group),
            int(strategy.reduce(v1.ReduceOp.SUM, 1)),
            strategy.cluster_resolver.task_id,
        )

    assert run_ranks(program, 2) == [(0, 2, 0), (1, 2, 1)]


@RANKS
def test_a_topology_and_several_steps_per_call(n):
    def program(comm):
        strategy = v1.experimental.TPUStrategy(steps_per_run=3, comm=comm)
        assert isinstance(strategy, v1.Strategy)
        assert not hasattr(strategy, "gather")
        assert strategy.device_assignment.num_replicas == n
        iterator = strategy.make_dataset_iterator(ms.Dataset.range(4 * 6).batch(4))

        def step(context, part):
            sums = strategy.experimental_run_v2(lambda x: x.sum(), args=(part,))
            context.set_last_step_output("sum", sums, reduce_op=v1.ReduceOp.SUM)

        done = strategy.extended.experimental_run_steps_on_iterator(
            step, iterator, iterations=strategy.steps_per_run
        )
        return int(np.asarray(done.last_step_outputs["sum"])), strategy.extended.num_hosts

    assert run_ranks(program, n) == [(8 + 9 + 10 + 11, 1)] * n


@RANKS
def test_one_value_that_all_share(n):
    def program(comm):
        strategy = v1.experimental.CentralStorageStrategy(comm=comm)
        with strategy.scope():
            v = ms.Variable(1.0, aggregation=ms.VariableAggregation.SUM)
        strategy.experimental_run(lambda: v.assign_add(2.0))
        return float(v.numpy()), float(strategy.reduce("SUM", strategy.run(lambda: 1.0)))

    assert run_ranks(program, n) == [(1.0 + 2 * n, float(n))] * n


def test_what_only_newer_strategies_have():
    strategy = v1.OneDeviceStrategy("cpu")
    for name in ("gather", "experimental_distribute_values_from_function"):
        assert not hasattr(strategy, name)
        with pytest.raises(
            AttributeError, match=f"OneDeviceStrategy of tf.compat.v1 has no {name}"
        ):
            getattr(strategy, name)
    with pytest.raises(TypeError, match="axis"):
        ms.OneDeviceStrategy("cpu").reduce("SUM", 1)


@pytest.mark.parametrize("make", [lambda: v1.MirroredStrategy(), v1.experimental.TPUStrategy])
def test_every_name_in_dir_can_be_read(make):
    strategy = make()
    unreadable = [name for name in dir(strategy) if not hasattr(strategy, name)]
    assert unreadable == []
    assert {"run", "reduce", "experimental_run_v2", "extended"} <= set(dir(strategy))
    # Reading other names raises nothing but AttributeError, on the class too.
    assert dict(inspect.getmembers(type(strategy)))["reduce"] is v1.Strategy.reduce
    assert not hasattr(type(strategy), "gather")


def test_they_are_strategies_of_their_own():
    newer = ms.OneDeviceStrategy("cpu")
    older = v1.Strategy(newer)
    assert isinstance(older, ms.Strategy)
    assert not isinstance(newer, v1.Strategy)
    with newer.scope(), pytest.raises(ms.StrategyError, match="Mixing"):
        older.run(int)
    assert type(copy.deepcopy(older)) is v1.Strategy
    assert repr(v1.OneDeviceStrategy("cpu")) == "OneDeviceStrategy(1 replicas)"


def test_names_that_are_the_newer_ones():
    for name in ("StrategyExtended", "ReplicaContext", "InputContext", "ReduceOp", "Server"):
        assert getattr(v1, name) is getattr(ms, name)
    assert v1.get_loss_reduction() is ms.ReduceOp.SUM
    assert v1.cluster_resolver is ms.cluster_resolver
    assert ms.compat.v1.distribute is v1
    assert ms.compat.tf.compat.v1.VariableAggregation is ms.VariableAggregation
    with pytest.raises(ms.RefusedError):
        v1.experimental.ParameterServerStrategy()


@pytest.mark.parametrize("module", [v1, v1.experimental])
def test_every_public_name_is_there(module):
    for name in module.__all__:
        assert getattr(module, name).__doc__


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: v1.MirroredStrategy(cross_device_ops=3), TypeError, "cross_device_ops must be"),
        (lambda: v1.MirroredStrategy(devices=3), TypeError, "devices must be a list"),
        (lambda: v1.MirroredStrategy(devices=["a", "a"]), ValueError, "different labels"),
        (lambda: workers(cluster_resolver=3), ValueError, "cluster_resolver must be"),
        (lambda: workers(communication=3), ValueError, "CommunicationImplementation"),
        (lambda: v1.experimental.CentralStorageStrategy(3), TypeError, "must be a list"),
        (lambda: v1.experimental.CentralStorageStrategy("ab"), TypeError, "must be a list"),
        (lambda: v1.experimental.TPUStrategy(3), TypeError, "tpu_cluster_resolver"),
        (lambda: v1.experimental.TPUStrategy(device_assignment=3), TypeError, "device_assignment"),
        (lambda: v1.experimental.TPUStrategy(steps_per_run=2.5), TypeError, "steps_per_run"),
        (lambda: v1.experimental.TPUStrategy(steps_per_run=0), ValueError, "steps_per_run"),
    ],
)
def test_wrong_arguments_of_strategies_raise_what_their_docstrings_say(make, kind, text):
    with pytest.raises(kind, match=text) as caught:
        make()
    assert isinstance(caught.value, kind)
    assert isinstance(caught.value, TypeError) is (kind is TypeError)


def workers(**given):
    return v1.experimental.MultiWorkerMirroredStrategy(**given)
