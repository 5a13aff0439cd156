"""The steps of a dataset as data: the transformations of examples and of batches.

A `Step` is one method call of the user. Before ``batch`` the elements are rows of arrays and a step
only rearranges row numbers (an `Order`); after it they are `LazyBatch` objects, in their order.
Repetitions are numbered by a path: the epoch, then the repetition of each ``repeat`` around a step.

The order is that of the elements' way: steps that choose and order elements (shuffle, take, skip,
shard, repeat), map, batch, rebatch (batches joined again, in other sizes), padded batch. The fields
of a step are part of the description of a dataset, which checkpoints keep.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array, as_shape, check_bool, check_int
from mpistrat.data.pieces import (
    ExampleBatch,
    ExampleReader,
    LazyBatch,
    MapFn,
    MappedBatch,
    Order,
    RowMappedBatch,
    StackedBatch,
    collect_columns,
    get_function_name,
    make_listed_order,
    make_repeated_order,
    make_strided_order,
    stack_elements,
)
from mpistrat.data.sources import INFINITE, UNKNOWN, ArrayTree, Spec
from mpistrat.errors import DataError, RefusedError

EpochPath: TypeAlias = tuple[int, ...]
Seeds: TypeAlias = tuple[int, ...]
BatchMaker: TypeAlias = Callable[[EpochPath], Iterator[LazyBatch]]


def count_batches(size: int, drop_remainder: bool, element_count: int) -> int:
    """Return the number of batches of so many elements; `INFINITE` and `UNKNOWN` do not change.

    Example:
      >>> count_batches(4, False, 10)
      3
    """
    if element_count < 0:
        return element_count
    return element_count // size if drop_remainder else -(-element_count // size)


def iterate_bounds(size: int, drop_remainder: bool, length: int) -> Iterator[tuple[int, int]]:
    """Iterate over the first and the end of each batch of so many examples.

    Example:
      >>> list(iterate_bounds(4, False, 10))
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
    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over one epoch of batches."""

    def batch_size(self, batch_rows: int | None) -> int | None:
        """Return the rows of a full batch after the step, or None if reading alone shows them."""
        return batch_rows


class ArrangingStep(Step):
    """A step that chooses and orders elements and leaves each as it is."""

    @abstractmethod
    def transform_order(
        self, make_order: Callable[[EpochPath], Order], seeds: Seeds, path: EpochPath
    ) -> Order:
        """Return one epoch of examples."""


@dataclasses.dataclass(frozen=True)
class Shuffle(ArrangingStep):
    """A permutation of the whole epoch, drawn from the seed and the path alone.

    Attributes:
      seed: The seed, or None for one that is given in each epoch.
      slot: The index of its seed among those that are given.
    """

    seed: int | None
    slot: int

    def cardinality(self, element_count: int) -> int:
        """Return the same number."""
        return element_count

    def _generator(self, seeds: Seeds, path: EpochPath) -> np.random.Generator:
        seed = seeds[self.slot] if self.seed is None else self.seed
        return np.random.default_rng(np.random.SeedSequence([seed, *path]))

    def transform_order(
        self, make_order: Callable[[EpochPath], Order], seeds: Seeds, path: EpochPath
    ) -> Order:
        """Return the permuted rows."""
        order = make_order(path)
        return make_listed_order(
            self._generator(seeds, path).permutation(order.get_rows(0, order.length))
        )

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over the permuted batches; those that an iterable gave are held meanwhile."""
        lazy_batches: list[LazyBatch | None] = list(make_batches(path))
        for index in self._generator(seeds, path).permutation(len(lazy_batches)):
            lazy_batch, lazy_batches[index] = (
                lazy_batches[index],
                None,
            )  # what it has read is not held here
            assert lazy_batch is not None
            yield lazy_batch


@final
@dataclasses.dataclass(frozen=True)
class FixedShuffle(Shuffle):
    """A permutation that is the same in every epoch and repetition, drawn from the seed alone."""

    def _generator(self, seeds: Seeds, path: EpochPath) -> np.random.Generator:
        return super()._generator(seeds, ())


