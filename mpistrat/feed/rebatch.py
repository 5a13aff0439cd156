"""Batches joined again, in other sizes; and of examples that are padded to one shape."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array, sizes
from mpistrat.errors import DataError
from mpistrat.feed.pieces import BatchSlice, ExampleReader, Order, Selected, columns_of, stack
from mpistrat.feed.sources import UNKNOWN, Arrays, Spec
from mpistrat.feed.steps import Path, Pieces, Seeds, Step, batches_of, bounds


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
        specs, structure = nest.flatten(arrays.specs())
        shapes = self.shapes_of(structure, [(None,) * len(spec.shape) for spec in specs])
        padded_specs = [
            Spec((*leading, *shape), spec.dtype) for spec, shape in zip(specs, shapes, strict=True)
        ]
        return nest.unflatten(structure, padded_specs)

    def shapes_of(
        self, structure: nest.Structure, longest: Sequence[Sequence[int | None]]
    ) -> list[tuple[int | None, ...]]:
        """Return the shape of each leaf, where None means what `longest` says.

        Raises:
          DataError: The tree of shapes does not fit.
        """
        padded_shapes = None
        if self.shapes is not None:
            padded_shapes = nest.up_to(structure, self.shapes, "padded_shapes")
        shapes = []
        for i, longest_sizes in enumerate(longest):
            padded_shape = padded_shapes and padded_shapes[i]
            shape = (None,) * len(longest_sizes)
            shape = (
                shape
                if padded_shape is None
                else sizes("padded_batch(padded_shapes)", padded_shape)
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
        sizes = [] if self.shapes is None else nest.flatten(self.shapes)[0]
        return self.shapes is not None and not any(size in (None, -1) for size in sizes)

    def padding(self, structure: nest.Structure) -> list[Any]:
        """Return the number to pad each leaf with; None for zero."""
        count = structure.num_leaves
        if self.values is None or np.isscalar(self.values):
            return [self.values] * count
        return nest.up_to(structure, self.values, "padding_values")


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
            return nest.map(lambda leaf: leaf[lo:hi].copy(), batch)
        if lo < hi:
            return self._padded(self._read(lo, hi))
        # Only an example shows the dtype.
        return nest.map(lambda leaf: leaf[:0].copy(), self._padded(self._read(0, 1)))

    def alike(self, includes_results: bool = True) -> Iterator[Array]:
        """Iterate over the leaves of the batch, if every replica reads it whole."""
        if not includes_results or self._how.fixed:
            return iter(())
        self._batch = self._whole()
        return iter(nest.flatten(self._batch)[0])

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
            nest.unflatten(
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
