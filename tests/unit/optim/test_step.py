"""What a training step costs: handshakes, barriers, and calls of Python functions."""

from __future__ import annotations

import numpy as np
import pytest
from python_calls import calls_of

import mpistrat as ms
from mpistrat import optim
from mpistrat.examples import mlp
from mpistrat.testing import run_ranks

STEPS, BATCH = 5, 64


class Training:
    """The digits job: a small network, momentum, a schedule, and a distributed dataset."""

    def __init__(self, strategy, buffers):
        rng, count = np.random.default_rng(0), BATCH * STEPS
        data = ms.Dataset((rng.random((count, 64)), rng.integers(0, 10, count)))
        self.strategy = strategy
        self.batches = strategy.experimental_distribute_dataset(data.shuffle(seed=1).batch(BATCH))
        with strategy.scope():
            self.model = mlp.Parameters(*map(ms.Variable, mlp.make_parameters(64, 128, 10, seed=0)))
        self.optimizer = optim.SGD(optim.Linear(0.1, 0.0, 1000), momentum=0.9)
        self.buffers = strategy.gradient_buffers(self.model) if buffers else None

    def step(self, x, y):
        found, *_ = mlp.compute_gradients(mlp.Parameters(*map(np.asarray, self.model)), x, y)
        if self.buffers is not None:
            for place, gradient in zip(self.buffers, found, strict=True):
                place[...] = gradient
            found = self.buffers
        self.optimizer.apply_gradients(zip(found, self.model, strict=True), weight=len(y))

    def epoch(self):
        for x, y in self.batches:
            self.strategy.run(self.step, args=(x, y))


@pytest.mark.parametrize("buffers", (True, False))
@pytest.mark.parametrize("size", (1, 2, 4))
def test_a_step_makes_three_handshakes_and_one_barrier_of_the_node(size, buffers):
    def rank(comm):
        job = Training(ms.MirroredStrategy(comm=comm), buffers)
        job.epoch()
        lockstep = job.strategy._replicas.lockstep
        met = []
        if size > 1:
            node = job.strategy._replicas.reducer.node.arena.nodes().node
            for name in ("barrier", "allreduce"):
                one = getattr(node, name)
                setattr(node, name, lambda *a, one=one: (met.append(1), one(*a))[1])
        before, first = lockstep.session.calls, None
        for x, y in job.batches:
            first = first or lockstep.session.calls - before
            job.strategy.run(job.step, args=(x, y))
        # iter() is a call, and so is the next() that tells the end.
        return lockstep.session.calls - before - first - 1, len(met)

    steps = 3 * STEPS - 1  # all but the first next(), which came with iter()
    if size == 1:
        steps -= STEPS  # of one rank, an update needs none
    assert run_ranks(rank, size) == [(steps, STEPS if size > 1 else 0)] * size


@pytest.mark.parametrize(("size", "most"), ((1, 117), (2, 240)))
def test_python_calls_of_a_warm_step(size, most):
    """One rank once took 513 calls a step; the gradients alone take 10, `LoopbackComm` about 60."""

    def rank(comm):
        job = Training(ms.MirroredStrategy(comm=comm), buffers=True)
        job.epoch()
        batches = iter(job.batches)
        job.strategy.run(job.step, args=next(batches))
        calls = calls_of(lambda: [job.strategy.run(job.step, args=next(batches)) for _ in range(3)])
        return calls / 3

    for calls in run_ranks(rank, size):
        assert calls < most


@pytest.mark.parametrize(("size", "most"), ((1, 8), (2, 11)))
def test_python_calls_of_a_small_write(size, most):
    """It was 13 calls on one rank once, and 17 on two."""
    count = 12

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            variables = [ms.Variable(np.zeros(128)) for _ in range(count)]
        values = np.ones(128)

        def write():
            for one in variables:
                one.assign_sub(values)

        strategy.run(write)
        empty = calls_of(lambda: strategy.run(lambda: None))
        return (calls_of(lambda: strategy.run(write)) - empty) / count

    for calls in run_ranks(rank, size):
        assert calls < most


MORE = {
    "plain": {},
    "clip": {"clip": optim.ClipByGlobalNorm(1.0)},
    "accumulate": {"accumulate": 2},
    "scale": {"nonfinite": "skip", "loss_scale": optim.LossScale()},
}


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("large", [False, True], ids=["small", "some large"])
def test_many_small_buffers_cost_no_more_calls_than_ordinary_arrays(large, more):
    """Of 100 variables with a norm it was 4,600 calls once, and 2,600 to accumulate."""
    sizes = [1 << 15 if large and i % 40 == 20 else 30 for i in range(100)]

    def rank(comm):
        strategy, counts = ms.MirroredStrategy(comm=comm), []
        with strategy.scope():
            variables = [ms.Variable(np.zeros(n, "f4"), name=f"v{i}") for i, n in enumerate(sizes)]
            optimizer = ms.optim.SGD(0.5, **MORE[more])
        arrays = [np.ones(n, "f4") for n in sizes]
        for given in (arrays, strategy.gradient_buffers(variables)):
            step = lambda: optimizer.apply_gradients(zip(given, variables, strict=True))  # noqa: B023, E731
            for _ in range(3):
                for one in given:
                    one[...] = 1
                counts.append(calls_of(lambda: strategy.run(step)))  # noqa: B023
        return counts, variables[7].numpy().tolist()

    for counts, weights in run_ranks(rank, 2):
        assert weights == [-3.0] * 30 or more != "plain"
        assert counts[5] <= counts[2] + 20
        assert counts[5] < 460
