"""How often the ranks of a training step wait for one another: every collective call of MPI."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.mpi import MPIComm
from mpistrat.metrics import Mean

pytestmark = pytest.mark.mpi

SYNCHRONISING = ("allgather", "allgatherv", "allreduce", "bcast", "barrier", "gatherv", "sendrecv")
STEPS = 5


@pytest.fixture
def synchronisations(monkeypatch):
    """A list of the collective calls of MPI that this rank has made."""
    names = []

    def counted(name, method):
        def call(self, *args):
            if self.size > 1:
                names.append(name)
            return method(self, *args)

        return call

    for name in SYNCHRONISING:
        monkeypatch.setattr(MPIComm, name, counted(name, getattr(MPIComm, name)))
    return names


@pytest.mark.parametrize(("columns", "barriers"), [(8, 0), (8192, 1)])
def test_a_step_synchronises_three_times(world, columns, barriers, synchronisations):
    """The next batch, the gradients, and the end of the run; a shared variable has its barrier."""
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        w, loss = ms.Variable(np.zeros(columns), name="w"), Mean("loss")
    optimizer = ms.optim.SGD(0.1, momentum=0.9)
    optimizer.build([w])
    rows = np.ones((64 * world.size, columns))
    batches = strategy.experimental_distribute_dataset(ms.Dataset(rows).batch(8 * world.size))

    def step(x):
        gradient = (x - np.asarray(w)).mean(axis=0) if len(x) else np.zeros(columns)
        optimizer.apply_gradients([(gradient, w)], weight=len(x))
        loss.update_state(gradient[:1])

    iterator = iter(batches)
    strategy.run(step, args=(next(iterator),))  # memory is made and shared now
    strategy.run(step, args=(next(iterator),))
    synchronisations.clear()
    for _ in range(STEPS):
        strategy.run(step, args=(next(iterator),))
    most = (3 + barriers) * STEPS if world.size > 1 else 0
    assert len(synchronisations) <= most, synchronisations
