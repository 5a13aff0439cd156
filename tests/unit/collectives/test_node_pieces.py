"""Large sums over 3 or 5 nodes: each node adds its piece for all, in the order of the nodes."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.collectives import inter_node
from mpistrat.testing import run_ranks

LAYOUTS = [(3, 1, True), (6, 2, True), (5, 2, True), (5, 1, True), (4, 2, False), (4, 1, False)]
DTYPES = ["f2", "f4", "f8", "c8", "i4", "u1"]


@pytest.fixture
def piece_counts(monkeypatch):
    """How many slices were added in pieces; pieces may be small."""
    counts = []
    add_pieces = inter_node.InterNodeGroup._sum_in_pieces

    def count_pieces(group, part, total):
        counts.append(part.size)
        add_pieces(group, part, total)

    monkeypatch.setattr(inter_node, "MIN_PIECE_NBYTES", 8)
    monkeypatch.setattr(inter_node.InterNodeGroup, "_sum_in_pieces", count_pieces)
    return counts


def draw_values(rank, dtype, size=30_001):
    return np.random.default_rng(rank).integers(0, 9, size).astype(dtype)


def reduce_on_ranks(op, draw, rank_count, weight=None):
    def program(comm):
        strategy, results = ms.MirroredStrategy(comm=comm), []

        def step():
            total = ms.get_replica_context().all_reduce(op, draw(comm.rank), weight=weight)
            results.append(np.array(total))

        strategy.run(step)
        return results[0]

    return run_ranks(program, rank_count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank_count", "node_size", "is_in_pieces"), LAYOUTS)
def test_sums_are_exact(monkeypatch, piece_counts, rank_count, node_size, is_in_pieces, dtype):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(node_size))
    totals = reduce_on_ranks("SUM", lambda rank: draw_values(rank, dtype), rank_count)
    expected = functools.reduce(np.add, [draw_values(rank, dtype) for rank in range(rank_count)])
    for total in totals:
        np.testing.assert_array_equal(total, expected, strict=True)
    assert bool(piece_counts) == is_in_pieces


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_order_is_that_of_the_nodes(monkeypatch, piece_counts, op):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")

    def draw(rank):
        return np.random.default_rng(rank).standard_normal(30_001).astype("f4")

    totals = reduce_on_ranks(op, draw, 6)
    sums = [draw(rank) + draw(rank + 1) for rank in (0, 2, 4)]
    expected = functools.reduce(np.add, sums)
    expected = expected / np.float32(6) if op == "MEAN" else expected
    for total in totals:
        assert total.tobytes() == expected.tobytes()
    assert piece_counts


def test_means_that_are_not_finite(monkeypatch, piece_counts):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "1")
    largest = np.finfo("f4").max

    def draw(rank):
        values = draw_values(rank, "f4")
        values[0] = largest  # the sum overflows, the mean does not
        values[1], values[2] = (np.nan if rank == 1 else 1.0), (np.inf if rank == 2 else 1.0)
        return values

    totals = reduce_on_ranks("MEAN", draw, 3)
    for total in totals:
        assert (total[0], total[2]) == (largest, np.inf) and np.isnan(total[1])
        assert total.tobytes() == totals[0].tobytes()
    assert piece_counts


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_other_operations_stay_with_mpi(monkeypatch, piece_counts, op):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "1")
    totals = reduce_on_ranks(op, lambda rank: draw_values(rank, "f4"), 3)
    ufunc = np.minimum if op == "MIN" else np.maximum
    expected = ufunc.reduce([draw_values(rank, "f4") for rank in range(3)])
    np.testing.assert_array_equal(totals[0], expected)
    assert not piece_counts


def test_small_sums_stay_with_mpi(monkeypatch, piece_counts):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "1")
    monkeypatch.setattr(inter_node, "MIN_PIECE_NBYTES", 1 << 16)
    size = 3 * (1 << 14)
    reduce_on_ranks("SUM", lambda rank: draw_values(rank, "f4", size - 1), 3)
    assert not piece_counts
    reduce_on_ranks("SUM", lambda rank: draw_values(rank, "f4", size), 3)
    assert piece_counts
