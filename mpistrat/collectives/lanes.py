"""Reduction between nodes of the sums of each node: one rank of each node for each slice.

`Lane.reduce` is one exchange, of one slice. What float32 travels as is up to the wire:

=============  ===================================================================================
wire           how
=============  ===================================================================================
``float32``    the MPI library's own all-reduce
``bfloat16``   each twin owns a piece of the slice, and gets what all others have of it in bfloat16;
               it adds them in float32, in the order of the nodes, rounds what comes of it to
               bfloat16 once, and gives that to all: ``2 (n - 1) / n`` times the slice in bfloat16,
               each way, of n nodes
=============  ===================================================================================

Everyone has the owner's bits, and what an element becomes does not depend on where it lies.

`Lane.reduce_own` is the first half: each twin gets what is its own from messages of all others, and
adds it in the order of the nodes. The sum has the bits that `Lane.reduce` gives, but where an MPI
library adds float32 or float64 of three nodes and more in another order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.collectives.by_mpi import reduce_by_mpi
from mpistrat.collectives.segments import Segment
from mpistrat.comm.base import Comm
from mpistrat.kernels.narrow import from_bfloat16, to_bfloat16
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.rows import compiles, reduce_rows
from mpistrat.kernels.scaling import divide, real, rescue

# What goes between nodes at once, in elements; bounds what it takes beside the arena.
MOST = 1 << 20


class Lane(NamedTuple):
    """One rank of each node, which reduce what their nodes have of a slice.

    Attributes:
      comm: The ranks, in the order of the nodes.
      power: A power of two that keeps a sum of all ranks of the session from overflowing.
      wire: What float32 travels as; see `mpistrat.collectives.communication.CommunicationOptions`.
    """

    comm: Comm
    power: float
    wire: str

    def reduce(self, op: ReduceOp, part: Array, kept: Array | None, divisor: float) -> Array:
        """Return what the nodes have of one slice, reduced. Collective over `comm`; unproved.

        Args:
          op: How.
          part: What this node has; flat, contiguous. It may be written over.
          kept: Of a mean, what is used where `part` is not finite: the same times `power`. What it
            has elsewhere is not read. None if it was not kept.
          divisor: What the sum is divided by.

        Returns:
          The total: `part` itself, or memory of its own.

        Cost: one MPI_Allreduce; in bfloat16 one message to each of the others, and a gather.
        """
        sums = op is ReduceOp.SUM or op is ReduceOp.MEAN
        if self.wire == "bfloat16" and part.dtype == np.float32 and sums:
            power = self.power if op is ReduceOp.MEAN else 1.0
            given, lowered = self._or_lowered(part, kept)
            factor = 1.0 if lowered else power
            self._reduce_narrow(given, factor, divisor * power, part)
            return part
        total = np.empty_like(part)
        reduce_by_mpi(self.comm, part, total, op)
        if divisor != 1.0:
            divide(total, divisor)
            low_total = functools.partial(self._low_total, part, kept)
            rescue(total, low_total, divisor, self.power)
        return total

    def _low_total(self, part: Array, kept: Array | None, where: NDArray[np.intp]) -> Array:
        """Add what the nodes have at some places, times `power`."""
        send = _lowered(real(part)[where], None if kept is None else real(kept)[where], self.power)
        total: Array = np.empty_like(send)
        reduce_by_mpi(self.comm, send, total, ReduceOp.MEAN)
        return total

    def _reduce_narrow(self, given: Array, factor: float, divisor: float, out: Array) -> None:
        """Add what the nodes give times `factor`, by way of bfloat16, and divide."""
        cuts = [given.size * rank // self.comm.size for rank in range(self.comm.size + 1)]
        bits = np.empty(given.size, np.uint16)
        _narrow(given, factor, bits)
        mine = self._own_narrow([bits[low:high] for low, high in itertools.pairwise(cuts)], divisor)
        counts = [2 * (stop - start) for start, stop in itertools.pairwise(cuts)]
        self.comm.allgatherv(mine.view(np.uint8), bits.view(np.uint8), counts)
        _widen(bits, out)

    def _own_narrow(self, bits: Sequence[Array], divisor: float) -> Array:
        """Return this rank's own part, reduced, of bfloat16 that are for each of the twins."""
        came = self._exchange(bits)
        wide: Array = np.empty(came.shape, np.float32)
        _widen(came.reshape(-1), wide.reshape(-1))
        reduce_rows(np.add, wide, wide[:1], 0, wide.shape[1])
        if divisor != 1.0:
            divide(wide[0], divisor)
        mine = np.empty(wide.shape[1], np.uint16)
        _narrow(wide[0], 1.0, mine)
        return mine

    def _or_lowered(self, part: Array, kept: Array | None) -> tuple[Array, bool]:
        """Return numbers; times `power` if one is not finite and was kept so, and whether that."""
        if kept is None or np.isfinite(part).all():
            return part, False
        return _lowered(part, kept, self.power), True

    def _exchange(self, given: Sequence[Array]) -> Array:
        """Send each twin what is for it; return what all have sent to this one, in rows."""
        comm, me, size = self.comm, self.comm.rank, self.comm.size
        came = np.empty((size, given[me].size), given[me].dtype)
        came[me] = given[me]
        for step in range(1, size):
            to, source = (me + step) % size, (me - step) % size
            comm.sendrecv(given[to], to, came[source], source)
        return came

    def reduce_own(
        self, parts: Sequence[Array], kept: Sequence[Array] | None, divisor: float
    ) -> Array:
        """Return the mean of what the nodes have for this rank. Collective; unproved.

        Args:
          parts: What this node has for each of the twins, in their order; flat, contiguous, of one
            dtype, float32 or float64.
          kept: As in `reduce`, for each of them, or None.
          divisor: As there.

        Cost: one message to each of the others.
        """
        lows = kept if kept is not None else [None] * len(parts)
        given = [self._or_lowered(part, low) for part, low in zip(parts, lows, strict=True)]
        if self.wire == "bfloat16" and parts[0].dtype == np.float32:
            wires = [np.empty(part.size, np.uint16) for part in parts]
            for (values, lowered), bits in zip(given, wires, strict=True):
                _narrow(values, 1.0 if lowered else self.power, bits)
            own = np.empty(parts[self.comm.rank].size, np.float32)
            _widen(self._own_narrow(wires, divisor * self.power), own)
            return own
        # The last element tells whether the others are scaled down.
        wide = [np.append(values, values.dtype.type(lowered)) for values, lowered in given]
        return _mean_of_rows(self._exchange(wide), divisor, self.power)


