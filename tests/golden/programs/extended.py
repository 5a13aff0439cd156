"""StrategyExtended, and what the older strategies have beyond the newer ones."""

from __future__ import annotations

import copy
import itertools

from ..recorder import Recorder
from .common import ctx, fid, in_scope, ms, np, per_replica, steps, tf


def extended_reduce_to(s, n, comm):
    r = Recorder(s, comm)
    e = s.extended
    with s.scope():
        v = ms.Variable(tf.constant(1.0))

    def pair():
        return per_replica(s, lambda i: tf.constant([1.0, 2.0]) * (i + 1))

    def one(dtype=None):
        return per_replica(s, lambda i: tf.constant(i, dtype))

    both = pair()
    plain = tf.constant(1.0)
    r("SUM_dest_var", lambda: e.reduce_to("SUM", pair(), v))
    r("MEAN_dest_var", lambda: e.reduce_to("MEAN", pair(), v))
    r("SUM_dest_self", lambda: e.reduce_to("SUM", both, both))
    r("SUM_dest_device", lambda: e.reduce_to("SUM", pair(), "/cpu:0"))
    r("SUM_dest_list", lambda: e.reduce_to("SUM", pair(), ["/cpu:0"]))
    r("SUM_dest_empty_str", lambda: e.reduce_to("SUM", pair(), ""))
    r("SUM_dest_none", lambda: e.reduce_to("SUM", pair(), None))
    r("plain_SUM", lambda: e.reduce_to("SUM", plain, v))
    r("plain_MEAN", lambda: e.reduce_to("MEAN", plain, v))
    r("mirrored_MEAN", lambda: e.reduce_to("MEAN", e.reduce_to("SUM", pair(), v), v))
    r("mirrored_SUM", lambda: e.reduce_to("SUM", e.reduce_to("SUM", pair(), v), v))
    r("nest", lambda: e.reduce_to("SUM", {"a": pair(), "b": [pair()]}, v))
    r("bad_op", lambda: e.reduce_to("MAX", pair(), v))
    r("op_aggregation", lambda: e.reduce_to(ms.VariableAggregation.SUM, pair(), v))
    ints = per_replica(s, lambda i: tf.constant([1, 2]) + i)
    r("int32_MEAN", lambda: e.reduce_to("MEAN", ints, v))
    r("in_replica", lambda: s.run(lambda: e.reduce_to("SUM", fid(), v)))
    two = [(pair(), v), (one(tf.float32), v)]
    r("batch_two", lambda: e.batch_reduce_to("SUM", two))
    r("batch_mean", lambda: e.batch_reduce_to("MEAN", two))
    r("batch_two_int32", lambda: e.batch_reduce_to("SUM", [(one(), v), (one(), v)]))
    r("batch_one_int32", lambda: e.batch_reduce_to("SUM", [(one(), v)]))
    longs = [(one(tf.int64), v), (one(tf.int64), v)]
    r("batch_two_int64", lambda: e.batch_reduce_to("SUM", longs))
    r("batch_mixed_dest", lambda: e.batch_reduce_to("SUM", [(pair(), v), (pair(), "/cpu:0")]))
    r("batch_empty", lambda: e.batch_reduce_to("SUM", []))
    r("batch_plain_tensor", lambda: e.batch_reduce_to("SUM", [(plain, v)]))
    r("batch_pair_as_list", lambda: e.batch_reduce_to("SUM", [[pair(), v]]))
    r("batch_in_replica", lambda: s.run(lambda: e.batch_reduce_to("SUM", [(fid(), v)])))
    return r


