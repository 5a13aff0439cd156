"""Functions of tensors, which are NumPy arrays; `tf` has those that are ``tf.*``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import as_shape, check_int
from mpistrat.compat.tf_tensors import (
    as_dtype,
    as_tuple,
    check_shape,
    constant,
    convert_dtype,
    convert_operands,
    convert_to_tensor,
)
from mpistrat.kernels.rows import is_narrow

__all__ = ["as_axes", "check_given"]


def identity(input: Any) -> Any:
    """Return a copy of `input`, as `constant` makes it."""
    return constant(input)


def cast(x: Any, dtype: Any) -> Any:
    """Return `x` as an array of `dtype`."""
    return np.asarray(x).astype(as_dtype(dtype, "cast"))


def zeros(shape: Any, dtype: Any = np.float32) -> Any:
    """Return an array of zeros of `shape` and `dtype`."""
    return np.zeros(shape, as_dtype(dtype, "zeros"))


def ones(shape: Any, dtype: Any = np.float32) -> Any:
    """Return an array of ones of `shape` and `dtype`."""
    return np.ones(shape, as_dtype(dtype, "ones"))


def zeros_like(input: Any, dtype: Any = None) -> Any:
    """Return an array of zeros of the shape of `input`, and of its dtype if `dtype` is None."""
    tensor = convert_to_tensor(input)
    return np.zeros_like(tensor, as_dtype(dtype or tensor.dtype, "zeros_like"))


def ones_like(input: Any, dtype: Any = None) -> Any:
    """Return an array of ones of the shape of `input`, and of its dtype if `dtype` is None."""
    tensor = convert_to_tensor(input)
    return np.ones_like(tensor, as_dtype(dtype or tensor.dtype, "ones_like"))


def fill(dims: Any, value: Any) -> Any:
    """Return an array of shape `dims` filled with `value`, converted as by `constant`.

    Example:
      >>> fill([2], 7.0)
      array([7., 7.], dtype=float32)
    """
    return np.full(as_shape("fill", dims), constant(value))


def range(start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None) -> Any:
    """Return evenly spaced numbers, of the dtype of the widest argument unless `dtype` is given.

    Args:
      start: The first; if `limit` is None, that is `start`, and the first is 0.
      limit: Where they end, excluded.
      delta: The distance between two.
      dtype: Their dtype.

    Example:
      >>> range(3).tolist(), range(1.0, 2.0, delta=0.5).tolist()
      ([0, 1, 2], [1.0, 1.5])
    """
    arguments = [
        constant(argument) for argument in ((0, start) if limit is None else (start, limit))
    ]
    arguments.append(constant(delta))
    kinds = [argument.dtype for argument in arguments if argument.dtype.kind == "f"] or [
        argument.dtype for argument in arguments
    ]
    result_dtype = as_dtype(dtype or np.result_type(*kinds), "range")
    return convert_dtype(
        np.arange(*(argument[()] for argument in arguments)), result_dtype, is_typed=True
    )


def reshape(tensor: Any, shape: Any) -> Any:
    """Return `tensor` as an array of another `shape`, or of one axis for -1."""
    return convert_to_tensor(tensor).reshape(as_shape("reshape", shape))


def check_given(value_name: str, value: Any) -> Any:
    """Return `value`, unless it is None, which NumPy takes for an object or for all axes.

    Args:
      value_name: The name of the value, for the error.
      value: The value.

    Raises:
      ValueError: It is None.
    """
    if value is None:
        raise ValueError(f"{value_name} is None; give a value.")
    return value


def _convert_indices(call_name: str, indices: Any) -> Any:
    """Return indices as a tensor; TypeError if they are not integers."""
    index_tensor = convert_to_tensor(indices)
    if index_tensor.dtype.kind not in "iu":
        raise TypeError(f"{call_name}: indices must be integers, got {index_tensor.dtype}.")
    return index_tensor


def stack(values: Sequence[Any], axis: int = 0) -> Any:
    """Return arrays `values` of the same shape, joined along a new axis `axis`."""
    return np.stack(convert_operands(values), axis)


def concat(values: Sequence[Any], axis: int) -> Any:
    """Return the arrays `values` joined along their axis `axis`.

    Raises:
      ValueError: The axis is None.
    """
    return np.concatenate(convert_operands(values), check_given("concat: axis", axis))


def transpose(a: Any, perm: Any = None, conjugate: bool = False) -> Any:
    """Return `a`, or its conjugate, with its axes in the order `perm`, or in reverse order."""
    turned = np.transpose(convert_to_tensor(a), perm)
    return np.conj(turned) if conjugate else turned


def shape(input: Any, out_type: Any = None) -> Any:
    """Return the shape of `input` as an array of dtype `out_type`, int32 if None.

    Example:
      >>> shape([[1, 2, 3]]).tolist()
      [1, 3]
    """
    sizes = np.shape(check_given("shape: input", input))
    return np.array(sizes, as_dtype(out_type or np.int32, "shape"))


def expand_dims(input: Any, axis: int) -> Any:
    """Return `input` with a new axis of size 1 at `axis`."""
    return np.expand_dims(convert_to_tensor(input), axis)


def squeeze(input: Any, axis: Any = None) -> Any:
    """Return `input` without its axes of size 1, or without `axis` only, if any are given."""
    squeezed_axes = as_axes(axis)
    return np.squeeze(convert_to_tensor(input), None if squeezed_axes == () else squeezed_axes)


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """Return elements of `x` where `condition` holds, and of `y` elsewhere.

    Without these, return the indices of the true elements, as rows.

    Raises:
      ValueError: Only one of them is given.

    Example:
      >>> where([False, True, True]).tolist()
      [[1], [2]]
    """
    check_given("where: condition", condition)
    if x is None and y is None:
        return np.argwhere(condition)
    if x is None or y is None:
        raise ValueError("where: expected both x and y, or none of them.")
    return np.where(condition, *convert_operands([x, y]))


def one_hot(
    indices: Any,
    depth: int,
    on_value: Any = None,
    off_value: Any = None,
    axis: int | None = None,
    dtype: Any = None,
) -> Any:
    """Return `depth` elements for each of `indices`: one value at that index, another elsewhere.

    Args:
      indices: Integers.
      depth: How many.
      on_value: The value at the index; 1 if None.
      off_value: The other value; 0 if None.
      axis: Where the new axis is; the last if None.
      dtype: Dtype of the result; that of the values if None, or float32.

    Raises:
      TypeError: The indices, or `depth`, are not integers.
      DataError: `depth` is negative.

    Example:
      >>> one_hot([1, 0], 2).tolist()
      [[0.0, 1.0], [1.0, 0.0]]
      >>> one_hot([1, 0], 2, on_value=5, off_value=-1).tolist()
      [[-1, 5], [5, -1]]
    """
    values = [1 if on_value is None else on_value, 0 if off_value is None else off_value]
    if on_value is None and off_value is None:
        dtype = dtype or np.float32
    on_tensor, off_tensor = (
        convert_operands(values) if dtype is None else [constant(value, dtype) for value in values]
    )
    classes = np.arange(check_int("one_hot: depth", depth, 0))
    encoded = np.where(
        _convert_indices("one_hot", indices)[..., None] == classes, on_tensor, off_tensor
    )
    return encoded if axis is None else np.moveaxis(encoded, -1, axis)


def as_axes(axis: Any) -> Any:
    """Return `axis` as NumPy takes it: an integer, a tuple of them, or None."""
    return tuple(axis) if isinstance(axis, list) else axis


def matmul(
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    output_type: Any = None,
) -> Any:
    """Return the product of the matrices `a` and `b`, or of stacks of them.

    Args:
      a: Matrix, [..., n, k].
      b: Matrix, [..., k, m].
      transpose_a: Swap the last two axes of `a` first.
      transpose_b: Swap those of `b`.
      adjoint_a: Swap those of `a`, and conjugate it.
      adjoint_b: Swap those of `b`, and conjugate it.
      a_is_sparse: No effect.
      b_is_sparse: No effect.
      output_type: The dtype to compute in; that of the matrices if None.

    Raises:
      ValueError: A matrix is to be both transposed and its adjoint.

    Example:
      >>> matmul([[1], [2]], [[3], [4]], transpose_a=True).tolist()
      [[11]]
    """
    if (transpose_a and adjoint_a) or (transpose_b and adjoint_b):
        raise ValueError("matmul: give transpose_a or adjoint_a, and transpose_b or adjoint_b.")
    left, right = convert_operands([a, b])
    if output_type is not None:
        compute_dtype = as_dtype(output_type, "matmul")
        left, right = left.astype(compute_dtype), right.astype(compute_dtype)
    left, right = np.conj(left) if adjoint_a else left, np.conj(right) if adjoint_b else right
    left = np.swapaxes(left, -1, -2) if transpose_a or adjoint_a else left
    right = np.swapaxes(right, -1, -2) if transpose_b or adjoint_b else right
    product = left @ right
    result_dtype = np.result_type(left, right)
    return (
        product.astype(result_dtype) if is_narrow(result_dtype) else product
    )  # of bfloat16 it is float32


def gather(
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: int | None = None,
    batch_dims: int = 0,
) -> Any:
    """Return the slices of `params` at `indices`. Never communicates.

    Args:
      params: Array.
      indices: Integers of any shape, from 0.
      validate_indices: No effect; they are always checked.
      axis: The axis that they index; the one after the batch axes if None.
      batch_dims: How many leading axes `params` and `indices` have in common.

    Raises:
      ValueError: An index is negative, or not below the size of the axis.
      TypeError: The indices are not integers.

    Example:
      >>> gather([[1, 2], [3, 4]], [1, 0, 1], axis=1).tolist()
      [[2, 1, 2], [4, 3, 4]]
      >>> gather([[1, 2], [3, 4]], [[1], [0]], batch_dims=1).tolist()
      [[2], [3]]
    """
    tensor, index_tensor = convert_to_tensor(params), _convert_indices("gather", indices)
    axis = batch_dims if axis is None else axis + (tensor.ndim if axis < 0 else 0)
    if batch_dims:
        pairs = zip(tensor, index_tensor, strict=True)
        return np.stack([gather(row, at, None, axis - 1, batch_dims - 1) for row, at in pairs])
    count = _count_slices(tensor, axis)
    invalid_indices = index_tensor[(index_tensor < 0) | (index_tensor >= count)]
    if invalid_indices.size:
        raise ValueError(
            f"gather: index {invalid_indices.flat[0]} is out of range for the {count} slices of "
            f"axis {axis}."
        )
    return np.take(tensor, index_tensor, axis)


def _count_slices(tensor: Any, axis: int) -> int:
    """Return how many slices a tensor has along an axis; ValueError if it has no such axis."""
    return int(np.moveaxis(tensor, axis, 0).shape[0])


def gather_nd(params: Any, indices: Any, batch_dims: int = 0) -> Any:
    """Return the slices of `params` at `indices`, whose last axis indexes its first axes.

    Args:
      params: Array.
      indices: Integers from 0, [..., k].
      batch_dims: How many leading axes `params` and `indices` have in common.

    Raises:
      ValueError: An index is negative, or not below the size of its axis.
      TypeError: The indices are not integers.

    Example:
      >>> gather_nd([[1, 2], [3, 4]], [[0, 1], [1, 0]]).tolist()
      [2, 3]
    """
    tensor, index_tensor = convert_to_tensor(params), _convert_indices("gather_nd", indices)
    if batch_dims:
        pairs = zip(tensor, index_tensor, strict=True)
        return np.stack([gather_nd(row, at, batch_dims - 1) for row, at in pairs])
    depth = _count_slices(index_tensor, -1)
    sizes = tensor.shape[:depth]
    if len(sizes) < depth or ((index_tensor < 0) | (index_tensor >= sizes)).any():
        raise ValueError(
            f"gather_nd: an index of {index_tensor.tolist()!r:.60} is not in {tensor.shape}."
        )
    return tensor[tuple(np.moveaxis(index_tensor, -1, 0))]


def boolean_mask(tensor: Any, mask: Any, axis: int | None = None) -> Any:
    """Return the elements of `tensor` at which `mask` is true.

    The mask covers the axes of `tensor` from `axis` on, or the first ones if `axis` is None.

    Raises:
      ValueError: The mask is not one of bool, or of another shape.

    Example:
      >>> boolean_mask([[1, 2], [3, 4]], [False, True]).tolist()
      [[3, 4]]
    """
    array, mask_array, axis = convert_to_tensor(tensor), np.asarray(mask), axis or 0
    mask_shape = array.shape[axis : axis + mask_array.ndim]
    if mask_array.dtype != bool or not mask_array.ndim or mask_array.shape != mask_shape:
        raise ValueError(
            f"boolean_mask: expected a mask of bool and shape {mask_shape or array.shape[axis:]}, "
            f"got {mask_array.dtype} {mask_array.shape}."
        )
    return array[(slice(None),) * axis + (mask_array,)]


def reverse(tensor: Any, axis: Any) -> Any:
    """Return `tensor` with the order of its elements along the axes `axis` turned round.

    Raises:
      ValueError: The axis is None.
    """
    return np.flip(convert_to_tensor(tensor), as_axes(check_given("reverse: axis", axis))).copy()


def ensure_shape(x: Any, shape: Any) -> Any:
    """Return `x`.

    Raises:
      ValueError: It has another shape than `shape`, where None is any size.

    Example:
      >>> ensure_shape([[1, 2]], [None, 2]).tolist()
      [[1, 2]]
    """
    return check_shape("ensure_shape", convert_to_tensor(x), shape)


def zeros_initializer() -> Callable[..., Any]:
    """Return a function of a shape and a dtype that returns zeros."""
    return zeros


def ones_initializer() -> Callable[..., Any]:
    """Return a function of a shape and a dtype that returns ones."""
    return ones


def constant_initializer(value: Any = 0, support_partition: bool = False) -> Callable[..., Any]:
    """Return a function of a shape and a dtype that returns `value`, as `constant` makes it.

    `support_partition` has no effect.

    Example:
      >>> constant_initializer(7)([2], np.float32).tolist()
      [7.0, 7.0]
    """
    return lambda shape, dtype=None: constant(value, dtype, shape)


def eye(
    num_rows: int, num_columns: int | None = None, batch_shape: Any = None, dtype: Any = np.float32
) -> Any:
    """Return a matrix of `num_rows` and `num_columns`, ones on the diagonal, of `dtype`.

    With a `batch_shape`, an array of this shape whose elements are such matrices.
    """
    matrix = np.eye(num_rows, num_columns, dtype=as_dtype(dtype, "eye"))
    return matrix if batch_shape is None else np.tile(matrix, (*batch_shape, 1, 1))


def linspace(start: Any, stop: Any, num: int, *, axis: int = 0) -> Any:
    """Return `num` evenly spaced numbers from `start` to `stop`, both included, along `axis`.

    Between integers they are float64.
    """
    first, last = convert_operands([start, stop])
    dtype = np.result_type(first, last)
    return np.linspace(first, last, num, dtype=None if dtype.kind in "iu" else dtype, axis=axis)


def tile(input: Any, multiples: Any) -> Any:
    """Return `input` repeated along each axis as often as `multiples` says."""
    return np.tile(convert_to_tensor(input), as_tuple("tile: multiples", multiples))


def repeat(input: Any, repeats: Any, axis: int | None = None) -> Any:
    """Return `input` with each element `repeats` times along `axis`, or flat if that is None."""
    return np.repeat(convert_to_tensor(input), repeats, axis)


def broadcast_to(input: Any, shape: Any) -> Any:
    """Return `input` in a larger `shape`."""
    return np.broadcast_to(convert_to_tensor(input), as_tuple("broadcast_to: shape", shape)).copy()


def split(value: Any, num_or_size_splits: Any, axis: int = 0, num: int | None = None) -> list[Any]:
    """Return the parts of `value` along `axis`.

    Args:
      value: Array.
      num_or_size_splits: How many parts of equal size, or the size of each; one may be -1, for
        the rest.
      axis: The axis.
      num: No effect.

    Raises:
      ValueError: The axis cannot be divided so.

    Example:
      >>> [part.tolist() for part in split([1, 2, 3], [1, 2])]
      [[1], [2, 3]]
    """
    tensor, sizes = convert_to_tensor(value), num_or_size_splits
    axis_size = _count_slices(tensor, axis)
    if np.ndim(sizes):
        parts = list(sizes)
        if parts.count(-1) == 1:
            parts[parts.index(-1)] = axis_size - (sum(parts) + 1)
        if sum(parts) != axis_size or min(parts, default=0) < 0:
            raise ValueError(f"split: the sizes {sizes} do not add up to {axis_size}.")
        sizes = np.cumsum(parts)[:-1]
    return list(np.split(tensor, sizes, axis))


def unstack(value: Any, num: int | None = None, axis: int = 0) -> list[Any]:
    """Return the slices of `value` along `axis`, without that axis; `num` has no effect."""
    return list(np.moveaxis(convert_to_tensor(value), axis, 0))


def size(input: Any, out_type: Any = None) -> Any:
    """Return the number of elements of `input` as `out_type`, int32 if None."""
    count = np.size(check_given("size: input", input))
    return as_dtype(out_type or np.int32, "size").type(count)


def rank(input: Any) -> Any:
    """Return the number of axes of `input`."""
    return np.int32(np.ndim(check_given("rank: input", input)))
