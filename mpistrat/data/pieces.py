"""Global batches that are not read yet, and the parts of them that replicas read.

For arrays, an `Order` is the sequence of their rows. Each `LazyBatch` class is one origin of a
batch. All of them can read a range of their rows (`read_rows`), and so the part of one replica
(`read_part`).
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
from mpistrat.data.sources import INFINITE, ArrayTree, RowIndices
from mpistrat.errors import DataError


class Order(NamedTuple):
    """A sequence of row numbers.

    Attributes:
      length: The number of rows, or `INFINITE`.
      get_rows: Returns the row numbers at positions lo to hi (exclusive); ``lo <= hi <= length``.
    """

    length: int
    get_rows: Callable[[int, int], RowIndices]


def make_straight_order(length: int) -> Order:
    """Return the order of so many rows, from the first to the last."""
    return Order(length, lambda lo, hi: np.arange(lo, hi, dtype=np.int64))


def make_listed_order(row_indices: RowIndices) -> Order:
    """Return the order of a list of rows."""
    return Order(len(row_indices), lambda lo, hi: row_indices[lo:hi])


def make_strided_order(inner: Order, start: int, stop: int | None, step: int) -> Order:
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

    def span(lo: int, hi: int) -> RowIndices:
        if lo >= hi:
            return np.empty(0, np.int64)
        return inner.get_rows(start + lo * step, start + (hi - 1) * step + 1)[::step]

    return Order(INFINITE if end == INFINITE else len(range(start, end, step)), span)


def make_repeated_order(
    first_order: Order, make_order: Callable[[int], Order], length: int
) -> Order:
    """Return one order after another, each made when it is first needed.

    Args:
      first_order: The order of repetition 0.
      make_order: Returns the order of repetition 1, 2 and so on, of the same length.
      length: The length of all together, or `INFINITE`.
    """
    if first_order.length == INFINITE:  # nothing comes after it
        return first_order._replace(length=length)
    order_length, orders = first_order.length, {0: first_order}  # which alone keeps it

    def get_order(index: int) -> Order:
        if index not in orders:
            # A batch can span an end, so the one before stays; older ones would only fill memory.
            for old_index in [i for i in orders if i != index - 1]:
                del orders[old_index]
            orders[index] = make_order(index)
        return orders[index]

    def span(lo: int, hi: int) -> RowIndices:
        parts = []
        while lo < hi:
            index, start = divmod(lo, order_length)
            stop = min(order_length, start + hi - lo)
            parts.append(get_order(index).get_rows(start, stop))
            lo += stop - start
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    return Order(length, span)


MapFn: TypeAlias = Callable[..., Any]


def get_function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function, which is equal on all ranks.

    Example:
      >>> get_function_name(print)
      'print'
    """
    return getattr(fn, "__qualname__", type(fn).__name__)


def _apply(fn: MapFn, element: Any) -> Any:
    try:
        # As in tf.data, which unpacks tuples but not named tuples.
        result = fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as error:
        raise DataError(
            f"the function of map, {get_function_name(fn)}, raised StopIteration, which would look "
            "like the end of the data. Return an element, or raise another exception; take(count) "
            "ends data."
        ) from error
    if result is None:
        raise DataError(
            f"the function of map, {get_function_name(fn)}, returned None: look for a missing "
            "return."
        )
    return result


