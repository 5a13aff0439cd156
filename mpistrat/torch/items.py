"""The items of a map-style dataset of PyTorch as arrays that are read by rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import numpy as np
import torch

from mpistrat import pytree
from mpistrat.arrays import Array, as_array
from mpistrat.errors import DataError

__all__ = ["rows_of"]


@final
class _Items:
    """A map-style dataset whose items are trees of tensors, arrays and numbers of one shape.

    The rows of the last read are kept: each leaf of a tree asks for the same rows in turn.
    """

    def __init__(self, dataset: Any, workers: int):
        """Read the first item, which shows the structure, shapes and dtypes of all."""
        self._worker_count = workers
        self._pool = ThreadPoolExecutor(workers, "mpistrat-items") if workers > 1 else None
        self.item_count = len(dataset)
        if not self.item_count:
            raise DataError(
                f"{type(dataset).__name__} has no items, so their structure is not known."
            )
        self._dataset = dataset
        leaves, self.structure = pytree.flatten(dataset[0])
        self.first_leaves = [self._convert_leaf(leaf, i) for i, leaf in enumerate(leaves)]
        self._last_read: tuple[tuple[int, ...], list[Array]] = (), []

    def _convert_leaf(self, leaf: object, index: int) -> Array:
        if isinstance(leaf, str | bytes):
            raise DataError(
                f"leaf {index} of an item of {type(self._dataset).__name__} is text; expected "
                "tensors, arrays or numbers. Let __getitem__ return the numbers of its words."
            )
        return as_array(leaf, str(index))

    def read_rows(self, row_numbers: Iterable[int]) -> list[Array]:
        """Return the leaves of the items of these rows, each stacked to one array."""
        row_numbers = tuple(map(int, row_numbers))
        if self._last_read[0] != row_numbers:
            items = self._read_items(list(row_numbers))
            item_leaves = [pytree.flatten_up_to(self.structure, item, "an item") for item in items]
            columns = zip(*item_leaves, strict=True)
            self._last_read = (
                row_numbers,
                [self._stack_leaf(i, c, row_numbers) for i, c in enumerate(columns)],
            )
        return self._last_read[1]

    def _stack_leaf(self, index: int, values: Sequence[Any], row_numbers: Sequence[int]) -> Array:
        """Return one leaf of several items as one array."""
        arrays = [self._convert_leaf(value, index) for value in values]
        for row_number, array in zip(row_numbers, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise DataError(
                    f"leaf {index} of item {row_number} of {type(self._dataset).__name__} has "
                    f"shape {array.shape}, and that of item {row_numbers[0]} in the same batch "
                    f"{arrays[0].shape}. Pad them to one shape in __getitem__, or give batches: "
                    "DataLoader(dataset, batch_size=..., collate_fn=...)."
                )
        return np.stack(arrays)

    def _read_items(self, row_numbers: list[int]) -> list[Any]:
        if self._pool is None or len(row_numbers) < 2:
            return self._read_items_here(row_numbers)
        chunk_size = -(-len(row_numbers) // self._worker_count)
        chunks = [
            row_numbers[at : at + chunk_size] for at in range(0, len(row_numbers), chunk_size)
        ]
        return [item for chunk in self._pool.map(self._read_items_here, chunks) for item in chunk]

    def _read_items_here(self, row_numbers: list[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(row_numbers))
        return [self._dataset[row_number] for row_number in row_numbers]


@final
class _LeafRows:
    """One leaf of all items, read by rows."""

    def __init__(self, items: _Items, index: int):
        """Read nothing more."""
        first_leaf = items.first_leaves[index]
        self._items, self._index = items, index
        self.shape, self.dtype = (items.item_count, *first_leaf.shape), first_leaf.dtype

    def __getitem__(self, selection: Any) -> Array:
        """Return the rows of a slice, or of an array of numbers."""
        row_numbers = selection
        if isinstance(selection, slice):
            row_numbers = range(*selection.indices(self.shape[0]))
        if not len(row_numbers):
            return np.empty((0, *self.shape[1:]), self.dtype)
        return self._items.read_rows(row_numbers)[self._index]

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        """Return all rows."""
        return np.asarray(self[:], dtype)


def rows_of(dataset: Any, workers: int = 0) -> Any:
    """Return a tree of array-like objects for `mpistrat.Dataset`; None if it is not a dataset.

    Args:
      dataset: A map-style dataset: an object with a length, and items by number.
      workers: How many threads read the items; with 0 or 1 the calling thread reads.

    Raises:
      DataError: It has no items, or an item has leaves that are neither tensors nor numbers.
    """
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if is_iterable or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return None
    items = _Items(dataset, workers)
    leaves: list[Any] = [_LeafRows(items, i) for i in range(len(items.first_leaves))]
    tree = pytree.unflatten(items.structure, leaves)
    return tuple(tree) if isinstance(tree, list) else tree
