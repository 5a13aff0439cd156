"""In-place all-reduces of arrays of `Strategy.buffers`, between the handshake and a barrier.

A few bytes of them are copied, as one run or some, to where `Direct` reduces them, and back: that
takes less than a barrier.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast, final

import numpy as np

from mpistrat.arena.arena import ArenaAddress, Block
from mpistrat.arrays import Array
from mpistrat.collectives.call import ONES, Call, specs_of
from mpistrat.collectives.dtypes import WireType
from mpistrat.collectives.paths.path import Path, StagedPath
from mpistrat.collectives.paths.shared import Direct
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.segments import placed
from mpistrat.collectives.weights import Scales

# Runs of memory that are worth to be copied.
_RUNS = 8
# Where arrays have been that were reduced so; programs have few.
_MOST = 16
_as_made = operator.attrgetter("flags.carray")  # without gaps, and to be written to


@final
class InPlace(StagedPath):
    """Arrays that are value and out both, each reduced in place.

    Args:
      reducer: The ranks.
      call: The call.
      homes: Where the arrays lie.
      leaves: The arrays; none of them is kept.

    Attributes:
      suffix: What the text of the call says: which arrays they are.
      generation: The arena's when they were found: nothing has come or gone while it is that.
    """

    stays = False

    def __init__(
        self, reducer: Reducer, call: Call, homes: Sequence[ArenaAddress], leaves: Sequence[Array]
    ):
        """Find the rows of the leaves."""
        super().__init__(reducer, call)
        self._alone, self._compiled = reducer.comm.size == 1, False
        self._placed = placed(homes)
        self.suffix = "" if self._alone else self._placed.suffix
        self._few = 0 if self._alone or reducer.watches else self._copied()
        self._arena, self._lockstep = reducer.node.arena, reducer.lockstep
        self.generation = self._arena.generation
        self._specs = specs_of(leaves)
        self._ids = list(map(id, leaves))
        self._direct: Direct | None = None

    @staticmethod
    def fits(reducer: Reducer, call: Call) -> bool:
        """Tell whether so much is reduced in place, if it lies there."""
        return call.worth_a_place and (reducer.node.possible or reducer.comm.size == 1)

    @classmethod
    def offer(
        cls, reducer: Reducer, call: Call, values: Sequence[Any], outs: Sequence[Array] | None
    ) -> Path | None:
        """Return this way, if all leaves are in the arena, and are value and out both."""
        if outs is None or values[0] is not outs[0] or not cls.fits(reducer, call):
            return None
        if outs is not values and not all(map(operator.is_, values, outs)):
            return None
        key = tuple(map(id, values))
        found: InPlace | None = call.places.get(key)
        if found is None or found.reducer is not reducer or not found.has(values):
            homes = [] if reducer.comm.size == 1 else reducer.node.homes(call, values)
            if homes is None or not all(map(_as_made, values)):
                return None
            if len(call.places) >= _MOST:
                call.places.clear()
            found = call.places[key] = cls(reducer, call, homes, values)
        return found

    @property
    def holds(self) -> bool:
        """Whether no array has come or gone since, and memory is shared still."""
        arena = self._arena
        return self.generation == arena.generation and not (arena.refused or arena.moving)

    def has(self, leaves: Sequence[Array]) -> bool:
        """Tell whether these are its arrays, as they were, and can be written to."""
        return (
            self.holds
            and self._ids == list(map(id, leaves))
            and all(map(_as_made, leaves))
            and self._specs == specs_of(leaves)
        )

    def run(
        self,
        values: Sequence[Any],
        weights: Sequence[float] = ONES,
        outs: Sequence[Array] | None = None,
    ) -> list[Any]:
        """Reduce these values; see `Path.run`. Collective."""
        if self._alone and not self.reducer.watches:
            self._lockstep.handshake(self.call.text)
            return self._of_one(values, weights)
        if self._few and self._direct is None and self._arena.direct >= self._few:
            self._direct = self._beside()
        if self._direct is None:
            return super().run(values, weights, outs if outs is values else values)
        mine = self._mine()
        self._direct.run(mine, weights, mine)
        return list(values)

    def _of_one(self, values: Sequence[Any], weights: Sequence[float]) -> list[Any]:
        """Return the values of the only rank, which are the results."""
        if self.call.mean and not weights[0]:  # the mean of nothing
            for array in values:
                array[...] = np.nan
        return values if isinstance(values, list) else list(values)

    def _copied(self) -> int:
        """Return how many bytes are copied, if it pays; alike on all ranks, as the suffix is."""
        nodes = self.reducer.node.arena.nodes().nodes
        if len(self._placed.rows) > 1 or not self.call.as_it_is or nodes > 1:
            return 0
        runs = [stop - start for start, stop, _ in self._placed.segments[0]]
        return sum(runs) * self.call.specs[0][0].itemsize if len(runs) <= _RUNS else 0

    def _mine(self) -> list[Array]:
        """Return this rank's runs of memory that are reduced as one."""
        (block, matrix), node = self._placed.rows[0], self._arena.nodes().node
        row = cast(Block, block()).matrices[matrix][node.rank]  # its arrays are in use
        return [row[start:stop] for start, stop, _ in self._placed.segments[0]]

    def _beside(self) -> Direct:
        """Return what reduces copies of these runs."""
        call, mine = self.call, self._mine()
        wire = WireType(mine[0].dtype, mine[0].dtype)
        shapes = [run.shape for run in mine]
        wires, text = [wire] * len(mine), call.text + self.suffix
        flat = Call(text, call.op, wires, shapes, 1, call.weigh, call.same, raw=True)
        return Direct(self.reducer, flat)

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> list[Any]:
        """Compile what is needed."""
        if not (self._compiled or self._alone):
            self.reducer.node.compile(self.call, inside=True)
            self._compiled = True
        return values if isinstance(values, list) else list(values)

    def finish(self, staged: list[Any], scales: Scales) -> list[Any]:
        """Reduce the rows into each other; of one rank they are the results."""
        if self._alone:
            return self._of_one(staged, ONES if scales.divisors is None else scales.divisors)
        self.reducer.node.reduce_placed(self.call.op, self._placed, scales)
        if self._few:
            self._arena.make_sides()
        return staged
