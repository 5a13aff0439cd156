"""All-reduces over one rank: its values are the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from mpistrat.arrays import Array
from mpistrat.collectives.algorithms.algorithm import StagedAlgorithm
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import copy_single_rank_values
from mpistrat.collectives.weights import Scales


@final
class SingleRank(StagedAlgorithm):
    """One copy of the values; no copy in place."""

    name = "alone"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Return whether there is one rank."""
        return reducer.comm.size == 1

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> tuple[Any, ...]:
        """Return the values, the weights and the outs unchanged."""
        return values, weights, outs

    def finish(self, staged: tuple[Any, ...], scales: Scales) -> list[Any]:
        """Return the values, in `outs` or as fresh arrays."""
        plan, (values, weights, outs) = self.plan, staged
        if scales.table is None and (scales.divisors is None or set(scales.divisors) == {1}):
            if outs is not None and values is outs:
                return outs if isinstance(outs, list) else list(outs)
            return copy_single_rank_values(
                values, outs, [d.result for d in plan.dtypes], self.reducer.pool
            )
        # Sums over several examples; or all weights are 0, and there is no mean.
        return plan.finish_totals(
            plan.convert_to_wire(values, weights, needs_copies=True), scales.divisors
        )