def _mean_of_rows(came: Array, divisor: float, power: float) -> Array:
    """Return the mean of rows, of which those that end in 1 are multiplied by `power`."""
    rows, size = came[:, :-1], len(came)
    total: Array = np.empty((1, came.shape[1]), came.dtype)
    lowered = {i: rows[i].copy() for i in np.flatnonzero(came[:, -1]).tolist()}
    for i in lowered:
        rows[i] /= rows.dtype.type(power)

    def low(where: NDArray[np.intp]) -> Array:
        scale = rows.dtype.type(power)
        some = [lowered[i][where] if i in lowered else rows[i, where] * scale for i in range(size)]
        found: Array = functools.reduce(np.add, some)
        return found

    reduce_rows(np.add, came, total, 0, rows.shape[1])
    found: Array = total[0, :-1]
    if divisor != 1.0:
        divide(found, divisor)
        rescue(found, low, divisor, power)
    return found


def _lowered(part: Array, kept: Array | None, power: float) -> Array:
    """Return numbers times a power of two; `kept` has them so where they are not finite."""
    low: Array = part * part.dtype.type(power)
    if kept is not None:
        np.copyto(low, kept, where=~np.isfinite(part))
    return low


def _large(array: Array) -> bool:
    return compiles(np.add, np.dtype(np.float32), array.size)


def _narrow(values: Array, factor: float, bits: Array) -> None:
    loop = to_bfloat16 if _large(values) else to_bfloat16.twin
    loop(values, np.float32(factor), bits)


def _widen(bits: Array, values: Array) -> None:
    (from_bfloat16 if _large(bits) else from_bfloat16.twin)(bits, values)


def compile_wire(dtype: np.dtype[Any], columns: int) -> None:
    """Compile what casting so many columns for the wire needs, if they are to be cast."""
    if dtype == np.float32 and compiles(np.add, dtype, columns):
        one, bits = np.zeros(1, np.float32), np.zeros(1, np.uint16)
        to_bfloat16(one, one[0], bits)
        from_bfloat16(bits, one)


