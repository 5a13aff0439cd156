"""Values that are zero except for some rows: `IndexedSlices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, as_array, as_shape, spec_text
from mpistrat.errors import LeafTypeError, StructureError
from mpistrat.kernels.rows import is_narrow


@final
class IndexedSlices:
    """Some rows of a larger array, and which rows they are; the rest is zero.

    ``values[k]`` is row ``indices[k]`` of that array. If an index appears more than once, its rows
    are added up.
    It is one leaf of a tree. ``np.asarray(slices)`` is the dense array.

    Args:
      values: Array of shape ``(k, ...)``.
      indices: Array of k integers.
      dense_shape: The shape of the whole; None if it is not needed.

    Raises:
      LeafTypeError: `values` is not an array of numbers, or `indices` are not integers.
      StructureError: The shapes do not fit together.

    Like: ``tf.IndexedSlices``.

    Example:
      >>> np.asarray(IndexedSlices([1.0, 2.0, 4.0], [0, 3, 3], (4,)))
      array([1., 0., 0., 6.])
    """

    def __init__(self, values: Any, indices: object, dense_shape: Sequence[int] | None = None):
        """Hold the rows, not a copy of them."""
        self._values = as_array(values, "values", accepts_lists=True)
        self._indices = as_array(indices, "indices", accepts_lists=True)
        if self._indices.size == 0 and isinstance(indices, list | tuple):
            self._indices = self._indices.astype(np.int64)
        if self._indices.dtype.kind not in "iu":
            raise LeafTypeError(
                f"IndexedSlices: indices must be integers, got {spec_text(self._indices)}."
            )
        if self._indices.ndim != 1 or self._values.shape[:1] != self._indices.shape:
            raise StructureError(
                "IndexedSlices: expected one index for each row of values, got values of shape "
                f"{self._values.shape} and indices of shape {self._indices.shape}."
            )
        shape = None if dense_shape is None else as_shape("IndexedSlices(dense_shape)", dense_shape)
        if shape is not None and (None in shape or shape[1:] != self._values.shape[1:]):
            raise StructureError(
                f"IndexedSlices: rows of shape {self._values.shape[1:]} are no rows of a whole of "
                f"shape {shape}."
            )
        self._shape = shape

    @property
    def values(self) -> Array:
        """The rows, one after the other."""
        return self._values

    @property
    def indices(self) -> Array:
        """The number of each row in the whole array."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The shape of the whole; None if it was not given."""
        return self._shape

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the whole, as `dense_shape`."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of the whole."""
        return self._values.ndim

    def __neg__(self) -> IndexedSlices:
        """Return the same rows with the opposite sign."""
        return IndexedSlices(-self._values, self._indices, self._shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the dense array.

        Raises:
          StructureError: Its shape is unknown.
          IndexError: An index is outside of it.
          ValueError: ``copy=False``, but it has to be made.
        """
        if self._shape is None:
            raise StructureError(
                "IndexedSlices without a dense_shape cannot be made dense. Give it one, or look at "
                "its values and indices."
            )
        if copy is False:
            raise ValueError("the dense array of IndexedSlices has to be made; copy=False forbids.")
        outside_mask = (self._indices < 0) | (self._indices >= max(self._shape[:1], default=0))
        if outside_mask.any():
            raise IndexError(
                f"IndexedSlices: index {self._indices[outside_mask][0]} is out of range for a "
                f"whole of shape {self._shape}."
            )
        sum_dtype = np.dtype(np.float32) if is_narrow(self.dtype) else self.dtype
        dense = np.zeros(self._shape, sum_dtype)
        np.add.at(dense, self._indices, self._values.astype(sum_dtype, copy=False))
        return dense.astype(self.dtype if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        """Return values, indices and shape."""
        return f"IndexedSlices({self._values!r}, {self._indices!r}, {self._shape})"


def list_arrays(value: object) -> list[Array]:
    """Return the arrays that say all of an array or number, or of `IndexedSlices`.

    Raises:
      LeafTypeError: The value is neither.
    """
    if isinstance(value, IndexedSlices):
        return [value.values, value.indices, np.array(value.dense_shape or (), np.int64)]
    return [as_array(value)]
