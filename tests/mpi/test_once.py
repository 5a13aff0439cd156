"""What one rank does for all, on real ranks."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import same

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("per_node", [0, 1, 2])
def test_first_ranks_call_it(world, per_node, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))  # read by a new communicator
    with ms.MirroredStrategy(comm=world.Dup()).scope():
        found = ms.once_per_node(lambda: {"rank": world.rank, "large": np.arange(300_000)})
    leader = world.rank // per_node * per_node if per_node else 0
    same(world, (found["rank"] == leader, found["large"].sum()), (True, 44_999_850_000))


def test_a_failure_is_one_on_all(world):
    def download():
        raise TimeoutError(f"rank {world.rank} has waited without success")

    with pytest.raises(TimeoutError, match="rank 0 has waited without success"):
        ms.once(download)
    same(world, ms.once(lambda: world.rank), 0)
