"""Gradients through collectives on real ranks: against sums and slices that NumPy makes."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_all_gather_of_uneven_parts(world, rows, dtype):
    """Replica i has i times `rows` rows, so the first has none; all bring whole numbers."""
    sizes = [rows * rank for rank in range(world.size)]

    def replica(mine):
        result, pull = ms.vjp.all_gather(mine, axis=0)
        return result, pull(np.arange(result.size).reshape(result.shape) % 7 + world.rank)

    mine = np.full((sizes[world.rank], 2), world.rank, dtype)
    result, gradient = ms.MultiWorkerMirroredStrategy().run(replica, args=(mine,))
    ranks = np.arange(world.size)
    np.testing.assert_array_equal(result[:, 0], np.repeat(ranks, sizes))
    brought = np.arange(2 * sum(sizes)).reshape(-1, 2) % 7 * world.size + ranks.sum()
    start = sum(sizes[: world.rank])
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, brought[start : start + sizes[world.rank]])


@pytest.mark.parametrize("size", [1, 30_000])
def test_a_weighted_mean(world, size):
    weights = np.arange(world.size) + 1.0

    def replica():
        _, pull = ms.vjp.all_reduce("MEAN", np.ones(size), weight=weights[world.rank])
        return pull(np.full(size, 1.0 + world.rank))

    gradient = ms.MultiWorkerMirroredStrategy().run(replica)
    want = weights.sum() * weights[world.rank] / weights.sum()  # they bring 1, 2, ... in turn
    np.testing.assert_allclose(gradient, want, rtol=1e-14)
