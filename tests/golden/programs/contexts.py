"""Scopes, the default strategy, several strategies in one process."""

from __future__ import annotations

from ..recorder import Recorder
from .common import ctx, fid, in_scope, ms, tf


def scopes(s, n, comm):
    r = Recorder(s, comm)
    s2 = ms.MirroredStrategy(comm=comm)

    def entered():
        with s.scope() as found:
            return found is s

    def settled():
        ms.experimental_set_strategy(s)
        try:
            return ms.has_strategy(), ms.get_strategy() is s, ms.in_cross_replica_context()
        finally:
            ms.experimental_set_strategy(None)

    r("nest_same", lambda: in_scope(s, lambda: in_scope(s, lambda: ms.get_strategy() is s)))
    r("nest_other", lambda: in_scope(s, lambda: in_scope(s2, lambda: None)))
    r("run_other_in_scope", lambda: in_scope(s, lambda: s2.run(lambda: 1)))
    r("scope_yields_strategy", entered)
    r(
        "set_strategy_in_scope",
        lambda: in_scope(s, lambda: ms.experimental_set_strategy(s2)),
    )
    r("experimental_set_strategy", settled)
    r("after_set_none", lambda: (ms.has_strategy(), ms.in_cross_replica_context()))
    _default(r)
    d = ms.get_strategy()
    r("default_scope_inside_scope", lambda: in_scope(s, lambda: in_scope(d, lambda: None)))
    r("exit_order", lambda: (ms.has_strategy(), ms.in_cross_replica_context()))
    r(
        "replica_ctx_attrs",
        lambda: s.run(
            lambda: {"strategy_is_s": ctx().strategy is s, "devices_len": len(ctx().devices)}
        ),
    )
    r("replica_ctx_bad_id", lambda: ms.ReplicaContext(s, "x"))
    return r


def _default(r):
    d = ms.get_strategy()
    here = ms.get_replica_context()

    def facts():
        return {
            "strategy": type(d).__name__,
            "has": ms.has_strategy(),
            "cross": ms.in_cross_replica_context(),
            "ctx": type(here).__name__,
            "rid": here.replica_id_in_sync_group,
            "rid_type": type(here.replica_id_in_sync_group).__name__,
            "n": here.num_replicas_in_sync,
        }

    def updated():
        v = ms.Variable(tf.constant(1.0))
        d.extended.update(v, lambda copy: copy.assign_add(1.0))
        return v.numpy()

    def pair(c):
        return (c.replica_id_in_sync_group, c.num_replicas_in_sync)

    dataset = ms.Dataset.range(3)
    r("default", facts)
    r("default_run", lambda: d.run(lambda x: x * 2, args=(3,)))
    r("default_reduce_SUM", lambda: d.reduce("SUM", 3.0, axis=None))
    r("default_reduce_axis0_MEAN", lambda: d.reduce("MEAN", tf.constant([1.0, 2.0, 6.0]), axis=0))
    r("default_gather", lambda: d.gather(tf.constant([1.0, 2.0]), axis=0))
    r("default_local_results", lambda: d.experimental_local_results([1, 2]))
    r(
        "default_merge_call",
        lambda: here.merge_call(lambda st, a: (ms.in_cross_replica_context(), a), args=(5,)),
    )
    r(
        "default_distribute_dataset_is_same",
        lambda: d.experimental_distribute_dataset(dataset) is dataset,
    )
    r("default_values_from_function", lambda: d.experimental_distribute_values_from_function(pair))
    r("default_worker_devices", lambda: d.extended.worker_devices)
    r("default_update", updated)


def two_strategies_in_one_process(s, n, comm):
    r = Recorder(s, comm)

    def summed(strategy, dtype=tf.float32):
        return strategy.run(lambda: ctx().all_reduce("SUM", tf.cast(fid(), dtype)))

    a = ms.MirroredStrategy(comm=comm)
    r("first_f32", lambda: summed(a))
    b = ms.MirroredStrategy(comm=comm)
    r("second_same_dtype_f32", lambda: summed(b))
    c = ms.MirroredStrategy(comm=comm)
    r("third_f64", lambda: summed(c, tf.float64))
    r("first_again_f32", lambda: summed(a))
    return r


PROGRAMS = (scopes, two_strategies_in_one_process)
