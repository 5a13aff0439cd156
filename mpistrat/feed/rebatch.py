"""Batches taken apart and joined anew, in other sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array
from mpistrat.errors import DataError
from mpistrat.feed.pieces import BatchSlice, columns_of
from mpistrat.feed.sources import UNKNOWN
from mpistrat.feed.steps import Path, Pieces, Seeds, Step


@final
class Joined(BatchSlice):
    """Rows of successive batches as one batch; a row is read where it is asked for.

    Args:
      parts: A batch, and which of its rows belong here, from and to; at least one.
    """

    def __init__(self, parts: Sequence[tuple[BatchSlice, int, int]]):
        """Create a batch of these parts."""
        self._parts = parts

    def count(self) -> int:
        """Return the number of rows of all parts."""
        return sum(hi - lo for _, lo, hi in self._parts)

    def span(self, lo: int, hi: int) -> Any:
        """Read these rows, each from its part."""
        found, start = [], 0
        for piece, first, last in self._parts:
            at = max(lo - start, 0), min(hi - start, last - first)
            if at[0] < at[1]:
                found.append(piece.span(first + at[0], first + at[1]))
            start += last - first
        if len(found) == 1:
            return found[0]
        if not found:
            piece, first, _ = self._parts[0]
            return piece.span(first, first)
        return _concatenated(found)

    def alike(self, made: bool = True) -> Iterator[Array]:
        """Iterate over those of all parts; their rows were counted, so the parts are made."""
        return itertools.chain.from_iterable(piece.alike() for piece, _, _ in self._parts)


def _concatenated(batches: Sequence[Any]) -> Any:
    columns, structure = columns_of(batches, "Batches that are joined", "batch")
    for column, path in zip(columns, nest.paths(batches[0]), strict=True):
        shapes = sorted({array.shape[1:] for array in column})
        if len(shapes) > 1:
            where = f"those of leaf {path!r}" if path else "these"
            raise DataError(
                f"Batches that are joined must have rows of one shape, but {where} have {shapes}."
            )
    return nest.unflatten(structure, [np.concatenate(column) for column in columns])


def rejoined(pieces: Iterator[BatchSlice], sizes: Sequence[int]) -> Iterator[BatchSlice]:
    """Iterate over batches of these sizes in turn, made of all rows of `pieces` in order.

    The last one may be short. A size of 0 gives a batch without rows, as long as rows follow.

    Args:
      pieces: The batches; each must know or find out its number of rows.
      sizes: How many rows, over and over again; not all 0.
    """
    piece, lo, hi = None, 0, 0
    for size in itertools.cycle(sizes):
        parts: list[tuple[BatchSlice, int, int]] = []
        missing = size
        while missing or not parts:
            while piece is None or lo == hi:
                piece = next(pieces, None)
                if piece is None:
                    break
                lo, hi = 0, piece.count()
            if piece is None:
                break
            end = min(hi, lo + missing)
            parts.append((piece, lo, end))
            missing -= end - lo
            lo = end
        if not parts:
            return
        yield Joined(parts)


def shares(rows: int, count: int) -> tuple[int, ...]:
    """Return how a batch of `rows` is divided evenly: the first rows % count get one more.

    Example:
      >>> shares(5, 4)
      (2, 1, 1, 1)
    """
    each, more = divmod(rows, count)
    return tuple(each + (index < more) for index in range(count))


@final
@dataclasses.dataclass(frozen=True)
class Rebatch(Step):
    """Batches of another size, made of the rows of all batches in order.

    Attributes:
      size: How many rows.
      drop_remainder: Leave out a last batch of fewer.
    """

    size: int
    drop_remainder: bool

    def cardinality(self, before: int) -> int:
        """Return 0, no end, or unknown: batches may have any number of rows."""
        return UNKNOWN if before > 0 else before

    def stream(self, before: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over the new batches."""
        for piece in rejoined(before(path), (self.size,)):
            if not self.drop_remainder or piece.count() == self.size:
                yield piece

    def batch_size(self, before: int | None) -> int | None:
        """Return the new size."""
        return self.size
