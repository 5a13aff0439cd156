"""Enumerations, contexts of inputs, arguments of strategies."""

from __future__ import annotations

from ..recorder import Recorder
from .common import ctx, fid, ms, tf


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
    older = tf.compat.v1
    r("InputReplicationMode_v1", lambda: members(older.distribute.InputReplicationMode))
    r("VariableAggregation_v1", lambda: members(older.VariableAggregation))
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
    _communication(r)
    _cross_device(r, comm)
    return r


def _communication(r):
    e = ms.experimental
    r(
        "CommunicationImplementation",
        lambda: [(member.name, member.value) for member in e.CommunicationImplementation],
    )
    same = e.CollectiveCommunication is e.CommunicationImplementation
    r("CollectiveCommunication_is", lambda: same)
    make, o = e.CommunicationOptions, e.CommunicationOptions()
    r(
        "options_defaults",
        lambda: (
            o.bytes_per_pack,
            o.timeout_seconds,
            str(o.implementation),
            str(o),
            type(o).__name__,
        ),
    )
    r("options_negative", lambda: make(bytes_per_pack=-1))
    r("options_impl_str", lambda: str(make(implementation="nccl").implementation))
    r("options_impl_bad_str", lambda: make(implementation="MPI"))
    r("options_impl_bad_type", lambda: make(implementation=3))
    first = make(bytes_per_pack=10, timeout_seconds=5.0, implementation="RING")
    default = make(bytes_per_pack=0, timeout_seconds=None, implementation="AUTO")
    second = make(bytes_per_pack=7, timeout_seconds=1.0, implementation="NCCL")
    r("options_merge", lambda: tuple(str(first.merge(b)) for b in (default, second, None)))
    r("hints", lambda: str(e.CollectiveHints(bytes_per_pack=3, timeout_seconds=2.0)))


def _cross_device(r, comm):
    r("num_packs_negative", lambda: ms.NcclAllReduce(num_packs=-1))
    r("hier_num_packs_negative", lambda: ms.HierarchicalCopyAllReduce(num_packs=-1))
    for ops in (
        ms.ReductionToOneDevice(),
        ms.HierarchicalCopyAllReduce(num_packs=1),
        ms.NcclAllReduce(),
    ):
        name = type(ops).__name__
        x = ms.MirroredStrategy(cross_device_ops=ops, comm=comm)
        r(
            f"{name}_reduce_sum",
            lambda x=x: x.reduce("SUM", x.run(lambda: fid() + 1.0), axis=None),
        )
        if name == "NcclAllReduce":
            continue
        r(
            f"{name}_all_reduce_two_f32",
            lambda x=x: x.run(lambda: ctx().all_reduce("MEAN", [fid(), fid() * 2.0])),
        )
        r(
            f"{name}_all_gather",
            lambda x=x: x.run(lambda: ctx().all_gather(fid().reshape(1), axis=0)),
        )


PROGRAMS = (options_and_enums,)
