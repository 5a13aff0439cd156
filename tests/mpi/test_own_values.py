"""Values that each rank has of its own, over MPI."""

from __future__ import annotations

import numpy as np

import mpistrat as ms


def test_arrays_of_each_rank_are_gathered(world):
    strategy = ms.MirroredStrategy()
    for count in (1, 100_000):  # in the handshake's frame, and beyond
        own = np.full((count * world.rank, 2), world.rank + 0.5)
        wanted = np.repeat(np.arange(world.size) + 0.5, count * np.arange(world.size))
        found = strategy.all_gather(own, axis=0)
        assert np.array_equal(found, np.stack([wanted, wanted], axis=1))


def test_objects_of_each_rank_are_gathered(world):
    strategy = ms.MultiWorkerMirroredStrategy()

    def own(rank, count):
        return {"names": [f"file {i}" for i in range(rank)], rank: np.arange(count * rank)}

    for count in (1, 100_000):
        for rank, tree in enumerate(strategy.gather_objects(own(world.rank, count))):
            wanted = own(rank, count)
            assert list(tree) == list(wanted)
            assert tree["names"] == wanted["names"]
            assert np.array_equal(tree[rank], wanted[rank])


def test_rows_of_each_rank_are_all_rows(world):
    strategy, x = ms.MirroredStrategy(), np.arange(17.0)
    rows = strategy.local_rows(x)
    each = -(-17 // world.size)
    assert np.array_equal(rows, x[world.rank * each : (world.rank + 1) * each])
    assert np.array_equal(strategy.all_gather(rows, axis=0), x)
