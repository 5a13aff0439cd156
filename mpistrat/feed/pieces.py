"""One global batch that nobody has read yet, and the part of it that one replica reads.

Each class is one way a batch comes about. All know a single verb: `cut`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from mpistrat import nest
from mpistrat.errors import DataError
from mpistrat.feed.orders import Order
from mpistrat.feed.sources import Arrays, Rows

__all__ = ["ExampleReader", "Given", "Grouped", "MapFn", "Mapped", "Piece", "RowMapped", "Selected"]

MapFn: TypeAlias = Callable[..., Any]


def _apply(fn: MapFn, element: Any) -> Any:
    # As in tf.data, which unpacks tuples but not named tuples.
    return fn(*element) if type(element) is tuple else fn(element)


def _stack(elements: Sequence[Any]) -> Any:
    """Return the tree whose leaves have the elements along a new first axis."""
    leaves, structure = nest.flatten(elements[0])
    columns = [[np.asarray(leaf)] for leaf in leaves]
    for index, element in enumerate(elements[1:], 1):
        others, other = nest.flatten(element)
        if other != structure:
            raise DataError(
                f"Elements of one batch must have the same structure: element 0 is "
                f"{nest.describe(structure)}, element {index} is {nest.describe(other)}."
            )
        for column, leaf in zip(columns, others, strict=True):
            column.append(np.asarray(leaf))
    for column, path in zip(columns, nest.paths(elements[0]), strict=True):
        shapes = sorted({array.shape for array in column})
        if len(shapes) > 1:
            where = f"leaf {path!r} has" if path else "there are"
            raise DataError(
                f"Elements of one batch must have the same shape, but {where} {shapes}. Pad them "
                "in map, or use drop_remainder=True if these are batches and the last one is short."
            )
    return nest.unflatten(structure, [np.stack(column) for column in columns])


def _bounds(rows: int, index: int, count: int) -> tuple[int, int]:
    """Return the rows of replica `index` of `count`, ceil(rows / count) or fewer."""
    if not 0 <= index < count:
        raise DataError(f"Replica {index} of {count} does not exist.")
    each = -(-rows // count)
    lo = min(index * each, rows)
    return lo, min(lo + each, rows)


class Piece(ABC):
    """One global batch before it is read.

    A piece belongs to the iterator that gave it: cut it before asking for the next one.
    """

    @property
    @abstractmethod
    def rows(self) -> int | None:
        """How many rows the whole batch has; None if that shows only when it is read."""

    @abstractmethod
    def cut(self, index: int, count: int) -> Any:
        """Read and return the part of replica `index` of `count`.

        Of L rows these are ``[index * k, min((index + 1) * k, L))`` with ``k = ceil(L / count)``:
        possibly none, and then arrays with 0 rows of the right dtype and trailing shape.
        ``cut(0, 1)`` is the whole batch.

        Raises:
          DataError: There is no such replica, or the data or a map do not fit together.
        """


@final
class ExampleReader:
    """Reads rows of arrays as examples, each sent through the maps that stand before ``batch``."""

    def __init__(self, arrays: Arrays, fns: tuple[MapFn, ...] = ()):
        """Keep both; nothing is read."""
        self.arrays = arrays
        self.fns = fns
        self._none: Any = None  # a mapped batch of 0 rows, once a row has shown what that is

    def example(self, row: int) -> Any:
        """Return one example, mapped."""
        element = self._rows(np.array([row]))
        return nest.map(lambda leaf: leaf[0], element)

    def read(self, order: Order, lo: int, hi: int, spare: int) -> Any:
        """Return the batch of the examples at positions lo to hi.

        With a map and no rows the result shows dtype and shape of an earlier one; if there is none
        yet, the example at position `spare` is read to learn them.
        """
        rows = order.span(lo, hi)
        if len(rows) or not self.fns:
            return self._rows(rows)
        if self._none is None:
            self._rows(order.span(spare, spare + 1))
        return nest.map(np.copy, self._none)

    def _rows(self, rows: Rows) -> Any:
        batch = self.arrays.read(rows)
        if not self.fns:
            return batch
        leaves, structure = nest.flatten(batch)
        examples = []
        for i in range(len(rows)):
            example = nest.unflatten(structure, [leaf[i] for leaf in leaves])
            for fn in self.fns:
                example = _apply(fn, example)
            examples.append(example)
        result = _stack(examples)
        if self._none is None:
            self._none = nest.map(lambda leaf: leaf[:0].copy(), result)
        return result


@final
class Selected(Piece):
    """A batch of examples from arrays; a replica reads its own rows and no other."""

    def __init__(self, reader: ExampleReader, order: Order, lo: int, hi: int):
        """Keep where the examples are."""
        self._reader = reader
        self._order = order
        self._lo = lo
        self._hi = hi

    @property
    def rows(self) -> int:
        """The number of examples."""
        return self._hi - self._lo

    def cut(self, index: int, count: int) -> Any:
        """Read the rows of one replica."""
        lo, hi = _bounds(self.rows, index, count)
        return self._reader.read(self._order, self._lo + lo, self._lo + hi, self._lo)


@final
class Given(Piece):
    """A batch that an iterable gave, whole."""

    def __init__(self, batch: Any, index: int):
        """Check the batch, which is number `index` of its epoch."""
        self._arrays = Arrays(batch, f"batch {index} of the iterable")

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self._arrays.rows

    def cut(self, index: int, count: int) -> Any:
        """Copy the rows of one replica."""
        return self._arrays.span(*_bounds(self.rows, index, count))


@final
class Mapped(Piece):
    """What a map makes of a whole batch; every replica makes it and keeps its part."""

    def __init__(self, inner: Piece, fn: MapFn):
        """Keep both."""
        self._inner = inner
        self._fn = fn

    @property
    def rows(self) -> None:
        """Unknown: a map may change the number of rows."""
        return None

    def cut(self, index: int, count: int) -> Any:
        """Map the whole batch and copy the rows of one replica."""
        result = Arrays(_apply(self._fn, self._inner.cut(0, 1)), "the result of map")
        lo, hi = _bounds(result.rows, index, count)
        return result.whole() if hi - lo == result.rows else result.span(lo, hi)


@final
class RowMapped(Piece):
    """What a map that treats each row on its own makes of a batch."""

    def __init__(self, inner: Piece, fn: MapFn):
        """Keep both."""
        self._inner = inner
        self._fn = fn

    @property
    def rows(self) -> int | None:
        """As before the map."""
        return self._inner.rows

    def cut(self, index: int, count: int) -> Any:
        """Map the rows of one replica."""
        batch = self._inner.cut(index, count)
        given = len(nest.flatten(batch)[0][0])
        result = Arrays(_apply(self._fn, batch), "the result of map with rowwise=True")
        if result.rows != given:
            raise DataError(
                f"map with rowwise=True was given {given} rows and returned {result.rows}; a map "
                "that changes the number of rows must see whole batches: leave rowwise out."
            )
        return result.whole()


@final
class Grouped(Piece):
    """A batch of batches, stacked along a new first axis."""

    def __init__(self, inner: Sequence[Piece]):
        """Keep the batches, at least one."""
        self._inner = inner

    @property
    def rows(self) -> int:
        """The number of batches."""
        return len(self._inner)

    def cut(self, index: int, count: int) -> Any:
        """Read and stack the batches of one replica; without any, one is read for its shape."""
        lo, hi = _bounds(self.rows, index, count)
        if lo < hi:
            return _stack([piece.cut(0, 1) for piece in self._inner[lo:hi]])
        return nest.map(lambda leaf: leaf[:0].copy(), _stack([self._inner[0].cut(0, 1)]))
