"""All-reduces by MPI, message by message, where memory cannot be shared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.collectives.algorithms.algorithm import StagedAlgorithm
from mpistrat.collectives.inter_node import reduce_by_mpi
from mpistrat.collectives.layout import ALONE, Bucket, buckets
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.elementwise import (
    multiply,
    recompute_nonfinite_means,
    safe_power,
    sum_scaled_down,
)

# Packs are bounded, so scratch memory is, whatever the tree.
_LIMIT = 4 * 1024 * 1024


class Sent(NamedTuple):
    """Leaves ready to travel.

    Attributes:
      wires: The leaves as they are reduced.
      messages: Which travel as one, their values in one piece, and room for the results.
    """

    wires: list[Array]
    messages: list[tuple[Bucket, Array, Array]]


@final
class MpiMessages(StagedAlgorithm):
    """One MPI_Allreduce for each large leaf, without a copy, and for small ones together."""

    name = "native"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Tell whether memory cannot be shared."""
        return not reducer.node.possible

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> Sent:
        """Make messages, and room for what comes."""
        plan = self.plan
        wires = plan.convert_to_wire(values, weights, fresh=plan.is_weighting)
        messages = []
        for bucket in buckets(plan.specs, _LIMIT, False, ALONE):
            bucket_wires = [wires[piece.leaf] for piece in bucket.pieces]
            send = (
                bucket_wires[0]
                if len(bucket_wires) == 1
                else np.concatenate([w.reshape(-1) for w in bucket_wires])
            )
            messages.append((bucket, send, np.empty_like(send)))
        return Sent(wires, messages)

    def finish(self, staged: Sent, scales: Scales) -> list[Any]:
        """Send the messages, and return the results."""
        plan, size = self.plan, self.reducer.comm.size
        sent_parts = [(i, part) for b, send, _ in staged.messages for i, part in _parts(b, send)]
        if plan.is_weighting:
            for i, part in sent_parts:
                factors, _ = scales.of(i)
                if factors is not None:
                    multiply(part, factors[self.reducer.comm.rank])
        for _, send, recv in staged.messages:
            self._reduce(send, recv)
        results = plan.finish_totals(self._totals(staged), scales.divisors)
        divisors = scales.divisors
        if divisors is not None and size > 1:
            power = safe_power(size)
            for i, value in sent_parts:
                low = functools.partial(_low_total, self._reduce, value, power)
                recompute_nonfinite_means(
                    results[i], low, divisors[i if len(divisors) > 1 else 0], power
                )
        return results

    def _reduce(self, send: Array, recv: Array) -> None:
        reduce_by_mpi(self.reducer.comm, send, recv, self.plan.op)

    def _totals(self, sent: Sent) -> list[Array]:
        totals = [w if w.size else np.empty_like(w) for w in sent.wires]
        for bucket, _, recv in sent.messages:
            for i, flat in _parts(bucket, recv):
                part = flat.reshape(sent.wires[i].shape)
                # Keeping one is to keep nothing else.
                totals[i] = part.copy() if len(bucket.pieces) > 1 else part
        return totals


def _parts(bucket: Bucket, message: Array) -> list[tuple[int, Array]]:
    """Return each leaf of a message and its part, as a flat array."""
    flat = message.reshape(-1)
    return [(p.leaf, flat[p.column : p.column + p.stop]) for p in bucket.pieces]


def _low_total(
    ufunc: Callable[[Array, Array], None], value: Array, power: float, where: NDArray[np.intp]
) -> Array:
    """Return the sums at some places of everybody's values, scaled down before. Collective."""
    send = sum_scaled_down([value], None, power, where)
    total = np.empty_like(send)
    ufunc(send, total)
    return total