def reduce_between(
    lane: Lane,
    op: ReduceOp,
    rows: Array,
    row: Array,
    mine: tuple[int, int],
    segments: Sequence[Segment],
) -> None:
    """Reduce this rank's slice of what the nodes have reduced. Collective over `lane`; unproved.

    Args:
      lane: One rank of each node.
      op: How.
      rows: What the ranks of this node gave; of a mean that is not finite the second row has the
        sum times the power of the lane.
      row: What they have together; takes the result.
      mine: The slice: its first column, and the one after its last.
      segments: What becomes of which columns.
    """
    low, high = mine
    for segment in segments:
        start, stop = max(low, segment.start), min(high, segment.stop)
        kept = op is ReduceOp.MEAN and segment.scales is None and len(rows) > 1
        for at in range(start, stop, MOST):
            part = row[at : min(at + MOST, stop)]
            low_sums = [rows[1, at : at + part.size]] if kept else None
            reduce_together(lane, op, [part], low_sums, segment.divisor)


def reduce_together(
    lane: Lane, op: ReduceOp, parts: Sequence[Array], kept: Sequence[Array] | None, divisor: float
) -> None:
    """Reduce several slices in one exchange, in place. Collective over `lane`; unproved.

    Args:
      lane: One rank of each node.
      op: How.
      parts: The slices, of one dtype; together at most `MOST` elements.
      kept: As in `Lane.reduce`, for each of them, or none.
      divisor: As there.
    """
    whole, low = parts[0], kept[0] if kept else None
    if len(parts) > 1:
        whole, low = np.concatenate(parts), None
        if kept and not np.isfinite(whole).all():
            low = np.concatenate(kept)
    total, at = lane.reduce(op, whole, low, divisor), 0
    for part in parts:
        if total is not part:
            part[:] = total[at : at + part.size]
        at += part.size


def reduce_far(lane: Lane, op: ReduceOp, parts: Sequence[Sequence[tuple[Array, Segment]]]) -> None:
    """Make means in the first rows of matrices, of what is there and of their second rows.

    Collective over `lane`; unproved.

    Args:
      lane: One rank of each node.
      op: MEAN.
      parts: One list of what all ranks of the lane are to have, or one for each, of what is its
        own: matrices, and which columns.
    """
    rows, segment = parts[0][0]
    sums, low = _columns(parts, 0), None
    if segment.scales is None and len(rows) > 1:
        low = _columns(parts, 1)
    if len(parts) == 1:
        reduce_together(lane, op, sums[0], None if low is None else low[0], segment.divisor)
        return
    given = [np.concatenate(some) for some in sums]
    kept = None if low is None else [np.concatenate(some) for some in low]
    own, at = lane.reduce_own(given, kept, segment.divisor), 0
    for mine in sums[lane.comm.rank]:
        mine[:] = own[at : at + mine.size]
        at += mine.size


def _columns(parts: Sequence[Sequence[tuple[Array, Segment]]], row: int) -> list[list[Array]]:
    return [[rows[row, segment.start : segment.stop] for rows, segment in some] for some in parts]


def in_pieces(
    parts: Sequence[tuple[int, Array]], step: int, twins: int = 1
) -> Iterator[list[tuple[int, int, int]]]:
    """Cut numbered arrays, and yield as many pieces of one dtype as may be reduced together.

    Args:
      parts: Flat arrays, and their numbers.
      step: At multiples of so many elements they may be cut.
      twins: How many ranks have such pieces in one exchange.

    Example:
      >>> f4, f8 = np.empty(2**20 + 5, "f4"), np.empty(3, "f8")
      >>> list(in_pieces([(0, f4), (1, f4[:9]), (2, f8)], 4096))
      [[(0, 0, 1048576)], [(0, 1048576, 1048581), (1, 0, 9)], [(2, 0, 3)]]
    """
    some: list[tuple[int, int, int]] = []
    most = MOST // twins
    room, dtype = most, None
    for i, array in parts:
        low = 0
        while low < array.size:
            if some and (array.dtype != dtype or room < min(step, array.size - low)):
                yield some
                some, room = [], most
            high = min(array.size, low + max(step, room // step * step))
            some.append((i, low, high))
            room, dtype, low = room - high + low, array.dtype, high
    if some:
        yield some
