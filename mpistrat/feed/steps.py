"""The steps of a dataset as data, each with what it does to examples and to batches.

A `Step` is one method call of the user. Before ``batch`` the elements are rows of arrays and a step
only rearranges row numbers (an `Order`); after it they are `BatchSlice` objects, in their order.
Repetitions are numbered by a path: the epoch, then the repetition of each ``repeat`` around a step.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeAlias, final

import numpy as np

from mpistrat.arrays import truth, whole_number
from mpistrat.errors import DataError, RefusedError
from mpistrat.feed.pieces import (
    BatchSlice,
    ExampleReader,
    Grouped,
    MapFn,
    Mapped,
    Order,
    RowMapped,
    Selected,
    listed,
    named,
    repeated,
    strided,
)
from mpistrat.feed.sources import INFINITE, UNKNOWN

Path: TypeAlias = tuple[int, ...]
Seeds: TypeAlias = tuple[int, ...]
Pieces: TypeAlias = Callable[[Path], Iterator[BatchSlice]]


def batches_of(size: int, drop_remainder: bool, element_count: int) -> int:
    """Return the number of batches of so many elements; `INFINITE` and `UNKNOWN` do not change.

    Example:
      >>> batches_of(4, False, 10)
      3
    """
    if element_count < 0:
        return element_count
    return element_count // size if drop_remainder else -(-element_count // size)


def bounds(size: int, drop_remainder: bool, length: int) -> Iterator[tuple[int, int]]:
    """Iterate over the first and the end of each batch of so many examples.

    Example:
      >>> list(bounds(4, False, 10))
      [(0, 4), (4, 8), (8, 10)]
    """
    if length == INFINITE:
        return zip(itertools.count(0, size), itertools.count(size, size))
    end = length - length % size if drop_remainder else length
    starts = range(0, end, size)
    return zip(starts, itertools.chain(starts[1:], (end,)))  # noqa: B905


class Step(ABC):
    """One transformation."""

    @abstractmethod
    def cardinality(self, element_count: int) -> int:
        """Return the number of elements after the step, from the number before it."""

    @abstractmethod
    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over one epoch of batches."""

    def batch_size(self, batch_rows: int | None) -> int | None:
        """Return the rows of a full batch after the step, or None if only reading could tell."""
        return batch_rows


class Arrange(Step):
    """A step that chooses and orders elements and leaves each as it is."""

    @abstractmethod
    def order(self, make_order: Callable[[Path], Order], seeds: Seeds, path: Path) -> Order:
        """Return one epoch of examples."""


@dataclasses.dataclass(frozen=True)
class Shuffle(Arrange):
    """A permutation of the whole epoch, drawn from the seed and the path alone.

    Attributes:
      seed: The seed, or None for one that comes with each pass.
      slot: Which of those it is.
    """

    seed: int | None
    slot: int

    def cardinality(self, element_count: int) -> int:
        """Return the same number."""
        return element_count

    def _generator(self, seeds: Seeds, path: Path) -> np.random.Generator:
        seed = seeds[self.slot] if self.seed is None else self.seed
        return np.random.default_rng(np.random.SeedSequence([seed, *path]))

    def order(self, make_order: Callable[[Path], Order], seeds: Seeds, path: Path) -> Order:
        """Return the permuted rows."""
        order = make_order(path)
        return listed(self._generator(seeds, path).permutation(order.span(0, order.length)))

    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over the permuted batches; those that an iterable gave are held meanwhile."""
        pieces: list[BatchSlice | None] = list(make_pieces(path))
        for index in self._generator(seeds, path).permutation(len(pieces)):
            piece, pieces[index] = pieces[index], None  # what it has read is not held here
            assert piece is not None
            yield piece


@final
@dataclasses.dataclass(frozen=True)
class FixedShuffle(Shuffle):
    """A permutation that is the same in every epoch and repetition, drawn from the seed alone."""

    def _generator(self, seeds: Seeds, path: Path) -> np.random.Generator:
        return super()._generator(seeds, ())


def shuffled(
    element_count: int, seed: int | None, slot: int, reshuffles_each_epoch: bool | None = True
) -> Shuffle:
    """Return the step that shuffles.

    Args:
      element_count: How many elements there are.
      seed: The seed, or None for one that comes with each pass.
      slot: Which of those it is.
      reshuffles_each_epoch: Whether each epoch has an order of its own; None for yes.

    Raises:
      DataError: There is no end, or it is not known.
      RefusedError: One order is asked for, and there is no seed.
    """
    seed = None if seed is None else whole_number("shuffle(seed)", seed, 0)
    if element_count == INFINITE:
        raise DataError("An endless dataset has no permutation; call shuffle before repeat().")
    if element_count == UNKNOWN:
        raise DataError(
            "The number of these batches is not known before they are read, so they cannot be "
            "permuted; shuffle where they are made, or pass them as a list."
        )
    if reshuffles_each_epoch is None or truth(
        "shuffle(reshuffle_each_iteration)", reshuffles_each_epoch
    ):
        return Shuffle(seed, slot)
    if seed is None:
        raise RefusedError(
            "shuffle(reshuffle_each_iteration=False) is refused without a seed, as each rank would "
            "have an order of its own. Write shuffle(seed=7, reshuffle_each_iteration=False)."
        )
    return FixedShuffle(seed, slot)


@final
@dataclasses.dataclass(frozen=True)
class Stride(Arrange):
    """Elements at regular distances, as a slice of a list has them; no others are read.

    Attributes:
      start: The first one.
      stop: The one after the last; None for the end.
      step: How far they are apart.
    """

    start: int
    stop: int | None = None
    step: int = 1

    def cardinality(self, element_count: int) -> int:
        """Return how many there are."""
        if self.stop is not None and (element_count == INFINITE or self.stop == 0):
            element_count = self.stop
        if element_count < 0:
            return element_count
        end = element_count if self.stop is None else min(element_count, self.stop)
        return len(range(self.start, end, self.step))

    def order(self, make_order: Callable[[Path], Order], seeds: Seeds, path: Path) -> Order:
        """Return their rows."""
        return strided(make_order(path), self.start, self.stop, self.step)

    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over these batches; the others are not read."""
        return itertools.islice(make_pieces(path), self.start, self.stop, self.step)


