"""Which rows of an array source one epoch visits, in which order; index arithmetic, no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpistrat.feed.sources import INFINITE, Rows


class Order(NamedTuple):
    """A sequence of row numbers.

    Attributes:
      length: How many there are, or `INFINITE`.
      span: Returns those at positions lo to hi (exclusive); ``lo <= hi <= length``.
    """

    length: int
    span: Callable[[int, int], Rows]


def straight(length: int) -> Order:
    """Return the order of so many rows as they lie."""
    return Order(length, lambda lo, hi: np.arange(lo, hi, dtype=np.int64))


def listed(rows: Rows) -> Order:
    """Return the order of a list of rows."""
    return Order(len(rows), lambda lo, hi: rows[lo:hi])


def strided(inner: Order, start: int, stop: int | None, step: int) -> Order:
    """Return another order at positions `start`, ``start + step`` and so on, before `stop`.

    Args:
      inner: The other order.
      start: The first position.
      stop: The end; None for that of the other order.
      step: The distance.
    """
    end = inner.length if stop is None else stop
    if inner.length != INFINITE:
        end = min(end, inner.length)

    def span(lo: int, hi: int) -> Rows:
        if lo >= hi:
            return np.empty(0, np.int64)
        return inner.span(start + lo * step, start + (hi - 1) * step + 1)[::step]

    return Order(INFINITE if end == INFINITE else len(range(start, end, step)), span)


def repeated(first: Order, make: Callable[[int], Order], length: int) -> Order:
    """Return one order after another, each made when it is first needed.

    Args:
      first: The order of repetition 0.
      make: Returns the order of repetition 1, 2 and so on, of the same length.
      length: The length of all together, or `INFINITE`.
    """
    each, made = first.length, {0: first}  # which alone keeps it

    def repetition(index: int) -> Order:
        if index not in made:
            # A batch can span an end, so the one before stays; older ones would only fill memory.
            for old in [i for i in made if i != index - 1]:
                del made[old]
            made[index] = make(index)
        return made[index]

    def span(lo: int, hi: int) -> Rows:
        parts = []
        while lo < hi:
            index, start = divmod(lo, each)
            stop = min(each, start + hi - lo)
            parts.append(repetition(index).span(start, stop))
            lo += stop - start
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    return Order(length, span)
