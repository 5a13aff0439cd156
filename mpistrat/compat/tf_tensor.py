"""What a tensor is here, and what all functions of tensors take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

__all__ = ["Kind", "Tensor", "TensorSpec", "is_tensor", "named"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def named(function: _Function) -> _Function:
    """Return `function`, which then takes ``name=`` too; it has no effect."""

    @functools.wraps(function)
    def apply(*args: Any, name: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return apply  # type: ignore[return-value]  # the same signature, and one name more


class Kind(type):
    """What makes instances of other classes instances of a class of this kind: its `kinds`."""

    kinds: tuple[type, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        """Tell whether `instance` is of one of the classes."""
        return isinstance(instance, cls.kinds)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Tell whether `subclass` is one of the classes."""
        return issubclass(subclass, cls.kinds)


class Tensor(metaclass=Kind):
    """What functions return: NumPy arrays and NumPy's scalars. Variables are not, as in TensorFlow.

    Raises:
      TypeError: It is called; `constant` makes tensors.

    Example:
      >>> isinstance(np.ones(1), Tensor), isinstance(np.float32(1), Tensor), isinstance(1, Tensor)
      (True, True, False)
    """

    kinds = (np.ndarray, np.generic)

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise TypeError("tf.Tensor is there for isinstance; tf.constant(value) makes a tensor.")


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
    """Tell whether `x` brings a dtype: an array, a NumPy scalar or a variable."""
    return hasattr(x, "dtype")
