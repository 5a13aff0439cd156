"""The sources of examples and batches: arrays that are read by rows, streams of batches, files.

A `Column` reads rows of one array-like (NumPy, memmap, HDF5, Zarr or anything with a shape, a dtype
and slicing) and touches no other row. `ArrayTree` is a tree of columns of equal length. A `Stream`
hands out batches, epoch by epoch. `Files` are read one by one.

A `ReadIterator` reads one element after the other, and continues after one that cannot be read.
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Generic, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt

from mpistrat import pytree
from mpistrat.arrays import is_masked
from mpistrat.errors import DataError, text_of
from mpistrat.pytree import with_values

INFINITE = -1
UNKNOWN = -2

RowIndices: TypeAlias = npt.NDArray[np.int64]

_SAMPLE_NBYTES = 1 << 20  # bytes of a leaf up to which all of it is sampled
_ROW_NBYTES = 1 << 14  # bytes of a row up to which all of it is sampled
_OFFSETS = 64  # places in a larger leaf, and in a longer row, at which it is sampled
_OBJECT_NBYTES = 64  # what an object counts as
# Errors of sources for an index array that they cannot use. Anything else is a reading error.
_NO_FANCY = (TypeError, IndexError, ValueError, NotImplementedError)


@final
@dataclass(frozen=True)  # no named tuple, which would be a node of a tree, not a leaf
class Spec:
    """The shape and the dtype of one leaf, as far as they are known before it is read.

    Attributes:
      shape: Its shape; None stands for a number of rows that may differ between elements.
      dtype: Its NumPy dtype.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def is_array(value: object) -> bool:
    """Return whether a value looks like an array: it has a shape, a dtype and can be indexed."""
    if isinstance(value, type):  # of NumPy's scalars, which have these for their objects
        return False
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))


def _is_frame(value: object) -> bool:
    """Return whether a value is a table or a column of pandas, Arrow, Polars or the like."""
    marks = ("iloc", "__arrow_c_stream__", "__arrow_c_array__", "__dataframe__")
    return any(hasattr(value, name) for name in marks)


def _describe_conversion(frame: Any, name: str) -> str:
    """Return the error text for a table or a column, with the expression to pass instead."""
    kind = f"{type(frame).__module__.partition('.')[0]} {type(frame).__name__}"
    index = " The index does not come along." if hasattr(frame, "reset_index") else ""
    names = next(
        (attribute for attribute in ("column_names", "columns") if hasattr(frame, attribute)), ""
    )
    if not names:
        return f"{name} is a {kind}, not an array; pass array.to_numpy().{index}"
    conversion = "table.to_numpy()" if hasattr(frame, "to_numpy") else "np.asarray(table)"
    return (
        f"{name} is a {kind}, which is a table of columns. Pass them as arrays, "
        f"{{name: table[name].to_numpy() for name in table.{names}}}, or, if all are of one type, "
        f"{conversion}.{index}"
    )


def _convert_to_array(value: Any, name: str) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.hasobject and array.ndim > 1 and _is_frame(value):  # columns of several types
        raise DataError(_describe_conversion(value, name))
    return array


