"""Reduction between nodes, and by the MPI library.

`reduce_by_mpi` is the MPI library's own all-reduce, with fixes for results that differ between
ranks.

An `InterNodeGroup` has one rank of each node, its *peers*; they reduce one slice of the sums of
their nodes. `InterNodeGroup.reduce` is one exchange of one slice; the wire decides how float32 is
sent:

=============  ===================================================================================
wire           how
=============  ===================================================================================
``float32``    the MPI library's own all-reduce; or, for large sums over a number of nodes that is
               no power of two, as in bfloat16 without the rounding
``bfloat16``   each peer owns a piece of the slice, and receives the others' values of its piece in
               bfloat16; it adds them in float32, in the order of the nodes, rounds the sum to
               bfloat16 once, and sends it to all: ``2 (n - 1) / n`` times the slice in bfloat16,
               each way, of n nodes
=============  ===================================================================================

Libraries halve and double between powers of two nodes. Of three nodes one then sends twice as much
as the others (MPICH 5), or two and a half times (Open MPI 5); in pieces each sends ``2 (n - 1) /
n`` times the slice. 4.2 MB over links of 200 Mbit/s: 240 ms and not 530 (MPICH) or 310 and not 810
(Open MPI) for 3 nodes, 500 and not 700 for 5; for 4 nodes 510 where MPICH's own takes 290.

All ranks have the owner's bits, which depend neither on the MPI library nor on the position of an
element. Before a mean is sent in bfloat16, the sums of the nodes are multiplied by a power of two,
so that nothing overflows. With 2 hosts of 2 ranks, 16.8 MB in place over 200 Mbit/s (the bytes
alone take 672 ms) took 732 ms in float32 and 389 ms in bfloat16, on a busy machine.

`InterNodeGroup.reduce_own_part` is the first half: each peer receives its own piece from all
others, and adds in the order of the nodes. The sum has the bits of `InterNodeGroup.reduce`, except
where an MPI library adds float32 or float64 of three or more nodes in another order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.collectives.dtypes import decode_order, encode_order, needs_ordered_integers
from mpistrat.collectives.layout import Segment
from mpistrat.comm.base import Comm
from mpistrat.kernels.elementwise import as_real, divide, normalize_nans, recompute_nonfinite_means
from mpistrat.kernels.ops import UFUNCS, ReduceOp
from mpistrat.kernels.rows import from_bfloat16, is_worth_compiling, reduce_rows, to_bfloat16


def reduce_by_mpi(comm: Comm, send: Array, recv: Array, op: ReduceOp) -> None:
    """Reduce by the MPI library's own all-reduce; a NaN has the same bits on all ranks.

    MPICH leaves other bits of a NaN on other ranks, which depend on the NaN's origin. Where MPI
    would lose a NaN, integers in the same order travel; where MPI has no such operation, or the
    dtype has no such integers, the values of all ranks are gathered instead.

    Collective; without a handshake. Cost: one MPI_Allreduce, and for floating point one pass over
    `recv`, or some over both arrays for MIN and MAX.
    """
    if needs_ordered_integers(op, send.dtype):
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


# Bytes of the piece of each node, from which on a sum over a number of nodes that is no power of
# two is made in pieces. Below, the many messages take longer.
MIN_PIECE_NBYTES = 1 << 16
# The elements that are sent between nodes at once; they bound the memory beside the arena.
MAX_EXCHANGE_ELEMENTS = 1 << 20


class InterNodeGroup(NamedTuple):
    """One rank of each node, the peers; they reduce a slice of the sums of their nodes.

    Attributes:
      comm: The ranks, in the order of the nodes.
      power: A power of two that keeps a sum of all ranks of the session from overflowing.
      wire: The dtype in which float32 is sent; see
        `mpistrat.collectives.communication.CommunicationOptions`.
    """

    comm: Comm
    power: float
    wire: str

    def reduce(
        self, op: ReduceOp, part: Array, lowered_part: Array | None, divisor: float
    ) -> Array:
        """Reduce one slice over the nodes. Collective over `comm`; without a handshake.

        Args:
          op: The operation.
          part: The slice of this node; flat, contiguous. It may be written over.
          lowered_part: For a mean, the same times `power`, which is used where `part` is not
            finite. Its other elements are not read. None if it was not kept.
          divisor: The sum is divided by it.

        Returns:
          The total: `part` itself, or other memory.

        Cost: one MPI_Allreduce; in pieces one message to each of the others, and a gather.
        """
        is_sum = op is ReduceOp.SUM or op is ReduceOp.MEAN
        if self.wire == "bfloat16" and part.dtype == np.float32 and is_sum:
            power = self.power if op is ReduceOp.MEAN else 1.0
            values, is_lowered = self._choose_finite_values(part, lowered_part)
            factor = 1.0 if is_lowered else power
            self._reduce_as_bfloat16(values, factor, divisor * power, part)
            return part
        total = np.empty_like(part)
        is_power_of_two = self.comm.size & (self.comm.size - 1) == 0
        if is_sum and not is_power_of_two and part.nbytes >= MIN_PIECE_NBYTES * self.comm.size:
            self._sum_in_pieces(part, total)
        else:
            reduce_by_mpi(self.comm, part, total, op)
        if divisor != 1.0:
            divide(total, divisor)
            sum_lowered = functools.partial(self._sum_lowered, part, lowered_part)
            recompute_nonfinite_means(total, sum_lowered, divisor, self.power)
        return total

    def _split(self, part: Array) -> list[Array]:
        """Return the piece of a slice that each peer owns."""
        bounds = [part.size * rank // self.comm.size for rank in range(self.comm.size + 1)]
        return [part[low:high] for low, high in itertools.pairwise(bounds)]

    def _sum_in_pieces(self, part: Array, total: Array) -> None:
        """Write the sum over all nodes to `total`; each peer adds its piece for all."""
        pieces = self._split(part)
        rows = self._exchange_parts(pieces)
        reduce_rows(np.add, rows, rows[:1], 0, rows.shape[1])
        normalize_nans(rows[0])
        counts = [piece.nbytes for piece in pieces]
        self.comm.allgatherv(rows[0].view(np.uint8), total.view(np.uint8), counts)

    def _sum_lowered(
        self, part: Array, lowered_part: Array | None, indices: NDArray[np.intp]
    ) -> Array:
        """Return the sums over all nodes at these indices, times `power`. Collective."""
        send = _lower_values(
            as_real(part)[indices],
            None if lowered_part is None else as_real(lowered_part)[indices],
            self.power,
        )
        total: Array = np.empty_like(send)
        reduce_by_mpi(self.comm, send, total, ReduceOp.MEAN)
        return total

    def _reduce_as_bfloat16(self, values: Array, factor: float, divisor: float, out: Array) -> None:
        """Write the sum over all nodes of values times `factor`, divided, sent as bfloat16."""
        bits = np.empty(values.size, np.uint16)
        _narrow_to_bfloat16(values, factor, bits)
        pieces = self._split(bits)
        own_bits = self._reduce_own_bfloat16(pieces, divisor)
        counts = [piece.nbytes for piece in pieces]
        self.comm.allgatherv(own_bits.view(np.uint8), bits.view(np.uint8), counts)
        _widen_from_bfloat16(bits, out)

    def _reduce_own_bfloat16(self, bits: Sequence[Array], divisor: float) -> Array:
        """Return this rank's own part, reduced; `bits` has the parts of all peers in bfloat16."""
        received_bits = self._exchange_parts(bits)
        wide_rows: Array = np.empty(received_bits.shape, np.float32)
        _widen_from_bfloat16(received_bits.reshape(-1), wide_rows.reshape(-1))
        reduce_rows(np.add, wide_rows, wide_rows[:1], 0, wide_rows.shape[1])
        if divisor != 1.0:
            divide(wide_rows[0], divisor)
        own_bits = np.empty(wide_rows.shape[1], np.uint16)
        _narrow_to_bfloat16(wide_rows[0], 1.0, own_bits)
        return own_bits

    def _choose_finite_values(self, part: Array, lowered_part: Array | None) -> tuple[Array, bool]:
        """Return the values and False; or, if one is not finite, those times `power` and True."""
        if lowered_part is None or np.isfinite(part).all():
            return part, False
        return _lower_values(part, lowered_part, self.power), True

    def _exchange_parts(self, parts: Sequence[Array]) -> Array:
        """Return the parts that this rank receives, in rows; each peer is sent its part."""
        comm, own_rank, size = self.comm, self.comm.rank, self.comm.size
        received_rows = np.empty((size, parts[own_rank].size), parts[own_rank].dtype)
        received_rows[own_rank] = parts[own_rank]
        for step in range(1, size):
            destination, source = (own_rank + step) % size, (own_rank - step) % size
            comm.sendrecv(parts[destination], destination, received_rows[source], source)
        return received_rows

    def reduce_own_part(
        self, parts: Sequence[Array], lowered_parts: Sequence[Array] | None, divisor: float
    ) -> Array:
        """Return the mean over the nodes of this rank's part. Collective; without a handshake.

        Args:
          parts: This node's sums for each peer, in the peers' order; flat, contiguous, of one
            dtype, float32 or float64.
          lowered_parts: As in `reduce`, for each of them, or None.
          divisor: As there.

        Cost: one message to each of the others.
        """
        lowered_or_none = lowered_parts if lowered_parts is not None else [None] * len(parts)
        values_and_flags = [
            self._choose_finite_values(part, lowered_part)
            for part, lowered_part in zip(parts, lowered_or_none, strict=True)
        ]
        if self.wire == "bfloat16" and parts[0].dtype == np.float32:
            bits_of_parts = [np.empty(part.size, np.uint16) for part in parts]
            for (values, is_lowered), bits in zip(values_and_flags, bits_of_parts, strict=True):
                _narrow_to_bfloat16(values, 1.0 if is_lowered else self.power, bits)
            own_mean = np.empty(parts[self.comm.rank].size, np.float32)
            _widen_from_bfloat16(
                self._reduce_own_bfloat16(bits_of_parts, divisor * self.power), own_mean
            )
            return own_mean
        # The last element is 1 if the others are scaled down.
        flagged_parts = [
            np.append(values, values.dtype.type(is_lowered))
            for values, is_lowered in values_and_flags
        ]
        return _average_rows(self._exchange_parts(flagged_parts), divisor, self.power)


