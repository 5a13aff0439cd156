"""Numbers, strings and states of generators as JSON: what a checkpoint holds besides arrays.

All of them are one array of bytes in the file, ``values.json``: a JSON object of names and values.
What JSON does not have is an object with one key, which says what it is: ``{"tuple": [...]}``,
``{"dict": [[key, value], ...]}``, ``{"complex": [re, im]}``, ``{"float": "nan"}``, ``{"numpy":
[dtype, value]}``. Nothing in it names a class or a function; reading makes values of these kinds,
or fails.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint.cells import Cell

NAME = "values.json"
_PLAIN = (bool, int, str, type(None))
_OF_NUMPY = (bool, int, float, complex)  # what numbers of NumPy are told as
_DEEPEST = 50  # containers in containers
_NUMBERS = {
    np.dtype(name).name: np.dtype(name)
    for name in ("?", "b", "h", "i", "q", "B", "H", "I", "Q", "e", "f", "d", "F", "D")
}
# Generators of NumPy: the place in their buffer, which NumPy does not check, and its end.
_GENERATORS = {
    **dict.fromkeys(("PCG64", "PCG64DXSM", "SFC64"), ("", 0)),
    "MT19937": ("pos", 624),
    "Philox": ("buffer_pos", 4),
}
_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError)  # of what is no such value


def encode(value: Any, depth: int = 0) -> Any:
    """Return a number, a text, None, or lists, tuples and dicts of them as JSON has them.

    Raises:
      TypeError: It is, or holds, something else.

    Example:
      >>> encode({"rate": 0.1, 3: (1, None)})
      {'dict': [['rate', 0.1], [3, {'tuple': [1, None]}]]}
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.generic) and value.dtype.name in _NUMBERS:
        return {"numpy": [value.dtype.name, encode(value.item())]}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if depth < _DEEPEST and kind in (list, tuple):
        items = [encode(item, depth + 1) for item in value]
        return items if kind is list else {"tuple": items}
    if depth < _DEEPEST and kind is dict:
        return {"dict": [[encode(k), encode(v, depth + 1)] for k, v in value.items()]}
    raise TypeError(f"a {kind.__name__} is not a number, string, or list, tuple or dict of them")


def decode(told: Any) -> Any:
    """Return what `encode` was given.

    Raises:
      ValueError: It is not what `encode` returns.
    """
    if isinstance(told, list):
        return [decode(item) for item in told]
    if not isinstance(told, dict):
        return told
    if len(told) != 1:
        raise ValueError(f"{told!r:.60} is not a value")
    [(what, held)] = told.items()
    if what == "tuple" and isinstance(held, list):
        return tuple(map(decode, held))
    if what == "dict" and isinstance(held, list):
        pairs = [(decode(key), decode(value)) for key, value in held]
        if any(isinstance(key, list | dict) for key, _ in pairs):
            raise ValueError(f"{held!r:.60} is not a dict")
        return dict(pairs)
    if what == "float" and held in ("nan", "inf", "-inf"):
        return float(held)
    if what == "complex" and isinstance(held, list) and len(held) == 2:
        return complex(*map(decode, held))
    if what == "numpy" and isinstance(held, list) and len(held) == 2 and held[0] in _NUMBERS:
        number = decode(held[1])
        if isinstance(number, _OF_NUMPY):  # of a list NumPy would make an array
            return _NUMBERS[held[0]].type(number)
    raise ValueError(f"{told!r:.60} is not a value")


@final
class Value(NamedTuple):
    """One value of a program.

    Attributes:
      told: As JSON has it.
      read: Makes what `write` takes of what a file has, or raises ValueError and the like.
      write: Puts it in its place.
    """

    told: Any
    read: Callable[[Any], Any]
    write: Callable[[Any], None]


def _is_empty(told: Any) -> bool:
    """Tell whether a value is None, or a container without items, which files need not have."""
    return told in (None, [], {"dict": []}, {"tuple": []})


