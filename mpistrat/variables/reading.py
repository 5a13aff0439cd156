"""Variables as arrays: conversion, NumPy functions, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

import numpy as np

from mpistrat.arrays import seal
from mpistrat.variables.kinds import DistributedVariable
from mpistrat.variables.values import ArrayOperators, DistributedValues

_WRITE_ADVICE = (
    "Write rows by v.scatter_update(mpistrat.IndexedSlices(rows, indices)), or scatter_add and so "
    "on; or everything by v.assign(array)."
)

# The attributes of a variable; no others can be set.
_SETTABLE_NAMES = frozenset(DistributedVariable.__annotations__) | {"trainable"}


def _make_in_place_refusal(sign: str) -> Callable[..., Any]:
    def refuse(self: ReadableVariable, other: object) -> NoReturn:
        raise TypeError(
            f"{self.name!r} is a variable: `v {sign}= x` would make v the name of an array, and "
            "leave the variable as it is. All replicas have to write alike, by v.assign_add(x), "
            f"v.assign_sub(x) or v.assign(v {sign} x). For a new array write v = v {sign} x."
        )

    return refuse


def _detach_result(result: Any) -> Any:
    """Return a read-only copy of a view of a variable's memory; anything else unchanged."""
    # An array without a base is no view of the variable's memory. A write to a copy would be lost.
    is_view = isinstance(result, np.ndarray) and result.base is not None
    return seal(result.copy()) if is_view else result


def _make_method(name: str) -> Callable[..., Any]:
    def read(self: ReadableVariable, *args: object, **kwargs: object) -> Any:
        return _detach_result(getattr(self._read(), name)(*args, **kwargs))

    read.__name__, read.__qualname__ = name, f"Reading.{name}"
    read.__doc__ = f"Return what ``ndarray.{name}`` returns; reads the variable once."
    return read


def _make_attribute(name: str) -> Any:
    text = f"``ndarray.{name}`` of a copy of the value, which is read-only."
    return property(lambda self: _detach_result(getattr(self._read(), name)), doc=text)


def _make_missing_attribute(name: str) -> Any:
    """Return a property that raises: it says that an array has this attribute."""

    def refuse(self: ReadableVariable) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}. Arrays have: take "
            f"np.asarray(v).{name}, of a read-only view of the value, or v.numpy().{name}, of "
            "a copy; v.assign(array) writes, on all ranks.",
            name=name,
            obj=self,
        )

    return property(refuse, doc=f"Raise AttributeError: ``ndarray.{name}`` is one of an array.")