def collect_columns(
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
        leaves, tree_structure = pytree.flatten(tree)
        if not index:
            structure, columns = tree_structure, [[] for _ in leaves]
        elif tree_structure != structure:
            raise DataError(
                f"{subject} must have the same structure: {tree_name} 0 is "
                f"{pytree.describe(structure)}, {tree_name} {index} is "
                f"{pytree.describe(tree_structure)}."
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(np.asarray(leaf))
    return columns, structure


def stack_elements(elements: Sequence[Any]) -> Any:
    """Return the tree whose leaves have the elements along a new first axis.

    Args:
      elements: Trees of one structure and of one shape at each leaf; at least one.

    Raises:
      DataError: They differ.
    """
    columns, structure = collect_columns(elements, "Elements of one batch", "element")
    for column, path in zip(columns, pytree.leaf_paths(elements[0]), strict=True):
        shapes = sorted({array.shape for array in column})
        if len(shapes) > 1:
            leaf_text = f"leaf {path!r} has" if path else "there are"
            raise DataError(
                f"Elements of one batch must have the same shape, but {leaf_text} {shapes}. Pad "
                "them by padded_batch or in map, or use drop_remainder=True if these are batches "
                "and the last one is short."
            )
    return pytree.unflatten(structure, [np.stack(column) for column in columns])


def find_row_bounds(row_count: int, index: int, count: int) -> tuple[int, int]:
    """Return the first row of replica `index` of `count`, and the end: ceil(rows / count) or fewer.

    Raises:
      DataError: There is no such replica.

    Example:
      >>> [find_row_bounds(5, replica, 3) for replica in range(3)]
      [(0, 2), (2, 4), (4, 5)]
    """
    if not 0 <= index < count:
        raise DataError(f"Replica {index} of {count} does not exist.")
    rows_per_replica = -(-row_count // count)
    lo = min(index * rows_per_replica, row_count)
    return lo, min(lo + rows_per_replica, row_count)


class LazyBatch(ABC):
    """One global batch before it is read.

    It belongs to the iterator that gave it: read it before asking for the next one.
    """

    @abstractmethod
    def count_rows(self) -> int:
        """Return the number of rows of the whole batch; this may have to read it."""

    @abstractmethod
    def read_rows(self, lo: int, hi: int) -> Any:
        """Read and return the rows lo to hi (exclusive); ``0 <= lo <= hi <= count()``.

        Without rows these are arrays with 0 rows of the right dtype and trailing shape.
        """

    def read_part(self, index: int, count: int) -> Any:
        """Read and return the part of replica `index` of `count`.

        In a batch of L rows the part is the rows ``[index * k, min((index + 1) * k, L))`` with
        ``k = ceil(L / count)``. It may have no rows; then it is arrays with 0 rows of the right
        dtype and trailing shape. ``read_part(0, 1)`` is the whole batch.

        Raises:
          DataError: There is no such replica, or the data or a map do not fit together.
        """
        return self.read_part_and_count(index, count)[0]

    def read_part_and_count(self, index: int, count: int) -> tuple[Any, int]:
        """Return the part as `read_part` does, and the number of rows of the whole batch."""
        row_count = self.count_rows()
        if count == 1 and index == 0:  # as with one rank, in each step
            return self.read_rows(0, row_count), row_count
        return self.read_rows(*find_row_bounds(row_count, index, count)), row_count

    def iterate_replicated_arrays(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the arrays that every replica holds whole, and that so have to be equal.

        Rows that a replica reads and maps for itself alone are not among them.

        Args:
          includes_results: Include the results that every replica computes whole. They are kept
            for the cut.
        """
        return iter(())


@final
class ExampleReader:
    """Reads rows of arrays as examples, and applies the maps before ``batch`` to each."""

    def __init__(self, array_tree: ArrayTree, fns: tuple[MapFn, ...] = ()):
        """Create it; nothing is read yet."""
        self.array_tree = array_tree
        self.fns = fns
        self._empty_batch: Any = None  # a mapped batch of 0 rows, after the first row was mapped

    def read_example(self, row_index: int) -> Any:
        """Return one example, mapped."""
        element = self._read_rows(np.array([row_index]))
        return pytree.map(lambda leaf: leaf[0], element)

    def read_examples(self, row_indices: RowIndices) -> list[Any]:
        """Return the examples of these rows, each mapped."""
        leaves, structure = pytree.flatten(self.array_tree.read_at_indices(row_indices))
        examples = []
        for i in range(len(row_indices)):
            example = pytree.unflatten(structure, [leaf[i] for leaf in leaves])
            for fn in self.fns:
                example = _apply(fn, example)
            examples.append(example)
        return examples

    def read_batch(self, order: Order, lo: int, hi: int, spare_position: int) -> Any:
        """Return the batch of the examples at positions lo to hi.

        With a map and no rows the result shows dtype and shape of an earlier one; if there is none
        yet, the example at position `spare_position` is read to learn them.
        """
        row_indices = order.get_rows(lo, hi)
        if len(row_indices) or not self.fns:
            return self._read_rows(row_indices)
        if self._empty_batch is None:
            self._read_rows(order.get_rows(spare_position, spare_position + 1))
        return pytree.map(np.copy, self._empty_batch)

    def _read_rows(self, row_indices: RowIndices) -> Any:
        if not self.fns:
            return self.array_tree.read_at_indices(row_indices)
        result = stack_elements(self.read_examples(row_indices))
        if self._empty_batch is None:
            self._empty_batch = pytree.map(lambda leaf: leaf[:0].copy(), result)
        return result


class ExampleBatch(LazyBatch):
    """A batch of examples from arrays; a replica reads its own rows and no other."""

    def __init__(self, reader: ExampleReader, order: Order, lo: int, hi: int):
        """Create it of the examples at positions `lo` to `hi` (exclusive)."""
        self._reader, self._order = reader, order
        self._lo, self._hi = lo, hi

    def count_rows(self) -> int:
        """Return the number of examples."""
        return self._hi - self._lo

    def read_rows(self, lo: int, hi: int) -> Any:
        """Read these rows."""
        reader, first = self._reader, self._lo
        if not reader.fns:
            return reader.array_tree.read_at_indices(self._order.get_rows(first + lo, first + hi))
        return reader.read_batch(self._order, first + lo, first + hi, first)


@final
class LoadedBatch(LazyBatch):
    """Arrays that are a whole batch: an element of an iterable, or the contents of a file.

    Args:
      make_arrays: Returns them; called once, when a row is asked for.
      is_in_memory: Every replica has them anyway, so they are taken at once.
    """

    def __init__(self, make_arrays: Callable[[], ArrayTree], is_in_memory: bool = False):
        """Create it; a file is not read yet."""
        self._get_arrays, self._is_in_memory = functools.cache(make_arrays), is_in_memory
        if is_in_memory:
            self._get_arrays()

    def count_rows(self) -> int:
        """Return the number of rows."""
        return self._get_arrays().row_count

    def read_rows(self, lo: int, hi: int) -> Any:
        """Copy these rows."""
        return self._get_arrays().read_rows(lo, hi)

    def iterate_replicated_arrays(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the leaves that are in memory."""
        return (
            self._get_arrays().iterate_in_memory()
            if includes_results or self._is_in_memory
            else iter(())
        )


@final
class MappedBatch(LazyBatch):
    """The result of a map of a whole batch; every replica computes it and keeps its part."""

    def __init__(self, inner: LazyBatch, fn: MapFn):
        """Create it; the function has not been called yet."""
        self._inner, self._fn = inner, fn
        self._result: ArrayTree | None = None
        self._row_count: int | None = None  # of the result, once it was made

    def count_rows(self) -> int:
        """Return the number of rows of the result; map the whole batch for it, and keep that."""
        if self._row_count is None:
            self._result = self._map_batch()
            return self._result.row_count
        return self._row_count

    def read_rows(self, lo: int, hi: int) -> Any:
        """Copy these rows of the result."""
        return (self._result or self._map_batch()).read_rows(lo, hi)

    def read_part_and_count(self, index: int, count: int) -> tuple[Any, int]:
        """Map the whole batch and copy the rows of one replica."""
        result = self._result or self._map_batch()
        lo, hi = find_row_bounds(result.row_count, index, count)
        needs_copy = self._result is not None or hi - lo < result.row_count
        return (
            result.read_rows(lo, hi) if needs_copy else result.get_whole_arrays()
        ), result.row_count

    def iterate_replicated_arrays(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the whole result, or over the batch before the map."""
        if not includes_results:
            return self._inner.iterate_replicated_arrays(includes_results)
        if self._result is None:
            self._result = self._map_batch()
        return iter(pytree.flatten(self._result.get_whole_arrays())[0])

    def _map_batch(self) -> ArrayTree:
        result = ArrayTree(_apply(self._fn, self._inner.read_part(0, 1)), "the result of map")
        self._row_count = result.row_count
        return result


@final
class RowMappedBatch(LazyBatch):
    """The result of a map that treats each row of a batch on its own."""

    def __init__(self, inner: LazyBatch, fn: MapFn):
        """Create it; the function has not been called yet."""
        self._inner = inner
        self._fn = fn

    def count_rows(self) -> int:
        """Return the number of rows before the map."""
        return self._inner.count_rows()

    def read_rows(self, lo: int, hi: int) -> Any:
        """Map these rows."""
        batch = self._inner.read_rows(lo, hi)
        input_row_count = len(pytree.flatten(batch)[0][0])
        result = ArrayTree(_apply(self._fn, batch), "the result of map with rowwise=True")
        if result.row_count != input_row_count:
            raise DataError(
                f"map with rowwise=True was given {input_row_count} rows and returned "
                f"{result.row_count}; a map that changes the number of rows must see whole "
                "batches: leave rowwise out."
            )
        return result.get_whole_arrays()

    def iterate_replicated_arrays(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the replicated arrays of the batch before the map."""
        return self._inner.iterate_replicated_arrays(includes_results)


@final
class StackedBatch(LazyBatch):
    """A batch of batches, stacked along a new first axis."""

    def __init__(self, inner: Sequence[LazyBatch]):
        """Create it of batches, at least one."""
        self._inner = inner

    def count_rows(self) -> int:
        """Return the number of batches."""
        return len(self._inner)

    def read_rows(self, lo: int, hi: int) -> Any:
        """Read and stack these batches; without any, one is read for its shape."""
        if lo < hi:
            return stack_elements([lazy_batch.read_part(0, 1) for lazy_batch in self._inner[lo:hi]])
        return pytree.map(
            lambda leaf: leaf[:0].copy(), stack_elements([self._inner[0].read_part(0, 1)])
        )

    def iterate_replicated_arrays(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the sources of the batches; each replica maps its own batches only."""
        return itertools.chain.from_iterable(
            lazy_batch.iterate_replicated_arrays(includes_results=False)
            for lazy_batch in self._inner
        )
