"""All-reduces of two ranks that share memory: each reduces everything into its results."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.algorithms.algorithm import StagedAlgorithm
from mpistrat.collectives.layout import buckets, fill
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import results_for
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.ops import UFUNCS
from mpistrat.kernels.rows import reduce_rows

# What two ranks pass through shared memory at once: so little that it stays in their caches (25 MB
# on 2 cores: 2.6 ms, in pieces of 8 MiB 3.9), and so much that they seldom meet, which takes turns
# of the scheduler where all cores are in use (there 59 ms, in pieces of 0.5 MiB 156).
_PIECE = 2 * 1024 * 1024


@final
class PairedSharedMemory(StagedAlgorithm):
    """Pieces of two ranks of one node, each of which reduces all of them for itself.

    Its own values it reads where they lie. Instead of 3.5 times the bytes of a rank, as where each
    reduces a half and copies both, 2 pass through memory, and what is between them through caches.
    """

    name = "node"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Tell whether there are two ranks, known to share memory, with enough of it."""
        arena, two = reducer.node.arena, reducer.comm.size == 2
        return (
            two
            and plan.keeps_dtypes
            and arena.has_room(plan.largest_bucket_nbytes)
            and arena.nodes().node_count == 1
        )

    def __init__(self, reducer: Reducer, plan: ReductionPlan):
        """Cut the leaves into pieces."""
        super().__init__(reducer, plan)
        self._buckets = buckets(plan.specs, _PIECE)
        # As many are reduced as one, whatever the pieces: which loop does it follows from that.
        self._sizes: dict[np.dtype[Any], int] = collections.Counter()
        for dtype, size in plan.specs:
            self._sizes[dtype] += size

    @property
    def is_valid(self) -> bool:
        """Whether there is still memory."""
        return self.reducer.node.arena.has_room(self.plan.largest_bucket_nbytes)

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> tuple[Sequence[Array], list[Array]]:
        """Fill the first piece of this rank's own memory; return C-ordered leaves, and results."""
        plan, node = self.plan, self.reducer.node
        values = plan.leaves_to_copy(values, weights, flat=True)
        node.compile(plan)
        # A thread or a child that may not call must not write first.
        self.reducer.lockstep.session.check()
        fill(self._buckets[0], values, self._rows(0)[node.rank])
        return values, results_for(plan, values, outs, self.reducer.pool, late=True).arrays

    def _rows(self, number: int) -> Array:
        """Return two rows for a piece: pieces take turns in two pairs, which lie side by side."""
        dtype = self._buckets[number].dtype
        scratch = self.reducer.node.arena.scratch(dtype)
        columns = min(scratch.shape[1], _PIECE // dtype.itemsize)
        at = 2 * columns * (number & 1)
        return scratch.reshape(-1)[at : at + 2 * columns].reshape(2, columns)

    def finish(self, staged: tuple[Sequence[Array], list[Array]], scales: Scales) -> list[Any]:
        """Reduce piece by piece; a rank is one piece ahead of the other at most."""
        reduces, rank, ufunc = self.reducer.node, self.reducer.node.rank, UFUNCS[self.plan.op]
        node = reduces.arena.nodes().node
        values, results = staged
        flat_values = [value.reshape(-1) for value in values]
        outs = [array.reshape(-1) for array in results]
        with reduces.moving():
            for number, bucket in enumerate(self._buckets):
                rows, element_count = self._rows(number), self._sizes[bucket.dtype]
                if number:
                    fill(bucket, values, rows[rank])
                    node.barrier()
                is_compiled = reduces.is_compiled(self.plan.op, bucket.dtype, element_count)
                for leaf, start, stop, column, _ in bucket.pieces:
                    table, divisor = scales.of(leaf)
                    end, target = column + stop - start, outs[leaf][start:stop]
                    if table is not None or divisor != 1.0:
                        reduce_rows(
                            ufunc,
                            rows,
                            target[None],
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
                    ufunc(*pair, out=target)
            node.barrier()
        return results