def extended_v1_misc(s, n, comm):
    r = Recorder(s, comm)
    e = s.extended
    with s.scope():
        v = ms.Variable(tf.constant(1.0))
    pair = tf.constant([1.0, 2.0])
    one = tf.constant(1.0)
    r("class", lambda: type(e).__name__)
    r("worker_devices", lambda: list(e.worker_devices))
    r("parameter_devices", lambda: list(e.parameter_devices))
    r("non_slot_devices", lambda: list(e.non_slot_devices([v])))
    _facts(r, s, v)
    _not_slots(r, s, v)
    r("should_checkpoint", lambda: e.should_checkpoint)
    r("should_save_summary", lambda: e.should_save_summary)
    r("broadcast_to_float", lambda: e.broadcast_to(2.5, v))
    r("broadcast_to_int", lambda: e.broadcast_to(2, v))
    r("broadcast_to_tensor_var", lambda: e.broadcast_to(pair, v))
    r("broadcast_to_tensor_device", lambda: e.broadcast_to(pair, "/cpu:0"))
    r("broadcast_to_none", lambda: e.broadcast_to(one, None))
    r("broadcast_to_list", lambda: e.broadcast_to(one, ["/cpu:0"]))
    r("broadcast_to_numpy", lambda: e.broadcast_to(np.array([1.0, 2.0], "float32"), v))
    r("broadcast_to_in_replica", lambda: s.run(lambda: e.broadcast_to(one, v)))

    def fn(a, b=0.0):
        return fid() + np.float32(a + b)

    r(
        "call_for_each_replica",
        lambda: e.call_for_each_replica(fn, args=(1.0,), kwargs={"b": 2.0}),
    )
    r(
        "call_for_each_replica_in_replica",
        lambda: s.run(lambda: e.call_for_each_replica(lambda: 1)),
    )
    r("cluster_resolver", lambda: s.cluster_resolver)
    return r


class ConfigProto:
    """Stands for what a session would be configured with."""


def _facts(r, s, v):
    e = s.extended
    numbers = per_replica(s, lambda i: tf.constant(float(i)))
    r("experimental_between_graph", lambda: e.experimental_between_graph)
    r("experimental_should_init", lambda: e.experimental_should_init)
    r("experimental_require_static_shapes", lambda: e.experimental_require_static_shapes)
    r("value_container_of_component", lambda: e.value_container(v.values[-1]) is v)
    r("value_container_plain", lambda: e.value_container(3))
    r("read_var", lambda: e.read_var(v))
    r("unwrap", lambda: s.unwrap(numbers))
    r("group", lambda: s.group(numbers))
    r("configure", lambda: s.configure())
    r("update_config_proto", lambda: type(s.update_config_proto(ConfigProto())).__name__)
    r(
        "colocate_vars_with_on_strategy",
        lambda: in_scope(s, lambda: type(s.colocate_vars_with(v)).__name__),
    )
    r("copy", lambda: copy.copy(s))
    older = (
        *("make_dataset_iterator", "make_input_fn_iterator", "experimental_run"),
        *("experimental_make_numpy_dataset", "experimental_run_v2", "unwrap", "group"),
        *("configure", "update_config_proto", "gather"),
        *("experimental_distribute_values_from_function", "cluster_resolver", "steps_per_run"),
    )
    r("has_v1_methods_on_v2_strategy", lambda: {name: hasattr(s, name) for name in older})


def _not_slots(r, s, v):
    e = s.extended
    devices = e.non_slot_devices([v])
    numbers = (per_replica(s, lambda i: tf.constant(float(i))),)

    def twice(a):
        return a * np.float32(2)

    r("update_non_slot", lambda: e.update_non_slot(devices, twice, args=numbers))
    r(
        "update_non_slot_group_false",
        lambda: e.update_non_slot(devices, twice, args=numbers, group=False),
    )
    r("update_non_slot_bad_devices", lambda: e.update_non_slot("/cpu:0", lambda: 1))


