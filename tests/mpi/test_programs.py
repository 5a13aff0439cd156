"""The well-known programs, unchanged except for the import line, on the ranks of a job."""

from __future__ import annotations

import contextlib
import json
import warnings

import numpy as np
import pytest

from mpistrat.compat import tf
from mpistrat.testing import same

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("spelling", ["run", "call_for_each_replica"])
def test_merge_call(world, spelling):
    distribution = tf.distribute.MirroredStrategy()

    def merge_fn(distribution, v):
        return sum(distribution.experimental_local_results(v))

    def fn(three):
        ctx = tf.distribute.get_replica_context() if spelling == "run" else tf.get_replica_context()
        v = three + ctx.replica_id_in_sync_group
        s = ctx.merge_call(merge_fn, args=(v,))
        return s + v

    start = distribution.run if spelling == "run" else distribution.extended.call_for_each_replica
    values = distribution.experimental_local_results(start(fn, args=[3]))
    n = world.size
    known = {1: [6], 2: [10, 11], 4: [21, 22, 23, 24]}
    total = sum(3 + r for r in range(n))
    want = known.get(n, [total + 3 + r for r in range(n)])
    same(world, np.array(values), np.array(want))


def test_replica_ids_are_printed(world):
    strategy = tf.distribute.MirroredStrategy()

    def func():
        return tf.distribute.get_replica_context().replica_id_in_sync_group

    text = str(strategy.run(func))
    lines = ",\n".join(f"  {r}: {r}" for r in range(world.size))
    assert text == "PerReplica:{\n" + lines + "\n}"


def test_all_gather(world):
    strategy = tf.distribute.MirroredStrategy()
    value_1 = tf.constant([1, 2, 3])
    value_2 = tf.constant([[1, 2], [3, 4]])

    def one():
        return tf.distribute.get_replica_context().all_gather(value_1, axis=0)

    def two():
        return tf.distribute.get_replica_context().all_gather([value_1, value_2], axis=0)

    n = world.size
    first = strategy.experimental_local_results(strategy.run(one))
    second = strategy.experimental_local_results(strategy.run(two))
    flat = np.array([1, 2, 3] * n, np.int32)
    square = np.array([[1, 2], [3, 4]] * n, np.int32)
    same(world, list(first), [flat] * n)
    same(world, list(second), [[flat, square]] * n)


def test_tf_config(world, monkeypatch):
    cluster = {"worker": ["localhost:12345", "localhost:23456"], "ps": ["localhost:34567"]}
    task = {"type": "worker", "index": world.rank % 2}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    # Names that do not fit the ranks are told once, on rank 0.
    told = world.rank == 0 and world.size != 2
    with pytest.warns(RuntimeWarning, match="2 workers") if told else contextlib.nullcontext():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.cluster_resolver.task_type == "worker"
    assert strategy.cluster_resolver.task_id == world.rank % 2


@pytest.mark.parametrize("batch", [None, 4])
def test_a_numpy_dataset(world, batch):
    strategy = tf.distribute.MirroredStrategy()
    dataset = strategy.experimental_make_numpy_dataset(np.ones([10], dtype=np.float32))
    if batch:
        dataset = dataset.batch(batch)
    seen, steps = 0, 0
    for x in strategy.experimental_distribute_dataset(dataset, unbatched=not batch):
        assert x.local.dtype == np.float32
        size = strategy.run(lambda x: np.array([len(x), x.sum()]), args=(x,))
        seen += strategy.reduce("SUM", size, axis=None)
        steps += 1
    same(world, seen, np.array([10.0, 10.0]))
    assert steps == -(-10 // (batch or world.size))


def test_named_devices(world):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
    assert strategy.num_replicas_in_sync == world.size
    assert strategy.extended.worker_devices[:2] == ("GPU:0", "GPU:1")[: world.size]
    assert len(found) == (1 if world.size != 2 and world.rank == 0 else 0)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.mpi(min_size=2)
def test_reduce_of_global_batches(world, op):
    strategy = tf.distribute.MirroredStrategy()
    reduce_op = tf.distribute.ReduceOp[op]
    fold = np.sum if op == "SUM" else np.mean
    n = world.size
    data = strategy.experimental_make_numpy_dataset(np.arange(4.0 * n + 6)).batch(4 * n)
    full, last = (
        strategy.run(lambda x: x, args=(batch,))
        for batch in strategy.experimental_distribute_dataset(data)
    )
    rows = np.arange(4.0 * n).reshape(n, 4)
    same(world, strategy.reduce(reduce_op, full, axis=None), fold(rows, axis=0))
    same(world, strategy.reduce(reduce_op, full, axis=0), fold(rows))
    same(world, strategy.reduce(reduce_op, last, axis=0), fold(np.arange(4.0 * n, 4 * n + 6)))
