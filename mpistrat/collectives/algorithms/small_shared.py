"""All-reduces in shared memory where each rank reduces the rows of all for itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.algorithms.algorithm import AllReduceAlgorithm
from mpistrat.collectives.layout import segments_of
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import put
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.elementwise import Overflow, divide, recompute_means_of_rows
from mpistrat.kernels.loops import fold_rows
from mpistrat.kernels.ops import UFUNCS
from mpistrat.kernels.rows import reduce_rows


class _Cut(NamedTuple):
    """Where leaves are in the total: one, or neighbours of one shape.

    Attributes:
      line: From where to where.
      shape: The shape to give to it; None for a number.
      leaves: How many leaves it is.
    """

    line: slice
    shape: tuple[int, ...] | None
    leaves: int


@final
class SmallSharedMemory(AllReduceAlgorithm):
    """Each rank writes to its row, comes to the handshake, and reduces all rows for itself.

    Rows have two sides, which take turns: a side is written to again in the next call but one, and
    to come to the handshake of the call between, each rank has to be through with this one.
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
        numbers = plan.number_flags or (False,) * len(plan.shapes)
        self._cuts = _cuts([None if n else s for s, n in zip(plan.shapes, numbers, strict=True)])
        # If no leaf has to be put into shape, that is half of what it takes to cut hundreds.
        flat = all(cut.leaves == 1 and len(cut.shape or ()) == 1 for cut in self._cuts)
        self._lines = [cut.line for cut in self._cuts] if flat else None

    @property
    def is_valid(self) -> bool:
        """Whether memory is still shared: else all of it goes by MPI, on all ranks."""
        return not self._arena.is_refused

    def run(self, inputs: ReductionInputs) -> list[Any]:
        """Reduce the inputs; see `AllReduceAlgorithm.run`. Collective."""
        session = self._lockstep.session
        session.check()  # before anything is written
        side = (session.calls + 1) & 1
        try:
            self._stage(self._own_rows[side], inputs.values, inputs.weights)
        except Exception as error:
            self._lockstep.refuse(self.plan.text, error)
        results = self._cut(self._total(side, inputs))
        return results if inputs.outs is None else put(results, inputs.outs)

    def _stage(self, own_row: Array, values: Sequence[Any], weights: Sequence[float]) -> None:
        """Write to this rank's row. Not collective."""
        plan = self.plan
        if plan.is_mean and 0 in weights:
            if plan.is_weighting and plan.weight_count == 1:
                return  # values without a weight are never read
            values = plan.convert_to_wire(values, weights, fresh=False)
        if plan.is_native:
            np.concatenate(values, axis=None, out=own_row)
            return
        with np.errstate(all="ignore"):
            np.concatenate(values, axis=None, out=own_row, casting="unsafe")

    def _cut(self, total: Array) -> list[Any]:
        if self._lines is not None:
            parts: list[Any] = [total[line] for line in self._lines]
        else:
            parts = []
            for line, shape, count in self._cuts:
                if shape is None:
                    parts.append(total[line.start])
                elif count == 1:
                    parts.append(total[line].reshape(shape))
                else:
                    parts.extend(total[line].reshape(count, *shape))
        if self.plan.keeps_dtypes:
            return parts
        with np.errstate(all="ignore"):
            return self.plan.finish_totals(parts)

    def _total(self, side: int, inputs: ReductionInputs) -> Array:
        plan = self.plan
        scales = self.handshake(inputs, plan.pack_weights(inputs.weights))
        hooks = self._lockstep.hooks
        if hooks.on_moving is not None:
            hooks.on_moving()
        total = np.empty(self._columns, self._dtype)
        if plan.has_equal_weights or (plan.is_weighting and scales.table is None):
            self._reduce(side, total)
        else:
            self._weigh(side, total, scales)
        if hooks.on_moved is not None:
            hooks.on_moved([total])
        return total

    def _reduce(self, side: int, total: Array) -> None:
        rows, overflow = self._rows[side], self._overflow
        if overflow is None:
            quiet().run(fold_rows, self._ufunc, rows, total)
            return
        overflow.quiet().run(fold_rows, self._ufunc, rows, total)
        quiet().run(divide, total, self._divisor)
        if overflow.reports:
            overflow.reports.clear()
            quiet().run(recompute_means_of_rows, total, rows, None, self._divisor)

    def _weigh(self, side: int, total: Array, scales: Scales) -> None:
        is_compiled = self.reducer.node.is_compiled(self.plan.op, self._dtype, self._columns)
        rows = self._sides[side]
        if self.plan.weight_count == 1:
            table, divisor = scales.of(0)
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
        for start, stop, table, divisor in segments_of(self.plan.buckets[0], scales):
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


def _cuts(shapes: Sequence[tuple[int, ...] | None]) -> tuple[_Cut, ...]:
    """Return the ranges of leaves in a row; the shape None is a number.

    Neighbours of one shape are one cut: an array is taken apart in one call.
    """
    cuts: list[_Cut] = []
    at = 0
    for shape, equal_shapes in itertools.groupby(shapes):
        count, size = len(list(equal_shapes)), math.prod(shape or ())
        # An array without dimensions comes out as a number.
        has_dimensions = shape is not None and len(shape) > 0
        for leaf_count in [count] if has_dimensions else [1] * count:
            cuts.append(_Cut(slice(at, at + leaf_count * size), shape, leaf_count))
            at += leaf_count * size
    return tuple(cuts)
