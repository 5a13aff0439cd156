"""Writes to some rows of a variable, with the promises of writes to the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.distribute import sparse, writes
from mpistrat.distribute.incoming import incoming_slices
from mpistrat.distribute.mode import Mode, same_strategy
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.views import ALONE
from mpistrat.distribute.writes import OPS, VariableAggregation
from mpistrat.errors import LeafTypeError

if TYPE_CHECKING:
    from mpistrat.distribute.variables import Variable

__all__ = ["REPLICA", "apply", "scatter"]

# How values of several replicas become one is known for these; a sum of bounds bounds nothing.
_FOLDED = frozenset({"scatter_add", "scatter_sub", "scatter_mul", "scatter_div"})
_APART = frozenset({VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA})


def scatter(variable: Variable, kind: str, delta: Any) -> None:
    """Write `delta` to its rows, after the proof that its place asks for.

    Collective, but in the function of an update.

    Args:
      variable: What is written to.
      kind: The name of the method.
      delta: `IndexedSlices`.

    Raises:
      NotImplementedError: The kind of variable does not take this kind of write.
    """
    mode = same_strategy(variable.strategy, f"variable {variable.name!r}")
    if mode is not None and mode.updating is variable:
        variable.store(kind, *_checked(variable, mode, kind, delta))
        return
    lockstep = variable.strategy.parts.lockstep
    several = variable.strategy.parts.view is not ALONE
    call = f"{kind}({variable.spec()})"
    with lockstep.preparing(call):
        if several:
            _refuse_kind(variable, kind)
        values, rows = _checked(variable, mode, kind, delta)
    if mode is None or mode.replica is None:
        advice = "Compute it alike on all ranks, or broadcast or reduce it first."
        contents = writes.digest(values) + writes.digest(rows)
        writes.prove_same(lockstep, f"{call} of rows", contents, advice)
    elif several:
        values, rows = REPLICA[variable.aggregation](variable, call, values, rows)
    variable.store(kind, values, rows)


def _refuse_kind(variable: Variable, kind: str) -> None:
    if variable.on_read:
        raise NotImplementedError(
            f"{kind} of {variable.name!r}: a variable with synchronization ON_READ takes no "
            "scatter updates. Assign the whole, or create it with ON_WRITE."
        )
    if kind not in _FOLDED and variable.aggregation not in _APART:
        raise NotImplementedError(
            f"{kind} of {variable.name!r}: only with aggregation NONE or ONLY_FIRST_REPLICA, and "
            f"this one's is {variable.aggregation.name}. Do it in strategy.extended.update, or "
            "create it with another aggregation."
        )


def _checked(variable: Variable, mode: Mode | None, kind: str, delta: Any) -> tuple[Array, Array]:
    slices = incoming_slices(variable, mode, kind, delta)
    dtype = variable.dtype
    nothing = dtype.kind == "b" and kind != "scatter_update"
    if nothing or (dtype.kind == "c" and kind in ("scatter_min", "scatter_max")):
        raise LeafTypeError(f"{kind} of {variable.name!r} has no meaning for {dtype}.")
    if kind == "scatter_div" and dtype.kind in "iu" and not slices.values.all():
        raise ZeroDivisionError(f"{kind} of {variable.name!r}: an integer divided by 0.")
    return slices.values, slices.indices


def _same(variable: Variable, call: str, values: Array, rows: Array) -> tuple[Array, Array]:
    text = (writes.digest(values) + writes.digest(rows)).hex()
    lockstep: Lockstep = variable.strategy.parts.lockstep
    lockstep.later(f"{call} of {len(rows)} rows {text}", variable.restorer(rows))
    return values, rows


def _reduced(variable: Variable, call: str, values: Array, rows: Array) -> tuple[Array, Array]:
    op = OPS[variable.aggregation]
    part = sparse.contribution(op, IndexedSlices(values, rows, variable.shape))
    (total,) = sparse.all_reduce(variable.strategy.parts.reducer, call, op, [part])
    return total.values, total.indices


def _first(variable: Variable, call: str, values: Array, rows: Array) -> tuple[Array, Array]:
    parts = variable.strategy.parts
    if parts.lockstep.comm.rank:
        values, rows = values[:0], rows[:0]
    call = f"{call} of replica 0"
    got = parts.reducer.all_gather(call, (0, 0), (values, rows), ("values", "indices"))
    return got[0], got[1]


# How the rows that replicas write become the ones that are written; see `writes.REPLICA`.
REPLICA: dict[VariableAggregation, Callable[[Any, str, Array, Array], tuple[Array, Array]]] = {
    VariableAggregation.NONE: _same,
    VariableAggregation.SUM: _reduced,
    VariableAggregation.MEAN: _reduced,
    VariableAggregation.ONLY_FIRST_REPLICA: _first,
}

# At a row that comes several times, each of these is done several times.
_AT: dict[str, Any] = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}


def apply(array: Array, kind: str, values: Array, rows: Array) -> None:
    """Do a scatter update of `array`, in place; of rows that are updated twice the last one wins.

    Example:
      >>> a = np.array([4, 4, 4])
      >>> apply(a, "scatter_mul", np.array([2, 3]), np.array([1, 1]))
      >>> a
      array([ 4, 24,  4])
    """
    if kind == "scatter_update":
        array[rows] = values
    elif kind == "scatter_div" and array.dtype.kind in "iu":
        _divide(array, values, rows)
    else:
        _AT[kind].at(array, rows, values)


def _divide(array: Array, values: Array, rows: Array) -> None:
    # Integers divide towards zero, as in C: magnitudes and signs apart.
    touched, where = np.unique(rows, return_inverse=True)
    part = array[touched]
    if array.dtype.kind == "u":
        np.floor_divide.at(part, where, values)
        array[touched] = part
        return
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    sizes, signs = np.abs(part).view(unsigned), np.where(part < 0, -1, 1).astype(array.dtype)
    np.floor_divide.at(sizes, where, np.abs(values).view(unsigned))
    np.multiply.at(signs, where, np.where(values < 0, -1, 1).astype(array.dtype))
    array[touched] = sizes.view(array.dtype) * signs