def v1_strategy(s, n, comm):
    v1 = tf.compat.v1.distribute
    newer, s = s, v1.MirroredStrategy(comm=comm)
    r = Recorder(s, comm)
    names = (
        *("make_dataset_iterator", "make_input_fn_iterator", "experimental_run"),
        *("experimental_make_numpy_dataset", "experimental_run_v2", "unwrap", "group"),
        *("configure", "update_config_proto", "gather"),
        *("experimental_distribute_values_from_function", "cluster_resolver", "steps_per_run"),
        *("reduce", "experimental_local_results", "colocate_vars_with"),
        "distribute_datasets_from_function",
        "experimental_distribute_datasets_from_function",
    )
    r("has", lambda: {name: hasattr(s, name) for name in names})
    r("reduce_axis_default_none", lambda: s.reduce("SUM", s.run(lambda: fid() + np.float32(1))))
    r("get_loss_reduction", lambda: str(v1.get_loss_reduction()))
    r("extended_is_v1", lambda: isinstance(s.extended, v1.StrategyExtended))
    r("v2_extended_is_v1_too", lambda: isinstance(newer.extended, v1.StrategyExtended))
    make = s.experimental_make_numpy_dataset

    def rows(value):
        return [r.write(x) for x in make(value)]

    def dealt(dataset):
        return steps(r, iter(s.experimental_distribute_dataset(dataset)))

    ten = np.ones([10], dtype=np.float32)
    r("ctx_type_has_all_gather", lambda: s.run(lambda: hasattr(ctx(), "all_gather")))
    r("ctx_type", lambda: s.run(lambda: type(ctx()).__name__))
    r("numpy_dataset", lambda: rows(np.arange(4, dtype="float32")))
    r("numpy_dataset_tuple", lambda: rows((np.arange(2), np.ones((2, 2), "float32"))))
    r("numpy_dataset_list_of_arrays", lambda: rows([np.arange(2), np.arange(2) + 10]))
    r("numpy_dataset_dict", lambda: rows({"a": np.arange(2), "b": np.ones((2, 3), "float32")}))
    r("numpy_dataset_len_mismatch", lambda: rows((np.arange(2), np.arange(3))))
    r("numpy_dataset_seed_ones10", lambda: len(list(make(ten))))
    r("numpy_dataset_unbatched_distribute", lambda: dealt(make(ten)))
    r(
        "numpy_dataset_batched_distribute",
        lambda: dealt(make(np.arange(10, dtype="float32")).batch(4)),
    )
    r("numpy_dataset_in_replica", lambda: s.run(lambda: make(np.arange(2))))
    _iterators(r, s)
    return r


def _iterators(r, s):
    ten = ms.Dataset.range(10).batch(4)

    def three():
        iterator = s.make_dataset_iterator(ten)
        return [r.write(iterator.get_next()) for _ in range(3)]

    def from_function():
        seen = []

        def input_fn(c):
            seen.append((c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync))
            return ms.Dataset.range(8).batch(2)

        return seen, s.make_input_fn_iterator(input_fn).get_next()

    def from_callable():
        numbers = itertools.count(1)
        return s.make_input_fn_iterator(lambda c: lambda: tf.constant(next(numbers))).get_next()

    once = ms.InputReplicationMode("PER_REPLICA")
    r("make_dataset_iterator", three)
    r("make_input_fn_iterator", from_function)
    r("make_input_fn_iterator_callable", from_callable)
    r("make_input_fn_iterator_bad", lambda: s.make_input_fn_iterator(lambda c: 3))
    r(
        "make_input_fn_iterator_per_replica",
        lambda: s.make_input_fn_iterator(lambda c: ms.Dataset.range(4), once),
    )
    r(
        "experimental_run",
        lambda: s.experimental_run(lambda x: x * 2, s.make_dataset_iterator(ten)),
    )
    r("experimental_run_no_iterator", lambda: s.experimental_run(fid))
    name = "experimental_run_steps_on_iterator"
    r(name, lambda: _two_steps(s))
    r(f"{name}@function", lambda: _two_steps(s) and tf.constant(1))


def _two_steps(s):
    n = s.num_replicas_in_sync
    floats = ms.Dataset.range(8).map(lambda x: np.float32(x)).batch(n, drop_remainder=True)

    def step(context, inputs):
        sums = s.extended.call_for_each_replica(np.sum, args=(inputs,))
        context.set_last_step_output("loss", sums, reduce_op=ms.ReduceOp.SUM)
        context.set_last_step_output("raw", sums)

    before = {"loss": 0.0, "raw": [0.0] * n}
    run_steps = s.extended.experimental_run_steps_on_iterator
    iterator = s.make_dataset_iterator(floats)
    return run_steps(step, iterator, iterations=2, initial_loop_values=before).last_step_outputs


PROGRAMS = (extended_reduce_to, extended_v1_misc, v1_strategy)
