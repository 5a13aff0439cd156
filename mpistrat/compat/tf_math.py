"""``tf.math`` as programs that import `mpistrat.compat.tf` see it: NumPy, element by element.

Python numbers alone become int32 and float32; beside an array they take its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.arrays import as_dtype
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.tf_arrays import convert_to_tensor, is_typed, square
from mpistrat.compat.tf_reductions import (
    add_n,
    reduce_all,
    reduce_any,
    reduce_logsumexp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_std,
    reduce_sum,
    reduce_variance,
)
from mpistrat.compat.tf_tensor import named

__all__ = [
    "abs",
    "add",
    "add_n",
    "argmax",
    "argmin",
    "ceil",
    "cos",
    "cosh",
    "divide",
    "divide_no_nan",
    "equal",
    "exp",
    "expm1",
    "floor",
    "floordiv",
    "greater",
    "greater_equal",
    "is_finite",
    "is_inf",
    "is_nan",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log_sigmoid",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "negative",
    "not_equal",
    "pow",
    "reciprocal",
    "reduce_all",
    "reduce_any",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_std",
    "reduce_sum",
    "reduce_variance",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "squared_difference",
    "subtract",
    "tan",
    "tanh",
    "truediv",
]

__getattr__ = _absent_from("tf.math")


def _one(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    def apply(x: Any, name: Any = None) -> Any:
        return function(convert_to_tensor(x))

    apply.__doc__ = f"Return {what} of each element of `x`; `name` has no effect."
    return apply


def _two(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    def apply(x: Any, y: Any, name: Any = None) -> Any:
        if not (is_typed(x) or is_typed(y)):
            return function(convert_to_tensor(x), convert_to_tensor(y))
        return function(
            np.asarray(x) if is_typed(x) else x,
            np.asarray(y) if is_typed(y) else y,
        )

    apply.__doc__ = f"Return {what} of each element of `x` and of `y`; `name` has no effect."
    return apply


abs = _one(np.abs, "the absolute value")
ceil = _one(np.ceil, "the next integer above")
cos = _one(np.cos, "the cosine")
cosh = _one(np.cosh, "the hyperbolic cosine")
exp = _one(np.exp, "the exponential")
expm1 = _one(np.expm1, "exp(x) - 1")
floor = _one(np.floor, "the next integer below")
is_finite = _one(np.isfinite, "whether it is finite,")
is_inf = _one(np.isinf, "whether it is infinite,")
is_nan = _one(np.isnan, "whether it is NaN,")
log = _one(np.log, "the natural logarithm")
log1p = _one(np.log1p, "log(1 + x)")
logical_not = _one(np.logical_not, "the negation")
negative = _one(np.negative, "the negative")
reciprocal = _one(np.reciprocal, "one over it")
round = _one(np.rint, "the nearest integer, the even one of two,")
rsqrt = _one(lambda x: 1 / np.sqrt(x), "one over the square root")
sigmoid = _one(lambda x: (1 + np.tanh(x / 2)) / 2, "1 / (1 + exp(-x))")
sign = _one(np.sign, "the sign")
sin = _one(np.sin, "the sine")
sinh = _one(np.sinh, "the hyperbolic sine")
softplus = _one(lambda x: np.logaddexp(x, x.dtype.type(0)), "log(1 + exp(x))")
log_sigmoid = _one(lambda x: -np.logaddexp(-x, x.dtype.type(0)), "log(sigmoid(x))")
sqrt = _one(np.sqrt, "the square root")
tan = _one(np.tan, "the tangent")
tanh = _one(np.tanh, "the hyperbolic tangent")

add = _two(np.add, "the sum")
divide = _two(np.true_divide, "the quotient")
truediv = divide
equal = _two(np.equal, "the equality")
floordiv = _two(np.floor_divide, "the quotient, rounded down,")
greater_equal = _two(np.greater_equal, "whether the first is not less,")
greater = _two(np.greater, "whether the first is greater,")
less_equal = _two(np.less_equal, "whether the first is not greater,")
less = _two(np.less, "whether the first is less,")
logical_and = _two(np.logical_and, "the conjunction")
logical_or = _two(np.logical_or, "the disjunction")
maximum = _two(np.maximum, "the larger one")
minimum = _two(np.minimum, "the smaller one")
mod = _two(np.mod, "the remainder, of the sign of the second,")
multiply = _two(np.multiply, "the product")
not_equal = _two(np.not_equal, "the inequality")
pow = _two(np.power, "the power")
squared_difference = _two(lambda x, y: np.square(np.subtract(x, y)), "the squared difference")
subtract = _two(np.subtract, "the difference")


@named
def divide_no_nan(x: Any, y: Any) -> Any:
    """Return the quotient of each element of `x` and of `y`, and 0 where `y` is 0.

    Example:
      >>> divide_no_nan([1.0, 2.0], [0.0, 4.0]).tolist()
      [0.0, 0.5]
    """
    above, below = np.broadcast_arrays(convert_to_tensor(x), convert_to_tensor(y))
    dtype = np.result_type(above, below)
    return np.divide(above, below, out=np.zeros(above.shape, dtype), where=below != 0)


@named
def argmax(input: Any, axis: int = 0, output_type: Any = np.int64) -> Any:
    """Return where along `axis` the largest elements of `input` are, as `output_type`."""
    return np.argmax(convert_to_tensor(input), axis).astype(as_dtype(output_type, "output_type"))


@named
def argmin(input: Any, axis: int = 0, output_type: Any = np.int64) -> Any:
    """Return where along `axis` the smallest elements of `input` are, as `output_type`."""
    return np.argmin(convert_to_tensor(input), axis).astype(as_dtype(output_type, "output_type"))


@named
def softmax(logits: Any, axis: int = -1) -> Any:
    """Return exponentials of `logits` that add up to 1 along `axis`.

    Example:
      >>> softmax([0.0, 0.0]).tolist()
      [0.5, 0.5]
    """
    tensor = convert_to_tensor(logits)
    shifted = np.exp(tensor - np.max(tensor, axis, keepdims=True, initial=-np.inf))
    return shifted / np.sum(shifted, axis, keepdims=True)


@named
def log_softmax(logits: Any, axis: int = -1) -> Any:
    """Return the logarithm of the `softmax` of `logits` along `axis`.

    Example:
      >>> log_softmax([[0.0, 0.0]]).tolist()
      [[-0.6931471824645996, -0.6931471824645996]]
    """
    tensor = convert_to_tensor(logits)
    return tensor - reduce_logsumexp(tensor, axis, keepdims=True)
