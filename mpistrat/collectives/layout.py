"""Leaves in buckets, and columns of matrices in shared memory.

A `Bucket` is the leaves that are sent together, and their places in the message. It follows from
dtypes and sizes alone, so it is equal on all ranks once the handshake has passed.

A `Segment` is neighbouring columns of a matrix with equal scales. `InPlaceColumns` are the columns
of the arena's matrices in which arrays are reduced without a copy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.weights import Scales
from mpistrat.shm.arena import BufferAddress, SharedBuffers

# The bytes of a bucket. They bound the scratch memory of a rank, whatever the tree, and a bucket
# is still in the outer caches when it is reduced: 102 MB took 1.3 times as long in buckets of
# 64 MiB (2 cores).
BUCKET_NBYTES = 8 * 1024 * 1024
# A leaf of so many bytes is a message of its own: packing it would only add two copies.
OWN_MESSAGE_NBYTES = 64 * 1024


class Piece(NamedTuple):
    """A leaf in a bucket, or a part of one that is larger than buckets are.

    Attributes:
      leaf_index: The number of the leaf.
      start: The first element of the leaf in the bucket.
      stop: The element after the last.
      column: The place of the first element in the bucket.
      is_whole: Whether all of the leaf is in the bucket.
    """

    leaf_index: int
    start: int
    stop: int
    column: int
    is_whole: bool


class Bucket(NamedTuple):
    """Leaves of one dtype that are sent, and reduced, at once.

    Attributes:
      dtype: The dtype in which they are sent.
      pieces: The leaves, or parts of leaves.
      columns: The number of elements.
    """

    dtype: np.dtype[Any]
    pieces: tuple[Piece, ...]
    columns: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.columns * self.dtype.itemsize


@functools.lru_cache(maxsize=256)
def make_buckets(
    specs: tuple[tuple[np.dtype[Any], int], ...],
    max_nbytes: int = BUCKET_NBYTES,
    may_cut_leaves: bool = True,
    own_bucket_nbytes: int | None = None,
) -> tuple[Bucket, ...]:
    """Return the buckets of leaves; leaves without elements are in no bucket.

    Args:
      specs: The dtype and the number of elements of each leaf.
      max_nbytes: A bucket is no larger than so many bytes; with whole leaves it is closed once it
        is larger.
      may_cut_leaves: Whether leaves may be cut. Else they are whole, in reverse order.
      own_bucket_nbytes: A leaf of so many bytes has a bucket of its own.

    Example:
      >>> f8 = np.dtype(np.float64)
      >>> specs = ((f8, 3), (f8, 0), (f8, 6))
      >>> [bucket.columns for bucket in make_buckets(specs, max_nbytes=64)]
      [8, 1]
      >>> [bucket.columns for bucket in make_buckets(specs, max_nbytes=64, may_cut_leaves=False)]
      [9]
    """
    finished_buckets: list[Bucket] = []
    pieces: dict[np.dtype[Any], list[Piece]] = {}
    columns: dict[np.dtype[Any], int] = {}

    def close(dtype: np.dtype[Any]) -> None:
        finished_buckets.append(Bucket(dtype, tuple(pieces.pop(dtype)), columns.pop(dtype)))

    numbered_specs = list(enumerate(specs))
    for leaf_index, (dtype, size) in numbered_specs if may_cut_leaves else reversed(numbered_specs):
        if size and own_bucket_nbytes is not None and size * dtype.itemsize >= own_bucket_nbytes:
            finished_buckets.append(Bucket(dtype, (Piece(leaf_index, 0, size, 0, True),), size))
            continue
        max_columns, start = max(1, max_nbytes // dtype.itemsize), 0
        while start < size:
            column = columns.get(dtype, 0)
            stop = min(size, start + max_columns - column) if may_cut_leaves else size
            piece = Piece(leaf_index, start, stop, column, stop - start == size)
            pieces.setdefault(dtype, []).append(piece)
            columns[dtype] = column + stop - start
            start = stop
            is_full = (
                columns[dtype] == max_columns
                if may_cut_leaves
                else columns[dtype] * dtype.itemsize > max_nbytes
            )
            if is_full:
                close(dtype)
    for dtype in list(pieces):
        close(dtype)
    return tuple(finished_buckets)


def fill_bucket(bucket: Bucket, values: Sequence[Array], row: Array) -> None:
    """Copy the leaves of `bucket` into the first columns of `row`, converted to its dtype.

    One call of NumPy copies the whole bucket, so the loop over the leaves is compiled.
    """
    first = bucket.pieces[0]
    if first.is_whole and len(bucket.pieces) == 1:
        value = values[first.leaf_index]
        np.copyto(row[: bucket.columns].reshape(value.shape), value, casting="unsafe")
        return
    parts = [
        values[p.leaf_index] if p.is_whole else values[p.leaf_index].reshape(-1)[p.start : p.stop]
        for p in bucket.pieces
    ]
    np.concatenate(parts, axis=None, out=row[: bucket.columns], casting="unsafe")


class Segment(NamedTuple):
    """Neighbouring columns of a matrix with equal scales.

    Attributes:
      start: The first column.
      stop: The column after the last.
      scales: The factor of each row; None for all ones.
      divisor: The number that the sum is divided by.
    """

    start: int
    stop: int
    scales: Array | None
    divisor: float


# A matrix with a row for each rank of the node, and the columns of it that are reduced.
MatrixColumns: TypeAlias = tuple[Array, list[Segment]]


def make_segments(bucket: Bucket, scales: Scales) -> list[Segment]:
    """Return the columns of a bucket as segments, one for each leaf if their scales differ."""
    if scales.is_uniform:
        return [Segment(0, bucket.columns, *scales.select_leaf(0))]
    return [
        Segment(p.column, p.column + p.stop - p.start, *scales.select_leaf(p.leaf_index))
        for p in bucket.pieces
    ]


class InPlaceColumns(NamedTuple):
    """The columns of the arena's matrices in which arrays are reduced in place.

    Attributes:
      suffix: The end of the text of the call, which names the arrays.
      matrices: The block of each matrix, and the number of the matrix there.
      segments: For each matrix its columns: their start, their end, and the leaf that begins there.
    """

    suffix: str
    matrices: list[tuple[weakref.ref[SharedBuffers], int]]
    segments: list[list[tuple[int, int, int]]]

    def list_matrices(self, scales: Scales) -> list[MatrixColumns]:
        """Return each matrix with the columns of it that are reduced."""
        matrices = []
        for (block, matrix_index), cuts in zip(self.matrices, self.segments, strict=True):
            living_block = block()
            assert living_block is not None  # the caller holds its arrays
            ranges = [
                Segment(start, stop, *scales.select_leaf(leaf_index))
                for start, stop, leaf_index in cuts
            ]
            matrices.append((living_block.matrices[matrix_index], ranges))
        return matrices


def find_in_place_columns(addresses: Sequence[BufferAddress]) -> InPlaceColumns:
    """Return the columns in which arrays of the arena are reduced, in the order of memory."""
    segments: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    # In memory, small leaves are behind large ones.
    for leaf, address in sorted(enumerate(addresses), key=lambda pair: pair[1].position.start):
        leaf_range = address.position
        matrix_segments = segments.setdefault((address.block.number, leaf_range.matrix), [])
        # Neighbours are reduced at once, with the few unused columns between them.
        step = address.block.layout.step(leaf_range.matrix)
        if matrix_segments and leaf_range.start == -(-matrix_segments[-1][1] // step) * step:
            matrix_segments[-1] = (matrix_segments[-1][0], leaf_range.stop, matrix_segments[-1][2])
        else:
            matrix_segments.append((leaf_range.start, leaf_range.stop, leaf))
    blocks = {address.block.number: address.block for address in addresses}
    # The references are weak: a plan must not keep a block that the program has dropped.
    matrices = [(weakref.ref(blocks[number]), matrix) for number, matrix in segments]
    text = " ".join(f"{address.block.number}/{address.leaf}" for address in addresses)
    return InPlaceColumns(f", out, in place {text}", matrices, list(segments.values()))
