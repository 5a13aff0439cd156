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
from mpistrat.collectives.layout import OWN_MESSAGE_NBYTES, Bucket, make_buckets
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.elementwise import (
    multiply,
    recompute_nonfinite_means,
    safe_power,
    sum_scaled_down,
)

# The bytes of a message of several leaves; they bound the scratch memory, whatever the tree.
_MESSAGE_NBYTES = 4 * 1024 * 1024


class StagedMessages(NamedTuple):
    """Leaves ready to travel.

    Attributes:
      wires: The leaves in the dtypes in which they are reduced.
      messages: For each message its leaves, their values in one array, and an array for the totals.
    """

    wires: list[Array]
    messages: list[tuple[Bucket, Array, Array]]


@final
class MpiMessages(StagedAlgorithm):
    """One MPI_Allreduce for each leaf of 64 KiB and more, without a copy; small ones are joined."""

    name = "native"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Return whether memory cannot be shared."""
        return not reducer.node.can_share_memory

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> StagedMessages:
        """Return the messages, with arrays for their totals."""
        plan = self.plan
        wires = plan.convert_to_wire(values, weights, needs_copies=plan.is_weighting)
        messages = []
        for bucket in make_buckets(plan.specs, _MESSAGE_NBYTES, False, OWN_MESSAGE_NBYTES):
            bucket_wires = [wires[piece.leaf_index] for piece in bucket.pieces]
            send = (
                bucket_wires[0]
                if len(bucket_wires) == 1
                else np.concatenate([w.reshape(-1) for w in bucket_wires])
            )
            messages.append((bucket, send, np.empty_like(send)))
        return StagedMessages(wires, messages)

    def finish(self, staged: StagedMessages, scales: Scales) -> list[Any]:
        """Send the messages, and return the results."""
        plan, size = self.plan, self.reducer.comm.size
        sent_parts = [
            (i, part) for b, send, _ in staged.messages for i, part in _split_message(b, send)
        ]
        if plan.is_weighting:
            for i, part in sent_parts:
                factors, _ = scales.select_leaf(i)
                if factors is not None:
                    multiply(part, factors[self.reducer.comm.rank])
        for _, send, recv in staged.messages:
            self._reduce_message(send, recv)
        results = plan.finish_totals(self._collect_totals(staged), scales.divisors)
        divisors = scales.divisors
        if divisors is not None and size > 1:
            power = safe_power(size)
            for i, value in sent_parts:
                sum_lowered = functools.partial(
                    _sum_lowered_values, self._reduce_message, value, power
                )
                recompute_nonfinite_means(
                    results[i], sum_lowered, divisors[i if len(divisors) > 1 else 0], power
                )
        return results

    def _reduce_message(self, send: Array, recv: Array) -> None:
        reduce_by_mpi(self.reducer.comm, send, recv, self.plan.op)

    def _collect_totals(self, staged: StagedMessages) -> list[Array]:
        totals = [w if w.size else np.empty_like(w) for w in staged.wires]
        for bucket, _, recv in staged.messages:
            for i, flat in _split_message(bucket, recv):
                part = flat.reshape(staged.wires[i].shape)
                # A copy: who keeps it does not keep the other leaves of the message.
                totals[i] = part.copy() if len(bucket.pieces) > 1 else part
        return totals


def _split_message(bucket: Bucket, message: Array) -> list[tuple[int, Array]]:
    """Return each leaf of a message and its part, as a flat array."""
    flat = message.reshape(-1)
    return [(p.leaf_index, flat[p.column : p.column + p.stop]) for p in bucket.pieces]


def _sum_lowered_values(
    reduce_message: Callable[[Array, Array], None],
    value: Array,
    power: float,
    indices: NDArray[np.intp],
) -> Array:
    """Return the sums over all ranks at these indices, of values scaled down before. Collective."""
    send = sum_scaled_down([value], None, power, indices)
    total = np.empty_like(send)
    reduce_message(send, total)
    return total
