"""CentralStorageStrategy."""

from __future__ import annotations

from ..recorder import Recorder, variable_kind
from .common import ctx, fid, ms, rid, steps


def central_storage(s, n, comm):
    r = Recorder(s, comm)
    c = ms.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0", comm=comm)
    r("num", lambda: c.num_replicas_in_sync)
    with c.scope():
        v = ms.Variable(1.0, aggregation=ms.VariableAggregation.SUM, dtype="float32")
        w = ms.Variable(1.0, dtype="float32")

    def dealt(*options):
        dataset = ms.Dataset.range(5).batch(4)
        return steps(r, iter(c.experimental_distribute_dataset(dataset, *options)))

    def added():
        c.run(lambda: v.assign_add(fid() + 1.0))
        return float(v.numpy())

    def assigned():
        v.assign(9.0)
        return float(v.numpy())

    r("var_type", lambda: (variable_kind(v), variable_kind(w)))
    r("assign_add_replica_SUM", added)
    r("assign_add_replica_NONE", lambda: c.run(lambda: w.assign_add(fid() + 1.0)))
    r("assign_cross", assigned)
    r("reduce", lambda: c.reduce("SUM", c.run(lambda: fid() + 1.0), axis=None))
    r("all_reduce", lambda: c.run(lambda: ctx().all_reduce("SUM", [fid(), rid(), rid()])))
    r("distribute_dataset", dealt)
    r("distribute_dataset_with_options", lambda: dealt(ms.InputOptions()))
    r("update", lambda: c.extended.update(v, lambda var, a: var.assign_add(a), args=(1.0,)))
    return r


PROGRAMS = (central_storage,)
