"""One global batch, not yet read, and the part of it that one replica reads.

For arrays, an `Order` says which rows they are. Each class is one way a batch comes about. All know
one verb, to read a `span` of their rows, and so the part that one replica gets: `cut`.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array
from mpistrat.data.sources import INFINITE, Arrays, Rows
from mpistrat.errors import DataError


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
    if first.length == INFINITE:  # nothing comes after it
        return first._replace(length=length)
    order_length, orders = first.length, {0: first}  # which alone keeps it

    def repetition(index: int) -> Order:
        if index not in orders:
            # A batch can span an end, so the one before stays; older ones would only fill memory.
            for old in [i for i in orders if i != index - 1]:
                del orders[old]
            orders[index] = make(index)
        return orders[index]

    def span(lo: int, hi: int) -> Rows:
        parts = []
        while lo < hi:
            index, start = divmod(lo, order_length)
            stop = min(order_length, start + hi - lo)
            parts.append(repetition(index).span(start, stop))
            lo += stop - start
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    return Order(length, span)


MapFn: TypeAlias = Callable[..., Any]


def named(fn: Callable[..., Any]) -> str:
    """Return what a function is called, on every rank alike.

    Example:
      >>> named(print)
      'print'
    """
    return getattr(fn, "__qualname__", type(fn).__name__)


def _apply(fn: MapFn, element: Any) -> Any:
    try:
        # As in tf.data, which unpacks tuples but not named tuples.
        result = fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as error:
        raise DataError(
            f"the function of map, {named(fn)}, raised StopIteration, which would look like the "
            "end of the data. Return an element, or raise another exception; take(count) ends data."
        ) from error
    if result is None:
        raise DataError(
            f"the function of map, {named(fn)}, returned None: look for a missing return."
        )
    return result


def columns_of(
    trees: Sequence[Any], subject: str, tree_name: str
) -> tuple[list[list[Array]], pytree.Structure]:
    """Return the arrays of each leaf, one for each tree, and the structure of all.

    Args:
      trees: The trees; at least one.
      subject: The name of all trees in errors.
      tree_name: The name of a single tree in errors.

    Raises:
      DataError: They differ in structure.
    """
    columns: list[list[Array]] = []
    for index, tree in enumerate(trees):
        leaves, other = pytree.flatten(tree)
        if not index:
            structure, columns = other, [[] for _ in leaves]
        elif other != structure:
            raise DataError(
                f"{subject} must have the same structure: {tree_name} 0 is "
                f"{pytree.describe(structure)}, {tree_name} {index} is {pytree.describe(other)}."
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(np.asarray(leaf))
    return columns, structure


def stack(elements: Sequence[Any]) -> Any:
    """Return the tree whose leaves have the elements along a new first axis.

    Args:
      elements: Trees of one structure and of one shape at each leaf; at least one.

    Raises:
      DataError: They differ.
    """
    columns, structure = columns_of(elements, "Elements of one batch", "element")
    for column, path in zip(columns, pytree.leaf_paths(elements[0]), strict=True):
        shapes = sorted({array.shape for array in column})
        if len(shapes) > 1:
            where = f"leaf {path!r} has" if path else "there are"
            raise DataError(
                f"Elements of one batch must have the same shape, but {where} {shapes}. Pad them "
                "by padded_batch or in map, or use drop_remainder=True if these are batches and "
                "the last one is short."
            )
    return pytree.unflatten(structure, [np.stack(column) for column in columns])


def row_bounds(rows: int, index: int, count: int) -> tuple[int, int]:
    """Return the first row of replica `index` of `count`, and the end: ceil(rows / count) or fewer.

    Raises:
      DataError: There is no such replica.

    Example:
      >>> [row_bounds(5, replica, 3) for replica in range(3)]
      [(0, 2), (2, 4), (4, 5)]
    """
    if not 0 <= index < count:
        raise DataError(f"Replica {index} of {count} does not exist.")
    rows_per_replica = -(-rows // count)
    lo = min(index * rows_per_replica, rows)
    return lo, min(lo + rows_per_replica, rows)


class BatchSlice(ABC):
    """One global batch before it is read.

    A piece belongs to the iterator that gave it: cut it before asking for the next one.
    """

    @abstractmethod
    def count(self) -> int:
        """Return how many rows the whole batch has, reading it if nothing else can tell."""

    @abstractmethod
    def span(self, lo: int, hi: int) -> Any:
        """Read and return the rows lo to hi (exclusive); ``0 <= lo <= hi <= count()``.

        Without rows these are arrays with 0 rows of the right dtype and trailing shape.
        """

    def cut(self, index: int, count: int) -> Any:
        """Read and return the part of replica `index` of `count`.

        Of L rows these are ``[index * k, min((index + 1) * k, L))`` with ``k = ceil(L / count)``:
        possibly none, and then arrays with 0 rows of the right dtype and trailing shape.
        ``cut(0, 1)`` is the whole batch.

        Raises:
          DataError: There is no such replica, or the data or a map do not fit together.
        """
        return self.cut_and_count(index, count)[0]

    def cut_and_count(self, index: int, count: int) -> tuple[Any, int]:
        """Return what `cut` returns, and how many rows the whole batch has."""
        rows = self.count()
        if count == 1 and index == 0:  # as with one rank, in each step
            return self.span(0, rows), rows
        return self.span(*row_bounds(rows, index, count)), rows

    def alike(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the arrays that every replica holds whole, and that so have to be equal.

        What a replica reads and maps for itself alone is not among them.

        Args:
          includes_results: Include the results that every replica computes whole. They are kept
            for the cut.
        """
        return iter(())


