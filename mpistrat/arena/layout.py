"""Where the leaves of a tree lie in a block of shared memory.

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

__all__ = ["LINE", "Layout", "Matrix", "Place", "Specs", "lay_out"]

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

    Each leaf begins on a cache line of its own.

    Example:
      >>> f4 = np.dtype(np.float32)
      >>> [place.start for place in lay_out(((f4, (3,)), (f4, (2, 2))), 2).places]
      [0, 16]
    """
    columns: dict[np.dtype[Any], int] = {}
    places = []
    for dtype, shape in specs:
        start = columns.get(dtype, 0)
        stop = start + math.prod(shape)
        step = _step(dtype)
        columns[dtype] = -(-stop // step) * step
        places.append(Place(list(columns).index(dtype), start, stop, shape))
    matrices, offset = [], 0
    for dtype, width in columns.items():
        matrices.append(Matrix(dtype, width, offset))
        offset += -(-width * dtype.itemsize * rows // LINE) * LINE
    return Layout(tuple(matrices), tuple(places), max(offset, LINE))
