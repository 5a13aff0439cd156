"""All-reduces in memory that the ranks of a node share: every rank's values stand in a row.

`Direct`: every rank reduces all rows for itself; the handshake is the barrier. `Packs`: each rank
reduces its slice of all rows, and copies the results out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.buckets import fill
from mpistrat.collectives.call import ONES, Call
from mpistrat.collectives.paths.mpi import Messages
from mpistrat.collectives.paths.pairs import Pairs
from mpistrat.collectives.paths.path import Path, StagedPath
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import Results, put, results_for
from mpistrat.collectives.segments import segments_of
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.blocks import fold
from mpistrat.kernels.ops import UFUNCS
from mpistrat.kernels.rows import reduce_rows
from mpistrat.kernels.scaling import Overflow, divide, rescue_rows


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
class Direct(Path):
    """Each rank writes to its row, comes to the handshake, and reduces all rows for itself.

    Rows have two sides, which take turns: a side is written to again in the next call but one, and
    to come to the handshake of the call between, each rank has to be through with this one.
    """

    @staticmethod
    def fits(reducer: Reducer, call: Call) -> bool:
        """Tell whether all of it is of one dtype, and small enough for the memory that is there."""
        alike = len({dtype for dtype, _ in call.specs}) == 1
        arena = reducer.node.arena
        return alike and len(call.buckets) == 1 and call.most <= arena.direct and not arena.refused

    def __init__(self, reducer: Reducer, call: Call):
        """Find the rows of both sides."""
        super().__init__(reducer, call)
        (bucket,) = call.buckets
        node, lockstep = reducer.node, reducer.lockstep
        self._lockstep, self._session, self._handshake = (
            lockstep,
            lockstep.session,
            lockstep.handshake,
        )
        self._text, self._digest = call.said(reducer.said)
        self._even = call.same or not call.mean
        self._rides = lockstep.fits(8 * call.weights)
        self._arena, self._received = node.arena, lockstep.received
        self._divisor = reducer.comm.size
        self._overflow = Overflow() if call.mean else None
        self._header, self._same = call.header(ONES * call.weights), Scales()
        self._ufunc: Callable[..., Any] = UFUNCS[call.op]
        self._columns, self._dtype = bucket.columns, bucket.dtype
        self._sides = node.arena.sides(bucket.dtype)
        self._rows = tuple(tuple(row[: bucket.columns] for row in side) for side in self._sides)
        self._mine = tuple(side[node.rank] for side in self._rows)
        numbers = call.numbers or (False,) * len(call.shapes)
        self._cuts = _cuts([None if n else s for s, n in zip(call.shapes, numbers, strict=True)])
        self._shape = call.shapes[0]
        # If no leaf has to be put into shape, that is half of what it takes to cut hundreds.
        flat = all(cut.leaves == 1 and len(cut.shape or ()) == 1 for cut in self._cuts)
        self._lines = [cut.line for cut in self._cuts] if flat else None

    @property
    def holds(self) -> bool:
        """Whether memory is shared still: else all of it goes by MPI, on all ranks."""
        return not self._arena.refused

    def run(
        self,
        values: Sequence[Any],
        weights: Sequence[float] = ONES,
        outs: Sequence[Array] | None = None,
    ) -> list[Any]:
        """Reduce these values; see `Path.run`. Collective."""
        self._session.check()  # before anything is written
        side = (self._session.calls + 1) & 1
        try:
            self._stage(self._mine[side], values, weights)
        except Exception as error:
            self._lockstep.refuse(self.call.text, error)
        results = self._cut(self._total(side, weights))
        return results if outs is None else put(results, outs)

    def one(self, leaf: Any) -> Any:
        """Return the total of the only leaf, an array, without weights. Collective."""
        self._session.check()
        side = (self._session.calls + 1) & 1
        mine = self._mine[side]
        if leaf.ndim == 1:
            mine[:] = leaf
            return self._total(side)
        mine.reshape(self._shape)[...] = leaf
        return self._total(side).reshape(self._shape)

    def _stage(self, mine: Array, values: Sequence[Any], weights: Sequence[float]) -> None:
        """Write to this rank's row. Not collective."""
        call = self.call
        if call.mean and 0 in weights:
            if call.weigh and call.weights == 1:
                return  # what has no weight is never read
            values = call.wires(values, weights, fresh=False)
        if call.raw:
            np.concatenate(values, axis=None, out=mine)
            return
        with np.errstate(all="ignore"):
            np.concatenate(values, axis=None, out=mine, casting="unsafe")

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
        if self.call.as_it_is:
            return parts
        with np.errstate(all="ignore"):
            return self.call.results(parts)

    def _total(self, side: int, weights: Sequence[float] = ONES) -> Array:
        call, even, scales = self.call, self._even, self._same
        header = self._header if even else call.header(weights)
        if not self._rides:
            scales, _ = self.reducer.handshake(call, "", header)
        else:
            text, digest = (
                call.said_now(self.reducer.said) if call.of else (self._text, self._digest)
            )
            self._handshake(text, header, digest=digest, alarm=call.alarm)
            if not even:
                scales = self.reducer.scales(call, self._received)
        hooks = self._lockstep.hooks
        if hooks.on_moving is not None:
            hooks.on_moving()
        total = np.empty(self._columns, self._dtype)
        if even or (call.weigh and scales.table is None):
            self._reduce(side, total)
        else:
            self._weigh(side, total, scales)
        if hooks.on_moved is not None:
            hooks.on_moved([total])
        return total

    def _reduce(self, side: int, total: Array) -> None:
        rows, overflow = self._rows[side], self._overflow
        if overflow is None:
            quiet().run(fold, self._ufunc, rows, total)
            return
        overflow.quiet().run(fold, self._ufunc, rows, total)
        quiet().run(divide, total, self._divisor)
        if overflow.seen:
            overflow.seen.clear()
            quiet().run(rescue_rows, total, rows, None, self._divisor)

    def _weigh(self, side: int, total: Array, scales: Scales) -> None:
        ready = self.reducer.node.ready(self.call.op, self._dtype, self._columns)
        rows = self._sides[side]
        if self.call.weights == 1:
            reduce_rows(self._ufunc, rows, total[None], 0, len(total), *scales.of(0), ready=ready)
            return
        for start, stop, table, divisor in segments_of(self.call.buckets[0], scales):
            reduce_rows(self._ufunc, rows, total[None], start, stop, table, divisor, ready=ready)


