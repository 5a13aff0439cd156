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

The MPI library's own all-reduce, with fixes for results that differ between ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.collectives.dtypes import decode_order, encode_order, ordered
from mpistrat.collectives.layout import Segment
from mpistrat.comm.base import Comm
from mpistrat.kernels.elementwise import as_real, divide, normalize_nans, recompute_nonfinite_means
from mpistrat.kernels.ops import UFUNCS, ReduceOp
from mpistrat.kernels.rows import from_bfloat16, is_worth_compiling, reduce_rows, to_bfloat16


def reduce_by_mpi(comm: Comm, send: Array, recv: Array, op: ReduceOp) -> None:
    """Reduce by the MPI library's own all-reduce; a NaN has the same bits on all ranks.

    MPICH leaves other bits of a NaN on other ranks, which depend on where it came from. Where MPI
    would lose a NaN, integers that sort alike travel; where it has no such operation, or they have
    none, everybody's values are gathered instead.

    Collective; unproved. Cost: one MPI_Allreduce, and of floating point one pass over `recv`, or
    some over both for MIN and MAX.
    """
    if ordered(op, send.dtype):
        keys = encode_order(send, op)
        reduced_keys = np.empty_like(keys)
        comm.allreduce(keys, reduced_keys, op._reduction.mpi_name)
        recv[...] = decode_order(reduced_keys, op)
        return
    if not op._reduction.mpi_name or (op._reduction.may_lose_nan and send.dtype.kind == "f"):
        rows = np.empty((comm.size, *send.shape), send.dtype)
        comm.allgather(send, rows)
        ufunc: Any = UFUNCS[op]
        ufunc.reduce(rows, axis=0, out=recv)
        return
    comm.allreduce(send, recv, op._reduction.mpi_name)
    if comm.size > 1:
        normalize_nans(recv)


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

    def reduce(
        self, op: ReduceOp, part: Array, lowered_part: Array | None, divisor: float
    ) -> Array:
        """Reduce one slice over the nodes, and return it. Collective over `comm`; unproved.

        Args:
          op: How.
          part: The slice of this node; flat, contiguous. It may be written over.
          lowered_part: For a mean, the same times `power`, which is used where `part` is not
            finite. Its other elements are not read. None if it was not kept.
          divisor: The sum is divided by it.

        Returns:
          The total: `part` itself, or memory of its own.

        Cost: one MPI_Allreduce; in bfloat16 one message to each of the others, and a gather.
        """
        sums = op is ReduceOp.SUM or op is ReduceOp.MEAN
        if self.wire == "bfloat16" and part.dtype == np.float32 and sums:
            power = self.power if op is ReduceOp.MEAN else 1.0
            values, lowered = self._or_lowered(part, lowered_part)
            factor = 1.0 if lowered else power
            self._reduce_narrow(values, factor, divisor * power, part)
            return part
        total = np.empty_like(part)
        reduce_by_mpi(self.comm, part, total, op)
        if divisor != 1.0:
            divide(total, divisor)
            low_total = functools.partial(self._low_total, part, lowered_part)
            recompute_nonfinite_means(total, low_total, divisor, self.power)
        return total

    def _low_total(self, part: Array, lowered_part: Array | None, where: NDArray[np.intp]) -> Array:
        """Add the values of all nodes at some places, times `power`."""
        send = _lowered(
            as_real(part)[where],
            None if lowered_part is None else as_real(lowered_part)[where],
            self.power,
        )
        total: Array = np.empty_like(send)
        reduce_by_mpi(self.comm, send, total, ReduceOp.MEAN)
        return total

    def _reduce_narrow(self, values: Array, factor: float, divisor: float, out: Array) -> None:
        """Add the values of all nodes times `factor`, by way of bfloat16, and divide."""
        cuts = [values.size * rank // self.comm.size for rank in range(self.comm.size + 1)]
        bits = np.empty(values.size, np.uint16)
        _narrow(values, factor, bits)
        own_bits = self._own_narrow(
            [bits[low:high] for low, high in itertools.pairwise(cuts)], divisor
        )
        counts = [2 * (stop - start) for start, stop in itertools.pairwise(cuts)]
        self.comm.allgatherv(own_bits.view(np.uint8), bits.view(np.uint8), counts)
        _widen(bits, out)

    def _own_narrow(self, bits: Sequence[Array], divisor: float) -> Array:
        """Return this rank's own part, reduced, of bfloat16 that are for each of the twins."""
        received_bits = self._exchange(bits)
        wide_rows: Array = np.empty(received_bits.shape, np.float32)
        _widen(received_bits.reshape(-1), wide_rows.reshape(-1))
        reduce_rows(np.add, wide_rows, wide_rows[:1], 0, wide_rows.shape[1])
        if divisor != 1.0:
            divide(wide_rows[0], divisor)
        own_bits = np.empty(wide_rows.shape[1], np.uint16)
        _narrow(wide_rows[0], 1.0, own_bits)
        return own_bits

    def _or_lowered(self, part: Array, lowered_part: Array | None) -> tuple[Array, bool]:
        """Return numbers; times `power` if one is not finite and was kept so, and whether that."""
        if lowered_part is None or np.isfinite(part).all():
            return part, False
        return _lowered(part, lowered_part, self.power), True

    def _exchange(self, parts: Sequence[Array]) -> Array:
        """Send each twin its part; return the parts that this rank receives, in rows."""
        comm, me, size = self.comm, self.comm.rank, self.comm.size
        received_rows = np.empty((size, parts[me].size), parts[me].dtype)
        received_rows[me] = parts[me]
        for step in range(1, size):
            to, source = (me + step) % size, (me - step) % size
            comm.sendrecv(parts[to], to, received_rows[source], source)
        return received_rows

    def reduce_own(
        self, parts: Sequence[Array], lowered_parts: Sequence[Array] | None, divisor: float
    ) -> Array:
        """Return the mean of what the nodes have for this rank. Collective; unproved.

        Args:
          parts: What this node has for each of the twins, in their order; flat, contiguous, of one
            dtype, float32 or float64.
          lowered_parts: As in `reduce`, for each of them, or None.
          divisor: As there.

        Cost: one message to each of the others.
        """
        lows = lowered_parts if lowered_parts is not None else [None] * len(parts)
        values_and_flags = [
            self._or_lowered(part, low) for part, low in zip(parts, lows, strict=True)
        ]
        if self.wire == "bfloat16" and parts[0].dtype == np.float32:
            wires = [np.empty(part.size, np.uint16) for part in parts]
            for (values, lowered), bits in zip(values_and_flags, wires, strict=True):
                _narrow(values, 1.0 if lowered else self.power, bits)
            own_mean = np.empty(parts[self.comm.rank].size, np.float32)
            _widen(self._own_narrow(wires, divisor * self.power), own_mean)
            return own_mean
        # The last element is 1 if the others are scaled down.
        flagged_parts = [
            np.append(values, values.dtype.type(lowered)) for values, lowered in values_and_flags
        ]
        return _mean_of_rows(self._exchange(flagged_parts), divisor, self.power)


def _mean_of_rows(received_rows: Array, divisor: float, power: float) -> Array:
    """Return the mean of rows, of which those that end in 1 are multiplied by `power`."""
    rows, size = received_rows[:, :-1], len(received_rows)
    total: Array = np.empty((1, received_rows.shape[1]), received_rows.dtype)
    lowered = {i: rows[i].copy() for i in np.flatnonzero(received_rows[:, -1]).tolist()}
    for i in lowered:
        rows[i] /= rows.dtype.type(power)

    def low(where: NDArray[np.intp]) -> Array:
        scale = rows.dtype.type(power)
        terms = [lowered[i][where] if i in lowered else rows[i, where] * scale for i in range(size)]
        low_total: Array = functools.reduce(np.add, terms)
        return low_total

    reduce_rows(np.add, received_rows, total, 0, rows.shape[1])
    mean: Array = total[0, :-1]
    if divisor != 1.0:
        divide(mean, divisor)
        recompute_nonfinite_means(mean, low, divisor, power)
    return mean


def _lowered(part: Array, lowered_part: Array | None, power: float) -> Array:
    """Return numbers times a power of two; `lowered_part` has them so where they are not finite."""
    low: Array = part * part.dtype.type(power)
    if lowered_part is not None:
        np.copyto(low, lowered_part, where=~np.isfinite(part))
    return low


def _large(array: Array) -> bool:
    return is_worth_compiling(np.add, np.dtype(np.float32), array.size)


def _narrow(values: Array, factor: float, bits: Array) -> None:
    loop = to_bfloat16 if _large(values) else to_bfloat16.reference
    loop(values, np.float32(factor), bits)


def _widen(bits: Array, values: Array) -> None:
    (from_bfloat16 if _large(bits) else from_bfloat16.reference)(bits, values)


def compile_wire(dtype: np.dtype[Any], columns: int) -> None:
    """Compile what casting so many columns for the wire needs, if they are to be cast."""
    if dtype == np.float32 and is_worth_compiling(np.add, dtype, columns):
        sample, bits = np.zeros(1, np.float32), np.zeros(1, np.uint16)
        to_bfloat16(sample, sample[0], bits)
        from_bfloat16(bits, sample)


def reduce_between(
    lane: Lane,
    op: ReduceOp,
    rows: Array,
    row: Array,
    own_columns: tuple[int, int],
    segments: Sequence[Segment],
) -> None:
    """Reduce this rank's slice of what the nodes have reduced. Collective over `lane`; unproved.

    Args:
      lane: One rank of each node.
      op: How.
      rows: What the ranks of this node gave; of a mean that is not finite the second row has the
        sum times the power of the lane.
      row: The values that they have reduced; it takes the result.
      own_columns: The slice: its first column, and the one after its last.
      segments: The columns, and how they are scaled.
    """
    low, high = own_columns
    for segment in segments:
        start, stop = max(low, segment.start), min(high, segment.stop)
        has_lowered = op is ReduceOp.MEAN and segment.scales is None and len(rows) > 1
        for at in range(start, stop, MOST):
            part = row[at : min(at + MOST, stop)]
            low_sums = [rows[1, at : at + part.size]] if has_lowered else None
            reduce_together(lane, op, [part], low_sums, segment.divisor)


def reduce_together(
    lane: Lane,
    op: ReduceOp,
    parts: Sequence[Array],
    lowered_parts: Sequence[Array] | None,
    divisor: float,
) -> None:
    """Reduce several slices in one exchange, in place. Collective over `lane`; unproved.

    Args:
      lane: One rank of each node.
      op: How.
      parts: The slices, of one dtype; together at most `MOST` elements.
      lowered_parts: As in `Lane.reduce`, for each of them, or none.
      divisor: As there.
    """
    joined_parts, low = parts[0], lowered_parts[0] if lowered_parts else None
    if len(parts) > 1:
        joined_parts, low = np.concatenate(parts), None
        if lowered_parts and not np.isfinite(joined_parts).all():
            low = np.concatenate(lowered_parts)
    total, at = lane.reduce(op, joined_parts, low, divisor), 0
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
    joined_sums = [np.concatenate(columns) for columns in sums]
    joined_lows = None if low is None else [np.concatenate(columns) for columns in low]
    own_mean, at = lane.reduce_own(joined_sums, joined_lows, segment.divisor), 0
    for own_sum in sums[lane.comm.rank]:
        own_sum[:] = own_mean[at : at + own_sum.size]
        at += own_sum.size


def _columns(parts: Sequence[Sequence[tuple[Array, Segment]]], row: int) -> list[list[Array]]:
    return [
        [rows[row, segment.start : segment.stop] for rows, segment in twin_parts]
        for twin_parts in parts
    ]


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
    pieces: list[tuple[int, int, int]] = []
    max_elements = MOST // twins
    room, dtype = max_elements, None
    for i, array in parts:
        low = 0
        while low < array.size:
            if pieces and (array.dtype != dtype or room < min(step, array.size - low)):
                yield pieces
                pieces, room = [], max_elements
            high = min(array.size, low + max(step, room // step * step))
            pieces.append((i, low, high))
            room, dtype, low = room - high + low, array.dtype, high
    if pieces:
        yield pieces