@final
class Reference:
    """A name of a variable that is equal to its other names alone, as keys of a dict are.

    Args:
      variable: The variable.
    """

    __slots__ = ("_variable",)

    def __init__(self, variable: DistributedVariable):
        """Create a name of `variable`."""
        self._variable = variable

    def deref(self) -> Any:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` is a name of the same variable."""
        if not isinstance(other, Reference):
            return NotImplemented
        return self._variable is other._variable

    def __hash__(self) -> int:
        """Return the identity of the variable."""
        return id(self._variable)

    def __repr__(self) -> str:
        """Return ``<Reference to Variable(...)>``. Never communicates."""
        return f"<Reference to {self._variable!r}>"


class ReadableVariable(ArrayOperators, DistributedVariable):
    """A named array that can be read, and written to only by its own methods.

    Operators in place, such as ``v += x``, raise TypeError: they would part the name from the
    variable. The methods of an array that only read it are those of the value, such as ``v.sum()``,
    ``v.T`` and ``v.reshape(-1)``; their results are copies, which later writes do not change.
    """

    __hash__ = object.__hash__

    __iadd__, __isub__, __imul__, __imatmul__ = map(_make_in_place_refusal, ("+", "-", "*", "@"))
    __itruediv__, __ifloordiv__, __imod__, __ipow__ = map(
        _make_in_place_refusal, ("/", "//", "%", "**")
    )
    __ilshift__, __irshift__, __iand__ = map(_make_in_place_refusal, ("<<", ">>", "&"))
    __ixor__, __ior__ = map(_make_in_place_refusal, ("^", "|"))

    def read_value(self) -> Any:
        """Return a copy of the value, a NumPy scalar if it has no dimensions.

        Collective in cross-replica code if it is ON_READ: the copies become one by `aggregation`.

        Raises:
          ValueError: It is ON_READ with aggregation NONE, in cross-replica code.
        """
        return np.array(self._read())[()]

    value = read_value
    numpy = read_value

    all, any, argmax, argmin, argsort = map(
        _make_method, ("all", "any", "argmax", "argmin", "argsort")
    )
    max, min, sum, prod, mean = map(_make_method, ("max", "min", "sum", "prod", "mean"))
    std, var, cumsum, cumprod = map(_make_method, ("std", "var", "cumsum", "cumprod"))
    dot, trace, diagonal, nonzero = map(_make_method, ("dot", "trace", "diagonal", "nonzero"))
    clip, round, conj, conjugate = map(_make_method, ("clip", "round", "conj", "conjugate"))
    copy, astype, item, tolist, tobytes = map(
        _make_method, ("copy", "astype", "item", "tolist", "tobytes")
    )
    reshape, ravel, flatten, squeeze = map(_make_method, ("reshape", "ravel", "flatten", "squeeze"))
    transpose, swapaxes, take, repeat = map(
        _make_method, ("transpose", "swapaxes", "take", "repeat")
    )
    T, mT, real, imag = map(_make_attribute, ("T", "mT", "real", "imag"))

    @property
    def nbytes(self) -> int:
        """The size of the value in bytes."""
        return self._storage.array.nbytes

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the variable, and refuse all others.

        Raises:
          AttributeError: A variable has no attribute `name`; says what to call.
        """
        if name not in _SETTABLE_NAMES:
            label = self.__dict__.get("_label", "the variable")
            raise AttributeError(
                f"{label}: `v.{name} = ...` would change nothing, as a variable has no such "
                "attribute to set. For its value call v.assign(array), on all ranks; notes of your "
                "own go into a dict, notes[v.ref()].",
                name=name,
                obj=self,
            )
        object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        """Return the names of a variable's attributes."""
        return [name for name in super().__dir__() if name not in _MISSING_NAMES]

    def ref(self) -> Reference:
        """Return a key for dicts and sets, whose ``deref()`` is the variable."""
        return Reference(self)

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return self.shape

    def _convert_array(self, array: Any, dtype: Any, copy: bool | None) -> Any:
        """Return the value, which is `array`, as `numpy.asarray` wants it."""
        needs_cast = dtype is not None and np.dtype(dtype) != array.dtype
        if needs_cast and copy is False:
            raise ValueError(
                f"variable {self.name!r} is {array.dtype}: converting to {np.dtype(dtype)} "
                "needs a copy, which copy=False forbids."
            )
        if copy or needs_cast:
            return array.astype(dtype or array.dtype)
        return array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply a NumPy function to the value; never write to it."""
        if method == "at" and isinstance(inputs[0], ReadableVariable):
            raise TypeError(
                f"{self.name!r} is a variable; np.{ufunc.__name__}.at would write to it. "
                f"{_WRITE_ADVICE}"
            )
        if kwargs:
            if any(isinstance(out, ReadableVariable) for out in kwargs.get("out", ())):
                raise TypeError(
                    f"{self.name!r} is a variable; write with assign, assign_add, assign_sub."
                )
            if "where" in kwargs:
                kwargs["where"] = np.asarray(kwargs["where"])
        return getattr(ufunc, method)(*map(unwrap_value, inputs), **kwargs)

    def __getitem__(self, key: object) -> Any:
        """Return a copy of a part of the value, which later writes do not change; read-only."""
        return _detach_result(self._read()[key])

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first axis of a copy of the value, which is read-only."""
        return iter(seal(self._read().copy()))

    def __setitem__(self, key: object, value: object) -> NoReturn:
        """Refuse: all replicas write together, so writing is a call and not an item.

        Raises:
          TypeError: Always; says what to call.
        """
        raise TypeError(
            f"{self.name!r} is a variable, which is not written to by v[{key!r:.40}] = ...: all "
            f"replicas have to write alike. {_WRITE_ADVICE}"
        )

    def __delitem__(self, key: object) -> NoReturn:
        """Refuse: the shape of a variable stays.

        Raises:
          TypeError: Always; says what to call.
        """
        raise TypeError(
            f"{self.name!r} is a variable, whose shape {self.shape} stays, so v[{key!r:.40}] "
            "cannot be deleted. For fewer rows make another variable: "
            "mpistrat.Variable(np.delete(v.numpy(), index, axis=0))."
        )

    def __len__(self) -> int:
        """Return the length of the first axis; never communicates."""
        if not self.shape:
            raise TypeError(f"variable {self.name!r} has no dimensions, so it has no length.")
        return self.shape[0]


# No `__getattr__`: NumPy looks for two attributes that are not there each time it reads a variable.
_MISSING_NAMES = [
    name
    for name in dir(np.ndarray)
    if not (name.startswith("_") or hasattr(ReadableVariable, name))
]
for _name in _MISSING_NAMES:
    setattr(ReadableVariable, _name, _make_missing_attribute(_name))


def unwrap_value(value: object) -> Any:
    """Return the contents of a variable or a distributed value; anything else unchanged."""
    if isinstance(value, ReadableVariable):
        return value._read()
    return value.local if isinstance(value, DistributedValues) else value