@final
class ExampleReader:
    """Reads rows of arrays as examples, each sent through the maps that stand before ``batch``."""

    def __init__(self, arrays: Arrays, fns: tuple[MapFn, ...] = ()):
        """Create it; nothing is read yet."""
        self.arrays = arrays
        self.fns = fns
        self._none: Any = None  # a mapped batch of 0 rows, once a row has shown what that is

    def example(self, row: int) -> Any:
        """Return one example, mapped."""
        element = self._rows(np.array([row]))
        return pytree.map(lambda leaf: leaf[0], element)

    def examples(self, rows: Rows) -> list[Any]:
        """Return the examples of these rows, each mapped."""
        leaves, structure = pytree.flatten(self.arrays.read(rows))
        examples = []
        for i in range(len(rows)):
            example = pytree.unflatten(structure, [leaf[i] for leaf in leaves])
            for fn in self.fns:
                example = _apply(fn, example)
            examples.append(example)
        return examples

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
        return pytree.map(np.copy, self._none)

    def _rows(self, rows: Rows) -> Any:
        if not self.fns:
            return self.arrays.read(rows)
        result = stack(self.examples(rows))
        if self._none is None:
            self._none = pytree.map(lambda leaf: leaf[:0].copy(), result)
        return result


class Selected(BatchSlice):
    """A batch of examples from arrays; a replica reads its own rows and no other."""

    def __init__(self, reader: ExampleReader, order: Order, lo: int, hi: int):
        """Create it of the examples at positions `lo` to `hi` (exclusive)."""
        self._reader, self._order = reader, order
        self._lo, self._hi = lo, hi

    def count(self) -> int:
        """Return the number of examples."""
        return self._hi - self._lo

    def span(self, lo: int, hi: int) -> Any:
        """Read these rows."""
        reader, first = self._reader, self._lo
        if not reader.fns:
            return reader.arrays.read(self._order.span(first + lo, first + hi))
        return reader.read(self._order, first + lo, first + hi, first)


