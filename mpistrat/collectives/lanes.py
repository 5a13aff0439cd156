"""What the nodes have folded each, folded between them: one rank of each node for each slice.

`Lane.fold` is one exchange, of one slice. What float32 travels as is up to the wire:

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
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.collectives.messages import fold_by_mpi, reduce_messages
from mpistrat.collectives.spans import Range
from mpistrat.comm.base import Comm
from mpistrat.kernels.fold import compiles, fold_rows
from mpistrat.kernels.narrow import from_bfloat16, to_bfloat16
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import divide, real, rescue

__all__ = ["MOST", "Lane", "compile_wire", "fold_between", "fold_together", "in_pieces"]

# What goes between nodes at once, in elements; bounds what it takes beside the arena.
MOST = 1 << 20


class Lane(NamedTuple):
    """One rank of each node, which fold what their nodes have of a slice.

    Attributes:
      comm: The ranks, in the order of the nodes.
      power: A power of two that keeps a sum of all ranks of the session from overflowing.
      wire: What float32 travels as; see `mpistrat.collectives.communication.CommunicationOptions`.
    """

    comm: Comm
    power: float
    wire: str

    def fold(self, op: ReduceOp, part: Array, kept: Array | None, divisor: float) -> Array:
        """Return the fold of what the nodes have of one slice. Collective over `comm`; unproved.

        Args:
          op: How.
          part: What this node has; flat, contiguous. It may be written over.
          kept: Of a mean, what is used where `part` is not finite: the same times `power`. What it
            has elsewhere is not read. None if it was not kept.
          divisor: What the sum is divided by.

        Returns:
          The fold; `part` itself, or memory of its own.

        Cost: one MPI_Allreduce; in bfloat16 one message to each of the others, and a gather.
        """
        sums = op is ReduceOp.SUM or op is ReduceOp.MEAN
        if self.wire == "bfloat16" and part.dtype == np.float32 and sums:
            power = factor = self.power if op is ReduceOp.MEAN else 1.0
            given = part
            if kept is not None and not np.isfinite(part).all():
                given, factor = _lowered(part, kept, power), 1.0
            self._fold_narrow(given, factor, divisor * power, part)
            return part
        (total,) = reduce_messages(self.comm, op, [part])
        if divisor != 1.0:
            divide(total, divisor)
            low_total = functools.partial(self._low_total, part, kept)
            rescue(total, low_total, divisor, self.power)
        return total

    def _low_total(self, part: Array, kept: Array | None, where: NDArray[np.intp]) -> Array:
        """Add what the nodes have at some places, times `power`."""
        send = _lowered(real(part)[where], None if kept is None else real(kept)[where], self.power)
        total: Array = np.empty_like(send)
        fold_by_mpi(self.comm, send, total, ReduceOp.MEAN)
        return total

    def _fold_narrow(self, given: Array, factor: float, divisor: float, out: Array) -> None:
        """Add what the nodes give times `factor`, by way of bfloat16, and divide."""
        comm, me, size = self.comm, self.comm.rank, self.comm.size
        cuts = [given.size * rank // size for rank in range(size + 1)]
        low, high = cuts[me], cuts[me + 1]
        bits = np.empty(given.size, np.uint16)
        _narrow(given, factor, bits)
        came = np.empty((size, high - low), np.uint16)
        came[me] = bits[low:high]
        for step in range(1, size):
            to, source = (me + step) % size, (me - step) % size
            comm.sendrecv(bits[cuts[to] : cuts[to + 1]], to, came[source], source)
        wide = np.empty(came.shape, np.float32)
        _widen(came.reshape(-1), wide.reshape(-1))
        fold_rows(np.add, wide, wide[:1], 0, high - low)
        if divisor != 1.0:
            divide(wide[0], divisor)
        mine = np.empty(high - low, np.uint16)
        _narrow(wide[0], 1.0, mine)
        counts = [2 * (stop - start) for start, stop in itertools.pairwise(cuts)]
        comm.allgatherv(mine.view(np.uint8), bits.view(np.uint8), counts)
        _widen(bits, out)


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


def fold_between(
    lane: Lane,
    op: ReduceOp,
    rows: Array,
    row: Array,
    mine: tuple[int, int],
    spans: Sequence[Range],
) -> None:
    """Fold this rank's slice of what the nodes have folded. Collective over `lane`; unproved.

    Args:
      lane: One rank of each node.
      op: How.
      rows: What the ranks of this node gave; of a mean that is not finite the second row has the
        sum times the power of the lane.
      row: What they have together; takes the result.
      mine: The slice: its first column, and the one after its last.
      spans: What becomes of which columns.
    """
    low, high = mine
    for span in spans:
        start, stop = max(low, span.start), min(high, span.stop)
        kept = op is ReduceOp.MEAN and span.scales is None and len(rows) > 1
        for at in range(start, stop, MOST):
            part = row[at : min(at + MOST, stop)]
            low_sums = [rows[1, at : at + part.size]] if kept else None
            fold_together(lane, op, [part], low_sums, span.divisor)


def fold_together(
    lane: Lane, op: ReduceOp, parts: Sequence[Array], kept: Sequence[Array] | None, divisor: float
) -> None:
    """Fold several slices in one exchange, in place. Collective over `lane`; unproved.

    Args:
      lane: One rank of each node.
      op: How.
      parts: The slices, of one dtype; together at most `MOST` elements.
      kept: As in `Lane.fold`, for each of them, or none.
      divisor: As there.
    """
    whole, low = parts[0], kept[0] if kept else None
    if len(parts) > 1:
        whole, low = np.concatenate(parts), None
        if kept and not np.isfinite(whole).all():
            low = np.concatenate(kept)
    total, at = lane.fold(op, whole, low, divisor), 0
    for part in parts:
        if total is not part:
            part[:] = total[at : at + part.size]
        at += part.size


def in_pieces(
    parts: Sequence[tuple[int, Array]], step: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Cut numbered arrays, and yield as many pieces of one dtype as may be folded together.

    Args:
      parts: Flat arrays, and their numbers.
      step: At multiples of so many elements they may be cut.

    Example:
      >>> f4, f8 = np.empty(2**20 + 5, "f4"), np.empty(3, "f8")
      >>> list(in_pieces([(0, f4), (1, f4[:9]), (2, f8)], 4096))
      [[(0, 0, 1048576)], [(0, 1048576, 1048581), (1, 0, 9)], [(2, 0, 3)]]
    """
    some: list[tuple[int, int, int]] = []
    room, dtype = MOST, None
    for i, array in parts:
        low = 0
        while low < array.size:
            if some and (array.dtype != dtype or room < min(step, array.size - low)):
                yield some
                some, room = [], MOST
            high = min(array.size, low + max(step, room // step * step))
            some.append((i, low, high))
            room, dtype, low = room - high + low, array.dtype, high
    if some:
        yield some