@final
class Values:
    """All values of a checkpoint, by name, as one array of bytes."""

    def __init__(self, values: Mapping[str, Value]):
        """Create it of what the program has now."""
        self.values = dict(sorted(values.items()))

    def cell(self) -> Cell:
        """Return what saving and restoring take in place of a variable."""
        return Cell(NAME, self._bytes, self._write, free=True, values=self)

    def _bytes(self) -> Array:
        told = {name: value.told for name, value in self.values.items()}
        return np.frombuffer(json.dumps(told, allow_nan=False).encode(), np.uint8)

    def shown(self) -> str:
        """Return all of them as a text in which ranks that differ see where."""
        return "; ".join(f"{name}={shown(one.told, False)}" for name, one in self.values.items())

    @property
    def wanted(self) -> list[str]:
        """The names of those that a file has to have: all but None and what holds nothing."""
        return [name for name, value in self.values.items() if not _is_empty(value.told)]

    def wrong(self, array: Array | None) -> tuple[list[str], list[str], list[str]]:
        """Return what a file lacks, what only the file has, and what does not fit, as texts.

        Args:
          array: What the file has; None for nothing.

        Raises:
          ValueError: The file's bytes are not values.
        """
        found = {} if array is None else parsed(array)
        lacks = [name for name in self.wanted if name not in found]
        extra = [name for name, told in found.items() if not _is_empty(told)]
        extra = [name for name in extra if name not in self.values]
        odd = []
        for name, value in self.values.items():
            try:
                if name in found:
                    value.read(found[name])
            except _ERRORS as error:
                odd.append(f"{name!r}: {error}")
        return lacks, extra, odd

    def _write(self, array: Array) -> None:
        found = parsed(array)
        for name, value in self.values.items():
            if name in found:
                value.write(value.read(found[name]))


def shown(told: Any, plainly: bool = True) -> str:
    """Return a value that JSON has as a text, plainly or with all that tells it from others.

    For a generator that is a digest of its state.

    Raises:
      ValueError: It is not a value.
    """
    text = json.dumps(told)
    if isinstance(told, dict) and "generator" in told:
        return f"generator with state {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    return repr(decode(told)) if plainly else text


def parsed(array: Array) -> dict[str, Any]:
    """Return names and values of a file.

    Raises:
      ValueError: Its bytes are not values.
    """
    found = json.loads(array.tobytes())
    if not isinstance(found, dict):
        raise ValueError(f"{NAME} is not an object of names and values")
    return found


def is_generator(value: Any) -> bool:
    """Tell whether it is a generator of random numbers of NumPy."""
    kinds = np.random.Generator | np.random.RandomState | np.random.BitGenerator
    return isinstance(value, kinds)


def generator_value(generator: Any) -> Value:
    """Return the state of a generator of NumPy.

    Raises:
      TypeError: It is of a kind that NumPy does not have.
    """
    legacy = isinstance(generator, np.random.RandomState)
    bits = getattr(generator, "bit_generator", generator)
    state: Any = generator.get_state(legacy=False) if legacy else bits.state

    def write(state: Any, of: Any = None) -> None:
        if legacy:
            (of or generator).set_state(state)
        else:
            (of or bits).state = state

    name = state["bit_generator"]
    if name not in _GENERATORS:
        raise TypeError(f"no state of a {name} is known, only of {', '.join(_GENERATORS)}")

    def read(told: Any) -> Any:
        found = decode(told["generator"])
        if found["bit_generator"] != name:
            raise ValueError(f"the generator is a {found['bit_generator']} there, a {name} here")
        place, end = _GENERATORS[name]
        at = {**found, **found["state"]}.get(place, 0)
        if type(at) is not int or not 0 <= at <= end:
            raise ValueError(f"the generator stands at {at!r:.20} of {end}")
        write(found, np.random.RandomState(0) if legacy else getattr(np.random, name)(0))
        return found  # NumPy has taken it

    return Value({"generator": encode(_state(state))}, read, write)


def _state(state: Any) -> Any:
    """Return a state with lists for its arrays, as NumPy takes them too."""
    if isinstance(state, dict):
        return {key: _state(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.tolist()
    return state
