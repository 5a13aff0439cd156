"""All-reduces in shared memory where each rank reduces its slice, and copies the results out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from mpistrat.arrays import Array
from mpistrat.collectives.algorithms.algorithm import StagedAlgorithm
from mpistrat.collectives.algorithms.mpi import MpiMessages
from mpistrat.collectives.algorithms.pairs import PairedSharedMemory
from mpistrat.collectives.algorithms.small_shared import SmallSharedMemory
from mpistrat.collectives.layout import fill, segments_of
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import Results, results_for
from mpistrat.collectives.weights import Scales


class _Packed(NamedTuple):
    """Leaves in transit to shared memory.

    Attributes:
      values: The leaves.
      weights: What each stands for.
      filled: The first bucket is in place already.
      results: Where the results go.
    """

    values: Sequence[Array]
    weights: Sequence[float]
    filled: bool
    results: Results


@final
class BucketedSharedMemory(StagedAlgorithm):
    """Buckets of up to 8 MiB in rows of shared memory; between nodes they continue in lanes."""

    name = "node"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Tell whether memory can be shared, as far as is known."""
        return reducer.node.possible

    @property
    def is_valid(self) -> bool:
        """Whether memory is still shared, and no quicker algorithm has become possible.

        A rank that makes this call for the first time would take that one.
        """
        shorter = any(
            kind.applies_to(self.reducer, self.plan)
            for kind in (SmallSharedMemory, PairedSharedMemory)
        )
        return self.applies_to(self.reducer, self.plan) and not shorter

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> _Packed:
        """Fill the first bucket if there is room for it: in this rank's own row."""
        plan, node, session = self.plan, self.reducer.node, self.reducer.lockstep.session
        values = plan.leaves_to_copy(values, weights)
        node.compile(plan)
        # A thread or a child that may not call must not write to the row first.
        session.check()
        filled = bool(plan.buckets) and node.arena.has_room(plan.largest_bucket_nbytes)
        if filled:
            bucket = plan.buckets[0]
            fill(bucket, values, node.arena.scratch(bucket.dtype)[node.rank])
        return _Packed(values, weights, filled, results_for(plan, values, outs, self.reducer.pool))

    def finish(self, staged: _Packed, scales: Scales) -> list[Any]:
        """Reduce all buckets, and give the results away."""
        plan, node, lockstep = self.plan, self.reducer.node, self.reducer.lockstep
        with lockstep.hooks:
            room = (
                staged.filled
                or not plan.buckets
                or node.arena.make_room(plan.largest_bucket_nbytes)
            )
        if not room:
            return self._by_mpi(staged, scales)
        with node.moving():
            self._reduce_slices(staged, scales)
        return staged.results.arrays

    def _by_mpi(self, staged: _Packed, scales: Scales) -> list[Any]:
        # This happens once in a session. Memory for MPI may be missing, so there is a handshake.
        lockstep, text = self.reducer.lockstep, f"{self.plan.text}, by MPI"
        mpi_messages = MpiMessages(self.reducer, self.plan)
        with lockstep.validating_collectively(text):
            sent = mpi_messages.stage(staged.values, staged.weights, None)
        lockstep.handshake(text)
        totals = mpi_messages.finish(sent, scales)
        self.reducer.node.warn("all_reduce")
        return totals

    def _reduce_slices(self, staged: _Packed, scales: Scales) -> None:
        plan, arena = self.plan, self.reducer.node.arena
        node = arena.nodes().node
        for number, bucket in enumerate(plan.buckets):
            rows = arena.scratch(bucket.dtype)
            # The handshake was the barrier after the first bucket, if that was filled before it.
            if number or not staged.filled:
                fill(bucket, staged.values, rows[node.rank])
                node.barrier()
            at = node.size + arena.turn()
            result, segments = rows[at : at + 1], segments_of(bucket, scales)
            self.reducer.node.reduce(plan.op, rows[: node.size], result, bucket.columns, segments)
            node.barrier()
            staged.results.take(number, result[0])
