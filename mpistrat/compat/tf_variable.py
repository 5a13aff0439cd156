"""``tf.Variable`` as programs that import `mpistrat.compat.tf` see it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import sizes
from mpistrat.compat.tf_tensors import Kind, as_dtype, constant, is_typed
from mpistrat.distribute import values
from mpistrat.distribute.kinds import VariableAggregation, VariableSynchronization
from mpistrat.distribute.strategies import current_strategy
from mpistrat.distribute.variables import Variable as CoreVariable
from mpistrat.distribute.views import ALONE
from mpistrat.errors import RefusedError, StructureError

__all__ = ["DistributedValues", "Mirrored", "Variable"]


def _make(
    initial_value: Any = None,
    trainable: bool | None = None,
    validate_shape: bool = True,
    caching_device: Any = None,
    name: str | None = None,
    variable_def: Any = None,
    dtype: Any = None,
    import_scope: Any = None,
    constraint: Any = None,
    synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | None = VariableAggregation.NONE,
    shape: Any = None,
    experimental_enable_variable_lifting: Any = True,
) -> CoreVariable:
    """Return an `mpistrat.Variable`; see `Variable` for the arguments."""
    # On all ranks it is an error, whichever has given what is refused.
    with current_strategy().replicas.lockstep.preparing("Variable"):
        required_shape = _shape(validate_shape, constraint, shape)
        dtype = None if dtype is None else as_dtype(dtype, "Variable")

    def value() -> Any:
        initial = initial_value() if callable(initial_value) else initial_value
        # The variable itself converts or refuses a value that has a dtype.
        requested_dtype = None if is_typed(initial) else dtype
        array = initial if hasattr(initial, "dtype") else constant(initial, requested_dtype)
        if required_shape is not None and np.shape(array) != required_shape:
            raise StructureError(
                f"Variable(shape={required_shape}): the initial value has shape {np.shape(array)}."
            )
        return array

    return CoreVariable(
        value,
        trainable,
        name=name,
        dtype=dtype,
        synchronization=synchronization or VariableSynchronization.AUTO,
        aggregation=aggregation or VariableAggregation.NONE,
    )


_make.__qualname__ = "Variable"  # as Python names it where arguments do not fit


def _shape(validate_shape: bool, constraint: Any, shape: Any) -> tuple[int, ...] | None:
    """Return the requested shape, or raise if an argument is refused."""
    if not validate_shape:
        raise RefusedError(
            "Variable(validate_shape=False) is refused: the shape of a variable does not change."
        )
    if constraint is not None:
        raise RefusedError(
            "Variable(constraint=) is refused: no optimizer of this library would apply it. After "
            "each step write variable.assign(constraint(variable))."
        )
    required_shape = None if shape is None else sizes("Variable", shape)
    if required_shape is not None and any(size is None for size in required_shape):
        raise RefusedError(
            f"Variable(shape={required_shape}) is refused: the shape of a variable does not "
            "change, so every size must be known."
        )
    return required_shape


class Variable(metaclass=Kind):
    """An `mpistrat.Variable` whose initial value is converted as by `constant`.

    Args:
      initial_value: Number, nested list, array, or a function that returns one.
      trainable: As in `mpistrat.Variable`.
      validate_shape: False is refused.
      caching_device: No effect.
      name: As in `mpistrat.Variable`.
      variable_def: No effect.
      dtype: As in `mpistrat.Variable`; of Python numbers int32 and float32 if None.
      import_scope: No effect.
      constraint: Anything but None is refused.
      synchronization: As in `mpistrat.Variable`; AUTO if None.
      aggregation: As in `mpistrat.Variable`; NONE if None.
      shape: The shape of the initial value; unknown sizes are refused.
      experimental_enable_variable_lifting: No effect.

    Raises:
      RefusedError: A shape that may change, or a constraint, is asked for.
      StructureError: The initial value has another shape.
      ValueError: An integer does not fit the dtype.

    Collective, as `mpistrat.Variable` is. Cost: as there.

    Example:
      >>> v = Variable([1.0, 2.0])
      >>> v.dtype, isinstance(v, Variable)
      (dtype('float32'), True)
      >>> Variable(0.1, dtype="float64").numpy().tolist()
      0.1
    """

    kinds = (CoreVariable,)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the variable that `mpistrat.Variable` makes."""
        return _make(*args, **kwargs)


class _OrVariable(Kind):
    """A metaclass as `Kind`, where variables of several replicas count too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        """Tell whether `instance` belongs to one of the classes, or is such a variable."""
        if not isinstance(instance, CoreVariable):
            return super().__instancecheck__(instance)
        return instance.strategy.replicas.view is not ALONE and cls._has(instance)

    def _has(cls, variable: CoreVariable) -> bool:
        return True


class _OrMirrored(_OrVariable):
    """The variables whose copies are always equal."""

    def _has(cls, variable: CoreVariable) -> bool:
        return not variable.on_read


class DistributedValues(metaclass=_OrVariable):
    """For ``isinstance``: an `mpistrat.DistributedValues`, or a variable that has replicas.

    Example:
      >>> isinstance(values.PerReplica(1), DistributedValues), isinstance(1, DistributedValues)
      (True, False)
    """

    kinds = (values.DistributedValues,)


class Mirrored(metaclass=_OrMirrored):
    """For ``isinstance``: an `mpistrat.Mirrored`, or a variable with a copy on each replica.

    Example:
      >>> isinstance(values.Mirrored(1), Mirrored), isinstance(values.PerReplica(1), Mirrored)
      (True, False)
    """

    kinds = (values.Mirrored,)
