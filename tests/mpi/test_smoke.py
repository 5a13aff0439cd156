"""The ranks of a job find each other; without this nothing else on this rung means anything."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.mpi


def test_every_rank_is_there(world):
    ranks = np.full(world.size, -1)
    world.Allgather(np.array([world.rank]), ranks)
    assert ranks.tolist() == list(range(world.size))


def test_all_ranks_hold_the_same_sum(world):
    mine = np.arange(5.0) + world.rank
    total = np.empty(5)
    world.Allreduce(mine, total)
    p = world.size
    assert total.tolist() == (p * np.arange(5.0) + p * (p - 1) / 2).tolist()


@pytest.mark.mpi(min_size=2)
def test_uneven_and_empty_parts_arrive_in_rank_order(world):
    """Rank r sends r elements, so rank 0 sends none."""
    counts = list(range(world.size))
    got = np.full(sum(counts), -1)
    world.Allgatherv(np.full(world.rank, world.rank), (got, counts))
    assert got.tolist() == [r for r in counts for _ in range(r)]


def test_ranks_have_directories_of_their_own(world, tmp_path):
    (tmp_path / "mine").write_text(str(world.rank))
    world.Barrier()
    assert (tmp_path / "mine").read_text() == str(world.rank)
