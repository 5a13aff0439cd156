"""``tf.math`` as programs that import `mpistrat.compat.tf` see it: NumPy, element by element.

Python numbers, and lists of them, become int32 and float32; beside a tensor they take its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.compat import tf_reductions as _reductions
from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.compat.tf_tensors import (
    as_dtype,
    check_floating,
    convert_operands,
    convert_to_tensor,
    takes_name,
)

__getattr__ = _make_getattr("tf.math")


def _sigmoid(x: Any) -> Any:
    if x.dtype.kind == "c":
        return 1 / (1 + np.exp(-x))
    small = np.exp(-np.abs(x))  # never too large, and exact where the result is next to 0
    return np.where(x < 0, small, small.dtype.type(1)) / (1 + small)


def _quotient(x: Any, y: Any, where: Any = True) -> Any:
    """Return the quotient; of integers of 8 and 16 bits it is float32, of larger ones float64."""
    dtype = np.result_type(x, y)
    if dtype.kind in "biu":
        dtype = np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    shape = np.broadcast_shapes(np.shape(x), np.shape(y))
    out = None if where is True else np.zeros(shape, dtype)
    return np.divide(x, y, out=out, where=where, dtype=dtype)


def _refuse_zero_divisor(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, where an integer cannot be divided by 0; NumPy would say it is 0."""

    def apply(x: Any, y: Any) -> Any:
        if x.dtype.kind in "iu" and y.dtype.kind in "iu" and not np.all(y):
            raise ValueError("an integer is divided by 0; cast both to floats, or look for the 0.")
        return function(x, y)

    return apply


def _squared_difference(x: Any, y: Any) -> Any:
    difference = np.subtract(x, y)
    return (
        difference * np.conj(difference) if difference.dtype.kind == "c" else np.square(difference)
    )


# Functions of one and of two tensors: those of NumPy with the same name, then the others.
_UNARY_OF_NUMPY = (
    "abs ceil cos cosh exp expm1 floor log log1p logical_not negative reciprocal sign sin sinh "
    "sqrt square tan tanh"
)
_UNARY: dict[str, Callable[..., Any]] = {
    "is_finite": np.isfinite,
    "is_inf": np.isinf,
    "is_nan": np.isnan,
    "log_sigmoid": lambda x: -np.logaddexp(-x, x.dtype.type(0)),
    "round": np.round,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": _sigmoid,
}
_BINARY_OF_NUMPY = (
    "add equal greater greater_equal less less_equal logical_and logical_or maximum minimum "
    "multiply not_equal subtract"
)
_BINARY: dict[str, Callable[..., Any]] = {
    "divide": _quotient,
    "floordiv": _refuse_zero_divisor(np.floor_divide),
    "mod": _refuse_zero_divisor(np.mod),
    "pow": np.power,
    "squared_difference": _squared_difference,
    "truediv": _quotient,
}
_REDUCTIONS = (
    "add_n reduce_all reduce_any reduce_logsumexp reduce_max reduce_mean reduce_min reduce_prod "
    "reduce_std reduce_sum reduce_variance"
)


def _wrap_unary(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, name: Any = None) -> Any:
        return function(convert_to_tensor(x))

    return _document_function(apply, name, function, "each element of `x`")


def _wrap_binary(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, y: Any, name: Any = None) -> Any:
        return function(*convert_operands([x, y]))

    return _document_function(apply, name, function, "`x` and `y`, element by element")


def _document_function(
    apply: Callable[..., Any], name: str, function: Callable[..., Any], operands_text: str
) -> Callable[..., Any]:
    function_name = (
        f"numpy.{function.__name__}" if isinstance(function, np.ufunc) else f"tf.math.{name}"
    )
    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"Return ``{function_name}`` of {operands_text}; `name` has no effect."
    return apply


def divide_no_nan(x: Any, y: Any) -> Any:
    """Return the quotient of each element of `x` and of `y`, and 0 where `y` is 0.

    Example:
      >>> divide_no_nan([1.0, 2.0], [0.0, 4.0]).tolist()
      [0.0, 0.5]
    """
    numerator, denominator = convert_operands([x, y])
    return _quotient(numerator, denominator, where=denominator != 0)


def softplus(features: Any) -> Any:
    """Return the logarithm of 1 and the exponential of each element of `features`."""
    tensor = convert_to_tensor(features)
    return np.logaddexp(tensor, tensor.dtype.type(0))


def argmax(input: Any, axis: int | None = None, output_type: Any = np.int64) -> Any:
    """Return where along `axis`, or the first, the largest of `input` are, as `output_type`."""
    indices = np.argmax(convert_to_tensor(input), axis or 0)
    return indices.astype(as_dtype(output_type or np.int64, "output_type"))


def argmin(input: Any, axis: int | None = None, output_type: Any = np.int64) -> Any:
    """Return where along `axis`, or the first, the smallest of `input` are, as `output_type`."""
    indices = np.argmin(convert_to_tensor(input), axis or 0)
    return indices.astype(as_dtype(output_type or np.int64, "output_type"))


def softmax(logits: Any, axis: int | None = None) -> Any:
    """Return exponentials of `logits` that add up to 1 along `axis`, the last if None.

    Example:
      >>> softmax([0.0, 0.0]).tolist()
      [0.5, 0.5]
    """
    tensor = check_floating("softmax", convert_to_tensor(logits))
    axis = -1 if axis is None else axis
    shifted = np.exp(tensor - np.max(tensor, axis, keepdims=True, initial=-np.inf))
    return shifted / _reductions.reduce_sum(shifted, axis, keepdims=True)


def log_softmax(logits: Any, axis: int | None = None) -> Any:
    """Return the logarithm of the `softmax` of `logits` along `axis`, the last if None.

    Example:
      >>> log_softmax([[0.0, 0.0]]).tolist()
      [[-0.6931471824645996, -0.6931471824645996]]
    """
    tensor, axis = convert_to_tensor(logits), -1 if axis is None else axis
    return tensor - _reductions.reduce_logsumexp(tensor, axis, keepdims=True)


_FUNCTIONS = {
    **{name: _wrap_unary(name, getattr(np, name)) for name in _UNARY_OF_NUMPY.split()},
    **{name: _wrap_unary(name, function) for name, function in _UNARY.items()},
    **{name: _wrap_binary(name, getattr(np, name)) for name in _BINARY_OF_NUMPY.split()},
    **{name: _wrap_binary(name, function) for name, function in _BINARY.items()},
    **{name: getattr(_reductions, name) for name in _REDUCTIONS.split()},
    **{
        f.__name__: takes_name(f)
        for f in (argmax, argmin, divide_no_nan, log_softmax, softmax, softplus)
    },
}
globals().update(_FUNCTIONS)
__all__ = sorted(_FUNCTIONS)
