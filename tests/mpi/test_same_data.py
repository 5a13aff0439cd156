"""Data and points that differ between real ranks, or that are the same where parts were meant."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mpistrat as ms


@pytest.mark.parametrize("rows", [64, 400_000])
@pytest.mark.parametrize("order", [True, False])
def test_rows_that_differ(world, rows, order):
    strategy = ms.MirroredStrategy()
    x = np.arange(1.0 * rows)
    own = np.random.default_rng(world.rank).permutation(x) if order else x + world.rank
    data = ms.Dataset((own, np.ones(rows))).batch(world.size)
    if world.size > 1:
        with pytest.raises(ms.LockstepError, match=r"(?s)dataset no\. \d+: the ranks hold.*seed"):
            strategy.experimental_distribute_dataset(data)
    steps = strategy.experimental_distribute_dataset(data, rows_may_differ=True)
    assert next(iter(steps))[0].local == own[world.rank]


def test_rows_that_differ_in_their_last_bits(world):
    strategy = ms.MirroredStrategy()
    x = np.arange(1.0, 200_001.0) * (1 + world.rank * 2.0**-52)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.experimental_distribute_dataset(ms.Dataset(x).batch(world.size))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (world.rank == 0 and world.size > 1)
    assert all("last bits" in text for text in texts)


def test_a_point_that_differs(world):
    strategy = ms.MirroredStrategy()
    for value in (1.0, np.ones(100_000)):
        if world.size > 1:
            with pytest.raises(ms.DivergenceError, match="rank 0:"):
                strategy.all_reduce("sum", value, same=np.full(3, world.rank))
        total = strategy.all_reduce("sum", value, same=np.full(3, 7))
        assert np.all(total == world.size)


def test_a_dataset_that_is_not_distributed(world):
    strategy = ms.MultiWorkerMirroredStrategy()
    strategy._replicas.lockstep.state.has_compared_batches = (
        False  # whatever ran before in this job
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in ms.Dataset(np.arange(8.0)).batch(2):
            strategy.run(np.sum, args=(batch,))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (world.rank == 0 and world.size > 1)
    assert all("experimental_distribute_dataset" in text for text in texts)
