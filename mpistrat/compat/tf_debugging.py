"""``tf.debugging`` as programs that import `mpistrat.compat.tf` see it: assertions about arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.compat.tf_tensors import convert_to_tensor

__getattr__ = _make_getattr("tf.debugging")

# The condition that every element has to fulfil, and its name.
_BINARY_CHECKS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "assert_equal": (np.equal, "x == y"),
    "assert_greater": (np.greater, "x > y"),
    "assert_greater_equal": (np.greater_equal, "x >= y"),
    "assert_less": (np.less, "x < y"),
    "assert_less_equal": (np.less_equal, "x <= y"),
}
_UNARY_CHECKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "assert_all_finite": (np.isfinite, "finite"),
    "assert_negative": (lambda x: x < 0, "negative"),
    "assert_non_negative": (lambda x: x >= 0, "at least 0"),
    "assert_non_positive": (lambda x: x <= 0, "at most 0"),
    "assert_positive": (lambda x: x > 0, "positive"),
}
_DOCSTRING = """Raise unless {}.

Args:
  {}: Tensor.
  message: The beginning of the error.
  summarize: No effect.
  name: No effect.

Raises:
  ValueError: An element is not.
"""


def _make_error(message: Any, condition: str, *tensors: Any) -> ValueError:
    prefix = f"{message}: " if message else ""
    values_text = " and ".join(np.array2string(x, threshold=8) for x in tensors)
    return ValueError(f"{prefix}expected {condition}, got {values_text}.")


def _make_binary_check(holds: Callable[[Any, Any], Any], condition: str) -> Callable[..., None]:
    def check(x: Any, y: Any, message: Any = None, summarize: Any = None, name: Any = None) -> None:
        left, right = convert_to_tensor(x), convert_to_tensor(y)
        if not np.all(holds(left, right)):
            raise _make_error(message, condition, left, right)

    check.__doc__ = _DOCSTRING.format(f"{condition}, element by element", "x: Tensor.\n  y")
    return check


def _make_unary_check(holds: Callable[[Any], Any], condition: str) -> Callable[..., None]:
    def check(x: Any, message: Any = None, summarize: Any = None, name: Any = None) -> None:
        tensor = convert_to_tensor(x)
        if not np.all(holds(tensor)):
            raise _make_error(message, condition, tensor)

    check.__doc__ = _DOCSTRING.format(f"all elements are {condition}", "x")
    return check


_FUNCTIONS = {
    **{name: _make_binary_check(*row) for name, row in _BINARY_CHECKS.items()},
    **{name: _make_unary_check(*row) for name, row in _UNARY_CHECKS.items()},
}
globals().update(_FUNCTIONS)
__all__ = [
    *_FUNCTIONS,
    "Assert",
    "assert_near",
    "assert_none_equal",
    "assert_rank",
    "check_numerics",
]


_check_unequal = _make_binary_check(np.not_equal, "x != y")


def assert_none_equal(
    x: Any, y: Any, summarize: Any = None, message: Any = None, name: Any = None
) -> None:
    """Raise unless ``x != y``, element by element. As in TensorFlow, `summarize` comes first.

    Args:
      x: Tensor.
      y: Tensor.
      summarize: No effect.
      message: The beginning of the error.
      name: No effect.

    Raises:
      ValueError: Two elements are equal.
    """
    _check_unequal(x, y, message)


def Assert(condition: Any, data: Any, summarize: Any = None, name: Any = None) -> None:
    """Raise unless every element of `condition` is true.

    Args:
      condition: Tensor of bool.
      data: The values that the error shows, as a list.
      summarize: No effect.
      name: No effect.

    Raises:
      ValueError: An element is not.
    """
    if not np.all(convert_to_tensor(condition)):
        raise _make_error("", "a condition that holds", *map(np.asarray, data))


def check_numerics(tensor: Any, message: Any, name: Any = None) -> Any:
    """Return `tensor`, or raise if an element of it is NaN or infinite.

    Args:
      tensor: Tensor.
      message: The beginning of the error.
      name: No effect.

    Raises:
      ValueError: An element is.
    """
    _FUNCTIONS["assert_all_finite"](tensor, message)
    return convert_to_tensor(tensor)


def assert_near(
    x: Any,
    y: Any,
    rtol: Any = None,
    atol: Any = None,
    message: Any = None,
    summarize: Any = None,
    name: Any = None,
) -> None:
    """Raise unless ``abs(x - y) <= atol + rtol * abs(y)``, element by element.

    Args:
      x: Tensor.
      y: Tensor.
      rtol: 10 times the precision of the dtype if None, as `atol`.
      atol: See there.
      message: The beginning of the error.
      summarize: No effect.
      name: No effect.

    Raises:
      ValueError: An element differs by more.
    """
    left, right = convert_to_tensor(x), convert_to_tensor(y)
    default_tolerance = 10 * np.finfo(np.result_type(left, right)).eps
    tolerances = [
        default_tolerance if tolerance is None else tolerance for tolerance in (rtol, atol)
    ]
    if not np.all(np.abs(left - right) <= tolerances[1] + tolerances[0] * np.abs(right)):
        raise _make_error(message, "x near y", left, right)


def assert_rank(x: Any, rank: int, message: Any = None, name: Any = None) -> None:
    """Raise unless a tensor has `rank` axes.

    Args:
      x: Tensor.
      rank: The number of axes.
      message: The beginning of the error.
      name: No effect.

    Raises:
      ValueError: It has more or fewer.
    """
    if np.ndim(x) != rank:
        raise _make_error(message, f"{rank} axes", np.array(np.shape(x)))
