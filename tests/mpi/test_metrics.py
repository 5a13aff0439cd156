"""Metrics where ranks are processes: every example counts once, and what is saved comes back."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms

pytestmark = pytest.mark.mpi


def rows(replica):
    """Uneven, and none on the first."""
    return np.random.default_rng(replica).integers(0, 3, (2, 5 * (replica % 3)))


def test_every_example_counts_once(tmp_path_factory):
    strategy = ms.MirroredStrategy()
    size, (true, predicted) = strategy.num_replicas_in_sync, rows(strategy.rank)
    with strategy.scope():
        kinds = ms.metrics.Mean, ms.metrics.Accuracy, lambda: ms.metrics.Confusion(3)
        mean, accuracy, confusion = (kind() for kind in kinds)

    def step():
        mean.update_state(true / 7, sample_weight=predicted)
        accuracy.update_state(true, predicted)
        confusion.update_state(true, predicted)

    strategy.run(step)
    whole = np.concatenate([rows(r) for r in range(size)], axis=1)
    matrix = np.zeros((3, 3), int)
    np.add.at(matrix, tuple(whole), 1)
    want = np.average(whole[0] / 7, weights=whole[1]) if whole.size else 0.0
    hits = np.trace(matrix) / max(matrix.sum(), 1)

    def check():
        np.testing.assert_array_equal(confusion.result(), matrix)
        np.testing.assert_allclose([mean.result(), accuracy.result()], [want, hits], rtol=1e-14)

    check()
    path = strategy.broadcast(str(tmp_path_factory.mktemp("metrics") / "c"))
    checkpoint = ms.Checkpoint(mean=mean, accuracy=accuracy, confusion=confusion)
    checkpoint.write(path)
    for metric in (mean, accuracy, confusion):
        metric.reset_state()
    assert (mean.result(), confusion.result().sum()) == (0.0, 0)
    checkpoint.read(path).assert_consumed()
    check()
