"""The steps of a dataset as data, each with what it does to examples and to batches.

A `Step` is one method call of the user. Before ``batch`` the elements are rows of arrays and a step
only rearranges row numbers (an `Order`); after it they are `BatchSlice` objects, in their order.
Repetitions are numbered by a path: the epoch, then the repetition of each ``repeat`` around a step.

Batches joined again, in other sizes; and of examples that are padded to one shape.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array, as_shape, check_bool, check_int
from mpistrat.data.pieces import (
    BatchSlice,
    ExampleReader,
    Grouped,
    MapFn,
    Mapped,
    Order,
    RowMapped,
    Selected,
    columns_of,
    listed,
    named,
    repeated,
    stack,
    strided,
)
from mpistrat.data.sources import INFINITE, UNKNOWN, Arrays, Spec
from mpistrat.errors import DataError, RefusedError

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
        spans, start = [], 0
        for piece, first, last in self._parts:
            at = max(lo - start, 0), min(hi - start, last - first)
            if at[0] < at[1]:
                spans.append(piece.span(first + at[0], first + at[1]))
            start += last - first
        if len(spans) == 1:
            return spans[0]
        if not spans:
            piece, first, _ = self._parts[0]
            return piece.span(first, first)
        return _concatenated(spans)

    def alike(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over those of all parts; their rows were counted, so the parts are made."""
        return itertools.chain.from_iterable(piece.alike() for piece, _, _ in self._parts)


def _concatenated(batches: Sequence[Any]) -> Any:
    columns, structure = columns_of(batches, "Batches that are joined", "batch")
    for column, path in zip(columns, pytree.leaf_paths(batches[0]), strict=True):
        shapes = sorted({array.shape[1:] for array in column})
        if len(shapes) > 1:
            where = f"those of leaf {path!r}" if path else "these"
            raise DataError(
                f"Batches that are joined must have rows of one shape, but {where} have {shapes}."
            )
    return pytree.unflatten(structure, [np.concatenate(column) for column in columns])


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
    base_share, remainder = divmod(rows, count)
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

    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over the new batches."""
        pieces = rejoined(make_pieces(path), self.sizes)
        for piece, size in zip(pieces, itertools.cycle(self.sizes), strict=False):
            if not self.drop_remainder or piece.count() == size:
                yield piece

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
        return batches_of(self.size, self.drop_remainder, element_count)

    def examples(self, reader: ExampleReader, order: Order) -> Iterator[BatchSlice]:
        """Iterate over batches of examples."""
        for lo, hi in bounds(self.size, self.drop_remainder, order.length):
            yield _Padded(reader, order, lo, hi, self)

    def spec(self, arrays: Arrays, leading: Sequence[int | None]) -> Any:
        """Return the tree of `Spec` of a batch of rows of these arrays, after the leading axes."""
        specs, structure = pytree.flatten(arrays.specs())
        shapes = self.shapes_of(structure, [(None,) * len(spec.shape) for spec in specs])
        padded_specs = [
            Spec((*leading, *shape), spec.dtype) for spec, shape in zip(specs, shapes, strict=True)
        ]
        return pytree.unflatten(structure, padded_specs)

    def shapes_of(
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
    def fixed(self) -> bool:
        """Whether the shapes leave nothing to be learned from the examples."""
        sizes = [] if self.shapes is None else pytree.flatten(self.shapes)[0]
        return self.shapes is not None and not any(size in (None, -1) for size in sizes)

    def padding(self, structure: pytree.Structure) -> list[Any]:
        """Return the number to pad each leaf with; None for zero."""
        count = structure.num_leaves
        if self.values is None or np.isscalar(self.values):
            return [self.values] * count
        return pytree.flatten_up_to(structure, self.values, "padding_values")


@final
class _Padded(Selected):
    """A batch of padded examples; a replica reads its own rows if the shape is given."""

    def __init__(
        self, reader: ExampleReader, order: Order, lo: int, hi: int, batch_step: PaddedBatch
    ):
        super().__init__(reader, order, lo, hi)
        self._how = batch_step
        self._batch: Any = None  # the whole of it, once somebody wants to look at that

    def span(self, lo: int, hi: int) -> Any:
        """Read these examples, or all if the longest is wanted, and pad them."""
        if not self._how.fixed:
            batch = self._whole() if self._batch is None else self._batch
            return pytree.map(lambda leaf: leaf[lo:hi].copy(), batch)
        if lo < hi:
            return self._padded(self._read(lo, hi))
        # Only an example shows the dtype.
        return pytree.map(lambda leaf: leaf[:0].copy(), self._padded(self._read(0, 1)))

    def alike(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the leaves of the batch, if every replica reads it whole."""
        if not includes_results or self._how.fixed:
            return iter(())
        self._batch = self._whole()
        return iter(pytree.flatten(self._batch)[0])

    def _whole(self) -> Any:
        return self._padded(self._read(0, self.count()))

    def _read(self, lo: int, hi: int) -> list[Any]:
        return self._reader.examples(self._order.span(self._lo + lo, self._lo + hi))

    def _padded(self, examples: list[Any]) -> Any:
        columns, structure = columns_of(examples, "Examples of one batch", "example")
        longest = [_longest(column) for column in columns]
        shapes = self._how.shapes_of(structure, longest)
        values = self._how.padding(structure)
        padded = [
            pytree.unflatten(
                structure,
                [_pad(*pad_arguments) for pad_arguments in zip(row, shapes, values, strict=True)],
            )
            for row in zip(*columns, strict=True)
        ]
        return stack(padded)


def _longest(column: Sequence[Any]) -> tuple[int, ...]:
    if len({array.ndim for array in column}) > 1:
        dims = sorted({array.ndim for array in column})
        raise DataError(f"padded_batch: examples of one batch have {dims} dimensions.")
    return tuple(max(sizes) for sizes in zip(*(array.shape for array in column), strict=True))


def _pad(array: Any, shape: tuple[int | None, ...], value: Any) -> Any:
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
        if not _fits(padding, out.dtype):
            raise DataError(
                f"padded_batch: padding_values has {value!r:.60}, which does not fit {out.dtype}."
            )
        out[...] = padding
    out[tuple(slice(0, size) for size in array.shape)] = array
    return out


def _fits(number: Array, dtype: np.dtype[Any]) -> bool:
    """Tell whether a number is the same one as `dtype`: without a fraction, and not too large."""
    if number.dtype.kind not in "biuf":
        return np.can_cast(number.dtype, dtype, "same_kind")
    with np.errstate(all="ignore"):
        return dtype.kind not in "biu" or np.array_equal(number.astype(dtype), number)
