"""Entries of a checkpoint that are no variables: `Cell`, and numbers and strings as JSON.

A `Cell` is a value that each rank has of its own, and that is equal on all: an array, or the copies
of a variable on all replicas. Numbers, strings and states of generators (`ProgramValues`) are one
array of bytes in the file, ``values.json``: a JSON object of names and values. Values that JSON
lacks are an object with one key, which says their kind: ``{"tuple": [...]}``, ``{"dict": [[key,
value], ...]}``, ``{"complex": [re, im]}``, ``{"float": "nan"}``, ``{"numpy": [dtype, value]}``.
Nothing in it names a class or a function; reading makes values of these kinds, or fails.
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

PARTS_SUFFIX = "/parts"


@final
@dataclass(frozen=True, eq=False)
class Cell:
    """A value that each rank has of its own, and that is the same on all: replica 0's is saved.

    It has those attributes of a variable that saving and restoring ask for.

    Attributes:
      name: The name for messages.
      read: Returns it, as an array.
      write: Takes replica 0's array of the same dtype and shape; it copies what it keeps, as the
        memory is shared with all other values.
      strategy: The strategy whose ranks have it; None for any.
      has_free_first_axis: The array in a file may have another first axis than that of the program.
      program_values: The `ProgramValues` that it holds; None in other cells.
      can_differ: Each rank may have another value, and replica 0's is meant.
    """

    name: str
    read: Callable[[], Array]
    write: Callable[[Array], None]
    strategy: Any = None
    has_free_first_axis: bool = False
    program_values: Any = None
    can_differ: bool = False

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
        return (
            f"{self.name!r} {spec_text(self.array[:0] if self.has_free_first_axis else self.array)}"
        )

    def _store(self, kind: str, value: Array, row_indices: Array | None) -> None:
        """Write the value.

        Args:
          kind: Always ``"assign"``.
          value: The value.
          row_indices: Always None.
        """
        self.write(value)


def make_cell(name: str, variable: DistributedVariable) -> Cell:
    """Return a variable that each rank has of its own as a cell of that name."""

    def write(value: Array) -> None:
        variable._store("assign", value, None)

    read = functools.partial(np.asarray, variable)
    return Cell(name, read, write, can_differ=variable._is_on_read)


def is_parts_entry(name: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a name is that of the parts of another of these arrays."""
    sum_entry = (
        entries.get(name.removesuffix(PARTS_SUFFIX)) if name.endswith(PARTS_SUFFIX) else None
    )
    return sum_entry is not None and entries[name].fits(
        sum_entry._replace(shape=(0, *sum_entry.shape))
    )


