"""What programs annotate: mypy checks this file, and a test runs it on two ranks.

Where a call may give None or something else in rare cases, as `get_replica_context` in
cross-replica code, its type is ``X | Any``: programs need no check, and what X does not have is an
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import mpistrat as ms

Batch = tuple[NDArray[np.float64], NDArray[np.float64]]


class Model:
    """A linear model."""

    def __init__(self, strategy: ms.Strategy, optimizer: ms.optim.Optimizer) -> None:
        """Create the weights."""
        self.strategy, self.optimizer = strategy, optimizer
        with strategy.scope() as entered:
            assert_type(entered, ms.Strategy)
            self.weights: ms.Variable = ms.Variable(np.zeros(3), name="w")

    def step(self, batch: Batch) -> NDArray[np.float64]:
        """Return the squares of the errors of this replica's rows."""
        context = ms.get_replica_context()
        assert_type(context, ms.ReplicaContext | Any)
        x, y = batch
        error: NDArray[np.float64] = x @ self.weights.numpy() - y
        gradient = x.T @ error / max(len(x), 1)
        done = self.optimizer.apply_gradients([(gradient, self.weights)], weight=len(x))
        assert_type(done, ms.Variable)
        return rows(context, error)

    def train(self, data: ms.DistributedDataset) -> float:
        """Return the last loss."""
        loss = 0.0
        for batch in data:
            squares: ms.PerReplica = self.strategy.run(self.step, args=(batch,))
            loss = float(self.strategy.reduce(ms.ReduceOp.MEAN, squares, axis=0))
        return loss


def rows(context: ms.ReplicaContext, error: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the squares, and look at what a context knows."""
    assert_type(context.strategy, ms.Strategy)
    assert_type(context.replica_id_in_sync_group, int | Any)
    assert_type(context.num_replicas_in_sync, int)
    return error**2


def variables(v: ms.Variable, context: ms.ReplicaContext) -> None:
    """Write, read and look at a variable."""
    assert_type(v.assign_sub(np.zeros(3)), ms.Variable)
    assert_type(v.shape, tuple[int, ...])
    assert_type(v.name, str)
    assert_type(v.aggregation, ms.VariableAggregation)
    total = context.all_reduce("sum", v.numpy(), weight=1.0)
    v.assign(total)


def batches(data: ms.DistributedDataset) -> Iterator[Batch]:
    """Iterate as cross-replica code does."""
    iterator = iter(data)
    assert_type(iterator, ms.DistributedIterator)
    yield from iterator


def optimizers() -> list[ms.optim.Optimizer]:
    """Return some."""
    schedule: ms.optim.Schedule = ms.optim.WarmUp(ms.optim.Cosine(0.1, 100), 10)
    adam = ms.optim.AdamW(schedule, weight_decay=0.1, clip=ms.optim.ClipByGlobalNorm(1.0))
    assert_type(adam, ms.optim.AdamW)
    assert_type(adam.beta_1, float)
    return [ms.optim.SGD(0.1, momentum=0.9), adam]


def program() -> float:
    """Train for one epoch."""
    strategy = ms.MirroredStrategy()
    assert_type(strategy.num_replicas_in_sync, int)
    assert_type(strategy.extended.should_save_summary, bool)
    assert_type(ms.get_strategy(), ms.Strategy)
    assert_type(ms.ReduceOp.SUM.value, str)
    x = np.random.default_rng(0).normal(size=(20, 3))
    dataset = ms.Dataset((x, x.sum(1))).shuffle(seed=1).batch(8)
    assert_type(dataset, ms.Dataset)
    data = strategy.experimental_distribute_dataset(dataset)
    assert_type(data, ms.DistributedDataset | Any)
    model = Model(strategy, optimizers()[0])
    saved: ms.Checkpoint = ms.Checkpoint(weights=model.weights)
    assert_type(saved.save_counter, int)
    value: ms.PerReplica = strategy.run(lambda: 1.0)
    assert_type(strategy.experimental_local_results(value), tuple[Any, ...])
    return model.train(data)
