"""The types of tensors, and the argument that all functions of tensors have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

__all__ = ["Kind", "Tensor", "TensorSpec", "is_tensor", "named"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def named(function: _Function) -> _Function:
    """Return `function` with a further argument ``name=``, which has no effect."""

    @functools.wraps(function)
    def apply(*args: Any, name: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return apply  # type: ignore[return-value]  # the same signature, and one argument more


class Kind(type):
    """A metaclass: instances of the classes in `kinds` count as instances of the class."""

    kinds: tuple[type, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        """Tell whether `instance` belongs to one of the classes."""
        return isinstance(instance, cls.kinds)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Tell whether `subclass` is one of the classes."""
        return issubclass(subclass, cls.kinds)


class Tensor(metaclass=Kind):
    """The type of tensors: NumPy arrays and scalars. As in TensorFlow, variables are not tensors.

    Raises:
      TypeError: It is called; use `constant` to make tensors.

    Example:
      >>> isinstance(np.ones(1), Tensor), isinstance(np.float32(1), Tensor), isinstance(1, Tensor)
      (True, True, False)
    """

    kinds = (np.ndarray, np.generic)

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a TypeError."""
        raise TypeError("tf.Tensor is for isinstance only; tf.constant(value) makes a tensor.")


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor, for programs that write them down; nothing is traced here.

    Attributes:
      shape: Sizes; None for one that is not known.
      dtype: Dtype.
      name: No effect.

    Example:
      >>> TensorSpec([None, 3]).dtype is np.float32
      True
    """

    shape: Any
    dtype: Any = np.float32
    name: Any = None


def is_tensor(x: Any) -> bool:
    """Tell whether `x` has a dtype: an array, a NumPy scalar or a variable."""
    return hasattr(x, "dtype")