def _average_rows(received_rows: Array, divisor: float, power: float) -> Array:
    """Return the mean of the rows; the rows whose last element is 1 are multiplied by `power`."""
    rows, size = received_rows[:, :-1], len(received_rows)
    total: Array = np.empty((1, received_rows.shape[1]), received_rows.dtype)
    lowered = {i: rows[i].copy() for i in np.flatnonzero(received_rows[:, -1]).tolist()}
    for i in lowered:
        rows[i] /= rows.dtype.type(power)

    def sum_lowered(indices: NDArray[np.intp]) -> Array:
        scale = rows.dtype.type(power)
        terms = [
            lowered[i][indices] if i in lowered else rows[i, indices] * scale for i in range(size)
        ]
        low_total: Array = functools.reduce(np.add, terms)
        return low_total

    reduce_rows(np.add, received_rows, total, 0, rows.shape[1])
    mean: Array = total[0, :-1]
    if divisor != 1.0:
        divide(mean, divisor)
        recompute_nonfinite_means(mean, sum_lowered, divisor, power)
    return mean


def _lower_values(part: Array, lowered_part: Array | None, power: float) -> Array:
    """Return `part` times a power of two, or `lowered_part` where `part` is not finite."""
    lowered: Array = part * part.dtype.type(power)
    if lowered_part is not None:
        np.copyto(lowered, lowered_part, where=~np.isfinite(part))
    return lowered


