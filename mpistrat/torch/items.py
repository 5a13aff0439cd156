"""The items of a map-style dataset of PyTorch as arrays that are read by rows."""

from __future__ import annotations

from collections.abc import Sequence
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

    Rows that were read last are kept: each leaf of a tree asks for the same ones in turn.
    """

    def __init__(self, dataset: Any, workers: int):
        """Read the first item, which tells what an item is."""
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "mpistrat-items") if workers > 1 else None
        self.count = len(dataset)
        if not self.count:
            raise DataError(
                f"{type(dataset).__name__} has no items, so their structure is not known."
            )
        self._dataset = dataset
        leaves, self.structure = pytree.flatten(dataset[0])
        self.first = [self._leaf(leaf, i) for i, leaf in enumerate(leaves)]
        self._last: tuple[tuple[int, ...], list[Array]] = (), []

    def _leaf(self, leaf: Any, index: int) -> Array:
        if isinstance(leaf, str | bytes):
            raise DataError(
                f"leaf {index} of an item of {type(self._dataset).__name__} is text; expected "
                "tensors, arrays or numbers. Let __getitem__ return the numbers of its words."
            )
        return as_array(leaf, str(index))

    def read(self, rows: Any) -> list[Array]:
        """Return the leaves of the items of these rows, each stacked."""
        row_numbers = tuple(map(int, rows))
        if self._last[0] != row_numbers:
            items = self._read(list(row_numbers))
            item_leaves = [pytree.flatten_up_to(self.structure, item, "an item") for item in items]
            columns = zip(*item_leaves, strict=True)
            self._last = (
                row_numbers,
                [self._stacked(i, c, row_numbers) for i, c in enumerate(columns)],
            )
        return self._last[1]

    def _stacked(self, index: int, values: Sequence[Any], rows: Sequence[int]) -> Array:
        """Return one leaf of several items as one array."""
        arrays = [self._leaf(value, index) for value in values]
        for row, array in zip(rows, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise DataError(
                    f"leaf {index} of item {row} of {type(self._dataset).__name__} has shape "
                    f"{array.shape}, and that of item {rows[0]} in the same batch "
                    f"{arrays[0].shape}. Pad them to one shape in __getitem__, or give batches: "
                    "DataLoader(dataset, batch_size=..., collate_fn=...)."
                )
        return np.stack(arrays)

    def _read(self, rows: list[int]) -> list[Any]:
        if self._pool is None or len(rows) < 2:
            return self._read_rows(rows)
        part_size = -(-len(rows) // self._workers)
        parts = [rows[at : at + part_size] for at in range(0, len(rows), part_size)]
        return [item for part in self._pool.map(self._read_rows, parts) for item in part]

    def _read_rows(self, rows: list[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(rows))
        return [self._dataset[row] for row in rows]


@final
class _Leaf:
    """One leaf of all items, read by rows."""

    def __init__(self, items: _Items, index: int):
        """Read nothing more."""
        like = items.first[index]
        self._items, self._index = items, index
        self.shape, self.dtype = (items.count, *like.shape), like.dtype

    def __getitem__(self, rows: Any) -> Array:
        """Return the rows of a slice, or of an array of numbers."""
        if isinstance(rows, slice):
            rows = range(*rows.indices(self.shape[0]))
        if not len(rows):
            return np.empty((0, *self.shape[1:]), self.dtype)
        return self._items.read(rows)[self._index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows."""
        return np.asarray(self[:], dtype)


def rows_of(dataset: Any, workers: int = 0) -> Any:
    """Return a tree of array-like objects for `mpistrat.Dataset`; None if it is not a dataset.

    Args:
      dataset: A map-style dataset: it has a length, and items by number.
      workers: How many threads read the items; up to 1 is the one that asks.

    Raises:
      DataError: It has no items, or one is neither tensors nor numbers.
    """
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if iterable or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return None
    items = _Items(dataset, workers)
    leaves: list[Any] = [_Leaf(items, i) for i in range(len(items.first))]
    tree = pytree.unflatten(items.structure, leaves)
    return tuple(tree) if isinstance(tree, list) else tree
