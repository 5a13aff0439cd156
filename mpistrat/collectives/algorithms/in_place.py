"""In-place all-reduces of arrays of `Strategy.buffers`, between the handshake and a barrier.

In place applies to more than 16 KiB together, or to 32 leaves or more. On one node, up to the limit
of `SmallSharedMemory` (256 KiB), the values are copied there in a few runs of memory and the sums
are copied back, which takes less time than a barrier.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.algorithms.algorithm import StagedAlgorithm
from mpistrat.collectives.algorithms.small_shared import SmallSharedMemory
from mpistrat.collectives.dtypes import WireType
from mpistrat.collectives.layout import find_in_place_columns
from mpistrat.collectives.plan import (
    UNIT_WEIGHTS,
    PlanOptions,
    ReductionInputs,
    ReductionPlan,
    list_specs,
)
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.weights import Scales
from mpistrat.shm.arena import BufferAddress, SharedBuffers

# With more runs of memory, copying takes longer than the barrier.
_MAX_COPIED_RUNS = 8
_is_writable_without_gaps = operator.attrgetter("flags.carray")


@final
class InPlaceSharedMemory(StagedAlgorithm):
    """Arrays that are value and out both, each reduced in place.

    Args:
      reducer: The ranks.
      plan: The plan.
      addresses: The addresses of the arrays in the arena.
      leaves: The arrays; no reference to them is kept.
    """

    name = "in place"
    is_cacheable = False

    def __init__(
        self,
        reducer: Reducer,
        plan: ReductionPlan,
        addresses: Sequence[BufferAddress],
        leaves: Sequence[Array],
    ):
        """Find the rows of the leaves."""
        self._is_single_rank, self._is_compiled = reducer.comm.size == 1, False
        if self._is_single_rank:
            self.name = "alone"
        self._columns = find_in_place_columns(addresses)
        suffix = "" if self._is_single_rank else self._columns.suffix
        super().__init__(reducer, plan, suffix)
        self._copied_nbytes = (
            0 if self._is_single_rank or reducer.needs_finite_check else self._count_copied_nbytes()
        )
        self._arena, self._lockstep = reducer.node.arena, reducer.lockstep
        self._generation = self._arena.generation
        self._specs = list_specs(leaves)
        self._ids = list(map(id, leaves))
        self._small_algorithm: SmallSharedMemory | None = None

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Return whether arrays of this plan are reduced in place, if they are in the arena."""
        return plan.can_reduce_in_place and (
            reducer.node.can_share_memory or reducer.comm.size == 1
        )

    @classmethod
    def try_create(
        cls, reducer: Reducer, plan: ReductionPlan, inputs: ReductionInputs
    ) -> InPlaceSharedMemory | None:
        """Return the algorithm if all leaves are value and out both, in the arena; else None."""
        values, outs = inputs.values, inputs.outs
        if outs is None or values[0] is not outs[0] or not cls.applies_to(reducer, plan):
            return None
        if outs is not values and not all(map(operator.is_, values, outs)):
            return None
        addresses = [] if reducer.comm.size == 1 else reducer.node.lookup_addresses(plan, values)
        if addresses is None or not all(map(_is_writable_without_gaps, values)):
            return None
        return cls(reducer, plan, addresses, values)

    @property
    def is_valid(self) -> bool:
        """Whether the arena has the same arrays as before, and memory is still shared."""
        arena = self._arena
        return self._generation == arena.generation and not (arena.is_refused or arena.moving_keys)

    def matches(self, inputs: ReductionInputs) -> bool:
        """Return whether the values are its arrays, are unchanged, and are the outs too."""
        values, outs = inputs.values, inputs.outs
        return (
            self.is_valid
            and (outs is values or (outs is not None and all(map(operator.is_, values, outs))))
            and self._ids == list(map(id, values))
            and all(map(_is_writable_without_gaps, values))
            and self._specs == list_specs(values)
        )

    def run(self, inputs: ReductionInputs) -> list[Any]:
        """Reduce the inputs; see `AllReduceAlgorithm.run`. Collective."""
        if self._is_single_rank and not self.reducer.needs_finite_check:
            self._lockstep.handshake(self.text)
            return self._reduce_single_rank(inputs.values, inputs.weights)
        small_algorithm = self._small_algorithm
        if (
            self._copied_nbytes
            and small_algorithm is None
            and self._arena.max_direct_nbytes >= self._copied_nbytes
        ):
            small_algorithm = self._small_algorithm = self._create_small_algorithm()
        if small_algorithm is None:
            return super().run(inputs._replace(outs=inputs.values))
        runs = self._list_own_runs()
        small_algorithm.run(inputs._replace(values=runs, outs=runs))
        return list(inputs.values)

    def _reduce_single_rank(self, values: Sequence[Any], weights: Sequence[float]) -> list[Any]:
        """Return the values of the only rank, which are the results."""
        if self.plan.is_mean and not weights[0]:  # the mean of nothing
            for array in values:
                array[...] = np.nan
        return values if isinstance(values, list) else list(values)

    def _count_copied_nbytes(self) -> int:
        """Return the number of bytes that are copied, 0 if that takes too long; as on all ranks."""
        nodes = self.reducer.node.arena.nodes().node_count
        if len(self._columns.matrices) > 1 or not self.plan.keeps_dtypes or nodes > 1:
            return 0
        runs = [stop - start for start, stop, _ in self._columns.segments[0]]
        return sum(runs) * self.plan.specs[0][0].itemsize if len(runs) <= _MAX_COPIED_RUNS else 0

    def _list_own_runs(self) -> list[Array]:
        """Return this rank's runs of memory that are reduced as one."""
        (block, matrix), node = self._columns.matrices[0], self._arena.nodes().node
        row = cast(SharedBuffers, block()).matrices[matrix][node.rank]  # its arrays are in use
        return [row[start:stop] for start, stop, _ in self._columns.segments[0]]

    def _create_small_algorithm(self) -> SmallSharedMemory:
        """Return the algorithm that reduces copies of these runs."""
        plan, runs = self.plan, self._list_own_runs()
        wire_type = WireType(runs[0].dtype, runs[0].dtype)
        shapes = [run.shape for run in runs]
        plan_options = PlanOptions(1, plan.is_weighting, plan.has_equal_weights, is_native=True)
        text = self.text.removesuffix(self.reducer.options_text)
        runs_plan = ReductionPlan(text, plan.op, [wire_type] * len(runs), shapes, plan_options)
        return SmallSharedMemory(self.reducer, runs_plan)

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> list[Any]:
        """Return the values, after compiling the loops."""
        if not (self._is_compiled or self._is_single_rank):
            self.reducer.node.compile_loops(self.plan, is_in_place=True)
            self._is_compiled = True
        return values if isinstance(values, list) else list(values)

    def finish(self, staged: list[Any], scales: Scales) -> list[Any]:
        """Return the values, after reducing the rows in place."""
        if self._is_single_rank:
            return self._reduce_single_rank(
                staged, UNIT_WEIGHTS if scales.divisors is None else scales.divisors
            )
        self.reducer.node.reduce_in_place(self.plan.op, self._columns, scales)
        if self._copied_nbytes:
            self._arena.make_sides()
        return staged
