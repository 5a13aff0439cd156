"""What is to be written to a variable, checked and converted; and writes to some of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpistrat.arrays import Array, as_array, as_dtype, is_bfloat16, is_inexact
from mpistrat.errors import LeafTypeError, RefusedError, StructureError
from mpistrat.strategy.context_stack import Mode
from mpistrat.variables import on_read
from mpistrat.variables.aggregation import write
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import (
    ALONE,
    DistributedVariable,
    VariableAggregation,
    VariableSynchronization,
)
from mpistrat.variables.reading import plain
from mpistrat.variables.values import PerReplica

_NUMBERS = frozenset("biufc")


def own_copy(variable: DistributedVariable, mode: Mode | None) -> bool:
    """Tell whether code in `mode` sees its own copy of `variable` only."""
    return mode is not None and (mode.replica is not None or mode.updating is variable)


def kinds(
    name: str, dtype: np.dtype[Any], synchronization: Any, aggregation: Any, alone: bool = False
) -> tuple[VariableSynchronization, VariableAggregation]:
    """Return what kind of variable is meant; AUTO is ON_WRITE.

    Where a replica is `alone`, variables are ordinary: nothing drifts apart, and nothing is meant.

    Raises:
      ValueError: The kind is unknown, or has no meaning for `dtype`.
    """
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            f"Invalid synchronization {synchronization!r} for {name!r}; expected a "
            "VariableSynchronization, such as VariableSynchronization.ON_READ."
        )
    if synchronization is VariableSynchronization.NONE and not alone:
        raise ValueError(
            f"synchronization NONE of {name!r} would let replicas drift apart. "
            "Use ON_READ for values that each replica owns."
        )
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            f"Invalid aggregation {aggregation!r} for {name!r}; expected a VariableAggregation, "
            "such as VariableAggregation.MEAN."
        )
    floats = is_inexact(dtype)
    if aggregation is VariableAggregation.MEAN and not floats and not alone:
        raise ValueError(
            f"aggregation MEAN of {name!r} needs a floating dtype, got {dtype}; a mean of "
            "integers is not an integer. Use SUM, or another dtype."
        )
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return synchronization, aggregation


def initial(name: str, value: Any, dtype: Any) -> Array:
    """Return a copy of an initial value, of the dtype that is wanted; None for its own.

    Raises:
      LeafTypeError: It is not an array of numbers, or does not convert: floating point to integers,
        integers to bool, or an integer that the dtype does not hold.
    """
    source, listed = _array(name, value)
    target_dtype = source.dtype if dtype is None else as_dtype(dtype, f"Variable {name!r}")
    if not _fits(source, target_dtype, listed):
        source_text = (
            f"{source.dtype}" if source.size != 1 else f"{source.dtype}, {source.item()!r},"
        )
        raise LeafTypeError(
            f"Variable {name!r}: an initial value of dtype {source_text} does not convert to "
            f"{target_dtype}. Give another dtype, or cast it with astype({str(target_dtype)!r}) if "
            "that is meant."
        )
    return as_array(np.array(source, target_dtype, order="C"), name)


def _array(name: str, value: Any) -> tuple[Array, bool]:
    """Return what is in `value` as an array, and whether it was a list."""
    value = plain(value)
    listed = isinstance(value, list | tuple)
    return as_array(value, name, accepts_lists=True), listed


def _fits(array: Array, dtype: np.dtype[Any], listed: bool) -> bool:
    """Tell whether values convert: within their kind, and integers that the dtype holds."""
    if array.dtype == dtype or (listed and not array.size):  # an empty list is of any dtype
        return True
    if array.dtype.kind not in "iu" or dtype.kind not in "iu":
        return _keeps_kind(array.dtype, dtype)
    if np.can_cast(array.dtype, dtype) or not array.size:
        return True
    minimum, maximum = np.iinfo(dtype).min, np.iinfo(dtype).max
    return int(array.min()) >= minimum and int(array.max()) <= maximum


def _keeps_kind(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    if source.kind == "c" and target.kind != "c":  # NumPy lets it become bfloat16
        return target.kind not in _NUMBERS and not is_bfloat16(target)
    # `as_array` refuses values that are no numbers at all, in its own words.
    return target.kind not in _NUMBERS or np.can_cast(source, target, "same_kind")


def incoming(variable: DistributedVariable, mode: Mode | None, kind: str, value: Any) -> Array:
    """Return what is to be written, in the variable's shape and dtype.

    Args:
      variable: What is written to.
      mode: The mode of the code that writes.
      kind: Which method writes.
      value: What was given to it.

    Raises:
      StructureError: A value per replica in cross-replica code, or another shape.
      LeafTypeError: The dtype does not convert, or it does not hold an integer.
      ValueError: The write has no meaning there.
    """
    is_own_copy = own_copy(variable, mode)
    _refuse_per_replica(variable, is_own_copy, kind, value)
    if not is_own_copy and variable.strategy.replicas.view is not ALONE:
        on_read.check_write(variable, kind)
    array, listed = _array(variable.name, value)
    if array.shape != variable.shape:
        raise StructureError(
            f"{kind} of {variable.name!r}: expected shape {variable.shape}, got {array.shape}."
        )
    return _converted(variable, kind, array, listed)


def incoming_slices(
    variable: DistributedVariable, mode: Mode | None, kind: str, value: Any
) -> IndexedSlices:
    """Return rows that are to be written: of the variable's dtype, and copies.

    Raises:
      StructureError: A value per replica in cross-replica code, or rows of another shape.
      LeafTypeError: `value` is not `IndexedSlices`, or the dtype does not convert.
      IndexError: A row index is out of range.
    """
    _refuse_per_replica(variable, own_copy(variable, mode), kind, value)
    value = plain(value)
    if not isinstance(value, IndexedSlices):
        raise LeafTypeError(
            f"{kind} of {variable.name!r}: expected IndexedSlices, got {type(value).__name__}. "
            "Make them: mpistrat.IndexedSlices(values, indices)."
        )
    if not variable.ndim or value.values.shape[1:] != variable.shape[1:]:
        raise StructureError(
            f"{kind} of {variable.name!r} of shape {variable.shape}: rows of shape "
            f"{value.values.shape[1:]} do not fit."
        )
    outside_mask = (value.indices < 0) | (value.indices >= variable.shape[0])
    if outside_mask.any():
        raise IndexError(
            f"{kind} of {variable.name!r}: row index {value.indices[outside_mask][0]} is out of "
            f"range for {variable.shape[0]} rows."
        )
    rows = _converted(variable, kind, value.values)
    return IndexedSlices(np.array(rows), value.indices.astype(np.int64), variable.shape)


def _refuse_per_replica(
    variable: DistributedVariable, is_own_copy: bool, kind: str, value: Any
) -> None:
    if not isinstance(value, PerReplica) or is_own_copy:
        return
    if variable.on_read:
        # Its copies may differ; but what is assigned here is what the variable reads as, one value.
        raise StructureError(
            f"{kind} of ON_READ variable {variable.name!r}: got a value per replica, and in "
            "cross-replica code it takes one value for all. Let each replica write its own in "
            "replica code (strategy.run), or give one array or number."
        )
    raise StructureError(
        f"{kind} of {variable.name!r}: got a value per replica, which would make the copies "
        "differ. Reduce it first (strategy.reduce, extended.reduce_to)."
    )


def _converted(
    variable: DistributedVariable, kind: str, array: Array, listed: bool = False
) -> Array:
    if not _fits(array, variable.dtype, listed):
        integers = array.dtype.kind in "iu" and variable.dtype.kind in "iu"
        problem = f"a value of dtype {array.dtype} does not convert to {variable.dtype}"
        if integers:
            limits = np.iinfo(variable.dtype)
            problem = f"{array.min()} to {array.max()} do not all fit in"
            problem = f"{array.item()} does not fit in" if array.size == 1 else problem
            problem += f" {variable.dtype} ({limits.min} to {limits.max})"
        raise LeafTypeError(
            f"{kind} of {variable.name!r}: {problem}. Cast it with astype if that is meant."
        )
    with np.errstate(all="ignore"):
        return array.astype(variable.dtype, order="C", copy=False)


# How values of several replicas become one is known for these; a sum of bounds bounds nothing.
_FOLDED = frozenset({"scatter_add", "scatter_sub", "scatter_mul", "scatter_div"})
_UNREDUCED_AGGREGATIONS = frozenset(
    {VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA}
)


V = TypeVar("V", bound=DistributedVariable)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: DistributedVariable, *args: Any, **kwargs: Any) -> NoReturn:
        raise RefusedError(
            f"{name} of {self.name!r} is refused: a variable is written whole or by rows. Use "
            "v.scatter_add, _sub, _min, _max or _update with mpistrat.IndexedSlices(rows, "
            "indices), or for other elements v.assign(array)."
        )

    refuse.__name__ = name
    refuse.__doc__ = (
        "Refuse: rows are written by `scatter_update` and so on.\n\n"
        "Raises:\n  RefusedError: Always; says what to call.\n"
    )
    return refuse


class ScatterUpdates(DistributedVariable):
    """The methods of variables that write to some rows."""

    batch_scatter_update = _refusing("batch_scatter_update")
    scatter_nd_add = _refusing("scatter_nd_add")
    scatter_nd_max = _refusing("scatter_nd_max")
    scatter_nd_min = _refusing("scatter_nd_min")
    scatter_nd_sub = _refusing("scatter_nd_sub")
    scatter_nd_update = _refusing("scatter_nd_update")

    def scatter_add(self: V, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> V:
        """Add rows to some rows, and return the variable.

        Collective, but in the function of ``extended.update``. In replica code the rows of all
        replicas are written one after the other with aggregation SUM; with MEAN, after division by
        the number of replicas; with ONLY_FIRST_REPLICA, those of replica 0. With NONE, and in
        cross-replica code, the rows must be the same on all ranks. A row that appears several times
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

        For a row that appears several times, the last one stays.

        Raises:
          NotImplementedError: The variable is ON_READ, or its aggregation is SUM or MEAN.
        """
        return _scatter(self, "scatter_update", sparse_delta)


def _scatter(var: V, kind: str, delta: Any) -> V:
    write(var, kind, delta, _convert_slices)
    return var


def _refuse_kind(variable: DistributedVariable, kind: str) -> None:
    if variable.on_read:
        raise NotImplementedError(
            f"{kind} of {variable.name!r}: a variable with synchronization ON_READ takes no "
            "scatter updates. Assign the whole, or create it with ON_WRITE."
        )
    if kind not in _FOLDED and variable.aggregation not in _UNREDUCED_AGGREGATIONS:
        raise NotImplementedError(
            f"{kind} of {variable.name!r}: only with aggregation NONE or ONLY_FIRST_REPLICA, and "
            f"this one's is {variable.aggregation.name}. Do it in strategy.extended.update, or "
            "create it with another aggregation."
        )


def _convert_slices(
    variable: DistributedVariable, mode: Mode | None, kind: str, delta: Any
) -> tuple[Array, Array]:
    if variable.strategy.replicas.view is not ALONE and (
        mode is None or mode.updating is not variable
    ):
        _refuse_kind(variable, kind)
    slices = incoming_slices(variable, mode, kind, delta)
    dtype = variable.dtype
    is_bool_arithmetic = dtype.kind == "b" and kind != "scatter_update"
    if is_bool_arithmetic or (dtype.kind == "c" and kind in ("scatter_min", "scatter_max")):
        raise LeafTypeError(f"{kind} of {variable.name!r} has no meaning for {dtype}.")
    if kind == "scatter_div" and dtype.kind in "iu" and not slices.values.all():
        raise ZeroDivisionError(f"{kind} of {variable.name!r}: an integer divided by 0.")
    return slices.values, slices.indices
