"""Which leaves are sent together, and where each is in the message.

Made from dtypes and sizes alone, so equal on all ranks once the handshake has passed.

Which columns of a matrix are reduced, and how they are scaled.
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

# Scratch memory of a rank is bounded by this, whatever the tree. What was packed is still in the
# outer caches when it is reduced: 102 MB took 1.3 times as long in packs of 64 MiB (2 cores).
LIMIT = 8 * 1024 * 1024
# A large leaf goes to MPI alone, without a copy: packing it would only add two copies.
ALONE = 64 * 1024


class Piece(NamedTuple):
    """A leaf in a bucket, or a part of one that is larger than buckets are.

    Attributes:
      leaf: Which leaf.
      start: The first element of the leaf that is in here.
      stop: The element after the last.
      column: Where the first one is in the bucket.
      whole: All of the leaf is in here.
    """

    leaf: int
    start: int
    stop: int
    column: int
    whole: bool


class Bucket(NamedTuple):
    """Leaves of one dtype that travel, and are reduced, at once.

    Attributes:
      dtype: In which dtype.
      pieces: What is in it.
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
def buckets(
    specs: tuple[tuple[np.dtype[Any], int], ...],
    limit: int = LIMIT,
    cut: bool = True,
    own_bucket_nbytes: int | None = None,
) -> tuple[Bucket, ...]:
    """Return the buckets for leaves with these ``(dtype, number of elements)``; empty ones in none.

    Args:
      specs: The dtype and the number of elements of each leaf.
      limit: A bucket is no larger than so many bytes; with whole leaves it is closed once it is
        larger.
      cut: Leaves may be cut. Else they are whole, in reverse order.
      own_bucket_nbytes: A leaf of so many bytes has a bucket of its own.

    Example:
      >>> f8 = np.dtype(np.float64)
      >>> [bucket.columns for bucket in buckets(((f8, 3), (f8, 0), (f8, 6)), limit=64)]
      [8, 1]
      >>> [bucket.columns for bucket in buckets(((f8, 3), (f8, 0), (f8, 6)), limit=64, cut=False)]
      [9]
    """
    done: list[Bucket] = []
    pieces: dict[np.dtype[Any], list[Piece]] = {}
    columns: dict[np.dtype[Any], int] = {}

    def close(dtype: np.dtype[Any]) -> None:
        done.append(Bucket(dtype, tuple(pieces.pop(dtype)), columns.pop(dtype)))

    numbered = list(enumerate(specs))
    for leaf, (dtype, size) in numbered if cut else reversed(numbered):
        if size and own_bucket_nbytes is not None and size * dtype.itemsize >= own_bucket_nbytes:
            done.append(Bucket(dtype, (Piece(leaf, 0, size, 0, True),), size))
            continue
        max_columns, at = max(1, limit // dtype.itemsize), 0
        while at < size:
            column = columns.get(dtype, 0)
            stop = min(size, at + max_columns - column) if cut else size
            piece = Piece(leaf, at, stop, column, stop - at == size)
            pieces.setdefault(dtype, []).append(piece)
            columns[dtype] = column + stop - at
            at = stop
            is_full = (
                columns[dtype] == max_columns if cut else columns[dtype] * dtype.itemsize > limit
            )
            if is_full:
                close(dtype)
    for dtype in list(pieces):
        close(dtype)
    return tuple(done)


def fill(bucket: Bucket, values: Sequence[Array], room: Array) -> None:
    """Copy what is in `bucket` into the first columns of `room`, converted to its dtype.

    One call of NumPy for the whole bucket, whose loop over the leaves is compiled.
    """
    first = bucket.pieces[0]
    if first.whole and len(bucket.pieces) == 1:
        value = values[first.leaf]
        np.copyto(room[: bucket.columns].reshape(value.shape), value, casting="unsafe")
        return
    parts = [
        values[p.leaf] if p.whole else values[p.leaf].reshape(-1)[p.start : p.stop]
        for p in bucket.pieces
    ]
    np.concatenate(parts, axis=None, out=room[: bucket.columns], casting="unsafe")


class Segment(NamedTuple):
    """Columns of a matrix that are treated alike."""

    start: int
    stop: int
    scales: Array | None
    divisor: float


# A matrix with a row for each rank of the node, and those of its columns that are reduced.
Part: TypeAlias = tuple[Array, list[Segment]]


class Placed(NamedTuple):
    """Arrays of the arena that are reduced in place.

    Attributes:
      suffix: What the text of the call says of it.
      rows: The matrices: the block of each, and its number there.
      segments: For each of them the columns: where they begin and end, and which leaf begins there.
    """

    suffix: str
    rows: list[tuple[weakref.ref[SharedBuffers], int]]
    segments: list[list[tuple[int, int, int]]]

    def parts(self, scales: Scales) -> list[Part]:
        """Return each matrix with those of its columns that are reduced."""
        matrix_parts = []
        for (block, matrix), cuts in zip(self.rows, self.segments, strict=True):
            living_block = block()
            assert living_block is not None  # its arrays are in the caller's hands
            ranges = [Segment(start, stop, *scales.of(leaf)) for start, stop, leaf in cuts]
            matrix_parts.append((living_block.matrices[matrix], ranges))
        return matrix_parts


def segments_of(bucket: Bucket, scales: Scales) -> list[Segment]:
    """Return the columns of a bucket, cut where leaves are scaled differently."""
    if scales.uniform:
        return [Segment(0, bucket.columns, *scales.of(0))]
    return [
        Segment(p.column, p.column + p.stop - p.start, *scales.of(p.leaf)) for p in bucket.pieces
    ]


def placed(homes: Sequence[BufferAddress]) -> Placed:
    """Return the columns in which arrays of the arena are reduced, the same every time."""
    segments: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    # The order is that of memory, where small leaves come behind large ones.
    for leaf, home in sorted(enumerate(homes), key=lambda pair: pair[1].position.start):
        place = home.position
        matrix_segments = segments.setdefault((home.block.number, place.matrix), [])
        # Neighbours are reduced as one, with the few columns between them that are nobody's.
        step = home.block.layout.step(place.matrix)
        if matrix_segments and place.start == -(-matrix_segments[-1][1] // step) * step:
            matrix_segments[-1] = (matrix_segments[-1][0], place.stop, matrix_segments[-1][2])
        else:
            matrix_segments.append((place.start, place.stop, leaf))
    blocks = {home.block.number: home.block for home in homes}
    # The references are weak: a plan must not keep a block that the program has dropped.
    rows = [(weakref.ref(blocks[number]), matrix) for number, matrix in segments]
    text = " ".join(f"{home.block.number}/{home.leaf}" for home in homes)
    return Placed(f", out, in place {text}", rows, list(segments.values()))
