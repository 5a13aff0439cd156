"""Partitioners: how many shards to cut a variable into along one axis, from its shape and dtype.

A partitioner returns the number of shards on each axis, 1 on all axes but the one it cuts. mpistrat
itself does not cut variables; these are for programs that do.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import final

from numpy.typing import DTypeLike

from mpistrat.arrays import as_dtype, check_int
from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.errors import AxisError

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]

__getattr__ = _make_getattr("mpistrat.experimental.partitioners")

_TEXT_KINDS = "SUOT"  # kinds of dtypes whose elements have no size of their own


class Partitioner(abc.ABC):
    """Decides how many shards a variable is cut into.

    Like: ``tf.distribute.experimental.partitioners.Partitioner``.
    """

    @abc.abstractmethod
    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of shards on each axis.

        Args:
          shape: The shape of the variable.
          dtype: Its dtype, or anything that NumPy converts to one.
          axis: The axis to cut.

        Returns:
          As many integers as there are axes: at least 1 on `axis`, 1 on the others.

        Raises:
          AxisError: The shape has no such axis.
        """


@final
class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards, but at most one per row.

    Args:
      num_shards: The number of shards, at least 1.

    Raises:
      ValueError: `num_shards` is less than 1.

    Like: ``tf.distribute.experimental.partitioners.FixedShardsPartitioner``.

    Example:
      >>> import numpy as np
      >>> FixedShardsPartitioner(4)([10, 3], np.float32)
      [4, 1]
    """

    def __init__(self, num_shards: int):
        """Create a partitioner."""
        self._shard_count = _check_positive(num_shards=num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of shards on each axis; `dtype` does not matter."""
        return _count_shards(shape, axis, self._shard_count)


@final
class MinSizePartitioner(Partitioner):
    """As many shards as give each of them about a number of bytes.

    Args:
      min_shard_bytes: The number of shards is the variable's bytes over this, rounded up.
      max_shards: The largest number of shards.
      bytes_per_string: The size to assume for an element of text or of objects.

    Raises:
      ValueError: One of them is less than 1.

    Like: ``tf.distribute.experimental.partitioners.MinSizePartitioner``.

    Example:
      >>> import numpy as np
      >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)([6, 1], np.float32)
      [2, 1]
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ):
        """Create a partitioner."""
        self._shard_nbytes = _check_positive(min_shard_bytes=min_shard_bytes)
        self._max_shards = _check_positive(max_shards=max_shards)
        self._text_nbytes = _check_positive(bytes_per_string=bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of shards on each axis."""
        total_bytes = math.prod(shape) * _element_nbytes(dtype, self._text_nbytes)
        return _count_shards(
            shape, axis, min(self._max_shards, -(-total_bytes // self._shard_nbytes))
        )


@final
class MaxSizePartitioner(Partitioner):
    """As few shards as keep each of them below a number of bytes.

    A row is never cut, so a shard of one row may be larger; `max_shards` has precedence.

    Args:
      max_shard_bytes: The largest number of bytes in a shard.
      max_shards: The largest number of shards; None for no limit.
      bytes_per_string: The size to assume for an element of text or of objects.

    Raises:
      ValueError: One of them is less than 1.

    Like: ``tf.distribute.experimental.partitioners.MaxSizePartitioner``.

    Example:
      >>> import numpy as np
      >>> MaxSizePartitioner(max_shard_bytes=8)([6, 1], np.float32)
      [3, 1]
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ):
        """Create a partitioner."""
        self._shard_nbytes = _check_positive(max_shard_bytes=max_shard_bytes)
        self._max_shards = None if max_shards is None else _check_positive(max_shards=max_shards)
        self._text_nbytes = _check_positive(bytes_per_string=bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of shards on each axis."""
        length = shape[_check_axis(shape, axis)]
        row_nbytes = math.prod(shape) // max(1, length) * _element_nbytes(dtype, self._text_nbytes)
        row_count = max(1, self._shard_nbytes // row_nbytes if row_nbytes else length)
        shard_count = -(-length // row_count)
        return _count_shards(
            shape,
            axis,
            shard_count if self._max_shards is None else min(self._max_shards, shard_count),
        )


def _check_positive(**arguments: int) -> int:
    ((name, value),) = arguments.items()
    return check_int(f"Argument `{name}` must be positive: it", value, 1, ValueError)


def _element_nbytes(dtype: DTypeLike, text_nbytes: int) -> int:
    checked_dtype = as_dtype(dtype, "partitioner")
    return text_nbytes if checked_dtype.kind in _TEXT_KINDS else checked_dtype.itemsize


def _check_axis(shape: Sequence[int], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise AxisError(f"a variable of shape {tuple(shape)} cannot be cut along axis {axis}.")
    return axis % len(shape)


def _count_shards(shape: Sequence[int], axis: int, shard_count: int) -> list[int]:
    checked_axis = _check_axis(shape, axis)
    return [
        max(1, min(shard_count, size)) if position == checked_axis else 1
        for position, size in enumerate(shape)
    ]
