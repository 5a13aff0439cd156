"""Constants and the few functions of tensors; tensors are NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "cast",
    "concat",
    "constant",
    "convert_to_tensor",
    "fill",
    "identity",
    "matmul",
    "ones",
    "ones_like",
    "range",
    "reduce_mean",
    "reduce_sum",
    "reshape",
    "square",
    "stack",
    "zeros",
    "zeros_like",
]

_NARROW = {"i": np.int32, "f": np.float32}


def constant(value: Any, dtype: Any = None, shape: Any = None) -> Any:
    """Return a fresh array; Python integers become int32 and Python floats float32.

    Args:
      value: Number, nested list or array.
      dtype: Dtype; of arrays, and of lists of them, their own if None.
      shape: Shape to fill or reshape to; None for that of `value`.

    Example:
      >>> constant([1, 2]).dtype
      dtype('int32')
    """
    array = np.array(value)
    if dtype is None and not _typed(value):
        dtype = _NARROW.get(array.dtype.kind)
    array = array.astype(dtype) if dtype is not None else array
    if shape is None:
        return array
    return np.full(shape, array) if array.size == 1 else array.reshape(shape)


def _typed(value: Any) -> bool:
    """Tell whether a value brings a dtype, or something in a list does."""
    if isinstance(value, list | tuple):
        return any(map(_typed, value))
    return hasattr(value, "dtype")


def convert_to_tensor(value: Any, dtype: Any = None) -> Any:
    """Return `value` as `constant` makes it; an array of that dtype as it is."""
    if isinstance(value, np.ndarray) and dtype in (None, value.dtype):
        return value
    return constant(value, dtype)


def identity(value: Any) -> Any:
    """Return a copy of `value`, as `constant` makes it."""
    return constant(value)


def cast(value: Any, dtype: Any) -> Any:
    """Return `value` as an array of `dtype`."""
    return np.asarray(value).astype(dtype)


def zeros(shape: Any, dtype: Any = np.float32) -> Any:
    """Return an array of zeros of `shape` and `dtype`."""
    return np.zeros(shape, dtype)


def ones(shape: Any, dtype: Any = np.float32) -> Any:
    """Return an array of ones of `shape` and `dtype`."""
    return np.ones(shape, dtype)


def zeros_like(value: Any, dtype: Any = None) -> Any:
    """Return an array of zeros of the shape of `value`, and of its dtype if `dtype` is None."""
    return np.zeros_like(convert_to_tensor(value), dtype)


def ones_like(value: Any, dtype: Any = None) -> Any:
    """Return an array of ones of the shape of `value`, and of its dtype if `dtype` is None."""
    return np.ones_like(convert_to_tensor(value), dtype)


def fill(dims: Any, value: Any) -> Any:
    """Return an array of shape `dims` with `value`, as `constant` takes it, everywhere.

    Example:
      >>> fill([2], 7.0)
      array([7., 7.], dtype=float32)
    """
    return np.full(tuple(dims), constant(value))


def range(*args: Any, dtype: Any = None) -> Any:
    """Return evenly spaced numbers, int32 or float32 unless `dtype` says otherwise."""
    array = np.arange(*args)
    return array.astype(dtype or _NARROW[array.dtype.kind])


def reshape(tensor: Any, shape: Sequence[int]) -> Any:
    """Return `tensor` as an array of another `shape`."""
    return convert_to_tensor(tensor).reshape(tuple(shape))


def stack(values: Sequence[Any], axis: int = 0) -> Any:
    """Return the arrays `values`, which have one shape, joined along a new axis `axis`."""
    return np.stack([convert_to_tensor(value) for value in values], axis)


def concat(values: Sequence[Any], axis: int) -> Any:
    """Return the arrays `values` joined along `axis`, which they have."""
    return np.concatenate([convert_to_tensor(value) for value in values], axis)


def reduce_sum(input_tensor: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the sum of `input_tensor` along `axis`, or of everything; the dtype is kept.

    Args:
      input_tensor: Array, number or nested list.
      axis: One axis, a list of them, or None for all.
      keepdims: Keep them, with one element each.

    Example:
      >>> reduce_sum(constant([1, 2])).dtype
      dtype('int32')
    """
    tensor = convert_to_tensor(input_tensor)
    return np.sum(tensor, _axes(axis), dtype=tensor.dtype, keepdims=keepdims)


def reduce_mean(input_tensor: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the mean as `reduce_sum` does the sum; integers are cut off."""
    tensor = convert_to_tensor(input_tensor)
    return np.mean(tensor, _axes(axis), keepdims=keepdims).astype(tensor.dtype)


def _axes(axis: Any) -> Any:
    return tuple(axis) if isinstance(axis, list) else axis


def matmul(a: Any, b: Any) -> Any:
    """Return the product of the matrices `a` and `b`."""
    return convert_to_tensor(a) @ convert_to_tensor(b)


def square(x: Any) -> Any:
    """Return each element of `x` times itself."""
    return np.square(convert_to_tensor(x))
