"""Enumerations, contexts of inputs, arguments of strategies."""

from __future__ import annotations

from ..recorder import Recorder
from .common import fid, ms, tf


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
    return r


PROGRAMS = (options_and_enums,)
