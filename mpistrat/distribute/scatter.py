"""Writes to some rows of a variable, with the promises of writes to the whole."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.distribute.aggregations import write
from mpistrat.distribute.incoming import incoming_slices
from mpistrat.distribute.kinds import DistributedVariable, VariableAggregation
from mpistrat.distribute.mode import Mode
from mpistrat.distribute.views import ALONE
from mpistrat.errors import LeafTypeError

# How values of several replicas become one is known for these; a sum of bounds bounds nothing.
_FOLDED = frozenset({"scatter_add", "scatter_sub", "scatter_mul", "scatter_div"})
KINDS = (*sorted(_FOLDED), "scatter_min", "scatter_max", "scatter_update")
_APART = frozenset({VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA})


V = TypeVar("V", bound=DistributedVariable)


class ScatterUpdates(DistributedVariable):
    """The methods of variables that write to some rows."""

    def scatter_add(self: V, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> V:
        """Add rows to some rows, and return the variable.

        Collective, but in the function of ``extended.update``. In replica code the rows of all
        replicas are written one after the other with aggregation SUM; with MEAN, after division by
        the number of replicas; with ONLY_FIRST_REPLICA, those of replica 0. With NONE, and in
        cross-replica code, the rows must be the same on all ranks. A row that comes several times
        is written several times.

        Args:
          sparse_delta: `IndexedSlices` whose rows have the shape of the variable's rows.
          use_locking: Ignored; for callers of ``tf.Variable``.
          name: Ignored.

        Raises:
          NotImplementedError: The variable is ON_READ.
          LeafTypeError: `sparse_delta` is not `IndexedSlices`, or its dtype does not convert.
          StructureError: The rows do not fit, or come per replica in cross-replica code.
          IndexError: A row index is out of range.
          LockstepError: The rows differ between ranks where they may not.

        Cost: a hash of the rows, and a handshake where `assign` has one; in replica code with
        aggregation, two ``MPI_Allgatherv``.

        Example:
          >>> import mpistrat as ms
          >>> v = ms.Variable([4.0, 4.0, 4.0])
          >>> v.scatter_add(ms.IndexedSlices([1.0, 2.0], [0, 2])).numpy()
          array([5., 4., 6.])
        """
        return _scatter(self, "scatter_add", sparse_delta)

    def scatter_sub(self: V, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> V:
        """Subtract rows from some rows, and return the variable; as `scatter_add` in all else."""
        return _scatter(self, "scatter_sub", sparse_delta)

    def scatter_mul(self: V, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> V:
        """Multiply some rows by rows, and return the variable; as `scatter_add` in all else."""
        return _scatter(self, "scatter_mul", sparse_delta)

    def scatter_div(self: V, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> V:
        """Divide some rows by rows, and return the variable; as `scatter_add` in all else.

        Integers divide towards zero.

        Raises:
          ZeroDivisionError: An integer would be divided by 0.
        """
        return _scatter(self, "scatter_div", sparse_delta)

    def scatter_min(self: V, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> V:
        """Make some rows no larger than rows, and return the variable; else as `scatter_add`.

        Raises:
          NotImplementedError: The variable is ON_READ, or its aggregation is SUM or MEAN.
        """
        return _scatter(self, "scatter_min", sparse_delta)

    def scatter_max(self: V, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> V:
        """Make some rows no smaller than rows, and return the variable; else as `scatter_add`.

        Raises:
          NotImplementedError: The variable is ON_READ, or its aggregation is SUM or MEAN.
        """
        return _scatter(self, "scatter_max", sparse_delta)

    def scatter_update(
        self: V, sparse_delta: Any, use_locking: bool = False, name: Any = None
    ) -> V:
        """Set some rows, and return the variable; as `scatter_add` in all else.

        Of a row that comes several times, the last one stays.

        Raises:
          NotImplementedError: The variable is ON_READ, or its aggregation is SUM or MEAN.
        """
        return _scatter(self, "scatter_update", sparse_delta)


def _scatter(var: V, kind: str, delta: Any) -> V:
    write(var, kind, delta, _taken)
    return var


def _refuse_kind(variable: DistributedVariable, kind: str) -> None:
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


def _taken(
    variable: DistributedVariable, mode: Mode | None, kind: str, delta: Any
) -> tuple[Array, Array]:
    if variable.strategy.replicas.view is not ALONE and (
        mode is None or mode.updating is not variable
    ):
        _refuse_kind(variable, kind)
    slices = incoming_slices(variable, mode, kind, delta)
    dtype = variable.dtype
    nothing = dtype.kind == "b" and kind != "scatter_update"
    if nothing or (dtype.kind == "c" and kind in ("scatter_min", "scatter_max")):
        raise LeafTypeError(f"{kind} of {variable.name!r} has no meaning for {dtype}.")
    if kind == "scatter_div" and dtype.kind in "iu" and not slices.values.all():
        raise ZeroDivisionError(f"{kind} of {variable.name!r}: an integer divided by 0.")
    return slices.values, slices.indices


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
