"""All-reduces in shared memory where each rank reduces its slice, and copies the results out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from mpistrat.arrays import Array
from mpistrat.collectives.algorithms.algorithm import StagedAlgorithm
from mpistrat.collectives.algorithms.mpi import MpiMessages
from mpistrat.collectives.algorithms.pairs import PairedSharedMemory
from mpistrat.collectives.algorithms.small_shared import SmallSharedMemory
from mpistrat.collectives.layout import fill_bucket, make_segments
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import Results, allocate_results
from mpistrat.collectives.weights import Scales


class _StagedLeaves(NamedTuple):
    """Leaves in transit to shared memory.

    Attributes:
      values: The leaves.
      weights: The weights of the leaves.
      is_first_bucket_filled: Whether the first bucket is in shared memory already.
      results: The memory of the results.
    """

    values: Sequence[Array]
    weights: Sequence[float]
    is_first_bucket_filled: bool
    results: Results


@final
class BucketedSharedMemory(StagedAlgorithm):
    """Buckets of up to 8 MiB in rows of shared memory, also between nodes."""

    name = "node"

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Return whether memory can be shared, unless it was refused already."""
        return reducer.node.can_share_memory

    @property
    def is_valid(self) -> bool:
        """Whether memory is still shared, and no quicker algorithm has become possible.

        A rank that makes this call for the first time would take the quicker one.
        """
        has_quicker_algorithm = any(
            algorithm_class.applies_to(self.reducer, self.plan)
            for algorithm_class in (SmallSharedMemory, PairedSharedMemory)
        )
        return self.applies_to(self.reducer, self.plan) and not has_quicker_algorithm

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> _StagedLeaves:
        """Return the leaves, after copying the first bucket to this rank's row if there is room."""
        plan, node, session = self.plan, self.reducer.node, self.reducer.lockstep.session
        values = plan.prepare_leaves_to_copy(values, weights)
        node.compile_loops(plan)
        # A thread or a child process that must not make calls must not write to the row either.
        session.check()
        is_first_bucket_filled = bool(plan.buckets) and node.arena.has_room(
            plan.largest_bucket_nbytes
        )
        if is_first_bucket_filled:
            bucket = plan.buckets[0]
            fill_bucket(bucket, values, node.arena.scratch(bucket.dtype)[node.rank])
        return _StagedLeaves(
            values,
            weights,
            is_first_bucket_filled,
            allocate_results(plan, values, outs, self.reducer.pool),
        )

    def finish(self, staged: _StagedLeaves, scales: Scales) -> list[Any]:
        """Return the results of all buckets."""
        plan, node, lockstep = self.plan, self.reducer.node, self.reducer.lockstep
        with lockstep.hooks:
            has_room = (
                staged.is_first_bucket_filled
                or not plan.buckets
                or node.arena.make_room(plan.largest_bucket_nbytes)
            )
        if not has_room:
            return self._reduce_by_mpi(staged, scales)
        with node.begin_data_movement():
            self._reduce_slices(staged, scales)
        return staged.results.arrays

    def _reduce_by_mpi(self, staged: _StagedLeaves, scales: Scales) -> list[Any]:
        # This happens once in a session. Memory for MPI may be missing, so there is a handshake.
        lockstep, text = self.reducer.lockstep, f"{self.plan.text}, by MPI"
        mpi_messages = MpiMessages(self.reducer, self.plan)
        with lockstep.validating_collectively(text):
            staged_messages = mpi_messages.stage(staged.values, staged.weights, None)
        lockstep.handshake(text)
        totals = mpi_messages.finish(staged_messages, scales)
        self.reducer.node.warn_of_private_memory("all_reduce")
        return totals

    def _reduce_slices(self, staged: _StagedLeaves, scales: Scales) -> None:
        plan, arena = self.plan, self.reducer.node.arena
        node = arena.nodes().node
        for bucket_index, bucket in enumerate(plan.buckets):
            rows = arena.scratch(bucket.dtype)
            # The handshake was the barrier after the first bucket, if that was filled before it.
            if bucket_index or not staged.is_first_bucket_filled:
                fill_bucket(bucket, staged.values, rows[node.rank])
                node.barrier()
            result_row = node.size + arena.turn()
            result, segments = rows[result_row : result_row + 1], make_segments(bucket, scales)
            self.reducer.node.reduce(plan.op, rows[: node.size], result, bucket.columns, segments)
            node.barrier()
            staged.results.copy_out(bucket_index, result[0])