def _is_large(array: Array) -> bool:
    return is_worth_compiling(np.add, np.dtype(np.float32), array.size)


def _narrow_to_bfloat16(values: Array, factor: float, bits: Array) -> None:
    loop = to_bfloat16 if _is_large(values) else to_bfloat16.reference
    loop(values, np.float32(factor), bits)


def _widen_from_bfloat16(bits: Array, values: Array) -> None:
    (from_bfloat16 if _is_large(bits) else from_bfloat16.reference)(bits, values)


def compile_wire_casts(dtype: np.dtype[Any], columns: int) -> None:
    """Compile the loops that cast so many columns to bfloat16 and back, if they are compiled."""
    if dtype == np.float32 and is_worth_compiling(np.add, dtype, columns):
        sample, bits = np.zeros(1, np.float32), np.zeros(1, np.uint16)
        to_bfloat16(sample, sample[0], bits)
        from_bfloat16(bits, sample)


def reduce_columns_between_nodes(
    peers: InterNodeGroup,
    op: ReduceOp,
    rows: Array,
    row: Array,
    *,
    own_columns: tuple[int, int],
    segments: Sequence[Segment],
) -> None:
    """Reduce this rank's slice of the nodes' sums. Collective over `peers`; without a handshake.

    Args:
      peers: One rank of each node.
      op: The operation.
      rows: The values of the ranks of this node. For a mean that is not finite the second row has
        the sum times the power of the group.
      row: The sum of this node; the result is written there.
      own_columns: The slice: its first column, and the column after its last.
      segments: The columns, and their scales.
    """
    low, high = own_columns
    for segment in segments:
        start, stop = max(low, segment.start), min(high, segment.stop)
        has_lowered = op is ReduceOp.MEAN and segment.scales is None and len(rows) > 1
        for at in range(start, stop, MAX_EXCHANGE_ELEMENTS):
            part = row[at : min(at + MAX_EXCHANGE_ELEMENTS, stop)]
            low_sums = [rows[1, at : at + part.size]] if has_lowered else None
            reduce_slices_between_nodes(peers, op, [part], low_sums, segment.divisor)


