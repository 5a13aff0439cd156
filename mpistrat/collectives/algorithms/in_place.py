"""In-place all-reduces of arrays of `Strategy.buffers`, between the handshake and a barrier.

A few bytes of them are copied, as one run or some, to where `SmallSharedMemory` reduces them, and
back: that takes less than a barrier.
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
from mpistrat.collectives.layout import placed
from mpistrat.collectives.plan import (
    ONES,
    PlanOptions,
    ReductionInputs,
    ReductionPlan,
    specs_of,
)
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.weights import Scales
from mpistrat.shm.arena import BufferAddress, SharedBuffers

# Runs of memory that are worth to be copied.
_RUNS = 8
_is_writable_without_gaps = operator.attrgetter(
    "flags.carray"
)  # without gaps, and to be written to


@final
class InPlaceSharedMemory(StagedAlgorithm):
    """Arrays that are value and out both, each reduced in place.

    Args:
      reducer: The ranks.
      plan: The plan.
      homes: The addresses of the arrays in the arena.
      leaves: The arrays; none of them is kept.
    """

    name = "in place"
    is_cacheable = False

    def __init__(
        self,
        reducer: Reducer,
        plan: ReductionPlan,
        homes: Sequence[BufferAddress],
        leaves: Sequence[Array],
    ):
        """Find the rows of the leaves."""
        self._is_alone, self._compiled = reducer.comm.size == 1, False
        if self._is_alone:
            self.name = "alone"
        self._placed = placed(homes)
        suffix = "" if self._is_alone else self._placed.suffix
        super().__init__(reducer, plan, suffix)
        self._copied_nbytes = 0 if self._is_alone or reducer.watches else self._count_copied()
        self._arena, self._lockstep = reducer.node.arena, reducer.lockstep
        self._generation = self._arena.generation
        self._specs = specs_of(leaves)
        self._ids = list(map(id, leaves))
        self._small: SmallSharedMemory | None = None

    @staticmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Tell whether arrays of this plan are reduced in place, if they are in the arena."""
        return plan.is_worth_a_place and (reducer.node.possible or reducer.comm.size == 1)

    @classmethod
    def try_create(
        cls, reducer: Reducer, plan: ReductionPlan, inputs: ReductionInputs
    ) -> InPlaceSharedMemory | None:
        """Return the algorithm, if all leaves are in the arena, and are value and out both."""
        values, outs = inputs.values, inputs.outs
        if outs is None or values[0] is not outs[0] or not cls.applies_to(reducer, plan):
            return None
        if outs is not values and not all(map(operator.is_, values, outs)):
            return None
        homes = [] if reducer.comm.size == 1 else reducer.node.homes(plan, values)
        if homes is None or not all(map(_is_writable_without_gaps, values)):
            return None
        return cls(reducer, plan, homes, values)

    @property
    def is_valid(self) -> bool:
        """Whether no array has come or gone since, and memory is still shared."""
        arena = self._arena
        return self._generation == arena.generation and not (arena.is_refused or arena.moving_keys)

    def matches(self, inputs: ReductionInputs) -> bool:
        """Tell whether the values are its arrays, are unchanged, and are the outs too."""
        values, outs = inputs.values, inputs.outs
        return (
            self.is_valid
            and (outs is values or (outs is not None and all(map(operator.is_, values, outs))))
            and self._ids == list(map(id, values))
            and all(map(_is_writable_without_gaps, values))
            and self._specs == specs_of(values)
        )

    def run(self, inputs: ReductionInputs) -> list[Any]:
        """Reduce the inputs; see `AllReduceAlgorithm.run`. Collective."""
        if self._is_alone and not self.reducer.watches:
            self._lockstep.handshake(self.text)
            return self._reduce_single_rank(inputs.values, inputs.weights)
        small = self._small
        if (
            self._copied_nbytes
            and small is None
            and self._arena.max_direct_nbytes >= self._copied_nbytes
        ):
            small = self._small = self._copying()
        if small is None:
            return super().run(inputs._replace(outs=inputs.values))
        runs = self._own_runs()
        small.run(inputs._replace(values=runs, outs=runs))
        return list(inputs.values)

    def _reduce_single_rank(self, values: Sequence[Any], weights: Sequence[float]) -> list[Any]:
        """Return the values of the only rank, which are the results."""
        if self.plan.is_mean and not weights[0]:  # the mean of nothing
            for array in values:
                array[...] = np.nan
        return values if isinstance(values, list) else list(values)

    def _count_copied(self) -> int:
        """Return how many bytes are copied, if it pays; alike on all ranks, as the suffix is."""
        nodes = self.reducer.node.arena.nodes().node_count
        if len(self._placed.rows) > 1 or not self.plan.keeps_dtypes or nodes > 1:
            return 0
        runs = [stop - start for start, stop, _ in self._placed.segments[0]]
        return sum(runs) * self.plan.specs[0][0].itemsize if len(runs) <= _RUNS else 0

    def _own_runs(self) -> list[Array]:
        """Return this rank's runs of memory that are reduced as one."""
        (block, matrix), node = self._placed.rows[0], self._arena.nodes().node
        row = cast(SharedBuffers, block()).matrices[matrix][node.rank]  # its arrays are in use
        return [row[start:stop] for start, stop, _ in self._placed.segments[0]]

    def _copying(self) -> SmallSharedMemory:
        """Return what reduces copies of these runs."""
        plan, runs = self.plan, self._own_runs()
        wire = WireType(runs[0].dtype, runs[0].dtype)
        shapes = [run.shape for run in runs]
        options = PlanOptions(1, plan.is_weighting, plan.has_equal_weights, is_native=True)
        text = self.text.removesuffix(self.reducer.said)
        flat = ReductionPlan(text, plan.op, [wire] * len(runs), shapes, options)
        return SmallSharedMemory(self.reducer, flat)

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> list[Any]:
        """Compile what is needed."""
        if not (self._compiled or self._is_alone):
            self.reducer.node.compile(self.plan, inside=True)
            self._compiled = True
        return values if isinstance(values, list) else list(values)

    def finish(self, staged: list[Any], scales: Scales) -> list[Any]:
        """Reduce the rows into each other; of one rank they are the results."""
        if self._is_alone:
            return self._reduce_single_rank(
                staged, ONES if scales.divisors is None else scales.divisors
            )
        self.reducer.node.reduce_placed(self.plan.op, self._placed, scales)
        if self._copied_nbytes:
            self._arena.make_sides()
        return staged
