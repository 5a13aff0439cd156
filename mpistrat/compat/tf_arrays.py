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
    "expand_dims",
    "fill",
    "identity",
    "is_typed",
    "matmul",
    "one_hot",
    "ones",
    "ones_like",
    "range",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "reshape",
    "shape",
    "square",
    "squeeze",
    "stack",
    "transpose",
    "where",
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

    Raises:
      ValueError: An integer does not fit the dtype; nothing wraps.
      TypeError: A Python float for an integer dtype.

    Example:
      >>> constant([1, 2]).dtype
      dtype('int32')
      >>> constant(2**40, "int64")
      array(1099511627776)
    """
    array = np.array(value)
    typed = is_typed(value)
    if dtype is None and not typed:
        # An integer beyond int64 makes an array of another kind, but it was meant as an integer.
        large = array.dtype.kind in "uO" and all(isinstance(x, int) for x in array.ravel().tolist())
        dtype = np.int32 if large else _NARROW.get(array.dtype.kind)
    array = array if dtype is None else _converted(array, np.dtype(dtype), typed)
    if shape is None:
        return array
    return np.full(shape, array) if array.size == 1 else array.reshape(shape)


def is_typed(value: Any) -> bool:
    """Tell whether `value` brings a dtype, or something in a list does."""
    if isinstance(value, list | tuple):
        return any(map(is_typed, value))
    return hasattr(value, "dtype")


def _converted(array: Any, dtype: np.dtype[Any], typed: bool) -> Any:
    if dtype.kind in "iu" and array.size:
        if array.dtype.kind == "f" and not typed:
            raise TypeError(
                f"a Python float was given for dtype {dtype}; it would be cut off. Write an "
                "integer, or cast(value, dtype) if that is meant."
            )
        if array.dtype.kind in "iuO":
            _check_range(array, dtype)
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, as it is there
        return array.astype(dtype)


def _check_range(array: Any, dtype: np.dtype[Any]) -> None:
    limits, least, most = np.iinfo(dtype), array.min(), array.max()
    if least < limits.min or most > limits.max:
        raise ValueError(
            f"{most if most > limits.max else least} does not fit {dtype}, the dtype that was "
            "asked for, or that Python integers get; say dtype=tf.int64 (or another) for it."
        )


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
    return _converted(array, np.dtype(dtype or _NARROW[array.dtype.kind]), typed=True)


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


def reduce_max(input_tensor: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the largest element as `reduce_sum` does the sum.

    Example:
      >>> reduce_max([[1, 5], [3, 2]], axis=1).tolist()
      [5, 3]
    """
    return np.max(convert_to_tensor(input_tensor), _axes(axis), keepdims=keepdims)


def reduce_min(input_tensor: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the smallest element as `reduce_sum` does the sum."""
    return np.min(convert_to_tensor(input_tensor), _axes(axis), keepdims=keepdims)


def transpose(a: Any, perm: Any = None) -> Any:
    """Return `a` with its axes in the order `perm`, or in reverse order if that is None."""
    return np.transpose(convert_to_tensor(a), perm)


def shape(input: Any, out_type: Any = np.int32) -> Any:
    """Return the shape of `input` as an array of dtype `out_type`.

    Example:
      >>> shape([[1, 2, 3]]).tolist()
      [1, 3]
    """
    return np.array(np.shape(input), out_type)


def expand_dims(input: Any, axis: int) -> Any:
    """Return `input` with a new axis of size 1 at `axis`."""
    return np.expand_dims(convert_to_tensor(input), axis)


def squeeze(input: Any, axis: Any = None) -> Any:
    """Return `input` without its axes of size 1, or without `axis` only."""
    return np.squeeze(convert_to_tensor(input), _axes(axis))


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return elements of `x` where `condition` holds, and of `y` elsewhere."""
    return np.where(condition, convert_to_tensor(x), convert_to_tensor(y))


def one_hot(indices: Any, depth: int, dtype: Any = np.float32) -> Any:
    """Return rows of `depth` elements of `dtype`: 1 at each of `indices`, else 0.

    Example:
      >>> one_hot([1, 0], 2).tolist()
      [[0.0, 1.0], [1.0, 0.0]]
    """
    return (np.asarray(indices)[..., None] == np.arange(depth)).astype(dtype)


def _axes(axis: Any) -> Any:
    return tuple(axis) if isinstance(axis, list) else axis


def matmul(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """Return the product of the matrices `a` and `b`, or of stacks of them.

    Args:
      a: Matrix, [..., n, k].
      b: Matrix, [..., k, m].
      transpose_a: Swap the last two axes of `a` first.
      transpose_b: Swap those of `b`.

    Example:
      >>> matmul([[1], [2]], [[3], [4]], transpose_a=True).tolist()
      [[11]]
    """
    left, right = convert_to_tensor(a), convert_to_tensor(b)
    left = np.swapaxes(left, -1, -2) if transpose_a else left
    right = np.swapaxes(right, -1, -2) if transpose_b else right
    return left @ right


def square(x: Any) -> Any:
    """Return each element of `x` times itself."""
    return np.square(convert_to_tensor(x))
