"""Numbers, strings and states of generators as JSON: what a checkpoint holds besides arrays.

All of them are one array of bytes in the file, ``values.json``: a JSON object of names and values.
What JSON does not have is an object with one key, which says what it is: ``{"tuple": [...]}``,
``{"dict": [[key, value], ...]}``, ``{"complex": [re, im]}``, ``{"float": "nan"}``, ``{"numpy":
[dtype, value]}``. Nothing in it names a class or a function; reading makes values of these kinds,
or fails.

What is no variable, as checkpoints take variables: arrays, numbers, copies of all replicas.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, spec_text
from mpistrat.checkpoint.format import Entry
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.variables import on_read
from mpistrat.variables.kinds import DistributedVariable, VariableAggregation

PARTS = "/parts"


@final
@dataclass(frozen=True, eq=False)
class Cell:
    """A value that each rank has of its own, and that is the same on all: replica 0's is saved.

    It has those attributes of a variable that saving and restoring ask for.

    Attributes:
      name: What messages call it.
      read: Returns it, as an array.
      write: Takes an array of the same dtype and shape, which is replica 0's; of what it keeps it
        makes a copy, as the memory is that of all other values too.
      strategy: Whose ranks have it; None if nobody said.
      free: The array in a file may have another first axis than that of the program.
      values: The `Values` that it holds, if it is they.
    """

    name: str
    read: Callable[[], Array]
    write: Callable[[Array], None]
    strategy: Any = None
    free: bool = False
    values: Any = None

    _is_on_read = _is_metric_sum = False
    aggregation = VariableAggregation.NONE

    @property
    def _storage(self) -> Cell:
        """Itself: what has an `array`."""
        return self

    @property
    def array(self) -> Array:
        """The value."""
        return self.read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the value."""
        return np.asarray(self.array, dtype)

    def _spec(self) -> str:
        """Return name, dtype and shape, as messages and handshakes show them."""
        return f"{self.name!r} {spec_text(self.array[:0] if self.free else self.array)}"

    def _store(self, kind: str, values: Array, rows: Array | None) -> None:
        """Write the value.

        Args:
          kind: Always ``"assign"``.
          values: The value.
          rows: Always None.
        """
        self.write(values)


def cell_of(name: str, variable: DistributedVariable) -> Cell:
    """Return a variable that each rank has of its own as a cell of that name."""

    def write(value: Array) -> None:
        variable._store("assign", value, None)

    return Cell(name, functools.partial(np.asarray, variable), write)


