"""Distributed datasets, their iterators, and values made per replica."""

from __future__ import annotations

from functools import partial

from ..recorder import Recorder
from .common import in_scope, ms, np, per_replica, steps, tf

PLANS = [
    (10, 4, False),
    (10, 4, True),
    (10, 3, False),
    (10, 5, False),
    (10, 8, False),
    (5, 4, False),
    (9, 4, False),
    (3, 1, False),
    (4, 1, True),
    (7, 2, False),
    (14, 8, False),
    (6, 8, False),
    (0, 4, False),
    (1, 4, False),
    (10, 6, True),
    (10, 7, False),
]


def dataset_partial_batches(s, n, comm):
    r = Recorder(s, comm)
    data = ms.Dataset

    def dealt(dataset, limit=12):
        return steps(r, iter(s.experimental_distribute_dataset(dataset)), limit)

    def ragged():
        return iter([np.arange(3), np.arange(3, 8), np.array([8])])

    for rows, batch, drop in PLANS:
        r(
            f"range{rows}_batch{batch}{'_drop' if drop else ''}",
            lambda rows=rows, batch=batch, drop=drop: dealt(data.range(rows).batch(batch, drop)),
        )
    slices = data.from_tensor_slices
    r("2d_features_range10_batch4", lambda: dealt(slices(tf.range(20.0).reshape(10, 2)).batch(4)))
    pair = (tf.range(6), tf.range(12.0).reshape(6, 2))
    r("tuple_structure_range6_batch4", lambda: dealt(slices(pair).batch(4)))
    both = {"x": tf.range(6), "y": tf.range(6.0)}
    r("dict_structure_range6_batch4", lambda: dealt(slices(both).batch(4)))
    r("batch_then_map_range10_batch4", lambda: dealt(data.range(10).batch(4).map(lambda x: x * 10)))
    r("batch_then_prefetch", lambda: dealt(data.range(10).batch(4).prefetch(2)))
    r("batch_repeat2_range5_batch4", lambda: dealt(data.range(5).batch(4).repeat(2)))
    r("repeat_forever_first3", lambda: dealt(data.range(5).repeat().batch(4), 3))
    ragged_rows = data.range(1, 6).map(lambda x: np.full([x % 3], x))
    r("padded_batch", lambda: dealt(ragged_rows.padded_batch(4, padded_shapes=[3])))
    whole = data.from_batches([tf.range(5)]).repeat(2)
    r("from_tensors_static_batch_of_5", lambda: dealt(whole))
    name = "unknown_batch (generator of ragged batches 3,5,1)"
    r(name, lambda: dealt(data.from_batches(ragged)))
    r("unbatched_scalars", lambda: dealt(data.range(10)))
    r("not_a_dataset", lambda: dealt([1, 2, 3]))
    r("batch_of_batches", lambda: dealt(data.range(12).batch(2).batch(3)))
    return r


def dataset_autoshard_policies(s, n, comm):
    r = Recorder(s, comm)

    def dealt(policy, rows, batch, drop=False):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        dataset = ms.Dataset.range(rows).batch(batch, drop).with_options(options)
        return steps(r, iter(s.experimental_distribute_dataset(dataset)))

    for policy in ms.AutoShardPolicy:
        for rows, batch in [(10, 4), (14, 8), (6, 8), (10, 5), (10, 3), (13, 7), (3, 1)]:
            r(f"{policy.name}_range{rows}_batch{batch}", partial(dealt, policy, rows, batch))
        r(f"{policy.name}_range10_batch5_drop", partial(dealt, policy, 10, 5, True))
    return r