def make_shuffle(
    element_count: int, seed: int | None, slot: int, reshuffles_each_epoch: bool | None = True
) -> Shuffle:
    """Return the step that shuffles.

    Args:
      element_count: How many elements there are.
      seed: The seed, or None for one that is given in each epoch.
      slot: The index of its seed among those that are given.
      reshuffles_each_epoch: Whether each epoch has an order of its own; None for yes.

    Raises:
      DataError: There is no end, or it is not known.
      RefusedError: One order is asked for, and there is no seed.
    """
    seed = None if seed is None else check_int("shuffle(seed)", seed, 0)
    if element_count == INFINITE:
        raise DataError("An endless dataset has no permutation; call shuffle before repeat().")
    if element_count == UNKNOWN:
        raise DataError(
            "The number of these batches is not known before they are read, so they cannot be "
            "permuted; shuffle where they are made, or pass them as a list."
        )
    if reshuffles_each_epoch is None or check_bool(
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
class Stride(ArrangingStep):
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

    def transform_order(
        self, make_order: Callable[[EpochPath], Order], seeds: Seeds, path: EpochPath
    ) -> Order:
        """Return their rows."""
        return make_strided_order(make_order(path), self.start, self.stop, self.step)

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over these batches; the others are not read."""
        return itertools.islice(make_batches(path), self.start, self.stop, self.step)


@final
@dataclasses.dataclass(frozen=True)
class Repeat(ArrangingStep):
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

    def transform_order(
        self, make_order: Callable[[EpochPath], Order], seeds: Seeds, path: EpochPath
    ) -> Order:
        """Return the rows of all repetitions."""
        first_order = make_order((*path, 0))
        length = self.cardinality(first_order.length)
        return make_repeated_order(first_order, lambda index: make_order((*path, index)), length)

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over all repetitions; an endless repetition of nothing ends."""
        for index in itertools.count() if self.count is None else range(self.count):
            is_empty = True
            for lazy_batch in make_batches((*path, index)):
                is_empty = False
                yield lazy_batch
            if is_empty and self.count is None:
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

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over the mapped batches; the function runs when one is cut."""
        batch_class = RowMappedBatch if self.rowwise else MappedBatch
        return (batch_class(lazy_batch, self.fn) for lazy_batch in make_batches(path))

    def batch_size(self, batch_rows: int | None) -> int | None:
        """Return the same number where the function treats each row on its own."""
        return batch_rows if self.rowwise else None

    def __repr__(self) -> str:
        """Return a string that does not depend on the process, as the address of `fn` does."""
        return f"Map({get_function_name(self.fn)}, rowwise={self.rowwise})"


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
        return count_batches(self.size, self.drop_remainder, element_count)

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over batches of batches."""
        lazy_batches = make_batches(path)
        while group := list(itertools.islice(lazy_batches, self.size)):
            if len(group) < self.size and self.drop_remainder:
                return
            yield StackedBatch(group)

    def batch_size(self, batch_rows: int | None) -> int | None:
        """Return how many are joined."""
        return self.size

    def make_batches(self, reader: ExampleReader, order: Order) -> Iterator[LazyBatch]:
        """Iterate over batches of examples."""
        for lo, hi in iterate_bounds(self.size, self.drop_remainder, order.length):
            yield ExampleBatch(reader, order, lo, hi)


class RowRange(NamedTuple):
    """A range of rows of a batch.

    Attributes:
      lazy_batch: The batch.
      start: The first row.
      stop: The row after the last.
    """

    lazy_batch: LazyBatch
    start: int
    stop: int


@final
class JoinedBatch(LazyBatch):
    """Rows of successive batches as one batch; a row is read only when it is needed.

    Args:
      row_ranges: The rows; at least one range.
    """

    def __init__(self, row_ranges: Sequence[RowRange]):
        """Create a batch of these rows."""
        self._row_ranges = row_ranges

    def count_rows(self) -> int:
        """Return the number of rows of all ranges."""
        return sum(stop - start for _, start, stop in self._row_ranges)

    def read_rows(self, lo: int, hi: int) -> Any:
        """Read these rows, each from its batch."""
        batches, passed_rows = [], 0
        for lazy_batch, start, stop in self._row_ranges:
            low, high = max(lo - passed_rows, 0), min(hi - passed_rows, stop - start)
            if low < high:
                batches.append(lazy_batch.read_rows(start + low, start + high))
            passed_rows += stop - start
        if len(batches) == 1:
            return batches[0]
        if not batches:
            first_range = self._row_ranges[0]
            return first_range.lazy_batch.read_rows(first_range.start, first_range.start)
        return _concatenate_batches(batches)

    def iterate_replicated_arrays(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over those of all batches; counting their rows has computed the results."""
        lazy_batches = (row_range.lazy_batch for row_range in self._row_ranges)
        return itertools.chain.from_iterable(
            lazy_batch.iterate_replicated_arrays() for lazy_batch in lazy_batches
        )


def _concatenate_batches(batches: Sequence[Any]) -> Any:
    columns, structure = collect_columns(batches, "Batches that are joined", "batch")
    for column, path in zip(columns, pytree.leaf_paths(batches[0]), strict=True):
        shapes = sorted({array.shape[1:] for array in column})
        if len(shapes) > 1:
            leaf_text = f"those of leaf {path!r}" if path else "these"
            raise DataError(
                "Batches that are joined must have rows of one shape, but "
                f"{leaf_text} have {shapes}."
            )
    return pytree.unflatten(structure, [np.concatenate(column) for column in columns])


def rejoin_batches(lazy_batches: Iterator[LazyBatch], sizes: Sequence[int]) -> Iterator[LazyBatch]:
    """Iterate over batches of these sizes in turn, made of all rows of `lazy_batches` in order.

    The last one may be short. A size of 0 gives a batch without rows, as long as rows follow.

    Args:
      lazy_batches: The batches; each must know or find out its number of rows.
      sizes: The numbers of rows, over and over again; not all 0.
    """
    lazy_batch, lo, hi = None, 0, 0
    for size in itertools.cycle(sizes):
        row_ranges: list[RowRange] = []
        missing_rows = size
        while missing_rows or not row_ranges:
            while lazy_batch is None or lo == hi:
                lazy_batch = next(lazy_batches, None)
                if lazy_batch is None:
                    break
                lo, hi = 0, lazy_batch.count_rows()
            if lazy_batch is None:
                break
            end = min(hi, lo + missing_rows)
            row_ranges.append(RowRange(lazy_batch, lo, end))
            missing_rows -= end - lo
            lo = end
        if not row_ranges:
            return
        yield JoinedBatch(row_ranges)


def divide_evenly(row_count: int, count: int) -> tuple[int, ...]:
    """Return how a batch of `row_count` is divided evenly: the first rows % count get one more.

    Example:
      >>> divide_evenly(5, 4)
      (2, 1, 1, 1)
    """
    base_share, remainder = divmod(row_count, count)
    return tuple(base_share + (index < remainder) for index in range(count))


@final
@dataclasses.dataclass(frozen=True)
class Rebatch(Step):
    """Batches of another size, made of the rows of all batches in order.

    Attributes:
      sizes: How many rows the batches have, in turns; at least one.
      drop_remainder: Leave out a last batch of fewer.
    """

    sizes: tuple[int, ...]
    drop_remainder: bool

    @property
    def size(self) -> int | None:
        """How many rows every batch has, or None if they take turns."""
        return self.sizes[0] if len(self.sizes) == 1 else None

    def cardinality(self, element_count: int) -> int:
        """Return 0, no end, or unknown: batches may have any number of rows."""
        return UNKNOWN if element_count > 0 else element_count

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over the new batches."""
        lazy_batches = rejoin_batches(make_batches(path), self.sizes)
        for lazy_batch, size in zip(lazy_batches, itertools.cycle(self.sizes), strict=False):
            if not self.drop_remainder or lazy_batch.count_rows() == size:
                yield lazy_batch

    def batch_size(self, batch_rows: int | None) -> int | None:
        """Return the new size; None if there are several."""
        return self.size


@final
@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """Successive examples, each padded at its ends, joined to one batch.

    Attributes:
      size: How many.
      shapes: A tree with the shape of an example in place of each leaf; None in a shape, or
        for all of them, stands for the longest of the global batch.
      values: A tree with the number to pad with in place of each leaf, or one for all; None
        for zeros.
      drop_remainder: Leave out a last one of fewer.
    """

    size: int
    shapes: Any
    values: Any
    drop_remainder: bool

    def cardinality(self, element_count: int) -> int:
        """Return the number of batches."""
        return count_batches(self.size, self.drop_remainder, element_count)

    def make_batches(self, reader: ExampleReader, order: Order) -> Iterator[LazyBatch]:
        """Iterate over batches of examples."""
        for lo, hi in iterate_bounds(self.size, self.drop_remainder, order.length):
            yield _PaddedExamples(reader, order, lo, hi, self)

    def make_spec(self, array_tree: ArrayTree, leading: Sequence[int | None]) -> Any:
        """Return the tree of `Spec` of a batch of rows of these arrays, after the leading axes."""
        specs, structure = pytree.flatten(array_tree.make_specs())
        shapes = self.resolve_shapes(structure, [(None,) * len(spec.shape) for spec in specs])
        padded_specs = [
            Spec((*leading, *shape), spec.dtype) for spec, shape in zip(specs, shapes, strict=True)
        ]
        return pytree.unflatten(structure, padded_specs)

    def resolve_shapes(
        self, structure: pytree.Structure, longest: Sequence[Sequence[int | None]]
    ) -> list[tuple[int | None, ...]]:
        """Return the shape of each leaf, where None means what `longest` says.

        Raises:
          DataError: The tree of shapes does not fit.
        """
        padded_shapes = None
        if self.shapes is not None:
            padded_shapes = pytree.flatten_up_to(structure, self.shapes, "padded_shapes")
        shapes = []
        for i, longest_sizes in enumerate(longest):
            padded_shape = padded_shapes and padded_shapes[i]
            shape = (None,) * len(longest_sizes)
            shape = (
                shape
                if padded_shape is None
                else as_shape("padded_batch(padded_shapes)", padded_shape)
            )
            if len(shape) != len(longest_sizes):
                raise DataError(
                    f"padded_batch: an example has {len(longest_sizes)} dimensions, the padded "
                    f"shape {list(shape)} has {len(shape)}."
                )
            shapes.append(
                tuple(
                    size if padded_size in (None, -1) else padded_size
                    for padded_size, size in zip(shape, longest_sizes, strict=True)
                )
            )
        return shapes

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the shapes leave nothing to be learned from the examples."""
        sizes = [] if self.shapes is None else pytree.flatten(self.shapes)[0]
        return self.shapes is not None and not any(size in (None, -1) for size in sizes)

    def list_padding_values(self, structure: pytree.Structure) -> list[Any]:
        """Return the number to pad each leaf with; None for zero."""
        count = structure.num_leaves
        if self.values is None or np.isscalar(self.values):
            return [self.values] * count
        return pytree.flatten_up_to(structure, self.values, "padding_values")


@final
class _PaddedExamples(ExampleBatch):
    """A batch of padded examples; a replica reads its own rows if the shape is given."""

    def __init__(
        self, reader: ExampleReader, order: Order, lo: int, hi: int, batch_step: PaddedBatch
    ):
        super().__init__(reader, order, lo, hi)
        self._batch_step = batch_step
        self._batch: Any = None  # the whole batch, if its contents were compared

    def read_rows(self, lo: int, hi: int) -> Any:
        """Read these examples, or all if the longest is wanted, and pad them."""
        if not self._batch_step.has_fixed_shapes:
            batch = self._read_whole_batch() if self._batch is None else self._batch
            return pytree.map(lambda leaf: leaf[lo:hi].copy(), batch)
        if lo < hi:
            return self._pad_examples(self._read_examples(lo, hi))
        # Only an example shows the dtype.
        return pytree.map(
            lambda leaf: leaf[:0].copy(), self._pad_examples(self._read_examples(0, 1))
        )

    def iterate_replicated_arrays(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the leaves of the batch, if every replica reads it whole."""
        if not includes_results or self._batch_step.has_fixed_shapes:
            return iter(())
        self._batch = self._read_whole_batch()
        return iter(pytree.flatten(self._batch)[0])

    def _read_whole_batch(self) -> Any:
        return self._pad_examples(self._read_examples(0, self.count_rows()))

    def _read_examples(self, lo: int, hi: int) -> list[Any]:
        return self._reader.read_examples(self._order.get_rows(self._lo + lo, self._lo + hi))

    def _pad_examples(self, examples: list[Any]) -> Any:
        columns, structure = collect_columns(examples, "Examples of one batch", "example")
        longest = [_find_longest(column) for column in columns]
        shapes = self._batch_step.resolve_shapes(structure, longest)
        values = self._batch_step.list_padding_values(structure)
        padded = [
            pytree.unflatten(
                structure,
                [
                    _pad_array(*pad_arguments)
                    for pad_arguments in zip(row, shapes, values, strict=True)
                ],
            )
            for row in zip(*columns, strict=True)
        ]
        return stack_elements(padded)


def _find_longest(column: Sequence[Any]) -> tuple[int, ...]:
    if len({array.ndim for array in column}) > 1:
        dims = sorted({array.ndim for array in column})
        raise DataError(f"padded_batch: examples of one batch have {dims} dimensions.")
    return tuple(max(sizes) for sizes in zip(*(array.shape for array in column), strict=True))


def _pad_array(array: Any, shape: tuple[int | None, ...], value: Any) -> Any:
    sizes = [size if size is not None else 0 for size in shape]
    if any(
        actual_size > padded_size
        for actual_size, padded_size in zip(array.shape, sizes, strict=True)
    ):
        raise DataError(
            f"padded_batch: an example of shape {array.shape} does not fit the padded shape "
            f"{tuple(sizes)}. Give None for a dimension to pad it to the longest."
        )
    out = np.zeros(sizes, array.dtype)
    if value is not None:
        padding = np.asarray(value)
        if not _can_represent(padding, out.dtype):
            raise DataError(
                f"padded_batch: padding_values has {value!r:.60}, which does not fit {out.dtype}."
            )
        out[...] = padding
    out[tuple(slice(0, size) for size in array.shape)] = array
    return out


def _can_represent(number: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` can represent a number exactly: no fraction, and not too large."""
    if number.dtype.kind not in "biuf":
        return np.can_cast(number.dtype, dtype, "same_kind")
    with np.errstate(all="ignore"):
        return dtype.kind not in "biu" or np.array_equal(number.astype(dtype), number)