def reduce_slices_between_nodes(
    peers: InterNodeGroup,
    op: ReduceOp,
    parts: Sequence[Array],
    lowered_parts: Sequence[Array] | None,
    divisor: float,
) -> None:
    """Reduce several slices in one exchange, in place. Collective over `peers`; no handshake.

    Args:
      peers: One rank of each node.
      op: The operation.
      parts: The slices, of one dtype; together at most `MAX_EXCHANGE_ELEMENTS` elements.
      lowered_parts: As in `InterNodeGroup.reduce`, for each of them, or None.
      divisor: As there.
    """
    joined_parts, joined_lowered = parts[0], lowered_parts[0] if lowered_parts else None
    if len(parts) > 1:
        joined_parts, joined_lowered = np.concatenate(parts), None
        if lowered_parts and not np.isfinite(joined_parts).all():
            joined_lowered = np.concatenate(lowered_parts)
    total, at = peers.reduce(op, joined_parts, joined_lowered, divisor), 0
    for part in parts:
        if total is not part:
            part[:] = total[at : at + part.size]
        at += part.size


def reduce_means_between_nodes(
    peers: InterNodeGroup, op: ReduceOp, peer_columns: Sequence[Sequence[tuple[Array, Segment]]]
) -> None:
    """Write the means over all nodes to the first rows of matrices.

    Collective over `peers`; without a handshake. The first rows have the sums of the nodes; where a
    sum is not finite, the second row has it times the power of the group.

    Args:
      peers: One rank of each node.
      op: MEAN.
      peer_columns: Matrices and their columns: one list, whose means all peers receive; or one list
        for each peer, whose means that peer alone receives.
    """
    rows, segment = peer_columns[0][0]
    sums, low = _select_row(peer_columns, 0), None
    if segment.scales is None and len(rows) > 1:
        low = _select_row(peer_columns, 1)
    if len(peer_columns) == 1:
        reduce_slices_between_nodes(
            peers, op, sums[0], None if low is None else low[0], segment.divisor
        )
        return
    joined_sums = [np.concatenate(columns) for columns in sums]
    joined_lows = None if low is None else [np.concatenate(columns) for columns in low]
    own_mean, at = peers.reduce_own_part(joined_sums, joined_lows, segment.divisor), 0
    for own_sum in sums[peers.comm.rank]:
        own_sum[:] = own_mean[at : at + own_sum.size]
        at += own_sum.size


def _select_row(
    peer_columns: Sequence[Sequence[tuple[Array, Segment]]], row_index: int
) -> list[list[Array]]:
    return [
        [rows[row_index, segment.start : segment.stop] for rows, segment in columns]
        for columns in peer_columns
    ]


def cut_into_exchanges(
    numbered_arrays: Sequence[tuple[int, Array]], step: int, peer_count: int = 1
) -> Iterator[list[tuple[int, int, int]]]:
    """Cut numbered arrays, and yield as many pieces of one dtype as may be reduced together.

    A piece is the number of an array, the first element, and the element after the last.

    Args:
      numbered_arrays: Flat arrays, and their numbers.
      step: Arrays may be cut at multiples of so many elements.
      peer_count: How many ranks have such pieces in one exchange.

    Example:
      >>> f4, f8 = np.empty(2**20 + 5, "f4"), np.empty(3, "f8")
      >>> list(cut_into_exchanges([(0, f4), (1, f4[:9]), (2, f8)], 4096))
      [[(0, 0, 1048576)], [(0, 1048576, 1048581), (1, 0, 9)], [(2, 0, 3)]]
    """
    pieces: list[tuple[int, int, int]] = []
    max_elements = MAX_EXCHANGE_ELEMENTS // peer_count
    remaining_elements, dtype = max_elements, None
    for i, array in numbered_arrays:
        low = 0
        while low < array.size:
            if pieces and (
                array.dtype != dtype or remaining_elements < min(step, array.size - low)
            ):
                yield pieces
                pieces, remaining_elements = [], max_elements
            high = min(array.size, low + max(step, remaining_elements // step * step))
            pieces.append((i, low, high))
            remaining_elements, dtype, low = remaining_elements - high + low, array.dtype, high
    if pieces:
        yield pieces