def is_part(name: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a name is that of the parts of another of these arrays."""
    sum_entry = entries.get(name.removesuffix(PARTS)) if name.endswith(PARTS) else None
    return sum_entry is not None and entries[name].fits(
        sum_entry._replace(shape=(0, *sum_entry.shape))
    )


def _select_sums(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables whose copies of all replicas are saved too, by the name of these.

    That is free but where a tree of the program and one in the root have names that meet.
    """
    return {
        name + PARTS: variable
        for name, variable in variables.items()
        if on_read.has_partials(variable) and name + PARTS not in variables
    }


def saved_partials(lockstep: Lockstep, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that are saved beside `variables`, of shape (replicas, ...).

    Collective; unproved.
    """
    sums = _select_sums(variables)
    if not sums or lockstep.comm.size == 1:
        return {}
    rows = on_read.replica_partials(lockstep, list(sums.values()))
    return {name: _make_partial_cell(name, array) for name, array in zip(sums, rows, strict=True)}


def partial_targets(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return what takes the parts from a file, if it has some; of no replicas yet."""
    return {
        name: _make_partial_cell(name, np.empty((0, *variable.shape), variable.dtype))
        for name, variable in _select_sums(variables).items()
    }


def _make_partial_cell(name: str, rows: Array) -> Cell:
    return Cell(name, lambda: rows, lambda _: None, free=True)


NAME = "values.json"
_PLAIN_TYPES = (bool, int, str, type(None))
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
    if kind in _PLAIN_TYPES:
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


def decode(encoded_value: Any) -> Any:
    """Return the value from which `encode` made its argument.

    Raises:
      ValueError: It is not what `encode` returns.
    """
    if isinstance(encoded_value, list):
        return [decode(item) for item in encoded_value]
    if not isinstance(encoded_value, dict):
        return encoded_value
    if len(encoded_value) != 1:
        raise ValueError(f"{encoded_value!r:.60} is not a value")
    [(kind, content)] = encoded_value.items()
    if kind == "tuple" and isinstance(content, list):
        return tuple(map(decode, content))
    if kind == "dict" and isinstance(content, list):
        pairs = [(decode(key), decode(value)) for key, value in content]
        if any(isinstance(key, list | dict) for key, _ in pairs):
            raise ValueError(f"{content!r:.60} is not a dict")
        return dict(pairs)
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "complex" and isinstance(content, list) and len(content) == 2:
        return complex(*map(decode, content))
    if (
        kind == "numpy"
        and isinstance(content, list)
        and len(content) == 2
        and content[0] in _NUMBERS
    ):
        number = decode(content[1])
        if isinstance(number, _OF_NUMPY):  # of a list NumPy would make an array
            return _NUMBERS[content[0]].type(number)
    raise ValueError(f"{encoded_value!r:.60} is not a value")


@final
class Value(NamedTuple):
    """One value of a program.

    Attributes:
      encoded: As JSON has it.
      read: Makes what `write` takes of what a file has, or raises ValueError and the like.
      write: Puts it in its place.
    """

    encoded: Any
    read: Callable[[Any], Any]
    write: Callable[[Any], None]


def _is_empty(encoded_value: Any) -> bool:
    """Return whether a value is None or an empty container, which files need not have."""
    return encoded_value in (None, [], {"dict": []}, {"tuple": []})


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
        encoded_values = {name: value.encoded for name, value in self.values.items()}
        return np.frombuffer(json.dumps(encoded_values, allow_nan=False).encode(), np.uint8)

    def to_text(self) -> str:
        """Return all of them as a text in which ranks that differ see where."""
        return "; ".join(
            f"{name}={value_text(value.encoded, False)}" for name, value in self.values.items()
        )

    @property
    def required_names(self) -> list[str]:
        """The names of those that a file has to have: all but None and what holds nothing."""
        return [name for name, value in self.values.items() if not _is_empty(value.encoded)]

    def compare_with(self, array: Array | None) -> tuple[list[str], list[str], list[str]]:
        """Return what a file lacks, what only the file has, and what does not fit, as texts.

        Args:
          array: The bytes of the values in the file; None if it has none.

        Raises:
          ValueError: The file's bytes are not values.
        """
        stored_values = {} if array is None else parsed(array)
        missing_names = [name for name in self.required_names if name not in stored_values]
        extra_names = [
            name for name, encoded_value in stored_values.items() if not _is_empty(encoded_value)
        ]
        extra_names = [name for name in extra_names if name not in self.values]
        wrong_texts = []
        for name, value in self.values.items():
            try:
                if name in stored_values:
                    value.read(stored_values[name])
            except _ERRORS as error:
                wrong_texts.append(f"{name!r}: {error}")
        return missing_names, extra_names, wrong_texts

    def _write(self, array: Array) -> None:
        stored_values = parsed(array)
        for name, value in self.values.items():
            if name in stored_values:
                value.write(value.read(stored_values[name]))


def value_text(encoded_value: Any, plainly: bool = True) -> str:
    """Return a value that JSON has as a text, plainly or with all that tells it from others.

    For a generator that is a digest of its state.

    Raises:
      ValueError: It is not a value.
    """
    text = json.dumps(encoded_value)
    if isinstance(encoded_value, dict) and "generator" in encoded_value:
        return f"generator with state {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    return repr(decode(encoded_value)) if plainly else text


def parsed(array: Array) -> dict[str, Any]:
    """Return names and values of a file.

    Raises:
      ValueError: Its bytes are not values.
    """
    values = json.loads(array.tobytes())
    if not isinstance(values, dict):
        raise ValueError(f"{NAME} is not an object of names and values")
    return values


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

    def write(state: Any, target: Any = None) -> None:
        if legacy:
            (target or generator).set_state(state)
        else:
            (target or bits).state = state

    name = state["bit_generator"]
    if name not in _GENERATORS:
        raise TypeError(f"no state of a {name} is known, only of {', '.join(_GENERATORS)}")

    def read(encoded_value: Any) -> Any:
        restored_state = decode(encoded_value["generator"])
        if restored_state["bit_generator"] != name:
            raise ValueError(
                f"the generator is a {restored_state['bit_generator']} there, a {name} here"
            )
        place, end = _GENERATORS[name]
        at = {**restored_state, **restored_state["state"]}.get(place, 0)
        if type(at) is not int or not 0 <= at <= end:
            raise ValueError(f"the generator stands at {at!r:.20} of {end}")
        write(restored_state, np.random.RandomState(0) if legacy else getattr(np.random, name)(0))
        return restored_state  # NumPy has taken it

    return Value({"generator": encode(_state(state))}, read, write)


def _state(state: Any) -> Any:
    """Return a state with lists for its arrays, as NumPy takes them too."""
    if isinstance(state, dict):
        return {key: _state(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.tolist()
    return state