def _select_metric_sums(variables_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables whose copies of all replicas are saved too, by the name of these.

    A name is taken only where a tree of the program and one in the root have names that meet.
    """
    return {
        name + PARTS_SUFFIX: variable
        for name, variable in variables_by_name.items()
        if on_read.has_partials(variable) and name + PARTS_SUFFIX not in variables_by_name
    }


def make_partial_cells(lockstep: Lockstep, variables_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that are saved beside `variables_by_name`, of shape (replicas, ...).

    Collective, without a handshake.
    """
    sums = _select_metric_sums(variables_by_name)
    if not sums or lockstep.comm.size == 1:
        return {}
    partial_arrays = on_read.replica_partials(lockstep, list(sums.values()))
    return {
        name: _make_partial_cell(name, array)
        for name, array in zip(sums, partial_arrays, strict=True)
    }


def make_partial_targets(variables_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return cells that take the parts from a file, if it has some; of no replicas yet."""
    return {
        name: _make_partial_cell(name, np.empty((0, *variable.shape), variable.dtype))
        for name, variable in _select_metric_sums(variables_by_name).items()
    }


def _make_partial_cell(name: str, partials: Array) -> Cell:
    return Cell(name, lambda: partials, lambda _: None, has_free_first_axis=True)


VALUES_NAME = "values.json"
_PLAIN_TYPES = (bool, int, str, type(None))
_NUMPY_NUMBER_TYPES = (bool, int, float, complex)  # the types that numbers of NumPy are encoded as
_MAX_DEPTH = 50  # containers in containers
_NUMBER_DTYPES = {
    np.dtype(name).name: np.dtype(name)
    for name in ("?", "b", "h", "i", "q", "B", "H", "I", "Q", "e", "f", "d", "F", "D")
}
# Generators of NumPy: the place in their buffer, which NumPy does not check, and its end.
_BUFFER_POSITIONS = {
    **dict.fromkeys(("PCG64", "PCG64DXSM", "SFC64"), ("", 0)),
    "MT19937": ("pos", 624),
    "Philox": ("buffer_pos", 4),
}
_DECODING_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError)  # for other encoded values


def encode_value(value: Any, depth: int = 0) -> Any:
    """Return a number, a text, None, or lists, tuples and dicts of them as JSON has them.

    Raises:
      TypeError: It is, or holds, something else.

    Example:
      >>> encode_value({"rate": 0.1, 3: (1, None)})
      {'dict': [['rate', 0.1], [3, {'tuple': [1, None]}]]}
    """
    value_type: Any = type(value)
    if value_type in _PLAIN_TYPES:
        return value
    if isinstance(value, np.generic) and value.dtype.name in _NUMBER_DTYPES:
        return {"numpy": [value.dtype.name, encode_value(value.item())]}
    if value_type is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if value_type is complex:
        return {"complex": [encode_value(value.real), encode_value(value.imag)]}
    if depth < _MAX_DEPTH and value_type in (list, tuple):
        encoded_items = [encode_value(member, depth + 1) for member in value]
        return encoded_items if value_type is list else {"tuple": encoded_items}
    if depth < _MAX_DEPTH and value_type is dict:
        return {"dict": [[encode_value(k), encode_value(v, depth + 1)] for k, v in value.items()]}
    raise TypeError(
        f"a {value_type.__name__} is not a number, string, or list, tuple or dict of them"
    )


def decode_value(encoded_value: Any) -> Any:
    """Return the value from which `encode_value` made its argument.

    Raises:
      ValueError: It is not what `encode_value` returns.
    """
    if isinstance(encoded_value, list):
        return [decode_value(member) for member in encoded_value]
    if not isinstance(encoded_value, dict):
        return encoded_value
    if len(encoded_value) != 1:
        raise ValueError(f"{encoded_value!r:.60} is not a value")
    [(kind, content)] = encoded_value.items()
    if kind == "tuple" and isinstance(content, list):
        return tuple(map(decode_value, content))
    if kind == "dict" and isinstance(content, list):
        pairs = [(decode_value(key), decode_value(value)) for key, value in content]
        if any(isinstance(key, list | dict) for key, _ in pairs):
            raise ValueError(f"{content!r:.60} is not a dict")
        return dict(pairs)
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "complex" and isinstance(content, list) and len(content) == 2:
        return complex(*map(decode_value, content))
    if (
        kind == "numpy"
        and isinstance(content, list)
        and len(content) == 2
        and content[0] in _NUMBER_DTYPES
    ):
        number = decode_value(content[1])
        if isinstance(number, _NUMPY_NUMBER_TYPES):  # of a list NumPy would make an array
            return _NUMBER_DTYPES[content[0]].type(number)
    raise ValueError(f"{encoded_value!r:.60} is not a value")


@final
class Value(NamedTuple):
    """One value of a program.

    Attributes:
      encoded: As JSON has it.
      read: Converts the encoded value of a file for `write`, or raises ValueError and the like.
      write: Puts it in its place.
    """

    encoded: Any
    read: Callable[[Any], Any]
    write: Callable[[Any], None]


def _is_empty(encoded_value: object) -> bool:
    """Return whether a value is None or an empty container, which files need not have."""
    return encoded_value in (None, [], {"dict": []}, {"tuple": []})


@final
class ProgramValues:
    """All values of a checkpoint, by name, as one array of bytes."""

    def __init__(self, values_by_name: Mapping[str, Value]):
        """Create it with the current values of the program."""
        self.values_by_name = dict(sorted(values_by_name.items()))

    def make_cell(self) -> Cell:
        """Return what saving and restoring take in place of a variable."""
        return Cell(
            VALUES_NAME, self._encode, self._assign, has_free_first_axis=True, program_values=self
        )

    def _encode(self) -> Array:
        encoded_values = {name: value.encoded for name, value in self.values_by_name.items()}
        return np.frombuffer(json.dumps(encoded_values, allow_nan=False).encode(), np.uint8)

    def describe(self) -> str:
        """Return all of them as a text in which ranks that differ see where."""
        return "; ".join(
            f"{name}={format_value(value.encoded, False)}"
            for name, value in self.values_by_name.items()
        )

    @property
    def required_names(self) -> list[str]:
        """The names of those that a file has to have: all but None and what holds nothing."""
        return [name for name, value in self.values_by_name.items() if not _is_empty(value.encoded)]

    def compare_with(self, array: Array | None) -> tuple[list[str], list[str], list[str]]:
        """Return names that a file lacks, names that only it has, and texts about misfits.

        Args:
          array: The bytes of the values in the file; None if it has none.

        Raises:
          ValueError: The file's bytes are not values.
        """
        stored_values = {} if array is None else parse_values(array)
        missing_names = [name for name in self.required_names if name not in stored_values]
        extra_names = [
            name for name, encoded_value in stored_values.items() if not _is_empty(encoded_value)
        ]
        extra_names = [name for name in extra_names if name not in self.values_by_name]
        wrong_texts = []
        for name, value in self.values_by_name.items():
            try:
                if name in stored_values:
                    value.read(stored_values[name])
            except _DECODING_ERRORS as error:
                wrong_texts.append(f"{name!r}: {error}")
        return missing_names, extra_names, wrong_texts

    def _assign(self, encoded_array: Array) -> None:
        stored_values = parse_values(encoded_array)
        for name, value in self.values_by_name.items():
            if name in stored_values:
                value.write(value.read(stored_values[name]))


def format_value(encoded_value: Any, is_plain: bool = True) -> str:
    """Return a value that JSON has as a text, plainly or with all that tells it from others.

    For a generator that is a digest of its state.

    Raises:
      ValueError: It is not a value.
    """
    text = json.dumps(encoded_value)
    if isinstance(encoded_value, dict) and "generator" in encoded_value:
        return f"generator with state {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    return repr(decode_value(encoded_value)) if is_plain else text


def parse_values(array: Array) -> dict[str, Any]:
    """Return names and values of a file.

    Raises:
      ValueError: Its bytes are not values.
    """
    values = json.loads(array.tobytes())
    if not isinstance(values, dict):
        raise ValueError(f"{VALUES_NAME} is not an object of names and values")
    return values


def is_generator(value: object) -> bool:
    """Return whether it is a generator of random numbers of NumPy."""
    kinds = np.random.Generator | np.random.RandomState | np.random.BitGenerator
    return isinstance(value, kinds)


def make_generator_value(generator: Any) -> Value:
    """Return the state of a generator of NumPy.

    Raises:
      TypeError: It is of a kind that NumPy does not have.
    """
    is_legacy = isinstance(generator, np.random.RandomState)
    bit_generator = getattr(generator, "bit_generator", generator)
    state: Any = generator.get_state(legacy=False) if is_legacy else bit_generator.state

    def set_state(state: Any, receiver: Any = None) -> None:
        if is_legacy:
            (receiver or generator).set_state(state)
        else:
            (receiver or bit_generator).state = state

    generator_name = state["bit_generator"]
    if generator_name not in _BUFFER_POSITIONS:
        raise TypeError(
            f"no state of a {generator_name} is known, only of {', '.join(_BUFFER_POSITIONS)}"
        )

    def check_state(encoded_value: Any) -> Any:
        restored_state = decode_value(encoded_value["generator"])
        if restored_state["bit_generator"] != generator_name:
            raise ValueError(
                f"the generator is a {restored_state['bit_generator']} there, a {generator_name} "
                "here"
            )
        position_name, max_position = _BUFFER_POSITIONS[generator_name]
        position = {**restored_state, **restored_state["state"]}.get(position_name, 0)
        if type(position) is not int or not 0 <= position <= max_position:
            raise ValueError(f"the generator stands at {position!r:.20} of {max_position}")
        set_state(
            restored_state,
            np.random.RandomState(0) if is_legacy else getattr(np.random, generator_name)(0),
        )
        return restored_state  # NumPy has taken it

    return Value({"generator": encode_value(_replace_arrays(state))}, check_state, set_state)


def _replace_arrays(state: Any) -> Any:
    """Return a state with lists for its arrays, as NumPy takes them too."""
    if isinstance(state, dict):
        return {key: _replace_arrays(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.tolist()
    return state
