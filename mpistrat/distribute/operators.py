"""What a value that is read as one array can do: operators, indexing, conversion."""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class Operators(np.lib.mixins.NDArrayOperatorsMixin):
    """What a value that is read as one array can do: arithmetic, indexing, conversion.

    Operators are those of the array itself, which leaves some to what stands beside it, such as a
    sparse matrix or an array of JAX. They make new values: ``x += 1`` makes `x` a name of the sum.
    """

    @abc.abstractmethod
    def _read(self) -> Any:
        """Return the value, not to be written to."""

    def _not_in_place(self, other: Any) -> Any:
        return NotImplemented  # so Python takes the operator itself

    __iadd__ = __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = _not_in_place
    __imod__ = __ipow__ = __ilshift__ = __irshift__ = __iand__ = __ixor__ = __ior__ = _not_in_place

    def __getitem__(self, key: Any) -> Any:
        """Return a part of the value."""
        return self._read()[key]

    def __contains__(self, item: Any) -> bool:
        """Tell whether an element of the value is equal to `item`."""
        return item in self._read()

    def __len__(self) -> int:
        """Return the length of the value's first axis."""
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the value's first axis; reads once."""
        return iter(self._read())

    def __bool__(self) -> bool:
        """Return the truth of the value, as NumPy does."""
        return bool(self._read())

    def __index__(self) -> int:
        """Return the value as an index."""
        return operator.index(self._read())

    def __float__(self) -> float:
        """Return the value as a float."""
        return float(self._read())

    def __int__(self) -> int:
        """Return the value as an int."""
        return int(self._read())

    def __complex__(self) -> complex:
        """Return the value as a complex number."""
        return complex(self._read())

    def __round__(self, digits: int | None = None) -> Any:
        """Return the value, rounded as NumPy does; without `digits` a number becomes an int."""
        value: Any = np.asarray(self._read())[()]
        return np.round(value, digits or 0) if np.ndim(value) else round(value, digits)

    def __format__(self, spec: str) -> str:
        """Return the value as text, in a format; without one, what `repr` says."""
        return format(np.array(self._read())[()], spec) if spec else str(self)


def _give_operators() -> None:
    """Make the operators of `Operators` those of the array that is read.

    With a tensor of PyTorch, which has ``__array_wrap__`` and no ``__array_ufunc__``, they stay
    NumPy's functions: an array's own operators do not take one on their right side.
    """

    def method(name: str, op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        by_numpy = getattr(np.lib.mixins.NDArrayOperatorsMixin, name)

        def apply(self: Operators, other: Any) -> Any:
            if hasattr(other, "__array_wrap__") and not hasattr(other, "__array_ufunc__"):
                return by_numpy(self, other)
            return op(self._read(), other)

        apply.__name__, apply.__doc__ = name, by_numpy.__doc__
        return apply

    for name in ("lt", "le", "eq", "ne", "gt", "ge"):
        setattr(Operators, f"__{name}__", method(f"__{name}__", getattr(operator, name)))
    words = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
    for name in words.split():
        op = divmod if name == "divmod" else getattr(operator, f"__{name}__")
        setattr(Operators, f"__{name}__", method(f"__{name}__", op))
        swapped = functools.partial(_swapped, op)
        setattr(Operators, f"__r{name}__", method(f"__r{name}__", swapped))


def _swapped(op: Callable[[Any, Any], Any], right: Any, left: Any) -> Any:
    return op(left, right)


_give_operators()