def _cuts(shapes: Sequence[tuple[int, ...] | None]) -> tuple[_Cut, ...]:
    """Return where leaves lie one after the other; None is a number.

    Neighbours of one shape are one cut: an array is taken apart in one call.
    """
    found: list[_Cut] = []
    at = 0
    for shape, several in itertools.groupby(shapes):
        count, size = len(list(several)), math.prod(shape or ())
        many = shape is not None and len(shape) > 0  # what has no dimension comes out as a number
        for number in [count] if many else [1] * count:
            found.append(_Cut(slice(at, at + number * size), shape, number))
            at += number * size
    return tuple(found)


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
class Packs(StagedPath):
    """Buckets of up to 8 MiB in rows of shared memory; between nodes they continue in lanes."""

    @staticmethod
    def fits(reducer: Reducer, call: Call) -> bool:
        """Tell whether memory can be shared, as far as is known."""
        return reducer.node.possible

    @property
    def holds(self) -> bool:
        """Whether memory is shared still, and that for a shorter way has not come meanwhile.

        A rank that makes this call again takes that way, so those that remember this one do, too.
        """
        shorter = any(kind.fits(self.reducer, self.call) for kind in (Direct, Pairs))
        return self.fits(self.reducer, self.call) and not shorter

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> _Packed:
        """Fill the first bucket if there is room for it: in this rank's own row."""
        call, node, session = self.call, self.reducer.node, self.reducer.lockstep.session
        values = call.to_copy(values, weights)
        node.compile(call)
        # A thread or a child that may not call must not write to the row first.
        session.check()
        filled = bool(call.buckets) and node.arena.has_room(call.most)
        if filled:
            bucket = call.buckets[0]
            fill(bucket, values, node.arena.scratch(bucket.dtype)[node.rank])
        return _Packed(values, weights, filled, results_for(call, values, outs, self.reducer.pool))

    def finish(self, staged: _Packed, scales: Scales) -> list[Any]:
        """Reduce all buckets, and give the results away."""
        call, node, lockstep = self.call, self.reducer.node, self.reducer.lockstep
        with lockstep.hooks:
            room = staged.filled or not call.buckets or node.arena.make_room(call.most)
        if not room:
            return self._by_mpi(staged, scales)
        with node.moving():
            self._reduce_slices(staged, scales)
        return staged.results.arrays

    def _by_mpi(self, staged: _Packed, scales: Scales) -> list[Any]:
        # Once in a session: what MPI needs instead may fail to be allocated, so there is a
        # handshake.
        lockstep, text = self.reducer.lockstep, f"{self.call.text}, by MPI"
        instead = Messages(self.reducer, self.call)
        with lockstep.preparing(text):
            sent = instead.stage(staged.values, staged.weights, None)
        lockstep.handshake(text)
        totals = instead.finish(sent, scales)
        self.reducer.node.warn("all_reduce")
        return totals

    def _reduce_slices(self, staged: _Packed, scales: Scales) -> None:
        call, arena = self.call, self.reducer.node.arena
        node = arena.nodes().node
        for number, bucket in enumerate(call.buckets):
            rows = arena.scratch(bucket.dtype)
            # The handshake was the barrier after the first bucket, if that was filled before it.
            if number or not staged.filled:
                fill(bucket, staged.values, rows[node.rank])
                node.barrier()
            at = node.size + arena.turn()
            result, segments = rows[at : at + 1], segments_of(bucket, scales)
            self.reducer.node.reduce(call.op, rows[: node.size], result, bucket.columns, segments)
            node.barrier()
            staged.results.take(number, result[0])
