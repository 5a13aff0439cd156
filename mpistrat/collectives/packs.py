"""Which leaves pass through shared memory together, and at which columns.

Made from dtypes and sizes alone, so equal on all ranks once the proof has passed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array

__all__ = ["LIMIT", "Pack", "Piece", "fill", "packs"]

# Scratch memory of a rank is bounded by this, whatever the tree. What was packed is still in the
# outer caches when it is folded: 102 MB took 1.3 times as long in packs of 64 MiB (2 cores).
LIMIT = 8 * 1024 * 1024


class Piece(NamedTuple):
    """A leaf in a pack, or a part of one that is larger than packs are.

    Attributes:
      leaf: Which leaf.
      start: The first element of the leaf that is in here.
      stop: The element after the last.
      column: Where the first one lies in the pack.
      whole: All of the leaf is in here.
    """

    leaf: int
    start: int
    stop: int
    column: int
    whole: bool


class Pack(NamedTuple):
    """What is folded at once.

    Attributes:
      dtype: In which dtype.
      pieces: What is in it, in the order of the leaves.
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
def packs(specs: tuple[tuple[np.dtype[Any], int], ...], limit: int = LIMIT) -> tuple[Pack, ...]:
    """Return the packs for leaves with these ``(dtype, number of elements)``; empty ones in none.

    Example:
      >>> f8 = np.dtype(np.float64)
      >>> [pack.columns for pack in packs(((f8, 3), (f8, 0), (f8, 6)), limit=64)]
      [8, 1]
    """
    done: list[Pack] = []
    pieces: dict[np.dtype[Any], list[Piece]] = {}
    columns: dict[np.dtype[Any], int] = {}

    def close(dtype: np.dtype[Any]) -> None:
        done.append(Pack(dtype, tuple(pieces.pop(dtype)), columns.pop(dtype)))

    for leaf, (dtype, size) in enumerate(specs):
        most, at = max(1, limit // dtype.itemsize), 0
        while at < size:
            column = columns.get(dtype, 0)
            stop = min(size, at + most - column)
            piece = Piece(leaf, at, stop, column, stop - at == size)
            pieces.setdefault(dtype, []).append(piece)
            columns[dtype] = column + stop - at
            at = stop
            if columns[dtype] == most:
                close(dtype)
    for dtype in list(pieces):
        close(dtype)
    return tuple(done)


def fill(pack: Pack, values: Sequence[Array], room: Array) -> None:
    """Copy what is in `pack` into the first columns of `room`, converted to its dtype.

    One call of NumPy for the whole pack, whose loop over the leaves is compiled.
    """
    first = pack.pieces[0]
    if first.whole and len(pack.pieces) == 1:
        value = values[first.leaf]
        np.copyto(room[: pack.columns].reshape(value.shape), value, casting="unsafe")
        return
    parts = [
        values[p.leaf] if p.whole else values[p.leaf].reshape(-1)[p.start : p.stop]
        for p in pack.pieces
    ]
    np.concatenate(parts, axis=None, out=room[: pack.columns], casting="unsafe")