def dataset_iteration_protocol(s, n, comm):
    r = Recorder(s, comm)
    dataset = ms.Dataset.range(5).batch(4)
    distributed = s.experimental_distribute_dataset(dataset)

    def folded(d):
        total = np.int64(0)
        for x in d:
            total += s.reduce("SUM", x, axis=0)
        return total

    def sums():
        return [s.run(np.sum, args=(x,)) for x in distributed]

    r("type_dataset", lambda: type(distributed).__name__)
    r("element_spec", lambda: repr(distributed.element_spec))
    iterator = iter(distributed)
    r("type_iterator", lambda: type(iterator).__name__)
    r("iterator_element_spec", lambda: repr(iterator.element_spec))
    r("get_next_1", iterator.get_next)
    r("get_next_2", iterator.get_next)
    r("get_next_3_end", iterator.get_next)
    r("next_after_end", lambda: next(iterator))
    r("second_epoch_restarts", lambda: steps(r, iter(distributed)))
    another = iter(distributed)
    first, second, third = (another.get_next_as_optional() for _ in range(3))
    r("optional_1_has_value", first.has_value)
    r("optional_1_value", first.get_value)
    r("optional_2_value", second.get_value)
    r("optional_3_has_value", third.has_value)
    r("optional_3_get_value", third.get_value)
    r("next_in_replica_fn", lambda: s.run(next, args=(iter(distributed),)))
    r("for_loop_run_collect", sums)
    r("for_loop_reduce_sum", lambda: [s.reduce("SUM", x, axis=None) for x in sums()])
    r(
        "dataset_reduce_method",
        lambda: distributed.reduce(np.int64(0), lambda t, x: t + s.reduce("SUM", x, axis=0)),
    )
    r("len", lambda: len(distributed))
    r("cardinality", lambda: distributed.cardinality)
    r("bare_next_on_dataset", lambda: next(distributed))
    r(
        "in_scope_same",
        lambda: in_scope(s, lambda: steps(r, iter(s.experimental_distribute_dataset(dataset)))),
    )
    full = ms.Dataset.range(8).batch(4, drop_remainder=True)
    r(
        "drop_remainder_element_spec",
        lambda: repr(s.experimental_distribute_dataset(full).element_spec),
    )
    empty = s.experimental_distribute_dataset(ms.Dataset.range(0).batch(4))
    r("empty_dataset_first_next", lambda: next(iter(empty)))
    r("empty_dataset_optional", lambda: iter(empty).get_next_as_optional().has_value())
    other = ms.OneDeviceStrategy("cpu")
    r("other_strategy_scope_iterates", lambda: in_scope(other, lambda: next(iter(distributed))))
    r("for_in_tf_function", lambda: folded(distributed))
    return r


def distribute_values_from_function(s, n, comm):
    r = Recorder(s, comm)
    seen = []
    make = s.experimental_distribute_values_from_function

    def value(c):
        seen.append((c.replica_id_in_sync_group, c.num_replicas_in_sync, str(c)))
        return tf.constant(float(c.replica_id_in_sync_group))

    def ones(*shape):
        return per_replica(s, lambda i: tf.ones(shape))

    def plus_one(c):
        return tf.constant(c.replica_id_in_sync_group + 1.0)

    r("tensors", lambda: make(value))
    r("contexts", lambda: list(seen))
    r("py_ints", lambda: make(lambda c: c.replica_id_in_sync_group))
    r("same_object_still_wrapped", lambda: make(lambda c: 7))
    r("numpy", lambda: make(lambda c: np.array([c.replica_id_in_sync_group])))
    r("list_nest", lambda: make(lambda c: [c.replica_id_in_sync_group, {"k": 1.0}]))
    r("none", lambda: make(lambda c: None))
    doubled = s.run(lambda x: x * 2, args=(make(plus_one),))
    r("into_run_and_reduce", lambda: s.reduce("SUM", doubled, axis=None))
    r("repr", lambda: repr(make(lambda c: c.replica_id_in_sync_group)))
    r("str", lambda: str(make(lambda c: c.replica_id_in_sync_group)))
    r("per_replica_convert_outside", lambda: tf.constant(ones()))
    r("per_replica_add_outside", lambda: ones() + 1.0)
    r("per_replica_numpy_attr", lambda: ones().numpy())
    r("per_replica_len", lambda: len(ones()))
    r("per_replica_getitem", lambda: ones(1)[0])
    r("per_replica_values_attr", lambda: per_replica(s, lambda i: tf.constant(float(i))).values)
    return r


PROGRAMS = (
    dataset_partial_batches,
    dataset_autoshard_policies,
    dataset_iteration_protocol,
    distribute_values_from_function,
)
