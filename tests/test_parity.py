"""Parity with tf.distribute: every exported name has its row, and every row says what is true."""

from __future__ import annotations

import functools
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat as ms
from mpistrat import parity
from mpistrat.compat import tf
from mpistrat.parity import Verdict
from mpistrat.refused import REFUSED, refused

README = Path(__file__).parents[1] / "README.md"

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
ROWS = {row.name: row for row in parity.rows()}
MEMBERS = {row.name: row for row in parity.members()}


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
    names = [row.name for row in parity.rows()]
    assert sorted(names) == sorted(NAMES)
    assert len(set(names)) == len(names)


def test_members_are_of_classes_that_have_rows():
    assert {name.rpartition(".")[0] for name in MEMBERS} <= set(ROWS)


EVERY = [*ROWS.values(), *MEMBERS.values()]


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_what_a_row_says_is_true(row):
    if row.verdict is Verdict.PENDING:
        return  # see below
    found = at(row.here)
    is_refused = found in [refused(path) for path in REFUSED]
    assert is_refused == (row.verdict is Verdict.REFUSED)
    if is_refused:
        with pytest.raises(ms.RefusedError) as error:
            found()
        assert str(error.value).endswith(row.why)
    assert bool(row.why) == (row.verdict is not Verdict.SAME)
    assert "|" not in row.why


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_compat_tf_has_it_by_its_own_name(row):
    path = row.name.removeprefix("tf.")
    if row.verdict is Verdict.PENDING:
        with pytest.raises(AttributeError):
            at(path, tf)
    else:
        assert at(path, tf) is at(row.here)


@pytest.mark.parametrize("name", sorted(parity.PENDING))
def test_what_is_to_come_is_not_there(name):
    assert f"tf.distribute.{name}" in {*ROWS, *MEMBERS}
    come = [path for path in (name, f"compat.v1.distribute.{name}") if exists(path)]
    assert not come, f"{come} came: take {name!r} out of PENDING; both namespaces must have it"


# The parameters that they have in TensorFlow; ours may have further ones, which have defaults.
SIGNATURES = {
    "InputContext": "num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1",
    "InputOptions": "experimental_fetch_to_device=None, experimental_replication_mode=PER_WORKER, "
    "experimental_place_dataset_on_device=False, experimental_per_replica_buffer_size=1",
    "RunOptions": "experimental_enable_dynamic_batch_size=True, "
    "experimental_bucketizing_dynamic_shape=False, experimental_xla_options=None",
    "OneDeviceStrategy": "device",
    "MirroredStrategy": "devices=None",
    "MultiWorkerMirroredStrategy": "cluster_resolver=None",
    "ReplicaContext": "strategy, replica_id_in_sync_group",
    "ReplicaContext.all_reduce": "reduce_op, value",
    "ReplicaContext.all_gather": "value, axis",
    "ReplicaContext.merge_call": "merge_fn, args=(), kwargs=None",
    "Strategy.run": "fn, args=(), kwargs=None, options=None",
    "Strategy.reduce": "reduce_op, value, axis",
    "Strategy.gather": "value, axis",
    "Strategy.experimental_distribute_dataset": "dataset, options=None",
    "Strategy.distribute_datasets_from_function": "dataset_fn, options=None",
    "Strategy.experimental_distribute_values_from_function": "value_fn",
    "Strategy.experimental_local_results": "value",
    "StrategyExtended.reduce_to": "reduce_op, value, destinations",
    "StrategyExtended.batch_reduce_to": "reduce_op, value_destination_pairs",
    "DistributedDataset.reduce": "initial_state, reduce_func",
    "experimental_set_strategy": "strategy",
    "get_replica_context": "",
    "get_strategy": "",
    "has_strategy": "",
    "in_cross_replica_context": "",
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


def spelled(parameter):
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={getattr(default, 'name', None) or repr(default)}"


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path):
    parameters = dict(inspect.signature(at(path)).parameters)
    parameters.pop("self", None)
    wanted = SIGNATURES[path].split(", ") if SIGNATURES[path] else []
    given = list(parameters.values())
    assert [spelled(parameter) for parameter in given[: len(wanted)]] == wanted
    further = [p.name for p in given[len(wanted) :] if p.default is inspect.Parameter.empty]
    assert not further


def test_what_is_the_same_has_a_signature_to_show_it():
    plain = {row.here for row in ROWS.values() if row.verdict is Verdict.SAME}
    without = {
        *("DistributedIterator", "VariableSynchronization"),
        *("cluster_resolver.ClusterResolver", "cluster_resolver.KubernetesExecutableLocation"),
        "experimental.partitioners.Partitioner",
    }
    of_v2 = {name for name in plain if not name.startswith("compat.")}
    assert of_v2 - set(SIGNATURES) == without


def test_python_m_prints_the_table():
    ask = [sys.executable, "-m", "mpistrat.parity"]
    text = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    assert text.strip() == parity.markdown()
    lines = text.splitlines()
    for row in EVERY:
        (line,) = (line for line in lines if line.startswith(f"| `{row.name}` |"))
        assert row.why in line
        assert f"**{row.verdict.value}**" in line
    assert {line.count("|") for line in lines if line.startswith("|")} == {4}


def test_counts_are_those_of_the_rows():
    verdicts = [row.verdict for row in ROWS.values()]
    text = parity.counts()
    assert text.startswith(f"{len(NAMES)} names: ")
    kinds = ((Verdict.SAME, "same"), (Verdict.DIFFERS, "differ"), (Verdict.REFUSED, "refused"))
    for kind, word in kinds:
        assert f" {verdicts.count(kind)} {word}" in text
    assert ("to come" in text) == (Verdict.PENDING in verdicts)


def test_readme_says_how_many():
    assert parity.counts() in README.read_text(encoding="utf-8")


def test_every_public_name_of_the_package_is_there():
    for module in ("", ".experimental", ".cluster_resolver", ".compat.v1.distribute"):
        found = importlib.import_module(f"mpistrat{module}")
        for name in found.__all__:
            assert hasattr(found, name)
