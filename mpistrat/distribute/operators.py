"""What values do in arithmetic and conversions: one value as NumPy does, a `PerReplica` refuses."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

ONE = (
    "each replica has a value of its own. Make them one, strategy.reduce(op, value, axis=None), or "
    "in replica code ctx.all_reduce(op, value); or look at value.local, which ranks differ in, or "
    "at all of them, strategy.experimental_local_results(value)."
)


def _refusal(text: str) -> Callable[..., Any]:
    def refuse(self: Any, *others: Any) -> NoReturn:
        raise TypeError(f"a PerReplica {text}: {ONE}")

    return refuse


class NotOne:
    """What a single value has. Here each raises a TypeError that says what to use instead."""

    _no_arithmetic, _no_bits = _refusal("has no arithmetic"), _refusal("has no bits")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_arithmetic
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _no_arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _no_arithmetic
    __neg__ = __pos__ = __abs__ = _no_arithmetic
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __invert__ = _no_bits
    __and__ = __rand__ = __xor__ = __rxor__ = __or__ = __ror__ = _no_bits
    __lt__ = __le__ = __gt__ = __ge__ = _refusal("cannot be compared")
    __int__ = __float__ = __complex__ = __round__ = _refusal("is not a number")
    __len__ = _refusal("has no length")
    __iter__ = __contains__ = _refusal("cannot be iterated over")
    __getitem__ = _refusal("has no parts")


class Operators(np.lib.mixins.NDArrayOperatorsMixin):
    """What a value that is read as one array can do: arithmetic, indexing, conversion.

    Operators make new values: ``x += 1`` makes `x` a name of the sum.
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