@final
class Given(BatchSlice):
    """Arrays that are a whole batch: one that an iterable gave, or what is read of a file.

    Args:
      arrays: Returns them; called once, when a row is asked for.
      is_in_memory: Every replica has them anyway, so they are taken at once.
    """

    def __init__(self, arrays: Callable[[], Arrays], is_in_memory: bool = False):
        """Create it; of a file, nothing is read yet."""
        self._arrays, self._here = functools.cache(arrays), is_in_memory
        if is_in_memory:
            self._arrays()

    def count(self) -> int:
        """Return the number of rows."""
        return self._arrays().rows

    def span(self, lo: int, hi: int) -> Any:
        """Copy these rows."""
        return self._arrays().span(lo, hi)

    def alike(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the leaves that are in memory."""
        return self._arrays().in_memory() if includes_results or self._here else iter(())


@final
class Mapped(BatchSlice):
    """What a map makes of a whole batch; every replica makes it and keeps its part."""

    def __init__(self, inner: BatchSlice, fn: MapFn):
        """Create it; the function has not been called yet."""
        self._inner, self._fn = inner, fn
        self._result: Arrays | None = None
        self._rows: int | None = None  # of the result, once it was made

    def count(self) -> int:
        """Return the number of rows of the result; map the whole batch for it, and keep that."""
        if self._rows is None:
            self._result = self._map()
            return self._result.rows
        return self._rows

    def span(self, lo: int, hi: int) -> Any:
        """Copy these rows of the result."""
        return (self._result or self._map()).span(lo, hi)

    def cut_and_count(self, index: int, count: int) -> tuple[Any, int]:
        """Map the whole batch and copy the rows of one replica."""
        result = self._result or self._map()
        lo, hi = row_bounds(result.rows, index, count)
        needs_copy = self._result is not None or hi - lo < result.rows
        return (result.span(lo, hi) if needs_copy else result.whole()), result.rows

    def alike(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the whole result, or over the batch before the map."""
        if not includes_results:
            return self._inner.alike(includes_results)
        if self._result is None:
            self._result = self._map()
        return iter(pytree.flatten(self._result.whole())[0])

    def _map(self) -> Arrays:
        result = Arrays(_apply(self._fn, self._inner.cut(0, 1)), "the result of map")
        self._rows = result.rows
        return result


@final
class RowMapped(BatchSlice):
    """What a map that treats each row on its own makes of a batch."""

    def __init__(self, inner: BatchSlice, fn: MapFn):
        """Create it; the function has not been called yet."""
        self._inner = inner
        self._fn = fn

    def count(self) -> int:
        """As before the map."""
        return self._inner.count()

    def span(self, lo: int, hi: int) -> Any:
        """Map these rows."""
        batch = self._inner.span(lo, hi)
        input_rows = len(pytree.flatten(batch)[0][0])
        result = Arrays(_apply(self._fn, batch), "the result of map with rowwise=True")
        if result.rows != input_rows:
            raise DataError(
                f"map with rowwise=True was given {input_rows} rows and returned {result.rows}; a "
                "map that changes the number of rows must see whole batches: leave rowwise out."
            )
        return result.whole()

    def alike(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over those of the batch before the map."""
        return self._inner.alike(includes_results)


@final
class Grouped(BatchSlice):
    """A batch of batches, stacked along a new first axis."""

    def __init__(self, inner: Sequence[BatchSlice]):
        """Create it of batches, at least one."""
        self._inner = inner

    def count(self) -> int:
        """Return the number of batches."""
        return len(self._inner)

    def span(self, lo: int, hi: int) -> Any:
        """Read and stack these batches; without any, one is read for its shape."""
        if lo < hi:
            return stack([piece.cut(0, 1) for piece in self._inner[lo:hi]])
        return pytree.map(lambda leaf: leaf[:0].copy(), stack([self._inner[0].cut(0, 1)]))

    def alike(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over what the batches were given as; each replica makes its own of them only."""
        return itertools.chain.from_iterable(
            piece.alike(includes_results=False) for piece in self._inner
        )
