"""Which rows of an array source one epoch visits, in which order; index arithmetic, no data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import numpy as np

from mpistrat.feed.sources import INFINITE, Rows

__all__ = ["Listed", "Order", "Repeated", "Sharded", "Skipped", "Straight", "Taken"]


class Order(ABC):
    """A sequence of row numbers.

    Attributes:
      length: How many there are, or `INFINITE`.
    """

    length: int

    @abstractmethod
    def span(self, lo: int, hi: int) -> Rows:
        """Return the row numbers at positions lo to hi (exclusive); ``lo <= hi <= length``."""


@final
class Straight(Order):
    """All rows as they lie."""

    def __init__(self, length: int):
        """Keep the number of rows."""
        self.length = length

    def span(self, lo: int, hi: int) -> Rows:
        """Return lo to hi."""
        return np.arange(lo, hi, dtype=np.int64)


@final
class Listed(Order):
    """Rows in the order of a list."""

    def __init__(self, rows: Rows):
        """Keep the list."""
        self.length = len(rows)
        self._rows = rows

    def span(self, lo: int, hi: int) -> Rows:
        """Return that part of the list."""
        return self._rows[lo:hi]


@final
class Taken(Order):
    """The first `count` of another order."""

    def __init__(self, inner: Order, count: int):
        """Keep both."""
        self.length = count if inner.length == INFINITE else min(inner.length, count)
        self._inner = inner

    def span(self, lo: int, hi: int) -> Rows:
        """Return the same positions of the other order."""
        return self._inner.span(lo, hi)


@final
class Skipped(Order):
    """Another order without its first `count`."""

    def __init__(self, inner: Order, count: int):
        """Keep both."""
        endless = inner.length == INFINITE
        self.length = INFINITE if endless else max(inner.length - count, 0)
        self._inner = inner
        self._count = count

    def span(self, lo: int, hi: int) -> Rows:
        """Return the later positions of the other order."""
        if lo >= hi:
            return np.empty(0, np.int64)
        return self._inner.span(self._count + lo, self._count + hi)


@final
class Sharded(Order):
    """Every count-th of another order, from number `index`."""

    def __init__(self, inner: Order, index: int, count: int):
        """Keep all three."""
        endless = inner.length == INFINITE
        self.length = INFINITE if endless else len(range(index, inner.length, count))
        self._inner = inner
        self._index = index
        self._count = count

    def span(self, lo: int, hi: int) -> Rows:
        """Return every count-th position of the other order."""
        if lo >= hi:
            return np.empty(0, np.int64)
        first, last = self._index + lo * self._count, self._index + (hi - 1) * self._count
        return self._inner.span(first, last + 1)[:: self._count]


@final
class Repeated(Order):
    """One order after another, each made when it is first needed.

    Args:
      first: The order of repetition 0.
      make: Returns the order of repetition 1, 2 and so on, of the same length.
      length: The length of all together, or `INFINITE`.
    """

    def __init__(self, first: Order, make: Callable[[int], Order], length: int):
        """Keep the recipe."""
        self.length = length
        self._make = make
        self._each = first.length
        self._made = {0: first}

    def span(self, lo: int, hi: int) -> Rows:
        """Return the positions, across the ends of repetitions."""
        parts = []
        while lo < hi:
            index, start = divmod(lo, self._each)
            stop = min(self._each, start + hi - lo)
            parts.append(self._repetition(index).span(start, stop))
            lo += stop - start
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _repetition(self, index: int) -> Order:
        if index not in self._made:
            # A batch can span an end, so the one before stays; older ones would only fill memory.
            self._made = {i: order for i, order in self._made.items() if i == index - 1}
            self._made[index] = self._make(index)
        return self._made[index]
