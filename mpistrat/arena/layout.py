"""Where the leaves of a tree are in a block of shared memory.

A block has one matrix for each dtype, with one row for each rank of the node, so that a slice of
columns is the same elements of the same leaves on every rank::

    float32   | w of rank 0          | b of rank 0 |      <- row 0
              | w of rank 1          | b of rank 1 |      <- row 1
    int64     | n of rank 0 |
              | n of rank 1 |
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arena.storage import LEAST

LINE = 64  # bytes of a cache line, and the widest vector unit's alignment

Specs = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


class Place(NamedTuple):
    """Where one leaf lies.

    Attributes:
      matrix: Which matrix.
      start: Its first column.
      stop: The column after its last.
      shape: Its shape.
    """

    matrix: int
    start: int
    stop: int
    shape: tuple[int, ...]


class Matrix(NamedTuple):
    """All leaves of one dtype.

    Attributes:
      dtype: The dtype.
      columns: How many elements a row has.
      offset: Where the matrix begins in the block, in bytes.
    """

    dtype: np.dtype[Any]
    columns: int
    offset: int


class Layout(NamedTuple):
    """A block as a whole.

    Attributes:
      matrices: One for each dtype, in the order in which they first come.
      places: One for each leaf.
      nbytes: The size of the block.
    """

    matrices: tuple[Matrix, ...]
    places: tuple[Place, ...]
    nbytes: int

    def step(self, matrix: int) -> int:
        """Return at multiples of how many columns leaves begin in that matrix."""
        return _step(self.matrices[matrix].dtype)


def _step(dtype: np.dtype[Any]) -> int:
    return max(1, LINE // dtype.itemsize)


@functools.lru_cache(maxsize=256)
def lay_out(specs: Specs, rows: int) -> Layout:
    """Return where leaves of these ``(dtype, shape)`` lie, with so many rows.

    Each leaf begins on a cache line of its own. Small ones lie side by side, behind the large ones,
    so that they can be read as one.

    Example:
      >>> f4 = np.dtype(np.float32)
      >>> [place.start for place in lay_out(((f4, (3,)), (f4, (2, 2)), (f4, (200, 100))), 2).places]
      [20000, 20016, 0]
    """
    columns = {dtype: 0 for dtype, _ in specs}
    sizes = [math.prod(shape) for _, shape in specs]
    places: dict[int, Place] = {}
    for i in sorted(range(len(specs)), key=lambda i: sizes[i] * specs[i][0].itemsize < LEAST):
        dtype, shape = specs[i]
        start, step = columns[dtype], _step(dtype)
        places[i] = Place(list(columns).index(dtype), start, start + sizes[i], shape)
        columns[dtype] = -(-(start + sizes[i]) // step) * step
    matrices, offset = [], 0
    for dtype, width in columns.items():
        matrices.append(Matrix(dtype, width, offset))
        offset += -(-width * dtype.itemsize * rows // LINE) * LINE
    return Layout(tuple(matrices), tuple(places[i] for i in range(len(specs))), max(offset, LINE))


def slice_of(rank: int, size: int, columns: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return where the columns that one of `size` ranks reduces begin and end.

    They begin on cache lines, so that no two ranks write to one.

    Example:
      >>> [slice_of(rank, 3, 100, np.dtype("f4")) for rank in range(3)]
      [(0, 32), (32, 64), (64, 100)]
    """
    step = _step(dtype)
    lines = -(-columns // step)
    low, high = lines * rank // size * step, lines * (rank + 1) // size * step
    return min(columns, low), min(columns, high)


def slices_of(rank: int, size: int, layout: Layout) -> list[tuple[int, int]]:
    """Return the bytes of a block that are in the columns of one rank, of all rows.

    Example:
      >>> block = lay_out(((np.dtype("f4"), (100,)),), 2)
      >>> [slices_of(rank, 2, block) for rank in range(2)]
      [[(0, 192), (448, 640)], [(192, 448), (640, 896)]]
    """
    byte_ranges = []
    for dtype, columns, offset in layout.matrices:
        low, high = slice_of(rank, size, columns, dtype)
        for row in range(size):
            start, stop = (
                offset + (row * columns + column) * dtype.itemsize for column in (low, high)
            )
            byte_ranges.append((start, stop))
    return byte_ranges
