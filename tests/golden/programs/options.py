"""Enumerations, contexts of inputs, arguments of strategies, cluster resolvers."""

from __future__ import annotations

import json

from mpistrat import cluster_resolver
from mpistrat.cluster.spec import ClusterSpec

from ..recorder import Recorder
from .common import fid, ms


def options_and_enums(s, n, comm):
    r = Recorder(s, comm)

    def members(kind):
        return [(member.name, member.value) for member in kind]

    def replicas(*devices):
        return ms.MirroredStrategy(*devices, comm=comm).num_replicas_in_sync

    r("ReduceOp", lambda: members(ms.ReduceOp))
    r("InputReplicationMode", lambda: members(ms.InputReplicationMode))
    r("RunOptions", lambda: ms.RunOptions()._asdict())
    r("InputOptions", lambda: {k: str(v) for k, v in ms.InputOptions()._asdict().items()})
    r("VariableSynchronization", lambda: members(ms.VariableSynchronization))
    r("VariableAggregation", lambda: members(ms.VariableAggregation))
    c = ms.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    r(
        "InputContext",
        lambda: (
            c.num_input_pipelines,
            c.input_pipeline_id,
            c.num_replicas_in_sync,
            str(c),
            c.get_per_replica_batch_size(12),
        ),
    )
    r("InputContext_13", lambda: c.get_per_replica_batch_size(13))
    d = ms.InputContext()
    r(
        "InputContext_default",
        lambda: (d.num_input_pipelines, d.input_pipeline_id, d.num_replicas_in_sync),
    )
    v = ms.ValueContext(1, 3)
    r("ValueContext", lambda: (v.replica_id_in_sync_group, v.num_replicas_in_sync, str(v)))
    r("mirrored_no_duplicates", lambda: replicas(["CPU:0", "CPU:0"]))
    r("mirrored_empty_devices", lambda: replicas([]))
    r("mirrored_bad_device", lambda: replicas(["GPU:7"]))
    r("mirrored_default_devices", replicas)
    dynamic = ms.RunOptions(experimental_enable_dynamic_batch_size=False)
    r("run_options_ignored", lambda: s.run(lambda: fid(), options=dynamic))
    r("run_options_garbage_ignored", lambda: s.run(lambda: fid(), options="whatever"))
    return r


WORKERS = {
    "cluster": {"worker": ["h0:1", "h1:2"], "ps": ["p0:3"]},
    "task": {"type": "worker", "index": 1},
    "rpc_layer": "grpc",
}


def cluster_resolvers(s, n, comm):
    r = Recorder(s, comm)

    def resolver(text, **given):
        env = {} if text is None else {"TF_CONFIG": text}
        return cluster_resolver.TFConfigClusterResolver(env=env, **given)

    t = resolver(json.dumps(WORKERS))
    r(
        "tfconfig",
        lambda: {
            "spec": t.cluster_spec().as_dict(),
            "type": t.task_type,
            "id": t.task_id,
            "rpc": t.rpc_layer,
            "master": t.master(),
            "master_ps0": t.master("ps", 0),
            "master_rpc": t.master("ps", 0, "http"),
            "env": t.environment,
        },
    )
    r("tfconfig_master_bad_task", lambda: t.master("worker", 9))
    r("tfconfig_master_bad_job", lambda: t.master("zzz", 0))
    t2 = resolver(json.dumps(WORKERS), task_type="ps", task_id="0", rpc_layer="x")
    r("tfconfig_override", lambda: (t2.task_type, t2.task_id, t2.rpc_layer, t2.master()))
    single = {"cluster": {"worker": ["h0:1"]}, "task": {"type": "worker", "index": 0}}
    r("tfconfig_single_job_single_task_master", lambda: resolver(json.dumps(single)).master())
    session = {"session_master": "sm://x", "cluster": {"worker": ["a", "b"]}}
    r("tfconfig_session_master", lambda: resolver(json.dumps(session)).master())
    e = resolver("{}")
    r("tfconfig_empty", lambda: (e.cluster_spec().as_dict(), e.task_type, e.task_id, e.master()))
    u = resolver(None)
    r("tfconfig_unset", lambda: (u.cluster_spec().as_dict(), u.task_id))
    r("tfconfig_bad_json", lambda: resolver("not json").cluster_spec())
    r("clusterspec_bad", lambda: ClusterSpec(3))
    r(
        "clusterspec_sparse",
        lambda: (
            ClusterSpec({"worker": {1: "w1:1"}}).as_dict(),
            ClusterSpec({"worker": ["a", "b"]}).num_tasks("worker"),
            ClusterSpec({"worker": {1: "w"}}).job_tasks("worker"),
            ClusterSpec({"w": ["a"]}).jobs,
            bool(ClusterSpec({})),
            ClusterSpec({"w": {0: "a", 1: "b"}}).as_dict(),
        ),
    )
    r("clusterspec_num_tasks_bad", lambda: ClusterSpec({}).num_tasks("x"))
    r("clusterspec_address_bad", lambda: ClusterSpec({"w": ["a"]}).task_address("w", 3))
    r("base_is_abstract", lambda: cluster_resolver.ClusterResolver())
    return r


PROGRAMS = (options_and_enums, cluster_resolvers)
