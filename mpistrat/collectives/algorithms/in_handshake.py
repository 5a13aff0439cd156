"""All-reduces that are sent with the handshake: every rank reduces all values, in rank order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.algorithms.algorithm import AllReduceAlgorithm
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import write_outs
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.elementwise import Overflow, divide, multiply, recompute_means_of_rows
from mpistrat.kernels.ops import UFUNCS


class _Run(NamedTuple):
    """Adjacent leaves of one dtype that are reduced at once.

    Attributes:
      values: The values of each rank, as one flat array.
      cuts: The start, the end and the shape of each leaf in the sum; the shape None is a number.
    """

    values: tuple[Array, ...]
    cuts: tuple[tuple[int, int, tuple[int, ...] | None], ...]


@final
class InHandshake(AllReduceAlgorithm):
    """Everything is sent with the handshake, after the weights of a mean."""

    name = "small"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Return whether weights and values fit in the payload of a handshake."""
        return reducer.lockstep.can_carry(8 * plan.weight_count + plan.nbytes)

    def __init__(self, reducer: Reducer, plan: ReductionPlan):
        """Find each rank's values in the payloads that are received."""
        super().__init__(reducer, plan)
        self._received = reducer.lockstep.received_payloads
        self._ufunc: Callable[..., Any] = UFUNCS[plan.op]
        self._is_exact = all(dtype.kind in "iu" for dtype, _ in plan.specs)
        self._overflow = Overflow() if plan.is_mean else None
        self._silence_warnings = quiet if self._overflow is None else self._overflow.quiet
        self._has_one_weight = plan.weight_count == 1 or not plan.is_mean  # for all leaves
        self._runs = self._find_runs(0, len(plan.specs))
        self._runs_by_leaf: list[tuple[_Run, ...]] = []

    def run(self, inputs: ReductionInputs) -> list[Any]:
        """Reduce the inputs; see `AllReduceAlgorithm.run`. Collective."""
        plan, (values, weights, outs, *_) = self.plan, inputs
        if not plan.is_native or (plan.is_weighting and 0 in weights):
            # A value of weight 0 is never read.
            with np.errstate(all="ignore"):
                values = plan.convert_to_wire(values, weights, needs_copies=False)
        payload = plan.pack_weights(weights)
        for leaf in values:
            payload += leaf.tobytes() if type(leaf) is np.ndarray else np.asarray(leaf).tobytes()
        totals = self._compute_totals(self.handshake(inputs, payload))
        return totals if outs is None else write_outs(totals, outs)

    def _compute_totals(self, scales: Scales) -> list[Any]:
        """Return the totals of the values that the last handshake received. Not collective."""
        plan, reduce_payloads = self.plan, self._reduce_payloads
        totals = (
            reduce_payloads(scales)
            if self._is_exact
            else self._silence_warnings().run(reduce_payloads, scales)
        )
        if plan.keeps_dtypes:
            return totals
        with np.errstate(all="ignore"):
            return plan.finish_totals(totals)

    def _reduce_payloads(self, scales: Scales) -> list[Any]:
        runs, overflow = self._runs, self._overflow
        if self._has_one_weight or scales.is_uniform:
            reduction_arguments = (self._ufunc, *scales.select_leaf(0), overflow)
            if len(runs) == 1:
                return _reduce_run(runs[0], *reduction_arguments)
            return list(
                itertools.chain.from_iterable(
                    _reduce_run(run, *reduction_arguments) for run in runs
                )
            )
        if not self._runs_by_leaf:
            self._runs_by_leaf = [
                self._find_runs(leaf, leaf + 1) for leaf in range(len(self.plan.specs))
            ]
        totals: list[Any] = []
        for leaf, (run,) in enumerate(self._runs_by_leaf):
            totals += _reduce_run(run, self._ufunc, *scales.select_leaf(leaf), overflow)
        return totals

    def _find_runs(self, first_leaf: int, end_leaf: int) -> tuple[_Run, ...]:
        """Return views of the received payloads: the values of all ranks of a range of leaves."""
        plan, runs = self.plan, []
        start = 8 * plan.weight_count + sum(
            size * d.itemsize for d, size in plan.specs[:first_leaf]
        )
        for dtype, leaf_numbers in itertools.groupby(
            range(first_leaf, end_leaf), lambda i: plan.specs[i][0]
        ):
            cuts, count = [], 0
            for leaf in leaf_numbers:
                size = plan.specs[leaf][1]
                is_number = plan.number_flags and plan.number_flags[leaf]
                shape = None if is_number else plan.shapes[leaf]
                cuts.append((count, count + size, shape))
                count += size
            stop = start + count * dtype.itemsize
            values = tuple(row[start:stop].view(dtype) for row in self._received)
            runs.append(_Run(values, tuple(cuts)))
            start = stop
        return tuple(runs)


def _reduce_run(
    run: _Run,
    ufunc: Callable[..., Any],
    factors: Array | None,
    divisor: float,
    overflow: Overflow | None,
) -> list[Any]:
    """Return the leaves of a run: the values of all ranks reduced, divided, and cut.

    NumPy notes an overflow in `overflow` meanwhile; then the mean is computed in another way.
    """
    values = run.values
    if factors is not None:
        values = tuple(value.copy() for value in values)
        for value, factor in zip(values, factors, strict=True):
            multiply(value, factor)
    total: Array = ufunc(values[0], values[1]) if len(values) > 1 else values[0].copy()
    for value in values[2:]:
        ufunc(total, value, out=total)
    if divisor != 1.0:
        divide(total, divisor)
    if overflow is not None and overflow.reports:
        overflow.reports.clear()
        recompute_means_of_rows(total, run.values, factors, divisor)
    return [total[a] if shape is None else total[a:b].reshape(shape) for a, b, shape in run.cuts]
