"""All-reduces in shared memory where each rank reduces the rows of all for itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.algorithms.algorithm import AllReduceAlgorithm
from mpistrat.collectives.layout import make_segments
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import write_outs
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.elementwise import Overflow, divide, recompute_means_of_rows
from mpistrat.kernels.loops import fold_rows
from mpistrat.kernels.ops import UFUNCS
from mpistrat.kernels.rows import reduce_rows


class _LeafRange(NamedTuple):
    """The range of a leaf in the total, or of neighbours of one shape.

    Attributes:
      columns: The range.
      shape: The shape of each leaf; None for a number.
      leaf_count: The number of leaves.
    """

    columns: slice
    shape: tuple[int, ...] | None
    leaf_count: int


@final
class SmallSharedMemory(AllReduceAlgorithm):
    """Each rank writes to its row, makes the handshake, and reduces all rows for itself.

    Rows have two sides, which are used in turns. A side is written again in the next call but one;
    before that, each rank must have finished with it to make the handshake of the call between.
    """

    name = "direct"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Return whether all leaves have one dtype and fit into the memory of the arena."""
        has_one_dtype = len({dtype for dtype, _ in plan.specs}) == 1
        arena = reducer.node.arena
        return (
            has_one_dtype
            and len(plan.buckets) == 1
            and plan.largest_bucket_nbytes <= arena.max_direct_nbytes
            and not arena.is_refused
        )

    def __init__(self, reducer: Reducer, plan: ReductionPlan):
        """Find the rows of both sides."""
        super().__init__(reducer, plan)
        (bucket,) = plan.buckets
        node, lockstep = reducer.node, reducer.lockstep
        self._lockstep, self._arena = lockstep, node.arena
        self._divisor = reducer.comm.size
        self._overflow = Overflow() if plan.is_mean else None
        self._ufunc: Callable[..., Any] = UFUNCS[plan.op]
        self._columns, self._dtype = bucket.columns, bucket.dtype
        self._sides = node.arena.sides(bucket.dtype)
        self._rows = tuple(tuple(row[: bucket.columns] for row in side) for side in self._sides)
        self._own_rows = tuple(side[node.rank] for side in self._rows)
        number_flags = plan.number_flags or (False,) * len(plan.shapes)
        self._leaf_ranges = _find_leaf_ranges(
            [
                None if is_number else s
                for s, is_number in zip(plan.shapes, number_flags, strict=True)
            ]
        )
        # Cutting hundreds of leaves takes half of the time if no leaf has to be reshaped.
        is_flat = all(
            leaf_range.leaf_count == 1 and len(leaf_range.shape or ()) == 1
            for leaf_range in self._leaf_ranges
        )
        self._flat_columns = (
            [leaf_range.columns for leaf_range in self._leaf_ranges] if is_flat else None
        )

    @property
    def is_valid(self) -> bool:
        """Whether memory is still shared; without it, all ranks use MPI."""
        return not self._arena.is_refused

    def run(self, inputs: ReductionInputs) -> list[Any]:
        """Reduce the inputs; see `AllReduceAlgorithm.run`. Collective."""
        session = self._lockstep.session
        session.check()  # before anything is written
        side = (session.calls + 1) & 1
        try:
            self._write_own_row(self._own_rows[side], inputs.values, inputs.weights)
        except Exception as error:
            self._lockstep.fail_collectively(self.plan.text, error)
        results = self._cut_total(self._reduce_inputs(side, inputs))
        return results if inputs.outs is None else write_outs(results, inputs.outs)

    def _write_own_row(
        self, own_row: Array, values: Sequence[Any], weights: Sequence[float]
    ) -> None:
        """Write to this rank's row. Not collective."""
        plan = self.plan
        if plan.is_mean and 0 in weights:
            if plan.is_weighting and plan.weight_count == 1:
                return  # values without a weight are never read
            values = plan.convert_to_wire(values, weights, needs_copies=False)
        if plan.is_native:
            np.concatenate(values, axis=None, out=own_row)
            return
        with np.errstate(all="ignore"):
            np.concatenate(values, axis=None, out=own_row, casting="unsafe")

    def _cut_total(self, total: Array) -> list[Any]:
        if self._flat_columns is not None:
            leaves: list[Any] = [total[columns] for columns in self._flat_columns]
        else:
            leaves = []
            for columns, shape, count in self._leaf_ranges:
                if shape is None:
                    leaves.append(total[columns.start])
                elif count == 1:
                    leaves.append(total[columns].reshape(shape))
                else:
                    leaves.extend(total[columns].reshape(count, *shape))
        if self.plan.keeps_dtypes:
            return leaves
        with np.errstate(all="ignore"):
            return self.plan.finish_totals(leaves)

    def _reduce_inputs(self, side: int, inputs: ReductionInputs) -> Array:
        plan = self.plan
        scales = self.handshake(inputs, plan.pack_weights(inputs.weights))
        hooks = self._lockstep.hooks
        if hooks.on_moving is not None:
            hooks.on_moving()
        total = np.empty(self._columns, self._dtype)
        if plan.has_equal_weights or (plan.is_weighting and scales.table is None):
            self._reduce_rows(side, total)
        else:
            self._reduce_weighted_rows(side, total, scales)
        if hooks.on_moved is not None:
            hooks.on_moved([total])
        return total

    def _reduce_rows(self, side: int, total: Array) -> None:
        rows, overflow = self._rows[side], self._overflow
        if overflow is None:
            quiet().run(fold_rows, self._ufunc, rows, total)
            return
        overflow.quiet().run(fold_rows, self._ufunc, rows, total)
        quiet().run(divide, total, self._divisor)
        if overflow.reports:
            overflow.reports.clear()
            quiet().run(recompute_means_of_rows, total, rows, None, self._divisor)

    def _reduce_weighted_rows(self, side: int, total: Array, scales: Scales) -> None:
        is_compiled = self.reducer.node.is_compiled(self.plan.op, self._dtype, self._columns)
        rows = self._sides[side]
        if self.plan.weight_count == 1:
            table, divisor = scales.select_leaf(0)
            reduce_rows(
                self._ufunc,
                rows,
                total[None],
                0,
                len(total),
                scales=table,
                divisor=divisor,
                is_compiled=is_compiled,
            )
            return
        for start, stop, table, divisor in make_segments(self.plan.buckets[0], scales):
            reduce_rows(
                self._ufunc,
                rows,
                total[None],
                start,
                stop,
                scales=table,
                divisor=divisor,
                is_compiled=is_compiled,
            )


def _find_leaf_ranges(shapes: Sequence[tuple[int, ...] | None]) -> tuple[_LeafRange, ...]:
    """Return the ranges of leaves in a row; the shape None is a number.

    Neighbours of one shape are one range: NumPy takes an array apart in one call.
    """
    leaf_ranges: list[_LeafRange] = []
    start = 0
    for shape, equal_shapes in itertools.groupby(shapes):
        count, size = len(list(equal_shapes)), math.prod(shape or ())
        # Unpacking an array makes numbers, so arrays without dimensions are cut one by one.
        has_dimensions = shape is not None and len(shape) > 0
        for leaf_count in [count] if has_dimensions else [1] * count:
            leaf_ranges.append(
                _LeafRange(slice(start, start + leaf_count * size), shape, leaf_count)
            )
            start += leaf_count * size
    return tuple(leaf_ranges)
