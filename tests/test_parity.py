"""Parity with tf.distribute: every exported name has a row in docs/parity.md, and each is true."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from every import every

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.compat.absent import REFUSED, get_refused

sys.path.insert(0, str(Path(__file__).parent))

from golden.compare import EQUAL
from golden.harness import results
from golden.judge import judge
from golden.patterns import matches
from golden.record import cases

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")

# What TensorFlow 2.21.0 exports.
_RESOLVERS = """
    ClusterResolver GCEClusterResolver KubernetesClusterResolver KubernetesExecutableLocation
    SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver
    UnionResolver
"""
EXPORTED = {
    "tf.distribute": """
        CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
        HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy
        MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ParameterServerStrategy ReduceOp
        ReductionToOneDevice ReplicaContext RunOptions Server Strategy StrategyExtended TPUStrategy
        experimental_set_strategy get_replica_context get_strategy has_strategy
        in_cross_replica_context
    """,
    "tf.distribute.cluster_resolver": _RESOLVERS,
    "tf.distribute.coordinator": """
        ClusterCoordinator PerWorkerValue RemoteValue experimental_get_current_worker_index
    """,
    "tf.distribute.experimental": """
        CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
        CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy
        PreemptionCheckpointHandler PreemptionWatcher TPUStrategy TerminationConfig ValueContext
    """,
    "tf.distribute.experimental.coordinator": "ClusterCoordinator PerWorkerValues RemoteValue",
    "tf.distribute.experimental.partitioners": """
        FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner
    """,
    "tf.distribute.experimental.rpc": "Client Server",
    "tf.types.experimental.distributed": "Mirrored PerReplica",
    "tf": "VariableAggregation VariableSynchronization",
    "tf.compat.v1.distribute": """
        CrossDeviceOps HierarchicalCopyAllReduce InputContext InputReplicationMode MirroredStrategy
        NcclAllReduce OneDeviceStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions
        Server Strategy StrategyExtended experimental_set_strategy get_loss_reduction
        get_replica_context get_strategy has_strategy in_cross_replica_context
    """,
    "tf.compat.v1.distribute.cluster_resolver": _RESOLVERS,
    "tf.compat.v1.distribute.experimental": """
        CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
        CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy TPUStrategy
    """,
}
NAMES = [f"{module}.{name}" for module, names in EXPORTED.items() for name in names.split()]


class Row(NamedTuple):
    """A row of the page: the name there, its path below mpistrat, and whether it is the same."""

    name: str
    here: str
    verdict: str
    why: str


SAME, DIFFERS, REFUSAL = "same", "differs", "refused"


def rows(text):
    found = re.findall(r"^\| `(tf\.\S+)` \| `(\S+)` \| \*\*(\w+)\*\*(?:: (.+))? \|$", text, re.M)
    assert len(found) == text.count("\n| `"), "a row has another form"
    return [Row(*row) for row in found]


NAMES_OF_PAGE, MEMBERS_OF_PAGE = map(rows, PAGE.split("Their members:"))
ROWS = {row.name: row for row in NAMES_OF_PAGE}
MEMBERS = {row.name: row for row in MEMBERS_OF_PAGE}


def at(path, start=ms):
    """What a path below mpistrat, or something else, leads to."""
    return functools.reduce(getattr, path.split("."), start)


def exists(path):
    try:
        at(path)
    except AttributeError:
        return False
    return True


def test_every_exported_name_has_one_row():
    assert sorted(row.name for row in NAMES_OF_PAGE) == sorted(NAMES)
    assert len(ROWS) == len(NAMES)
    assert len(MEMBERS) == len(MEMBERS_OF_PAGE)


def test_members_are_of_classes_that_have_rows():
    assert {name.rpartition(".")[0] for name in MEMBERS} <= set(ROWS)


EVERY = [*ROWS.values(), *MEMBERS.values()]


@every("row", EVERY)
def test_what_a_row_says_is_true(row):
    found = at(row.here)
    is_refused = found in [get_refused(path) for path in REFUSED]
    assert is_refused == (row.verdict == REFUSAL)
    if is_refused:
        with pytest.raises(ms.RefusedError) as error:
            found()
        assert str(error.value).endswith(row.why)
    assert row.verdict in (SAME, DIFFERS, REFUSAL)
    assert bool(row.why) == (row.verdict != SAME)


WITH_VARIABLES = {"DistributedValues", "Mirrored"}  # under the name of there, as there


@every("row", ROWS.values())
def test_compat_tf_has_it_by_its_own_name(row):
    found = at(row.name.removeprefix("tf."), tf)
    if row.here in WITH_VARIABLES:
        assert issubclass(at(row.here), found) and not issubclass(found, at(row.here))
    else:
        assert found is at(row.here)


# All parameters that they have in TensorFlow 2.21.0, in their order. Ours may have further ones, by
# name only and with defaults.
SIGNATURES = {
    "InputContext": "num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1",
    "InputContext.get_per_replica_batch_size": "global_batch_size",
    "InputOptions": "experimental_fetch_to_device=None, experimental_replication_mode=PER_WORKER, "
    "experimental_place_dataset_on_device=False, experimental_per_replica_buffer_size=1",
    "RunOptions": "experimental_enable_dynamic_batch_size=True, "
    "experimental_bucketizing_dynamic_shape=False, experimental_xla_options=None",
    "OneDeviceStrategy": "device",
    "MirroredStrategy": "devices=None, cross_device_ops=None",
    "MultiWorkerMirroredStrategy": "cluster_resolver=None, communication_options=None",
    "TPUStrategy": "tpu_cluster_resolver=None, experimental_device_assignment=None, "
    "experimental_spmd_xla_partitioning=False",
    "TPUStrategy.experimental_assign_to_logical_device": "tensor, logical_device_id",
    "TPUStrategy.experimental_split_to_logical_devices": "tensor, partition_dimensions",
    "TPUStrategy.experimental_replicate_to_logical_devices": "tensor",
    "experimental.MultiWorkerMirroredStrategy": "communication=AUTO, cluster_resolver=None",
    "experimental.TPUStrategy": "tpu_cluster_resolver=None, device_assignment=None",
    "experimental.CentralStorageStrategy": "compute_devices=None, parameter_device=None",
    "experimental.CommunicationOptions": "bytes_per_pack=0, timeout_seconds=None, "
    "implementation=AUTO",
    "experimental.CollectiveHints": "bytes_per_pack=0, timeout_seconds=None",
    "compat.v1.distribute.MirroredStrategy": "devices=None, cross_device_ops=None",
    "compat.v1.distribute.OneDeviceStrategy": "device",
    "compat.v1.distribute.experimental.CentralStorageStrategy": "compute_devices=None, "
    "parameter_device=None",
    "compat.v1.distribute.experimental.MultiWorkerMirroredStrategy": "communication=AUTO, "
    "cluster_resolver=None",
    "compat.v1.distribute.experimental.TPUStrategy": "tpu_cluster_resolver=None, "
    "steps_per_run=None, device_assignment=None",
    "compat.v1.distribute.Strategy.reduce": "reduce_op, value, axis=None",
    "compat.v1.distribute.Strategy.experimental_make_numpy_dataset": "numpy_input, session=None",
    "NcclAllReduce": "num_packs=1",
    "HierarchicalCopyAllReduce": "num_packs=1",
    "ReductionToOneDevice": "reduce_to_device=None, accumulation_fn=None",
    "CrossDeviceOps": "",
    "CrossDeviceOps.reduce": "reduce_op, per_replica_value, destinations, options=None",
    "CrossDeviceOps.batch_reduce": "reduce_op, value_destination_pairs, options=None",
    "CrossDeviceOps.broadcast": "tensor, destinations",
    "ReplicaContext": "strategy, replica_id_in_sync_group",
    "ReplicaContext.all_reduce": "reduce_op, value, options=None",
    "ReplicaContext.all_gather": "value, axis, options=None",
    "ReplicaContext.merge_call": "merge_fn, args=(), kwargs=None",
    "Strategy.run": "fn, args=(), kwargs=None, options=None",
    "Strategy.reduce": "reduce_op, value, axis",
    "Strategy.gather": "value, axis",
    "Strategy.scope": "",
    "Strategy.experimental_distribute_dataset": "dataset, options=None",
    "Strategy.distribute_datasets_from_function": "dataset_fn, options=None",
    "Strategy.experimental_distribute_datasets_from_function": "dataset_fn, options=None",
    "Strategy.experimental_distribute_values_from_function": "value_fn",
    "Strategy.experimental_local_results": "value",
    "Strategy.unwrap": "value",
    "Strategy.group": "value, name=None",
    "Strategy.configure": "session_config=None, cluster_spec=None, task_type=None, task_id=None",
    "Strategy.update_config_proto": "config_proto",
    "Strategy.colocate_vars_with": "colocate_with_variable",
    "Strategy.make_dataset_iterator": "dataset",
    "Strategy.make_input_fn_iterator": "input_fn, replication_mode=PER_WORKER",
    "Strategy.experimental_run": "fn, input_iterator=None",
    "StrategyExtended.reduce_to": "reduce_op, value, destinations, options=None",
    "StrategyExtended.batch_reduce_to": "reduce_op, value_destination_pairs, options=None",
    "StrategyExtended.broadcast_to": "tensor, destinations",
    "StrategyExtended.update": "var, fn, args=(), kwargs=None, group=True",
    "StrategyExtended.update_non_slot": "colocate_with, fn, args=(), kwargs=None, group=True",
    "StrategyExtended.non_slot_devices": "var_list",
    "StrategyExtended.call_for_each_replica": "fn, args=(), kwargs=None",
    "StrategyExtended.colocate_vars_with": "colocate_with_variable",
    "StrategyExtended.variable_created_in_scope": "v",
    "StrategyExtended.read_var": "v",
    "StrategyExtended.value_container": "value",
    "StrategyExtended.experimental_make_numpy_dataset": "numpy_input, session=None",
    "StrategyExtended.experimental_run_steps_on_iterator": "fn, iterator, iterations=1, "
    "initial_loop_values=None",
    "DistributedDataset.reduce": "initial_state, reduce_func",
    "DistributedIterator.get_next": "",
    "DistributedIterator.get_next_as_optional": "",
    "cluster_resolver.ClusterResolver.cluster_spec": "",
    "cluster_resolver.ClusterResolver.master": "task_type=None, task_id=None, rpc_layer=None",
    "cluster_resolver.ClusterResolver.num_accelerators": "task_type=None, task_id=None, "
    "config_proto=None",
    "cluster_resolver.UnionResolver": "*args, **kwargs",
    "experimental_set_strategy": "strategy",
    "get_replica_context": "",
    "get_strategy": "",
    "has_strategy": "",
    "in_cross_replica_context": "",
    "experimental.PreemptionCheckpointHandler": "cluster_resolver, "
    "checkpoint_or_checkpoint_manager, checkpoint_dir=None, termination_config=None",
    "experimental.PreemptionWatcher": "",
    "experimental.TerminationConfig": "termination_watcher_fn=None, exit_fn=None, "
    "grace_period=None, save_fn=None",
    "experimental.ValueContext": "replica_id_in_sync_group=0, num_replicas_in_sync=1",
    "experimental.partitioners.FixedShardsPartitioner": "num_shards",
    "experimental.partitioners.MinSizePartitioner": "min_shard_bytes=262144, max_shards=1, "
    "bytes_per_string=16",
    "experimental.partitioners.MaxSizePartitioner": "max_shard_bytes, max_shards=None, "
    "bytes_per_string=16",
    "cluster_resolver.SimpleClusterResolver": "cluster_spec, master='', task_type=None, "
    "task_id=None, environment='', num_accelerators=None, rpc_layer=None",
    "cluster_resolver.TFConfigClusterResolver": "task_type=None, task_id=None, rpc_layer=None, "
    "environment=None",
    "cluster_resolver.SlurmClusterResolver": "jobs=None, port_base=8888, gpus_per_node=None, "
    "gpus_per_task=None, tasks_per_node=None, auto_set_gpu=True, rpc_layer='grpc'",
    "cluster_resolver.KubernetesClusterResolver": "job_to_label_mapping=None, tf_server_port=8470, "
    "rpc_layer='grpc', override_client=None, executable_location=WITHIN_CLUSTER",
    "cluster_resolver.GCEClusterResolver": "project, zone, instance_group, port, "
    "task_type='worker', task_id=0, rpc_layer='grpc', credentials='default', service=None",
    "cluster_resolver.TPUClusterResolver": "tpu=None, zone=None, project=None, "
    "job_name='worker', coordinator_name=None, coordinator_address=None, credentials='default', "
    "service=None, discovery_url=None",
}


STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def spelled(parameter):
    default = parameter.default
    if default is inspect.Parameter.empty:
        return STARS.get(parameter.kind, "") + parameter.name
    return f"{parameter.name}={getattr(default, 'name', None) or repr(default)}"


@every("path", SIGNATURES)
def test_signature(path):
    parameters = dict(inspect.signature(at(path)).parameters)
    parameters.pop("self", None)
    wanted = SIGNATURES[path].split(", ") if SIGNATURES[path] else []
    given = list(parameters.values())
    assert [spelled(parameter) for parameter in given[: len(wanted)]] == wanted
    # A further one by place could be taken for what a later TensorFlow has there.
    for parameter in given[len(wanted) :]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default is not inspect.Parameter.empty


WITHOUT = {
    *("DistributedIterator", "DistributedDataset", "DistributedValues", "InputReplicationMode"),
    *("PerReplica", "Mirrored", "ReduceOp", "VariableAggregation", "VariableSynchronization"),
    *("Strategy", "StrategyExtended", "cluster_resolver.ClusterResolver"),
    *("cluster_resolver.KubernetesExecutableLocation", "experimental.partitioners.Partitioner"),
    *("experimental.CollectiveCommunication", "experimental.CommunicationImplementation"),
}


def test_every_name_that_is_called_has_a_signature_to_show():
    """The rest are classes that programs do not make, and enumerations."""
    named = {row.here for row in ROWS.values() if row.verdict != REFUSAL}
    own = {name for name in named if not name.startswith("compat.")}
    called = {
        row.here
        for row in MEMBERS.values()
        if callable(at(row.here)) and not row.here.startswith("compat.")
    }
    assert own - set(SIGNATURES) == WITHOUT
    assert called - set(SIGNATURES) == set()


# What shows that a row that says *same* is true: recorded cases of which one is equal and
# none is wrong, or a test of what TensorFlow's documentation says, in which the name is used.
SHOWN = {
    "DistributedIterator": "dataset_iteration_protocol/{get_next|next|optional}_*",
    "InputContext": "options_and_enums/InputContext*",
    "OneDeviceStrategy": "one_device_strategy/{num|run|reduce_SUM|local_results_tensor}",
    "RunOptions": "options_and_enums/RunOptions",
    "experimental_set_strategy": "scopes/{experimental_set_strategy|set_strategy_in_scope}",
    "get_replica_context": "merge_call_context/*",
    "get_strategy": "merge_call_context/*",
    "has_strategy": "merge_call_context/*",
    "in_cross_replica_context": "merge_call_context/*",
    "cluster_resolver.ClusterResolver": "cluster_resolvers/base_is_abstract",
    "cluster_resolver.GCEClusterResolver": "unit/cluster/test_clouds.py::"
    "test_instances_of_all_pages",
    "cluster_resolver.KubernetesClusterResolver": "cluster_resolvers/k8s*",
    "cluster_resolver.KubernetesExecutableLocation": "cluster_resolvers/k8s_locations",
    "cluster_resolver.SimpleClusterResolver": "cluster_resolvers/simple*",
    "experimental.PreemptionWatcher": "unit/checkpoint/test_preemption.py",
    "experimental.ValueContext": "options_and_enums/ValueContext",
    "experimental.partitioners.FixedShardsPartitioner": "unit/experimental/test_partitioners.py",
    "experimental.partitioners.MaxSizePartitioner": "unit/experimental/test_partitioners.py",
    "experimental.partitioners.MinSizePartitioner": "unit/experimental/test_partitioners.py",
    "experimental.partitioners.Partitioner": "unit/experimental/test_partitioners.py::"
    "test_one_of_ones_own",
    "VariableSynchronization": "options_and_enums/VariableSynchronization",
    "Strategy.cluster_resolver": "extended_v1_misc/cluster_resolver",
    "Strategy.colocate_vars_with": "extended_v1_misc/colocate_vars_with_on_strategy",
    "Strategy.experimental_run": "v1_strategy/experimental_run{|_no_iterator}",
    "Strategy.extended": "v1_strategy/v2_extended_is_v1_too",
    "Strategy.make_dataset_iterator": "v1_strategy/make_dataset_iterator",
    "Strategy.num_replicas_in_sync": "one_device_strategy/num",
    "Strategy.scope": "scopes/{scope_yields_strategy|nest_same|nest_other}",
    "StrategyExtended.colocate_vars_with": "variables_creation/colocate_vars_with*",
    "StrategyExtended.experimental_between_graph": "extended_v1_misc/experimental_between_graph",
    "StrategyExtended.experimental_make_numpy_dataset": "v1_strategy/numpy_dataset",
    "StrategyExtended.experimental_require_static_shapes": "extended_v1_misc/"
    "experimental_require_static_shapes",
    "StrategyExtended.experimental_should_init": "extended_v1_misc/experimental_should_init",
    "StrategyExtended.read_var": "extended_v1_misc/read_var",
    "StrategyExtended.value_container": "extended_v1_misc/value_container_*",
    "StrategyExtended.variable_created_in_scope": "variables_creation/variable_created_in_scope_*",
    "ReplicaContext.num_replicas_in_sync": "unit/strategy/test_context.py::"
    "test_what_a_context_says_of_itself",
    "ReplicaContext.strategy": "unit/strategy/test_context.py::test_what_a_context_says_of_itself",
    "DistributedDataset.cardinality": "dataset_iteration_protocol/cardinality",
    "DistributedDataset.reduce": "dataset_iteration_protocol/dataset_reduce_method",
    "DistributedIterator.get_next_as_optional": "dataset_iteration_protocol/optional_*",
    "compat.v1.distribute.OneDeviceStrategy": "unit/compat/test_v1.py",
    "compat.v1.distribute.Strategy.experimental_make_numpy_dataset": "unit/compat/test_v1.py",
}


def shown(here):
    """What shows that it is the same; of an older name that of the newer, if it is that."""
    newer = here.removeprefix("compat.v1.distribute.")
    same = here != newer and exists(newer) and vars_of(here) is vars_of(newer)
    return SHOWN.get(here) or (SHOWN.get(newer, "") if same else "")


def vars_of(here):
    """What the class itself holds: properties are not asked for, and classes inherit."""
    owner, _, name = here.rpartition(".")
    return inspect.getattr_static(at(owner) if owner else ms, name)


ALIKE = [row for row in EVERY if row.verdict == SAME]


@every("row", ALIKE)
def test_what_is_the_same_has_been_compared(row):
    place = shown(row.here)
    assert place, f"{row.name}: name a recorded case, or a test, in SHOWN"
    if ".py" in place:
        uses(place, row.here.rpartition(".")[2])
        return
    found = [case for case in cases() if matches(place, case.key)]
    assert found, f"{place} is no recorded case"
    for case in found:
        verdict = judge(case, results(case.program, case.size))
        assert verdict.problem == ""
    assert any(judge(case, results(case.program, case.size)).kind == EQUAL for case in found), (
        f"{place}: no case is equal"
    )


def uses(place, name):
    """See that a test there uses the name."""
    path, _, test = place.partition("::")
    tree = ast.parse((Path(__file__).parent / path).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if test:
        tests = [node for node in tests if node.name == test]
        assert tests, f"{path} has no {test}"
    text = ast.unparse(tree if not test else tests[0])
    assert re.search(rf"\b{name}\b", text), f"{place} does not use {name}"


def test_nothing_is_shown_that_is_not_said():
    assert set(SHOWN) <= {row.here for row in ALIKE}


def test_page_and_readme_count_the_rows():
    counts = [
        sum(row.verdict == kind for row in ROWS.values()) for kind in (SAME, DIFFERS, REFUSAL)
    ]
    told = "101 names: {} same, {} differ, {} refused".format(*counts)
    assert sum(counts) == len(NAMES) == 101
    assert told in PAGE
    assert told in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_public_name_of_the_package_is_there():
    for module in ("", ".experimental", ".cluster_resolver", ".compat.v1.distribute"):
        found = importlib.import_module(f"mpistrat{module}")
        for name in found.__all__:
            assert hasattr(found, name)