@final
@dataclasses.dataclass(frozen=True)
class Repeat(Arrange):
    """Several epochs in a row, each with orders of its own.

    Attributes:
      count: How many, or None for no end.
    """

    count: int | None

    def cardinality(self, element_count: int) -> int:
        """Return the product."""
        if element_count == 0 or self.count == 0:
            return 0
        if self.count is None:
            return INFINITE
        return element_count if element_count < 0 else element_count * self.count

    def order(self, make_order: Callable[[Path], Order], seeds: Seeds, path: Path) -> Order:
        """Return the rows of all repetitions."""
        first = make_order((*path, 0))
        length = self.cardinality(first.length)
        return repeated(first, lambda index: make_order((*path, index)), length)

    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over all repetitions; nothing forever is nothing."""
        for index in itertools.count() if self.count is None else range(self.count):
            empty = True
            for piece in make_pieces((*path, index)):
                empty = False
                yield piece
            if empty and self.count is None:
                return


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Map(Step):
    """A function applied to batches.

    Attributes:
      fn: The function.
      rowwise: It treats each row on its own.
    """

    fn: MapFn
    rowwise: bool

    def cardinality(self, element_count: int) -> int:
        """Return the same number."""
        return element_count

    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over the mapped batches; the function runs when one is cut."""
        kind = RowMapped if self.rowwise else Mapped
        return (kind(piece, self.fn) for piece in make_pieces(path))

    def batch_size(self, batch_rows: int | None) -> int | None:
        """Return the same number where the function treats each row on its own."""
        return batch_rows if self.rowwise else None

    def __repr__(self) -> str:
        """Return a string that does not depend on the process, as the address of `fn` does."""
        return f"Map({named(self.fn)}, rowwise={self.rowwise})"


@final
@dataclasses.dataclass(frozen=True)
class Batch(Step):
    """Successive elements joined to one.

    Attributes:
      size: How many.
      drop_remainder: Leave out a last one of fewer.
    """

    size: int
    drop_remainder: bool

    def cardinality(self, element_count: int) -> int:
        """Return the number of batches."""
        return batches_of(self.size, self.drop_remainder, element_count)

    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over batches of batches."""
        pieces = make_pieces(path)
        while group := list(itertools.islice(pieces, self.size)):
            if len(group) < self.size and self.drop_remainder:
                return
            yield Grouped(group)

    def batch_size(self, batch_rows: int | None) -> int | None:
        """Return how many are joined."""
        return self.size

    def examples(self, reader: ExampleReader, order: Order) -> Iterator[BatchSlice]:
        """Iterate over batches of examples."""
        for lo, hi in bounds(self.size, self.drop_remainder, order.length):
            yield Selected(reader, order, lo, hi)
