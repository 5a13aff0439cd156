"""Which rows of an array source one epoch visits, in which order; index arithmetic, no data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import numpy as np

from mpistrat.feed.sources import INFINITE, Rows


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
        """Create the order of so many rows."""
        self.length = length

    def span(self, lo: int, hi: int) -> Rows:
        """Return lo to hi."""
        return np.arange(lo, hi, dtype=np.int64)


@final
class Listed(Order):
    """Rows in the order of a list."""

    def __init__(self, rows: Rows):
        """Create the order of a list."""
        self.length = len(rows)
        self._rows = rows

    def span(self, lo: int, hi: int) -> Rows:
        """Return that part of the list."""
        return self._rows[lo:hi]


@final
class Strided(Order):
    """Another order at positions `start`, ``start + step`` and so on, before `stop`."""

    def __init__(self, inner: Order, start: int, stop: int | None, step: int):
        """Create it; `stop` is None for the end of the other order."""
        end = inner.length if stop is None else stop
        if inner.length != INFINITE:
            end = min(end, inner.length)
        self.length = INFINITE if end == INFINITE else len(range(start, end, step))
        self._inner = inner
        self._start = start
        self._step = step

    def span(self, lo: int, hi: int) -> Rows:
        """Return every step-th position of the other order."""
        if lo >= hi:
            return np.empty(0, np.int64)
        first, last = self._start + lo * self._step, self._start + (hi - 1) * self._step
        return self._inner.span(first, last + 1)[:: self._step]


@final
class Repeated(Order):
    """One order after another, each made when it is first needed.

    Args:
      first: The order of repetition 0.
      make: Returns the order of repetition 1, 2 and so on, of the same length.
      length: The length of all together, or `INFINITE`.
    """

    def __init__(self, first: Order, make: Callable[[int], Order], length: int):
        """Create it; no repetition but the first is made yet."""
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
