"""Which columns of a matrix are reduced, and how they are scaled."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from mpistrat.arena.arena import ArenaAddress, Block
from mpistrat.arrays import Array
from mpistrat.collectives.buckets import Bucket
from mpistrat.collectives.weights import Scales


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
    rows: list[tuple[weakref.ref[Block], int]]
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


def placed(homes: Sequence[ArenaAddress]) -> Placed:
    """Return the columns in which arrays of the arena are reduced, the same every time."""
    segments: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    # The order is that of memory, where small leaves come behind large ones.
    for leaf, home in sorted(enumerate(homes), key=lambda pair: pair[1].place.start):
        place = home.place
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
