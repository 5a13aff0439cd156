"""All-reduces of two ranks that share memory: each reduces everything into its results."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.algorithms.algorithm import StagedAlgorithm
from mpistrat.collectives.layout import fill_bucket, make_buckets
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import allocate_results
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.ops import UFUNCS
from mpistrat.kernels.rows import reduce_rows

# The bytes that two ranks pass through shared memory at once: so few that they stay in the caches
# (25 MB on 2 cores: 2.6 ms, in pieces of 8 MiB 3.9), and so many that the ranks seldom wait for
# each other, which takes turns of the scheduler where all cores are in use (there 59 ms, in pieces
# of 0.5 MiB 156).
_PIECE_NBYTES = 2 * 1024 * 1024


@final
class PairedSharedMemory(StagedAlgorithm):
    """Pieces of two ranks of one node, each of which reduces all of them for itself.

    A rank reads its own values in place. So twice the bytes of a rank pass through memory, and the
    pieces through caches; if each rank reduced a half and copied both, it would be 3.5 times.
    """

    name = "node"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Return whether there are two ranks that share enough memory already."""
        arena, has_two_ranks = reducer.node.arena, reducer.comm.size == 2
        return (
            has_two_ranks
            and plan.keeps_dtypes
            and arena.has_room(plan.largest_bucket_nbytes)
            and arena.nodes().node_count == 1
        )

    def __init__(self, reducer: Reducer, plan: ReductionPlan):
        """Cut the leaves into pieces."""
        super().__init__(reducer, plan)
        self._buckets = make_buckets(plan.specs, _PIECE_NBYTES)
        # The elements of each dtype, whatever the pieces: the choice of the loop follows from them.
        self._element_counts: dict[np.dtype[Any], int] = collections.Counter()
        for dtype, size in plan.specs:
            self._element_counts[dtype] += size

    @property
    def is_valid(self) -> bool:
        """Whether there is still enough memory."""
        return self.reducer.node.arena.has_room(self.plan.largest_bucket_nbytes)

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> tuple[Sequence[Array], list[Array]]:
        """Return C-ordered leaves, and results; the first piece is copied to this rank's row."""
        plan, node = self.plan, self.reducer.node
        values = plan.prepare_leaves_to_copy(values, weights, needs_contiguous=True)
        node.compile_loops(plan)
        # A thread or a child process that must not make calls must not write either.
        self.reducer.lockstep.session.check()
        fill_bucket(self._buckets[0], values, self._select_rows(0)[node.rank])
        return values, allocate_results(
            plan, values, outs, self.reducer.pool, reads_values_late=True
        ).arrays

    def _select_rows(self, piece_index: int) -> Array:
        """Return two rows for a piece; pieces use two adjacent pairs of rows in turns."""
        dtype = self._buckets[piece_index].dtype
        scratch = self.reducer.node.arena.scratch(dtype)
        columns = min(scratch.shape[1], _PIECE_NBYTES // dtype.itemsize)
        start = 2 * columns * (piece_index & 1)
        return scratch.reshape(-1)[start : start + 2 * columns].reshape(2, columns)

    def finish(self, staged: tuple[Sequence[Array], list[Array]], scales: Scales) -> list[Any]:
        """Return the results, reduced piece by piece.

        A rank is at most one piece ahead of the other.
        """
        node_reducer, rank, ufunc = self.reducer.node, self.reducer.node.rank, UFUNCS[self.plan.op]
        node = node_reducer.arena.nodes().node
        values, results = staged
        flat_values = [value.reshape(-1) for value in values]
        outs = [array.reshape(-1) for array in results]
        with node_reducer.begin_data_movement():
            for piece_index, bucket in enumerate(self._buckets):
                rows, element_count = (
                    self._select_rows(piece_index),
                    self._element_counts[bucket.dtype],
                )
                if piece_index:
                    fill_bucket(bucket, values, rows[rank])
                    node.barrier()
                is_compiled = node_reducer.is_compiled(self.plan.op, bucket.dtype, element_count)
                for leaf, start, stop, column, _ in bucket.pieces:
                    table, divisor = scales.select_leaf(leaf)
                    end, out_part = column + stop - start, outs[leaf][start:stop]
                    if table is not None or divisor != 1.0:
                        reduce_rows(
                            ufunc,
                            rows,
                            out_part[None],
                            column,
                            end,
                            scales=table,
                            divisor=divisor,
                            total_columns=element_count,
                            is_compiled=is_compiled,
                            shift=column,
                        )
                        continue
                    pair = [rows[0, column:end], rows[1, column:end]]
                    if flat_values[leaf].dtype == bucket.dtype:
                        pair[rank] = flat_values[leaf][start:stop]
                    ufunc(*pair, out=out_part)
            node.barrier()
        return results
