"""Reductions of a tensor along its axes, and norms to clip gradients with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.compat.tf_arrays import as_axes, check_given
from mpistrat.compat.tf_tensors import check_floating, convert_operands, convert_to_tensor
from mpistrat.kernels.rows import is_narrow
from mpistrat.variables.indexed_slices import IndexedSlices


def _reduction(
    function: Callable[..., Any], description: str, truth: bool = False
) -> Callable[..., Any]:
    def apply(
        input_tensor: Any, axis: Any = None, keepdims: bool | None = False, name: Any = None
    ) -> Any:
        tensor, keepdims = convert_to_tensor(input_tensor), bool(keepdims)
        if truth and tensor.dtype.kind != "b":
            raise TypeError(f"expected a tensor of bool, got {tensor.dtype}; compare it first.")
        if not truth:
            _refuse_bool(tensor)
        if is_narrow(tensor.dtype):  # rounded once, where sums would stop growing at 256 or 2048
            float32_result = function(tensor.astype(np.float32), as_axes(axis), keepdims)
            return float32_result.astype(tensor.dtype)
        return function(tensor, as_axes(axis), keepdims)

    apply.__doc__ = f"""Return {description} of `input_tensor` along `axis`; the dtype is kept.

    For float16 and bfloat16 it is computed in float32.

    Args:
      input_tensor: Array, number or nested list.
      axis: One axis, a list of them, or None for all.
      keepdims: Keep the reduced axes, with size 1.
      name: No effect.

    Raises:
      TypeError: `reduce_all` or `reduce_any` is given a dtype other than bool, or others are given
        that; or `reduce_logsumexp` is given integers.
    """
    return apply


def _refuse_bool(tensor: Any) -> None:
    """Raise TypeError for what NumPy would add up to True, whatever is counted."""
    if tensor.dtype.kind == "b":
        raise TypeError(
            "expected numbers, got a tensor of bool; cast it first: tf.cast(x, 'float32')."
        )


def _logsumexp(x: Any, axis: Any, keep: bool) -> Any:
    maximum = np.max(check_floating("reduce_logsumexp", x), axis, keepdims=True, initial=-np.inf)
    maximum = np.where(np.isfinite(maximum), maximum, 0).astype(x.dtype)
    with np.errstate(divide="ignore"):
        logarithm = np.log(np.sum(np.exp(x - maximum), axis, keepdims=True)) + maximum
    return logarithm if keep else np.squeeze(logarithm, axis)


def _mean(x: Any, axis: Any, keep: bool) -> Any:
    if x.dtype.kind not in "iu":
        return np.mean(x, axis, keepdims=keep).astype(x.dtype)
    total = np.sum(x, axis, dtype=np.float64, keepdims=keep)
    return (total / max(x.size // max(total.size, 1), 1)).astype(x.dtype)


def _extreme(function: Callable[..., Any], of_none: float) -> Callable[..., Any]:
    """Return a function that gives infinity, or the last integer, where there are no elements."""

    def apply(x: Any, axis: Any, keep: bool) -> Any:
        if x.size:
            return function(x, axis, keepdims=keep)
        limits = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
        last = of_none if limits is None else limits.max if of_none > 0 else limits.min
        return function(x, axis, keepdims=keep, initial=last)

    return apply


reduce_sum = _reduction(lambda x, a, k: np.sum(x, a, dtype=x.dtype, keepdims=k), "the sum")
reduce_prod = _reduction(lambda x, a, k: np.prod(x, a, dtype=x.dtype, keepdims=k), "the product")
reduce_mean = _reduction(_mean, "the mean, cut off for integers, of which none have 0,")
reduce_max = _reduction(
    _extreme(np.max, -np.inf), "the largest element, or -infinity or the least integer of none,"
)
reduce_min = _reduction(
    _extreme(np.min, np.inf), "the smallest element, or infinity or the largest integer of none,"
)
reduce_any = _reduction(lambda x, a, k: np.any(x, a, keepdims=k), "whether any is true", True)
reduce_all = _reduction(lambda x, a, k: np.all(x, a, keepdims=k), "whether all are true", True)
reduce_std = _reduction(lambda x, a, k: np.std(x, a, keepdims=k), "the standard deviation")
reduce_variance = _reduction(lambda x, a, k: np.var(x, a, keepdims=k), "the variance")
reduce_logsumexp = _reduction(_logsumexp, "the logarithm of the sum of the exponentials")


def norm(
    tensor: Any,
    ord: Any = "euclidean",
    axis: Any = None,
    keepdims: bool | None = None,
    name: Any = None,
) -> Any:
    """Return the norm of the vectors, or of the matrices, in `tensor`.

    Args:
      tensor: Array of floating point or complex numbers; with the default `ord`, the norm has its
        dtype.
      ord: ``euclidean`` or ``fro``, or a number as `numpy.linalg.norm` takes it.
      axis: That of the vectors, or the two of the matrices; None takes `tensor` as one vector.
      keepdims: Keep these axes, with size 1.
      name: No effect.

    Raises:
      TypeError: The elements are integers.
      ValueError: There is no such norm.

    Example:
      >>> norm([[3.0, 4.0], [0.0, 2.0]], axis=1).tolist()
      [5.0, 2.0]
    """
    array, is_one_vector, norm_axes = convert_to_tensor(tensor), axis is None, as_axes(axis)
    keepdims = bool(keepdims)
    if is_narrow(array.dtype):
        float32_norms = norm(array.astype(np.float32), ord, axis, keepdims)
        return float32_norms.astype(array.dtype)
    check_floating("norm", array)
    if isinstance(ord, str) and ord not in ("euclidean", "fro"):
        raise ValueError(f"norm: expected 'euclidean', 'fro' or a number, got ord={ord!r}.")
    if is_one_vector:
        array, norm_axes = array.ravel(), 0
    order: Any = ord
    if isinstance(ord, str):
        order = "fro" if np.size(norm_axes) == 2 else 2
    norms = np.linalg.norm(array, order, norm_axes, keepdims)
    if array.dtype.kind == "c" and (isinstance(ord, str) or (ord == 2 and np.size(norm_axes) == 1)):
        norms = norms.astype(array.dtype)  # as of a sum of products, there
    return np.reshape(norms, (1,) * np.ndim(tensor)) if is_one_vector and keepdims else norms


def add_n(inputs: Any, name: Any = None) -> Any:
    """Return the sum of tensors of one shape; the dtype is kept.

    Args:
      inputs: A list of tensors, or one.
      name: No effect.

    Raises:
      ValueError: The list is empty, or the shapes differ.
      TypeError: They are of bool.

    Example:
      >>> add_n([[1.0, 2.0], [3.0, 4.0]]).tolist()
      [4.0, 6.0]
    """
    tensor_list = inputs if isinstance(inputs, list | tuple) else [inputs]
    tensors = convert_operands([_dense(tensor) for tensor in tensor_list])
    if len({tensor.shape for tensor in tensors}) != 1:
        shapes = [tensor.shape for tensor in tensors]
        raise ValueError(f"add_n: expected tensors of one shape, got {shapes or 'none'}.")
    _refuse_bool(tensors[0])
    total = tensors[0].copy()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _dense(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, IndexedSlices) else value


def _like(original: Any, values: Any) -> Any:
    """Return new values in the form of the original: slices of the same rows, or an array."""
    if isinstance(original, IndexedSlices):
        return IndexedSlices(values, original.indices, original.dense_shape)
    return values


def _values(tensor: Any) -> Any:
    return convert_to_tensor(tensor.values if isinstance(tensor, IndexedSlices) else tensor)


def _limit(limit: Any, values: Any) -> Any:
    """Return a limit in the dtype of the values; raise if it is None, or would be cut off."""
    check_given("a limit", limit)
    converted_limit = np.asarray(limit, values.dtype)
    if values.dtype.kind in "iu" and np.any(converted_limit != limit):
        raise TypeError(f"the limit {limit!r:.60} is no {values.dtype}, as the tensor is; cast it.")
    return converted_limit


def clip_by_value(t: Any, clip_value_min: Any, clip_value_max: Any, name: Any = None) -> Any:
    """Return `t` with its values limited to a range; the dtype is kept.

    Args:
      t: Tensor, or `IndexedSlices`.
      clip_value_min: The smallest value.
      clip_value_max: The largest value.
      name: No effect.

    Raises:
      TypeError: A limit is not an integer, and the tensor is of integers.
      ValueError: A limit is None.
    """
    values = _values(t)
    lower, upper = (_limit(limit, values) for limit in (clip_value_min, clip_value_max))
    return _like(t, np.maximum(np.minimum(values, upper), lower))


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: Any = None) -> Any:
    """Return `t`, scaled down to a norm of `clip_norm` if its norm is larger.

    Args:
      t: Tensor, or `IndexedSlices`.
      clip_norm: The largest norm. If it is negative, the result is 0.
      axes: The axes that the norm is taken over; all if None.
      name: No effect.

    Raises:
      TypeError: As of `clip_by_value`.
      ValueError: As there.

    Example:
      >>> clip_by_norm([3.0, 4.0], 1.0).tolist()
      [0.6000000238418579, 0.800000011920929]
    """
    values = _values(t)
    limit = np.maximum(_limit(clip_norm, values), 0)
    norm = np.sqrt(reduce_sum(values * values, axes, keepdims=True))
    return _like(t, values * limit / np.maximum(norm, limit))


def global_norm(t_list: Sequence[Any], name: Any = None) -> Any:
    """Return the square root of the sum of the squares of all elements of all tensors.

    Args:
      t_list: Tensors, `IndexedSlices`, or None, which is ignored.
      name: No effect.

    Raises:
      TypeError: `t_list` is not a list or tuple.

    Example:
      >>> float(global_norm([[3.0], None, [[4.0]]]))
      5.0
    """
    if not isinstance(t_list, list | tuple):
        text = f"expected a list of tensors, got {t_list!r:.60}; see mpistrat.pytree.flatten."
        raise TypeError(text)
    tensors = [_values(tensor) for tensor in t_list if tensor is not None]
    dtype = np.result_type(*tensors) if tensors else np.dtype(np.float32)
    return np.sqrt(sum((reduce_sum((x * x).astype(dtype)) for x in tensors), start=dtype.type(0)))


def clip_by_global_norm(
    t_list: Sequence[Any], clip_norm: Any, use_norm: Any = None, name: Any = None
) -> tuple[list[Any], Any]:
    """Return tensors scaled down together to a `global_norm`, and the norm that they had.

    If the norm is infinite or NaN, all of them become NaN.

    Args:
      t_list: See `global_norm`; None stays None.
      clip_norm: The largest norm. If it is negative, nothing is scaled.
      use_norm: The norm, if it is known, as after an all-reduce; computed if None.
      name: No effect.

    Raises:
      TypeError: `t_list` is not a list or tuple, or a tensor is of integers.
      ValueError: `clip_norm` is None.

    Example:
      >>> clipped, norm = clip_by_global_norm([[3.0], [4.0]], 10.0)
      >>> [one.tolist() for one in clipped], float(norm)
      ([[3.0], [4.0]], 5.0)
    """
    computed_norm = global_norm(t_list)
    norm = computed_norm if use_norm is None else np.asarray(use_norm, computed_norm.dtype)[()]
    scale = np.float64(check_given("clip_norm", clip_norm)) / max(norm, clip_norm)
    if clip_norm < 0 or not np.isfinite(norm):
        scale = np.float64(1 if np.isfinite(norm) else np.nan)
    for tensor in t_list:
        if tensor is not None and _values(tensor).dtype.kind in "biu":
            raise TypeError(
                f"expected floating-point tensors, got {_values(tensor).dtype}; cast it."
            )
    clipped = [
        tensor
        if tensor is None
        else _like(tensor, _values(tensor) * _values(tensor).dtype.type(scale))
        for tensor in t_list
    ]
    return clipped, norm
