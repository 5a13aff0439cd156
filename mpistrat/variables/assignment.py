"""Values for variables, checked and converted; and the methods that write to some rows.

`convert_initial_value` is for creation, `prepare_value` for the whole of a variable, and
`prepare_slices` for rows. `ScatterUpdates` has the methods of variables that write rows. They
follow the table of aggregations: rows that are the same on all replicas (NONE), the rows of all
replicas one after the other (SUM), these divided by the number of replicas (MEAN), or replica 0's
rows (ONLY_FIRST_REPLICA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpistrat.arrays import Array, as_array, as_dtype, is_bfloat16, is_inexact
from mpistrat.errors import LeafTypeError, RefusedError, StructureError
from mpistrat.strategy.context_stack import CodeContext
from mpistrat.variables import on_read
from mpistrat.variables.aggregation import write
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import (
    SINGLE_REPLICA,
    DistributedVariable,
    VariableAggregation,
    VariableSynchronization,
)
from mpistrat.variables.reading import unwrap_value
from mpistrat.variables.values import PerReplica

_NUMBERS = frozenset("biufc")


def sees_own_copy(variable: DistributedVariable, context: CodeContext | None) -> bool:
    """Tell whether code in `context` sees its own copy of `variable` only."""
    return context is not None and (
        context.replica is not None or context.updated_variable is variable
    )


def resolve_kinds(
    name: str,
    dtype: np.dtype[Any],
    synchronization: object,
    aggregation: object,
    is_single_replica: bool = False,
) -> tuple[VariableSynchronization, VariableAggregation]:
    """Return synchronization and aggregation of a variable, checked; AUTO becomes ON_WRITE.

    With `is_single_replica` variables are ordinary: there are no copies that could drift apart.

    Raises:
      ValueError: The kind is unknown, or has no meaning for `dtype`.
    """
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            f"Invalid synchronization {synchronization!r} for {name!r}; expected a "
            "VariableSynchronization, such as VariableSynchronization.ON_READ."
        )
    if synchronization is VariableSynchronization.NONE and not is_single_replica:
        raise ValueError(
            f"synchronization NONE of {name!r} would let replicas drift apart. "
            "Use ON_READ for values that each replica owns."
        )
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            f"Invalid aggregation {aggregation!r} for {name!r}; expected a VariableAggregation, "
            "such as VariableAggregation.MEAN."
        )
    is_floating = is_inexact(dtype)
    if aggregation is VariableAggregation.MEAN and not is_floating and not is_single_replica:
        raise ValueError(
            f"aggregation MEAN of {name!r} needs a floating dtype, got {dtype}; a mean of "
            "integers is not an integer. Use SUM, or another dtype."
        )
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return synchronization, aggregation


def convert_initial_value(name: str, value: object, dtype: Any) -> Array:
    """Return a copy of an initial value, of the dtype that is wanted; None for its own.

    Raises:
      LeafTypeError: It is not an array of numbers, or does not convert: floating point to integers,
        integers to bool, or an integer that the dtype does not hold.
    """
    array, is_list = _convert_to_array(name, value)
    target_dtype = array.dtype if dtype is None else as_dtype(dtype, f"Variable {name!r}")
    if not _can_convert(array, target_dtype, is_list):
        value_text = f"{array.dtype}" if array.size != 1 else f"{array.dtype}, {array.item()!r},"
        raise LeafTypeError(
            f"Variable {name!r}: an initial value of dtype {value_text} does not convert to "
            f"{target_dtype}. Give another dtype, or cast it with astype({str(target_dtype)!r}) if "
            "that is meant."
        )
    return as_array(np.array(array, target_dtype, order="C"), name)


def _convert_to_array(name: str, value: object) -> tuple[Array, bool]:
    """Return the contents of `value` as an array, and whether it was a list."""
    value = unwrap_value(value)
    is_list = isinstance(value, list | tuple)
    return as_array(value, name, accepts_lists=True), is_list


def _can_convert(array: Array, dtype: np.dtype[Any], is_list: bool) -> bool:
    """Tell whether values convert: within their kind, and integers that the dtype holds."""
    if array.dtype == dtype or (is_list and not array.size):  # an empty list is of any dtype
        return True
    if array.dtype.kind not in "iu" or dtype.kind not in "iu":
        return _can_convert_dtype(array.dtype, dtype)
    if np.can_cast(array.dtype, dtype) or not array.size:
        return True
    minimum, maximum = np.iinfo(dtype).min, np.iinfo(dtype).max
    return int(array.min()) >= minimum and int(array.max()) <= maximum


def _can_convert_dtype(source_dtype: np.dtype[Any], target_dtype: np.dtype[Any]) -> bool:
    if source_dtype.kind == "c" and target_dtype.kind != "c":  # NumPy lets it become bfloat16
        return target_dtype.kind not in _NUMBERS and not is_bfloat16(target_dtype)
    # `as_array` refuses values that are no numbers at all, in its own words.
    return target_dtype.kind not in _NUMBERS or np.can_cast(source_dtype, target_dtype, "same_kind")


def prepare_value(
    variable: DistributedVariable, context: CodeContext | None, kind: str, value: object
) -> Array:
    """Return the value of a write, in the variable's shape and dtype.

    Args:
      variable: The variable.
      context: The context of the code that writes.
      kind: The method that writes.
      value: The argument of that method.

    Raises:
      StructureError: A value per replica in cross-replica code, or another shape.
      LeafTypeError: The dtype does not convert, or it does not hold an integer.
      ValueError: The write has no meaning there.
    """
    is_own_copy = sees_own_copy(variable, context)
    _refuse_per_replica(variable, is_own_copy, kind, value)
    if not is_own_copy and variable.strategy._replicas.view is not SINGLE_REPLICA:
        on_read.check_write(variable, kind)
    array, is_list = _convert_to_array(variable.name, value)
    if array.shape != variable.shape:
        raise StructureError(
            f"{kind} of {variable.name!r}: expected shape {variable.shape}, got {array.shape}."
        )
    return _cast_value(variable, kind, array, is_list)


def prepare_slices(
    variable: DistributedVariable, context: CodeContext | None, kind: str, value: object
) -> IndexedSlices:
    """Return rows that are to be written: of the variable's dtype, and copies.

    Raises:
      StructureError: A value per replica in cross-replica code, or rows of another shape.
      LeafTypeError: `value` is not `IndexedSlices`, or the dtype does not convert.
      IndexError: A row index is out of range.
    """
    _refuse_per_replica(variable, sees_own_copy(variable, context), kind, value)
    value = unwrap_value(value)
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
    rows = _cast_value(variable, kind, value.values)
    return IndexedSlices(np.array(rows), value.indices.astype(np.int64), variable.shape)


def _refuse_per_replica(
    variable: DistributedVariable, is_own_copy: bool, kind: str, value: object
) -> None:
    if not isinstance(value, PerReplica) or is_own_copy:
        return
    if variable._is_on_read:
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


def _cast_value(
    variable: DistributedVariable, kind: str, array: Array, is_list: bool = False
) -> Array:
    if not _can_convert(array, variable.dtype, is_list):
        are_integers = array.dtype.kind in "iu" and variable.dtype.kind in "iu"
        problem = f"a value of dtype {array.dtype} does not convert to {variable.dtype}"
        if are_integers:
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
_REDUCIBLE_KINDS = frozenset({"scatter_add", "scatter_sub", "scatter_mul", "scatter_div"})
_UNREDUCED_AGGREGATIONS = frozenset(
    {VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA}
)


VariableType = TypeVar("VariableType", bound=DistributedVariable)


def _make_refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: DistributedVariable, *args: object, **kwargs: object) -> NoReturn:
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

    batch_scatter_update = _make_refusal("batch_scatter_update")
    scatter_nd_add = _make_refusal("scatter_nd_add")
    scatter_nd_max = _make_refusal("scatter_nd_max")
    scatter_nd_min = _make_refusal("scatter_nd_min")
    scatter_nd_sub = _make_refusal("scatter_nd_sub")
    scatter_nd_update = _make_refusal("scatter_nd_update")

    def scatter_add(
        self: VariableType, sparse_delta: object, use_locking: bool = False, name: object = None
    ) -> VariableType:
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
        return _write_rows(self, "scatter_add", sparse_delta)

    def scatter_sub(
        self: VariableType, sparse_delta: object, use_locking: bool = False, name: object = None
    ) -> VariableType:
        """Subtract rows from some rows, and return the variable; as `scatter_add` in all else."""
        return _write_rows(self, "scatter_sub", sparse_delta)

    def scatter_mul(
        self: VariableType, sparse_delta: object, use_locking: bool = False, name: object = None
    ) -> VariableType:
        """Multiply some rows by rows, and return the variable; as `scatter_add` in all else."""
        return _write_rows(self, "scatter_mul", sparse_delta)

    def scatter_div(
        self: VariableType, sparse_delta: object, use_locking: bool = False, name: object = None
    ) -> VariableType:
        """Divide some rows by rows, and return the variable; as `scatter_add` in all else.

        Integers divide towards zero.

        Raises:
          ZeroDivisionError: An integer would be divided by 0.
        """
        return _write_rows(self, "scatter_div", sparse_delta)

    def scatter_min(
        self: VariableType, sparse_delta: object, use_locking: bool = False, name: object = None
    ) -> VariableType:
        """Make some rows no larger than rows, and return the variable; else as `scatter_add`.

        Raises:
          NotImplementedError: The variable is ON_READ, or its aggregation is SUM or MEAN.
        """
        return _write_rows(self, "scatter_min", sparse_delta)

    def scatter_max(
        self: VariableType, sparse_delta: object, use_locking: bool = False, name: object = None
    ) -> VariableType:
        """Make some rows no smaller than rows, and return the variable; else as `scatter_add`.

        Raises:
          NotImplementedError: The variable is ON_READ, or its aggregation is SUM or MEAN.
        """
        return _write_rows(self, "scatter_max", sparse_delta)

    def scatter_update(
        self: VariableType, sparse_delta: object, use_locking: bool = False, name: object = None
    ) -> VariableType:
        """Set some rows, and return the variable; as `scatter_add` in all else.

        For a row that appears several times, the last one stays.

        Raises:
          NotImplementedError: The variable is ON_READ, or its aggregation is SUM or MEAN.
        """
        return _write_rows(self, "scatter_update", sparse_delta)


def _write_rows(variable: VariableType, kind: str, slices: object) -> VariableType:
    write(variable, kind, slices, _convert_slices)
    return variable


def _check_scatter_kind(variable: DistributedVariable, kind: str) -> None:
    if variable._is_on_read:
        raise NotImplementedError(
            f"{kind} of {variable.name!r}: a variable with synchronization ON_READ takes no "
            "scatter updates. Assign the whole, or create it with ON_WRITE."
        )
    if kind not in _REDUCIBLE_KINDS and variable.aggregation not in _UNREDUCED_AGGREGATIONS:
        raise NotImplementedError(
            f"{kind} of {variable.name!r}: only with aggregation NONE or ONLY_FIRST_REPLICA, and "
            f"this one's is {variable.aggregation.name}. Do it in strategy.extended.update, or "
            "create it with another aggregation."
        )


def _convert_slices(
    variable: DistributedVariable, context: CodeContext | None, kind: str, value: object
) -> tuple[Array, Array]:
    if variable.strategy._replicas.view is not SINGLE_REPLICA and (
        context is None or context.updated_variable is not variable
    ):
        _check_scatter_kind(variable, kind)
    slices = prepare_slices(variable, context, kind, value)
    dtype = variable.dtype
    is_bool_arithmetic = dtype.kind == "b" and kind != "scatter_update"
    if is_bool_arithmetic or (dtype.kind == "c" and kind in ("scatter_min", "scatter_max")):
        raise LeafTypeError(f"{kind} of {variable.name!r} has no meaning for {dtype}.")
    if kind == "scatter_div" and dtype.kind in "iu" and not slices.values.all():
        raise ZeroDivisionError(f"{kind} of {variable.name!r}: an integer divided by 0.")
    return slices.values, slices.indices
