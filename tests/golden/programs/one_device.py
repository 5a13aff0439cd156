"""OneDeviceStrategy, and MirroredStrategy with one replica."""

from __future__ import annotations

from mpistrat.comm.session import make_single_rank_comm

from ..recorder import Recorder, variable_kind
from .common import ctx, fid, ms, rid, steps, tf


def _merged(r, strategy):
    seen = []

    def merge(st, a):
        seen.append((r.write(a), r.write(st.experimental_local_results(a))))

    strategy.run(lambda: ctx().merge_call(merge, args=(fid(),)))
    return seen[0]


def _first(strategy):
    make = strategy.experimental_distribute_values_from_function
    return make(lambda c: c.replica_id_in_sync_group)


def one_device_strategy(s, n, comm):
    r = Recorder(s, comm)
    o = ms.OneDeviceStrategy("/cpu:0")
    local = o.experimental_local_results
    pair = tf.constant([1.0, 2.0])

    def reduced(op, *values):
        return o.reduce(op, tf.constant(list(values)), axis=0)

    def own(c):
        return ms.Dataset.range(3).batch(c.get_per_replica_batch_size(2))

    def dealt(dataset):
        return steps(r, iter(o.experimental_distribute_dataset(dataset)))

    r("run", lambda: o.run(lambda a: (fid() + a, 3, [a]), args=(1.0,)))
    r("num", lambda: o.num_replicas_in_sync)
    r("local_results_tensor", lambda: local(o.run(lambda: fid())))
    r("local_results_list", lambda: local([1, 2]))
    r("reduce_SUM", lambda: o.reduce("SUM", pair, axis=None))
    r("reduce_MEAN_axis0", lambda: reduced("MEAN", 1.0, 2.0, 6.0))
    r("reduce_MEAN_int_axis0", lambda: reduced("MEAN", 1, 2, 6))
    r("reduce_nest", lambda: o.reduce("SUM", {"a": 1}, axis=None))
    r("gather", lambda: o.gather(pair, axis=0))
    r("gather_scalar", lambda: o.gather(tf.constant(1.0), axis=0))
    two = [tf.constant(2.0), tf.constant(3)]
    r("all_reduce", lambda: o.run(lambda: ctx().all_reduce("SUM", two)))
    r("all_reduce_int_mean", lambda: o.run(lambda: ctx().all_reduce("MEAN", tf.constant(3))))
    r("all_gather", lambda: o.run(lambda: ctx().all_gather(tf.constant([2.0]), axis=0)))
    r("merge_call_arg", lambda: _merged(r, o))
    r("values_from_function", lambda: _first(o))
    r("dataset", lambda: dealt(ms.Dataset.range(5).batch(2)))
    r("dataset_unbatched", lambda: dealt(ms.Dataset.range(2)))
    r("from_function", lambda: steps(r, iter(o.distribute_datasets_from_function(own))))
    r("variable", lambda: _variable(o))
    r("update", lambda: _update(o))
    r("broadcast_to", lambda: o.extended.broadcast_to(tf.constant(1.0), "/cpu:0"))
    r("replica_id_type", lambda: o.run(lambda: type(ctx().replica_id_in_sync_group).__name__))
    r("run_inside_run", lambda: o.run(lambda: o.run(lambda: 1)))
    _mirrored_of_one(r)
    return r


def _variable(o):
    with o.scope():
        v = ms.Variable(
            tf.constant(1.0),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    added = v.assign_add(1.0).numpy()
    return variable_kind(v), added, o.run(lambda: v.assign_add(2.0)).numpy()


def _update(o):
    with o.scope():
        v = ms.Variable(tf.constant(1.0))
    grouped = o.extended.update(v, lambda copy, a: copy.assign_add(a), args=(2.0,))
    return grouped, o.extended.update(v, lambda copy: copy.read_value(), group=False)


def _mirrored_of_one(r):
    m = ms.MirroredStrategy(comm=make_single_rank_comm())

    def reduced(op, value):
        return m.run(lambda: ctx().all_reduce(op, value()))

    r("mirrored1_run", lambda: m.run(lambda: (fid(), 3)))
    r("mirrored1_run_type", lambda: type(m.run(lambda: fid())).__name__)
    r("mirrored1_all_reduce", lambda: reduced("SUM", lambda: fid() + 2.0))
    r("mirrored1_all_reduce_int_mean", lambda: reduced("MEAN", lambda: rid() + 3))
    r("mirrored1_all_reduce_two_int32", lambda: reduced("SUM", lambda: [rid() + 3, rid()]))
    r("mirrored1_reduce_plain_SUM", lambda: m.reduce("SUM", tf.constant(3.0), axis=None))
    r("mirrored1_reduce", lambda: m.reduce("SUM", m.run(lambda: fid() + 3.0), axis=None))
    r("mirrored1_merge_arg", lambda: _merged(r, m))
    dataset = ms.Dataset.range(3).batch(2)
    r("mirrored1_dataset", lambda: steps(r, iter(m.experimental_distribute_dataset(dataset))))
    r("mirrored1_values_from_function", lambda: _first(m))
    r("mirrored1_gather", lambda: m.gather(tf.constant([1.0]), axis=0))
    return r


PROGRAMS = (one_device_strategy,)
