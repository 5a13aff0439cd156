"""Resuming in the middle of an epoch, and state that is not a variable, under MPI."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import same

pytestmark = pytest.mark.mpi


class Ended(Exception):
    pass


def start(world, directory, seen, end=None, epochs=2):
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        w, history = ms.Variable(np.zeros(46)), ms.History()
    dataset = ms.Dataset(np.arange(46)).shuffle().batch(8).prefetch(2)
    rng = np.random.default_rng(3)
    checkpoint = ms.Checkpoint(w=w, data=dataset, rng=rng, history=history, step=0, told=[])
    manager = ms.CheckpointManager(checkpoint, directory, 2, every="2 steps")

    def step(rows):
        counts = np.bincount(rows, minlength=46).astype(float)
        w.assign_add(ms.get_replica_context().all_reduce("sum", counts))

    for batch in manager.resume(strategy.experimental_distribute_dataset(dataset), epochs):
        if checkpoint.step == end:
            raise Ended
        strategy.run(step, args=(batch,))
        parts = strategy.experimental_local_results(batch)
        seen[checkpoint.step] = np.concatenate(parts)
        history.append(checkpoint.step, drawn=rng.random())
        checkpoint.told.append(f"step {checkpoint.step}")
        checkpoint.step += 1
    same(world, [w.numpy(), history.table(), len(checkpoint.told), rng.random()])
    return w.numpy(), history.table(), checkpoint


def test_every_example_once(world, tmp_path):
    directory = world.bcast(str(tmp_path))
    seen = {}
    for end in (5, 9):
        with pytest.raises(Ended):
            start(world, directory, seen, end)
    w, table, checkpoint = start(world, directory, seen)
    assert w.tolist() == [2] * 46
    assert sorted(np.concatenate([seen[step] for step in range(6)])) == list(range(46))
    assert sorted(np.concatenate([seen[step] for step in range(6, 12)])) == list(range(46))
    draws = np.random.default_rng(3).random(13)
    assert table[:, 1].tolist() == draws[:12].tolist()
    assert checkpoint.told == [f"step {step}" for step in range(12)]
    if world.rank == 0:
        history = checkpoint.history
        assert len(history["drawn"][0]) == 12
    checkpoint.history.write_csv(f"{directory}/curves.csv")


def test_numbers_that_differ_are_told(world, tmp_path):
    directory = world.bcast(str(tmp_path))
    with ms.MirroredStrategy().scope():
        checkpoint = ms.Checkpoint(w=ms.Variable(0.0), step=world.rank)
    if world.size > 1:
        with pytest.raises(ms.LockstepError, match="step=1"):
            checkpoint.save(f"{directory}/x")
