"""The plan of a large save, for many ranks on many nodes."""

import numpy as np
import pytest
from growth_rank0 import Planned
from python_calls import calls_of

from mpistrat.checkpoint import sharded

RNG = np.random.default_rng(3)


def nodes_of(rank_count, ranks_per_node, is_cyclic):
    """The first rank of each rank's node."""
    ranks = np.arange(rank_count)
    if is_cyclic:
        return (ranks % max(1, rank_count // ranks_per_node)).tolist()
    return (ranks // ranks_per_node * ranks_per_node).tolist()


def random_nodes():
    """The same, of nodes of any sizes in any order."""
    node_of_rank = RNG.integers(0, RNG.integers(1, 9), RNG.integers(1, 40)).tolist()
    return [node_of_rank.index(node) for node in node_of_rank]


CASES = [
    *(nodes_of(n, k, c) for n in (1, 2, 3, 70) for k in (1, 2, 64) for c in (False, True)),
    *(random_nodes() for _ in range(200)),
]


def test_each_file_is_written_by_the_ranks_of_one_node(monkeypatch):
    monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", 1 << 20)
    for leaders in CASES:
        planned = Planned(leaders)
        own_pieces = planned.plan()
        files = [[r for r, leader in enumerate(leaders) if leader == a] for a in sorted({*leaders})]
        assert planned._ranks_by_file == files
        nbytes = 0
        for piece, rank in planned._assign_pieces():
            assert rank in files[piece.region.file_number]
            assert (piece in own_pieces) == (rank == 0)
            nbytes += piece.stop - piece.start
        assert nbytes == sum(planned._file_sizes) >= 100_000_000 * 0.99


@pytest.mark.parametrize("ranks_per_node", [1, 64])
@pytest.mark.parametrize("is_cyclic", [False, True])
def test_a_plan_makes_as_many_calls_for_any_number_of_ranks(ranks_per_node, is_cyclic):
    counts = {
        calls_of(Planned(nodes_of(n, ranks_per_node, is_cyclic)).plan) for n in (256, 1024, 16_384)
    }
    assert len(counts) == 1, counts