@final
class Column:
    """One array-like, read by rows.

    Every array that it gives is a copy that the caller owns, never a view of the source.

    Args:
      array: The array-like; anything but an array is converted with `numpy.asarray`.
      name: Its name in errors.

    Raises:
      DataError: It has no first dimension, or is of a kind whose rows cannot be read by position.
    """

    def __init__(self, array: Any, name: str):
        """Create a column of the array; nothing is read."""
        if hasattr(array, "iloc"):  # slices by label
            raise DataError(_describe_conversion(array, name))
        if hasattr(array, "toarray"):  # slices into what NumPy cannot read
            raise DataError(
                f"{name} is a sparse matrix ({type(array).__name__}), which NumPy does not read by "
                "rows. Pass toarray() of it; or where that is too large, a function that makes "
                "dense batches: Dataset.from_batches(fn)."
            )
        if is_masked(array):
            raise DataError(
                f"{name} is a masked array, and its mask would be lost; pass data and mask."
            )
        self.array = array if is_array(array) else _convert_to_array(array, name)
        self.name = name
        self.shape = tuple(self.array.shape)
        if not self.shape:
            raise DataError(
                f"{name} has no first dimension to divide into rows: it is "
                f"{type(array).__name__} of shape (). Give it a leading axis."
            )
        self._can_take_index_arrays = True
        is_ndarray = isinstance(self.array, np.ndarray)
        self._memory: npt.NDArray[Any] | None = np.asarray(self.array) if is_ndarray else None
        # `take` is quicker for rows of many numbers, but it copies arrays that are not C-ordered.
        flags = None if self._memory is None else self._memory.flags
        self._can_take_rows = flags is not None and flags.carray and len(self.shape) > 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the rows."""
        try:
            return np.dtype(self.array.dtype)
        except TypeError:  # another library's dtype object: let its own conversion say
            return np.asarray(self.array[0:0]).dtype

    def read_at_indices(self, row_indices: RowIndices) -> npt.NDArray[Any]:
        """Return the named rows, at least one, in their order, touching no other row."""
        if self._memory is not None:
            return (
                self._memory.take(row_indices, 0)
                if self._can_take_rows
                else self._memory[row_indices]
            )
        # HDF5 takes increasing indices only; reading forward suits every file format.
        unique, inverse = np.unique(row_indices, return_inverse=True)
        unique_rows = self._read_increasing(unique)
        return unique_rows if np.array_equal(unique, row_indices) else unique_rows[inverse]

    def read_rows(self, lo: int, hi: int) -> npt.NDArray[Any]:
        """Return rows lo to hi (exclusive)."""
        if lo >= hi:
            return np.empty((0, *self.shape[1:]), self.dtype)
        return self._convert_to_owned(self.array[lo:hi], hi - lo)

    def _convert_to_owned(self, selection: Any, row_count: int) -> npt.NDArray[Any]:
        array = np.asarray(selection)
        if array.shape[:1] != (row_count,):
            raise DataError(
                f"{self.name}: asked for {row_count} rows, {type(self.array).__name__} gave an "
                f"array of shape {array.shape}. Slicing a[lo:hi] must give hi - lo rows."
            )
        return array if array.flags.owndata and array.flags.writeable else array.copy()

    def _read_increasing(self, row_indices: RowIndices) -> npt.NDArray[Any]:
        if self._can_take_index_arrays:
            try:
                return self._convert_to_owned(self.array[row_indices], len(row_indices))
            except _NO_FANCY:
                pass  # no index arrays here; the slices below raise what is really wrong
        out = np.empty((len(row_indices), *self.shape[1:]), self.dtype)
        starts = np.flatnonzero(np.diff(row_indices, prepend=row_indices[0] - 2) != 1)
        for start, stop in zip(starts, [*starts[1:], len(row_indices)], strict=True):
            out[start:stop] = self.read_rows(
                int(row_indices[start]), int(row_indices[stop - 1]) + 1
            )
        self._can_take_index_arrays = False
        return out


@final
class ArrayTree:
    """A tree of array-likes with the same number of rows.

    Args:
      tree: The tree; nodes as in `mpistrat.pytree`.
      subject: The name of the tree in errors.

    Raises:
      DataError: It holds no array, a leaf has no first dimension, or the leaves differ in rows.
    """

    def __init__(self, tree: Any, subject: str):
        """Create the columns of all leaves; nothing is read."""
        leaves, self.structure = pytree.flatten(tree)
        names = [
            f"{subject}: leaf {path!r}" if path else subject for path in pytree.leaf_paths(tree)
        ]
        if not leaves:
            raise DataError(f"{subject} holds no array.")
        self.columns = [Column(*pair) for pair in zip(leaves, names, strict=True)]
        self.row_count = int(self.columns[0].shape[0])
        if any(column.shape[0] != self.row_count for column in self.columns):
            sizes = ", ".join(
                f"{path!r} has {column.shape[0]}"
                for path, column in zip(pytree.leaf_paths(tree), self.columns, strict=True)
            )
            raise DataError(
                f"{subject}: the leaves must have the same number of rows, but {sizes}."
            )

    def read_at_indices(self, row_indices: RowIndices) -> Any:
        """Return the tree of the named rows, in their order."""
        count = len(row_indices)
        if not count:
            return self.read_rows(0, 0)
        first, last = int(row_indices[0]), int(row_indices[-1])
        # Rows in another order seldom have the first and the last of a run.
        if last - first == count - 1 and (row_indices[1:] - row_indices[:-1] == 1).all():
            return self.read_rows(first, last + 1)
        return pytree.unflatten(
            self.structure, [column.read_at_indices(row_indices) for column in self.columns]
        )

    def read_rows(self, lo: int, hi: int) -> Any:
        """Return the tree of rows lo to hi (exclusive)."""
        return pytree.unflatten(
            self.structure, [column.read_rows(lo, hi) for column in self.columns]
        )

    def describe(self) -> str:
        """Return rows, structure, dtypes and shapes of a row as text; nothing is read."""
        rows = ", ".join(f"{c.dtype.name} {c.shape[1:]}" for c in self.columns)
        return f"{self.row_count} rows of {pytree.describe(self.structure)}: {rows}"

    def get_whole_arrays(self) -> Any:
        """Return the tree with its leaves as NumPy arrays, not copied."""
        return pytree.unflatten(
            self.structure, [np.asarray(column.array) for column in self.columns]
        )

    def iterate_in_memory(self) -> Iterator[npt.NDArray[Any]]:
        """Iterate over the leaves that can be looked at without reading a file."""
        arrays = (column.array for column in self.columns)
        return (a for a in arrays if isinstance(a, np.ndarray) and not isinstance(a, np.memmap))

    def sample_rows(self) -> list[npt.NDArray[Any] | None]:
        """Return rows of each leaf, all of them up to 1 MB; None for a leaf that is not in memory.

        Equal leaves give equal samples. The sample of a larger leaf is runs of rows at 64 places,
        from the first row to the last.
        """
        ids_in_memory = {*map(id, self.iterate_in_memory())}
        arrays = [column.array for column in self.columns]
        return [_sample_rows(a) if id(a) in ids_in_memory else None for a in arrays]

    def make_specs(self, *leading: int | None) -> Any:
        """Return the tree of `Spec` of one row, with `leading` dimensions before it."""
        specs = [Spec((*leading, *column.shape[1:]), column.dtype) for column in self.columns]
        return pytree.unflatten(self.structure, specs)


def _sample_rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return sampled rows, as an array of shape (rows, n); long rows are sampled too."""
    count, width = len(array), int(np.prod(array.shape[1:], dtype=np.int64))
    item_nbytes = _OBJECT_NBYTES if array.dtype.hasobject else max(array.itemsize, 1)
    if count * width * item_nbytes <= _SAMPLE_NBYTES:
        return np.asarray(array).reshape(count, width)
    row_nbytes = max(_ROW_NBYTES, _SAMPLE_NBYTES // max(count, 1))
    columns = _spread_indices(width, row_nbytes // item_nbytes)
    rows = _spread_indices(count, _SAMPLE_NBYTES // (len(columns) * item_nbytes))
    column_indices = np.unravel_index(columns, array.shape[1:]) if array.ndim > 1 else ()
    sampled: npt.NDArray[Any] = np.asarray(array)[(rows[:, None], *column_indices)]
    return sampled.reshape(len(rows), len(columns))


def _spread_indices(count: int, max_count: int) -> RowIndices:
    """Return about `max_count` of `count` numbers from 0 on, in equal runs; at least one."""
    if count <= max_count:
        return np.arange(count)
    runs = max(1, min(max_count, _OFFSETS))
    length = max(1, max_count // runs)
    starts = np.linspace(0, count - length, runs).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(length))


def _convert_leaf(leaf: Any) -> Any:
    if is_array(leaf):
        return leaf
    try:
        return _convert_to_array(leaf, "a leaf of from_tensor_slices")
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"A list in from_tensor_slices becomes one array, but {error}") from None


def convert_lists(tree: Any, convert_leaf: Callable[[Any], Any] = _convert_leaf) -> Any:
    """Return a tree with every list in it made one array, and every other leaf an array.

    Args:
      tree: Mappings and tuples; all else is a leaf.
      convert_leaf: Makes an array of one.

    Raises:
      DataError: The items of a list differ in shape; a table has columns of several types.

    Example:
      >>> convert_lists({"x": [[1, 2], [3, 4]]})["x"].shape
      (2, 2)
    """
    if isinstance(tree, Mapping):
        return with_values(
            tree, {key: convert_lists(value, convert_leaf) for key, value in tree.items()}
        )
    if isinstance(tree, tuple):
        items = [convert_lists(value, convert_leaf) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return convert_leaf(tree)


def _refuse_frame(source: object) -> None:
    # Batches of a table would be its columns, or their names. A reader gives batches of rows.
    if _is_frame(source) and not isinstance(source, Iterator):
        raise DataError(_describe_conversion(source, "the source of the dataset"))


@final
class Stream:
    """Batches from an iterable, or from a callable that returns one; one pass per epoch.

    Args:
      batches: An iterable of batches, or a callable without arguments that returns one.

    Raises:
      TypeError: It is neither.
      DataError: It is text, a mapping or a table, whose items are not batches.
    """

    def __init__(self, batches: Iterable[Any] | Callable[[], Iterable[Any]]):
        """Create a stream of the source; nothing is read."""
        if isinstance(batches, (str, bytes, Mapping)):
            raise DataError(
                f"A {type(batches).__name__} is not a source of batches; pass a tree of arrays, "
                "an iterable of batches, or a callable that returns one."
            )
        _refuse_frame(batches)
        if not isinstance(batches, Iterable) and not callable(batches):
            raise TypeError(
                "Dataset wants a tree of arrays, an iterable of batches or a callable that "
                f"returns one, not {type(batches).__name__}."
            )
        self._batches = batches
        # Held weakly where possible, so that an abandoned generator is closed at once.
        self._get_last_iterator: Callable[[], Any] = lambda: None
        self.cardinality = UNKNOWN
        self.type_name = type(batches).__name__
        if isinstance(batches, Iterable) and isinstance(batches, Sized):
            # A ``DataLoader`` of an iterable has a ``__len__`` that raises TypeError.
            self.cardinality = operator.length_hint(batches, UNKNOWN)

    def __call__(self) -> Iterator[Any]:
        """Return an iterator over the batches of the next epoch.

        Raises:
          DataError: The source gives the iterator that it gave before.
          TypeError: It is a callable that returns no iterable.
        """
        source = self._batches
        iterable = source if isinstance(source, Iterable) else source()
        _refuse_frame(iterable)
        try:
            batches = iter(iterable)
        except TypeError:
            if isinstance(iterable, Iterable):
                raise
            raise TypeError(
                f"the callable that a dataset was made of, {self.type_name}, has returned "
                f"{iterable!r:.60}; expected an iterable of batches."
            ) from None
        if batches is self._get_last_iterator():
            raise DataError(
                "The batches of this dataset come from an iterator that can be read only once, and "
                "another epoch was asked for; pass a callable instead, which returns a new "
                "iterator every time it is called."
            )
        try:
            self._get_last_iterator = weakref.ref(batches)
        except TypeError:
            self._get_last_iterator = lambda: batches
        return batches


@final
@dataclass(frozen=True)
class Files:
    """A list of files, each of which a function reads.

    Attributes:
      paths: Their names, in order.
      read: ``read(path)`` returns a tree of arrays with the same first dimension.
    """

    paths: tuple[str, ...]
    read: Callable[[str], Any]

    def describe(self) -> str:
        """Return their number and a digest of their names; directories may differ by node."""
        names = "\n".join(PurePath(path).name for path in self.paths)
        names_digest = hashlib.blake2b(
            names.encode(errors="surrogateescape"), digest_size=8
        ).hexdigest()
        return f"{len(self.paths)} files {names_digest}"

    def open(self, path: str) -> ArrayTree:
        """Return the arrays of a file."""
        return ArrayTree(self.read(path), f"what was read of {path}")

    def select_files(self, index: int, count: int) -> Files:
        """Return every count-th file, from number `index`."""
        return Files(self.paths[index::count], self.read)


P = TypeVar("P")
T = TypeVar("T")


def describe_failure(error: BaseException) -> str:
    """Return the text of the `DataError` that an iterator raises after it has failed.

    Raising the error again would keep the iterator alive by its traceback; and a StopIteration
    would end an epoch in its middle, unseen.

    Args:
      error: The error with which the iterator has failed.
    """
    reason = f"{type(error).__name__}: {text_of(error):.300}".partition("\n")[0]
    return (
        f"this iterator has failed ({reason}), and cannot find its next element: make a new one, "
        "by iter(dataset)."
    )


@final
class ReadIterator(Iterator[T], Generic[P, T]):
    """The results of a function for each of many sources.

    An error of the function takes the place of one element; the next ``next()`` continues with the
    next source. If the iterator of sources has failed, each further ``next()`` is an error.

    Example:
      >>> halves = ReadIterator(iter([2, 0, 4]), {2: 4, 4: 2}.__getitem__)
      >>> next(halves)
      4
      >>> next(halves)
      Traceback (most recent call last):
      KeyError: 0
      >>> next(halves)
      2
    """

    def __init__(self, sources: Iterator[P], read: Callable[[P], T]):
        """Create an iterator of ``read(source)`` for each of `sources`."""
        self._sources = sources
        self._read = read
        self._failure = ""

    def __next__(self) -> T:
        """Read the next one.

        Raises:
          StopIteration: There are no more.
          DataError: The iterator of sources has failed before.
        """
        if self._failure:
            raise DataError(self._failure)
        try:
            source = next(self._sources)
        except StopIteration:
            raise
        except Exception as error:
            # A generator that has raised says that it has ended.
            self._failure = describe_failure(error)
            raise
        return self._read(source)

    @property
    def has_failed(self) -> bool:
        """Whether there are no more elements because the iterator of sources has failed."""
        return bool(self._failure)

    def close(self) -> None:
        """Close the iterator of sources."""
        close: Any = getattr(self._sources, "close", None)
        if close is not None:
            close()
