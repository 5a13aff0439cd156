"""Options and contexts of inputs."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.testing import run_ranks

PER_REPLICA = ms.InputOptions(experimental_replication_mode=ms.InputReplicationMode.PER_REPLICA)


def test_defaults():
    assert ms.InputOptions() == (True, ms.InputReplicationMode.PER_WORKER, False, 1)
    assert ms.InputOptions(None).experimental_fetch_to_device is True
    assert ms.InputOptions(False).experimental_fetch_to_device is False
    assert ms.RunOptions() == (True, False, None)
    assert tf.distribute.InputOptions is ms.InputOptions
    assert tf.distribute.RunOptions is ms.RunOptions
    assert tf.distribute.InputReplicationMode is ms.InputReplicationMode


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_one_dataset_is_not_made_per_replica(make):
    def rank(comm):
        strategy = make(comm=comm)
        data = ms.Dataset.range(4).batch(2)
        with pytest.raises(NotImplementedError, match="PER_REPLICA"):
            strategy.experimental_distribute_dataset(data, PER_REPLICA)
        with pytest.raises(TypeError, match="InputOptions"):
            strategy.experimental_distribute_dataset(data, 3)
        plain = strategy.experimental_distribute_dataset(data, ms.InputOptions())
        return [e.local.tolist() for e in plain]

    assert run_ranks(rank, 2) == [[[0], [2]], [[1], [3]]]


def test_per_replica_pipelines():
    def rank(comm):
        seen = []

        def dataset_fn(context):
            seen.append(tuple(vars(context).values()))
            return ms.Dataset(np.full(2 + 2 * comm.rank, comm.rank)).batch(2)

        strategy = ms.MirroredStrategy(comm=comm)
        data = strategy.experimental_distribute_datasets_from_function(dataset_fn, PER_REPLICA)
        return seen, [e.local.tolist() for e in data]

    assert run_ranks(rank, 3) == [
        ([(3, 0, 3)], [[0, 0], [], []]),
        ([(3, 1, 3)], [[1, 1], [1, 1], []]),
        ([(3, 2, 3)], [[2, 2], [2, 2], [2, 2]]),
    ]


def test_per_replica_pipelines_elsewhere():
    def rank(comm):
        for strategy in (ms.MultiWorkerMirroredStrategy(comm=comm), ms.OneDeviceStrategy("cpu")):
            with pytest.raises(NotImplementedError, match="MirroredStrategy"):
                strategy.distribute_datasets_from_function(lambda c: None, PER_REPLICA)

    run_ranks(rank, 2)


def test_options_on_one_rank_only_are_an_error_on_all():
    def rank(comm):
        options = 3 if comm.rank == 1 else None
        with pytest.raises(TypeError, match="InputOptions"):
            ms.MirroredStrategy(comm=comm).experimental_distribute_dataset(
                ms.Dataset.range(4).batch(2), options
            )

    run_ranks(rank, 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ms.InputOptions(experimental_place_dataset_on_device=True), "needs .* PER_REPLICA"),
        (PER_REPLICA._replace(experimental_place_dataset_on_device=True), "cannot both"),
    ],
)
def test_options_that_contradict_each_other(options, text):
    with pytest.raises(ValueError, match=text):
        ms.MirroredStrategy().distribute_datasets_from_function(
            lambda c: ms.Dataset.range(2).batch(1), options
        )


def test_policies_are_set_by_name_only():
    options = tf.data.Options()
    with pytest.raises(TypeError, match="AutoShardPolicy"):
        options.experimental_distribute.auto_shard_policy = 3
    with pytest.raises(AttributeError):
        options.experimental_distribute.auto_shard = ms.AutoShardPolicy.OFF
    with pytest.raises(TypeError, match="DatasetOptions"):
        ms.Dataset.range(2).with_options("OFF")
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = ms.Dataset.range(4).with_options(options).shuffle(seed=0).batch(2)
    kept = data.options().experimental_distribute.auto_shard_policy
    assert kept is data._policy is ms.AutoShardPolicy.OFF
    assert [(p.name, p.value) for p in ms.AutoShardPolicy] == [
        ("OFF", -1),
        ("AUTO", 0),
        ("FILE", 1),
        ("DATA", 2),
        ("HINT", 3),
    ]


def test_an_error_of_a_part_without_rows_says_that_it_has_none():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        data = strategy.experimental_distribute_dataset(ms.Dataset(np.arange(5.0)).batch(4))
        told = []
        for batch in data:
            try:
                strategy.run(lambda part: part.max(), (batch,))
            except ValueError as error:
                told.append(str(error))
        with pytest.raises(ValueError, match=r"^mine$"):
            strategy.run(lambda part: (_ for _ in ()).throw(ValueError("mine")), (np.ones(3),))
        return told

    for (text,) in run_ranks(rank, 2):
        assert "zero-size array to reduction operation maximum" in text
        assert "has no rows" in text


class TestAMeanWithoutAWeight:
    """Replicas with unequal parts of a batch count alike, which a warning says."""

    @staticmethod
    def warned(fn, rows=5, batch=4, size=2, like=lambda batch: (batch,)):
        def program(comm):
            strategy = ms.MirroredStrategy()
            batches = ms.Dataset(np.arange(float(rows))).batch(batch)
            for part in strategy.experimental_distribute_dataset(batches):
                strategy.run(fn, args=like(part))

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run_ranks(program, size)
        return [str(one.message) for one in found]

    @pytest.mark.parametrize("name", ["all_reduce", "all_reduce_start"])
    def test_once_of_unequal_parts(self, name):
        def step(x):
            for _ in range(2):
                done = getattr(ms.get_replica_context(), name)("mean", x.sum())
                if name == "all_reduce_start":
                    done.wait()

        (text,) = self.warned(step)  # batches of 2 + 2 and 1 + 0
        assert text.startswith(f"{name}: a mean without a weight")
        assert "weight=len(x)" in text

    def test_of_an_optimizer(self):
        def program(comm):
            strategy = ms.MultiWorkerMirroredStrategy()
            with strategy.scope():
                w = ms.Variable(0.0, name="w")
            sgd = ms.optim.SGD(0.1)
            data = ms.Dataset({"x": np.arange(3.0)}).batch(3)
            for batch in strategy.experimental_distribute_dataset(data):
                strategy.run(lambda x: sgd.apply_gradients([(x.mean(), w)]), args=(batch["x"],))

        with pytest.warns(UserWarning, match=r"SGD.apply_gradients: a mean without a weight"):
            run_ranks(program, 2)

    def test_nothing_is_said_where_nothing_is_wrong(self):
        def reduce(*args, **more):
            return ms.get_replica_context().all_reduce(*args, **more)

        assert not self.warned(lambda x: reduce("mean", x.sum(), weight=len(x)))
        assert not self.warned(lambda x: reduce("sum", x.sum()))
        assert not self.warned(lambda x: reduce("mean", x.sum()), rows=4)  # 2 + 2
        assert not self.warned(lambda x: reduce("mean", x.sum()), size=1)
        assert not self.warned(lambda: reduce("mean", 1.0), like=lambda batch: ())

    def test_an_error_on_every_rank_where_warnings_are_errors(self):
        def program(comm):
            strategy = ms.MirroredStrategy()
            (batch,) = strategy.experimental_distribute_dataset(ms.Dataset(np.ones(3)).batch(3))
            with pytest.raises(UserWarning, match="without a weight"):
                strategy.run(
                    lambda x: ms.get_replica_context().all_reduce("mean", x.sum()), args=(batch,)
                )
            return strategy.all_reduce("sum", 1)

        assert run_ranks(program, 2) == [2, 2]
