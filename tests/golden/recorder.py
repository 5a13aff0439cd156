"""Runs the cases of a program on every rank, and writes down what this rank got.

Values are written in the form of golden.json, with one kind ``number`` for arrays, tensors and
numbers. A `PerReplica` is written with the values of all replicas, a variable with all its copies
and with what cross-replica code reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpistrat import IndexedSlices, Mirrored, PerReplica, Variable
from mpistrat.comm.loopback import LoopbackComm


class Written(dict):
    """A value that has been written already."""


class Each(tuple):
    """Stands for a `PerReplica` where only the values are at hand."""


class Copies(tuple):
    """Stands for a `Mirrored` where only the values are at hand."""


class Recorder(dict):
    """What one rank got: the name of each case, and its value or error.

    Args:
      strategy: The strategy that fetches the values of other replicas.
      comm: The ranks; mpi4py's world or thread ranks.
    """

    def __init__(self, strategy: Any, comm: Any):
        super().__init__()
        self.strategy = strategy
        self._comm = comm
        self._meetings = 0
        self.prefix = ""

    def exchange(self, item: Any) -> list[Any]:
        """Return every rank's `item`; not through mpistrat, whose mistakes this is to find."""
        if not isinstance(self._comm, LoopbackComm):
            return self._comm.allgather(item)
        self._meetings += 1
        # Negative numbers: the ranks' own meetings count upwards.
        return self._comm.world.exchange(self._comm.rank, -self._meetings, "case", item)

    def __call__(self, case: str, thunk: Callable[[], Any]) -> Any:
        """Write down what `thunk` returns or raises; return what it returned."""
        value, error = None, None
        try:
            value = thunk()
        except Exception as raised:
            error = raised
        good = self.exchange(error is None)
        name = self.prefix + case
        if all(good):
            self[name] = {"ok": self.write(value)}
            return value
        if any(good):
            self[name] = {"mixed": self.exchange(repr(value) if error is None else repr(error))}
        else:
            self[name] = {"error": written_error(error)}
        return None

    def write(self, value: Any) -> Written:
        """Return `value` as golden.json has it. Collective."""
        return Written(self._write(value))

    def _write(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Variable):
            return self._variable(value)
        if isinstance(value, PerReplica):
            values = value.values if value._is_known else self._fetched(value)
            return {"kind": "PerReplica", "values": [self._write(v) for v in values]}
        if isinstance(value, Mirrored):
            return {"kind": "Mirrored", "values": [self._write(v) for v in value.values]}
        return written(value, self._write)

    def _fetched(self, value: PerReplica) -> tuple[Any, ...]:
        return self.strategy.experimental_local_results(value)

    def _variable(self, variable: Variable) -> dict[str, Any]:
        here = np.array(variable._component())
        mine = variable.strategy is self.strategy
        kind = variable_kind(variable)
        found = {
            "kind": kind,
            "name": variable.name,
            "dtype": variable.dtype.name,
            "aggregation": variable.aggregation.name,
            "values": [written(copy) for copy in (self.exchange(here) if mine else [here])],
        }
        if not mine or variable.aggregation.name != "NONE" or not variable._is_on_read:
            found["read"] = written(variable.read_value())
        return found


def variable_kind(variable: Variable) -> str:
    """Return which of tf.distribute's variables this one behaves like. Collective.

    Found out by what may be asked of it, not by what it says of itself: a variable of one replica
    has one local result, and is itself the value; replicas' own values have a sum, and a mirrored
    variable has none.
    """
    strategy = variable.strategy
    if len(strategy.experimental_local_results(variable)) == 1:
        return "ResourceVariable"
    try:
        total = np.asarray(strategy.reduce("SUM", variable, axis=None))
    except ValueError:
        return "MirroredVariable"
    copies = [np.asarray(copy) for copy in strategy.experimental_local_results(variable)]
    assert np.array_equal(total, np.sum(copies, axis=0)), (total, copies)
    return "SyncOnReadVariable"


def written_error(error: BaseException) -> dict[str, Any]:
    """Return the names of an error's classes, and its text."""
    names = [c.__name__ for c in type(error).__mro__ if c is not object]
    return {"type": names[0], "classes": names, "message": str(error)[:600]}


def written(value: Any, inner: Callable[[Any], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a value that is not distributed as golden.json has it; `inner` writes its parts."""
    part = inner or written
    if isinstance(value, Written):
        return value
    if isinstance(value, Each | Copies):
        kind = "PerReplica" if isinstance(value, Each) else "Mirrored"
        return {"kind": kind, "values": [part(v) for v in value]}
    if isinstance(value, bool):
        return {"kind": "number", "dtype": "python bool", "shape": [], "value": value}
    if type(value) in (int, float):  # not NumPy's float64, which is a float too
        dtype = f"python {type(value).__name__}"
        return {"kind": "number", "dtype": dtype, "shape": [], "value": _json(value)}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        wide = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        values = _json(wide.tolist())
        return {
            "kind": "number",
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "value": values,
        }
    if isinstance(value, IndexedSlices):
        shape = np.array(value.dense_shape, np.int32)
        return {
            "kind": "IndexedSlices",
            "values": written(value.values),
            "indices": written(value.indices),
            "dense_shape": written(shape),
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {name: part(getattr(value, name)) for name in value._fields}
        return {"kind": "namedtuple", "type": type(value).__name__, "fields": fields}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {"kind": kind, "items": [part(v) for v in value]}
    if isinstance(value, Mapping):
        items = {str(k): part(v) for k, v in value.items()}
        return {"kind": "dict", "type": type(value).__name__, "items": items}
    if value is None or isinstance(value, str):
        return {"kind": "py", "type": type(value).__name__, "value": value}
    return {"kind": "object", "type": type(value).__name__}


def _json(value: Any) -> Any:
    if isinstance(value, list):
        return [_json(v) for v in value]
    if isinstance(value, complex):
        return {"re": value.real, "im": value.imag}
    if isinstance(value, bytes):
        return value.decode("latin1")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
