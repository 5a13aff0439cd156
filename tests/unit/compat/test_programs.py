"""The well-known programs, unchanged except for the import line, on ranks that are threads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mpistrat.compat import tf
from mpistrat.errors import DataError
from mpistrat.testing import run_ranks

RANKS = pytest.mark.parametrize("n", [1, 2, 4])


def merge_fn(distribution, v):
    return sum(distribution.experimental_local_results(v))


@RANKS
@pytest.mark.parametrize("spelling", ["run", "call_for_each_replica", "old context"])
def test_merge_call(n, spelling):
    def program(comm):
        distribution = tf.distribute.MirroredStrategy()

        def fn(three):
            if spelling == "old context":
                replica_ctx = tf.get_replica_context()
            else:
                replica_ctx = tf.distribute.get_replica_context()
            v = three + replica_ctx.replica_id_in_sync_group
            s = replica_ctx.merge_call(merge_fn, args=(v,))
            return s + v

        if spelling == "run":
            result = distribution.run(fn, args=[3])
        else:
            result = distribution.extended.call_for_each_replica(fn, args=[3])
        return [int(x) for x in distribution.experimental_local_results(result)]

    want = {1: [6], 2: [10, 11], 4: [21, 22, 23, 24]}[n]
    assert run_ranks(program, n) == [want] * n


@RANKS
def test_replica_ids_are_printed(n):
    def program(comm):
        strategy = tf.distribute.MirroredStrategy()

        def func():
            return tf.distribute.get_replica_context().replica_id_in_sync_group

        return str(strategy.run(func))

    lines = ",\n".join(f"  {r}: {r}" for r in range(n))
    assert run_ranks(program, n) == ["PerReplica:{\n" + lines + "\n}"] * n


@RANKS
def test_all_gather(n):
    def program(comm):
        strategy = tf.distribute.MirroredStrategy()

        def gather_value():
            ctx = tf.distribute.get_replica_context()
            local_value = tf.constant([1, 2, 3])
            return ctx.all_gather(local_value, axis=0)

        def gather_nest():
            ctx = tf.distribute.get_replica_context()
            value_1 = tf.constant([1, 2, 3])
            value_2 = tf.constant([[1, 2], [3, 4]])
            return ctx.all_gather([value_1, value_2], axis=0)

        one = strategy.experimental_local_results(strategy.run(gather_value))
        two = strategy.experimental_local_results(strategy.run(gather_nest))
        assert one[0].dtype == tf.int32
        return [x.tolist() for x in one], [[x.tolist() for x in pair] for pair in two]

    first, second = [1, 2, 3] * n, [[1, 2], [3, 4]] * n
    assert run_ranks(program, n) == [([first] * n, [[first, second]] * n)] * n


@RANKS
def test_tf_config(n, monkeypatch):
    cluster = {"worker": ["localhost:12345", "localhost:23456"], "ps": ["localhost:34567"]}
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    )

    def program(comm):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if strategy.cluster_resolver.task_type == "worker":
            return "worker"
        return "something else"

    # Written for one process; every rank inherits the same name.
    with pytest.warns(RuntimeWarning, match="Names .* do not choose ranks"):
        assert run_ranks(program, n) == ["worker"] * n


@RANKS
@pytest.mark.parametrize("batched", [False, True])
def test_a_numpy_dataset(n, batched):
    """One that is batched later; or not at all, which has to be said."""

    def program(comm):
        strategy = tf.distribute.MirroredStrategy()
        numpy_input = np.ones([10], dtype=np.float32)
        dataset = strategy.experimental_make_numpy_dataset(numpy_input)
        if batched:
            dataset = dataset.batch(4)
        if not batched:
            with pytest.raises(DataError, match=r"\.batch\(global_batch_size\)"):
                strategy.experimental_distribute_dataset(dataset)
        dist_dataset = strategy.experimental_distribute_dataset(dataset, unbatched=not batched)
        return [(x.local.dtype.name, len(x.local)) for x in dist_dataset]

    sizes = [4, 4, 2] if batched else [min(n, 10 - i) for i in range(0, 10, n)]
    for r, got in enumerate(run_ranks(program, n)):
        want = []
        for size in sizes:
            k = -(-size // n)
            want.append(("float32", min(k, max(0, size - r * k))))
        assert got == want


@RANKS
def test_named_devices(n):
    def program(comm):
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        return strategy.num_replicas_in_sync, strategy.extended.worker_devices

    if n == 2:
        got = run_ranks(program, n)
    else:
        with pytest.warns(UserWarning, match=rf"2 devices.*{n} ranks.*-n 2"):
            got = run_ranks(program, n)
    labels = ("GPU:0", "GPU:1", "rank:2", "rank:3")[:n]
    assert got == [(n, labels)] * n


REDUCE = tf.distribute.ReduceOp


@pytest.mark.parametrize(
    ("op", "fold"),
    [(REDUCE.SUM, np.sum), (REDUCE.MEAN, np.mean), ("sum", np.sum), ("Mean", np.mean)],
)
def test_reduce_of_a_global_batch_of_8_on_2_replicas(op, fold):
    def program(comm):
        strategy = tf.distribute.MirroredStrategy()
        dataset = strategy.experimental_make_numpy_dataset(np.arange(8.0)).batch(8)
        (batch,) = strategy.experimental_distribute_dataset(dataset)
        values = strategy.run(lambda x: x, args=(batch,))
        return (
            strategy.reduce(op, values, axis=None).tolist(),
            float(strategy.reduce(op, values, axis=0)),
        )

    want = fold(np.arange(8.0).reshape(2, 4), axis=0).tolist(), float(fold(np.arange(8.0)))
    assert run_ranks(program, 2) == [want, want]


def test_reduce_of_a_last_batch_of_6_on_2_replicas():
    """Four and two: the mean divides by six."""

    def program(comm):
        strategy = tf.distribute.MirroredStrategy()
        parts = ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0])

        def value_fn(context):
            return tf.constant(parts[context.replica_id_in_sync_group])

        values = strategy.experimental_distribute_values_from_function(value_fn)
        mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, values, axis=0)
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=0)
        with pytest.raises(ValueError, match="differ between ranks"):
            strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)
        return float(mean), float(total), mean.dtype.name

    assert run_ranks(program, 2) == [(2.5, 15.0, "float32")] * 2


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1, "int32"), (1.5, "float32"), ([1, 2], "int32"), ([1, 2.0], "float32"), (True, "bool"),
     (np.float64(1), "float64"), (np.arange(2), "int64"), (1j, "complex128")],
)  # fmt: skip
def test_constants(value, dtype):
    assert tf.constant(value).dtype == dtype
    assert tf.constant(value, tf.float64).dtype == "float64" if dtype != "complex128" else True
    assert tf.identity(value).dtype == dtype


def test_the_few_other_names():
    assert tf.constant(2, shape=(2, 2)).tolist() == [[2, 2], [2, 2]]
    assert tf.constant([1, 2, 3, 4], shape=(2, 2)).tolist() == [[1, 2], [3, 4]]
    assert tf.zeros((2,)).dtype == tf.ones(3).dtype == np.float32
    assert tf.range(3).dtype == np.int32
    assert tf.range(0.0, 1.0, 0.5).dtype == np.float32
    assert tf.cast([1.7], tf.int64).tolist() == [1]
    source = np.ones(2)
    assert not np.shares_memory(tf.constant(source), source)
    assert not np.shares_memory(tf.identity(source), source)
    assert tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM).numpy() == 1.0
    for name in tf.distribute.__all__:
        assert getattr(tf.distribute, name) is not None
    for name in tf.__all__:
        assert getattr(tf, name) is not None


@RANKS
def test_a_program_that_may_be_preempted(n, tmp_path):
    """The loop of the guide to PreemptionCheckpointHandler: told once, then started again."""

    def program(comm):
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": [f"host{i}:1" for i in range(n)]}),
            task_type="worker",
            task_id=comm.rank,
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
        with strategy.scope():
            total = tf.Variable(0, dtype=tf.int64)
            checkpoint = tf.train.Checkpoint(total=total)

        def step():
            context = tf.distribute.get_replica_context()
            total.assign_add(context.all_reduce("sum", tf.constant(1, tf.int64)))

        config = tf.distribute.experimental.TerminationConfig(
            termination_watcher_fn=lambda: False, exit_fn=lambda: None
        )
        handler = tf.distribute.experimental.PreemptionCheckpointHandler(
            resolver, checkpoint, str(tmp_path), config
        )
        first = handler.total_run_calls
        for number in range(first, 20):
            with handler.watch_preemption_scope():
                handler.run(strategy.run, step)
            if number == 4 and not first and comm.rank == n - 1:
                handler._notice.record("a test")
        return first, int(total.numpy())

    assert run_ranks(program, n) == [(0, 20 * n)] * n
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-1.npz")
    assert run_ranks(program, n) == [(5, 20 * n)] * n
