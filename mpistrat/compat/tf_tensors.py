"""Tensors, which are NumPy arrays, and ``tf.Variable``, for programs that import ``tf``.

- `Tensor`, `TensorSpec`, `is_tensor`: the types of tensors.
- `constant`, `convert_to_tensor`, `convert_operands`: values become tensors, with TensorFlow's
  dtypes for Python numbers.
- `as_dtype`, `as_tuple`, `check_floating`, `check_shape`: checks of arguments.
- `takes_name`: a decorator for functions with an argument `name`, as all have in TensorFlow.
- `Variable`, `DistributedValues`, `Mirrored`: variables, and classes for ``isinstance``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, final

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import as_shape
from mpistrat.compat.absent import Advised
from mpistrat.data.sources import Spec
from mpistrat.errors import LeafTypeError, RefusedError, StructureError
from mpistrat.strategy.strategies import current_strategy
from mpistrat.variables import values
from mpistrat.variables.kinds import SINGLE_REPLICA, VariableAggregation, VariableSynchronization
from mpistrat.variables.variable import Variable as CoreVariable

__all__ = [
    "NARROW",
    "DistributedValues",
    "Kind",
    "Mirrored",
    "Tensor",
    "TensorSpec",
    "Variable",
    "as_dtype",
    "constant",
    "convert_to_tensor",
]


__all__ += ["as_tuple", "check_floating", "check_shape", "convert_dtype", "convert_operands"]
__all__ += ["find_dtype", "has_dtype", "is_tensor", "takes_name"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_dtype(dtype_like: Any, call_name: str = "") -> np.dtype[Any]:
    """Return the dtype that a program has named; Python's ``float`` is float32, as it is there.

    Args:
      dtype_like: A dtype, its name, a class of NumPy's scalars, ``float`` or ``bool``.
      call_name: The call that needs the dtype, for errors.

    Raises:
      LeafTypeError: It is not a dtype; nor are None and ``int``, which NumPy takes for float64 and
        int64.

    Example:
      >>> as_dtype(float), as_dtype("int8")
      (dtype('float32'), dtype('int8'))
    """
    word = dtype_like if dtype_like is None or isinstance(dtype_like, type | str) else ""
    if word in (None, int, complex, "int", "complex"):
        text = f"{dtype_like!r} is not a dtype; pass one such as tf.float32 or tf.int32."
        raise LeafTypeError(f"{call_name}: {text}" if call_name else text)
    return arrays.as_dtype(np.float32 if word in (float, "float") else dtype_like, call_name)


def takes_name(tensor_function: _Function) -> _Function:
    """Return `tensor_function` with a further argument `name`, the last one, which has no effect.

    Arrays without dimensions come back as NumPy's scalars, which cannot change: ``total += x`` then
    makes `total` the name of another one, as it does in TensorFlow.
    """
    positional_count = tensor_function.__code__.co_argcount  # keyword-only arguments do not count

    @functools.wraps(tensor_function)
    def apply(*args: Any, name: Any = None, **kwargs: Any) -> Any:
        if len(args) == positional_count + 1 and (args[-1] is None or isinstance(args[-1], str)):
            args = args[:-1]
        result = tensor_function(*args, **kwargs)
        if type(result) is np.ndarray and not result.ndim and result.dtype.kind != "O":
            return result[()]
        return result

    return apply  # type: ignore[return-value]  # the same signature, and one argument more


class Kind(type):
    """A metaclass: instances of the classes in `kinds` count as instances of the class."""

    kinds: tuple[type, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether `instance` belongs to one of the classes."""
        return isinstance(instance, cls.kinds)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return whether `subclass` is one of the classes."""
        return issubclass(subclass, cls.kinds)


class Tensor(metaclass=Kind):
    """The type of tensors: NumPy arrays and scalars. As in TensorFlow, variables are not tensors.

    Raises:
      TypeError: It is called; use `constant` to make tensors.

    Example:
      >>> isinstance(np.ones(1), Tensor), isinstance(np.float32(1), Tensor), isinstance(1, Tensor)
      (True, True, False)
    """

    kinds = (np.ndarray, np.generic)

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a TypeError."""
        raise TypeError("tf.Tensor is for isinstance only; tf.constant(value) makes a tensor.")


@final
class TensorSpec(metaclass=Advised):
    """Shape and dtype of a tensor, for programs that write them down; nothing is traced here.

    It equals what ``dataset.element_spec`` has of the same shape and dtype.

    Attributes:
      shape: Sizes, as a tuple; None for one that is not known, and None for any shape.
      dtype: Dtype.
      name: Told apart by ``==``; no other effect.

    Example:
      >>> TensorSpec([None, 3]), TensorSpec([2]) == TensorSpec((2,), "float32")
      (TensorSpec(shape=(None, 3), dtype=float32, name=None), True)
    """

    _where = "tf.TensorSpec"

    def __init__(self, shape: Any, dtype: Any = "float32", name: Any = None):
        """Create it; an integer is a shape of one size."""
        self.shape = None if shape is None else arrays.as_shape("TensorSpec", shape)
        self.dtype = as_dtype(dtype, "TensorSpec")
        self.name = name

    def _parts(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.name

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has this shape, dtype and name."""
        if isinstance(other, Spec):  # of a dataset, which has no name
            return self._parts() == (other.shape, other.dtype, None)
        return isinstance(other, TensorSpec) and self._parts() == other._parts()

    def __hash__(self) -> int:
        """Return the hash of the shape, the dtype and the name."""
        return hash(self._parts())

    def __repr__(self) -> str:
        """Return shape, dtype and name."""
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype}, name={self.name!r})"


def is_tensor(x: Any) -> bool:
    """Return whether `x` has a dtype: an array, a NumPy scalar or a variable."""
    return hasattr(x, "dtype")


NARROW = {"i": np.int32, "f": np.float32}


def constant(value: Any, dtype: Any = None, shape: Any = None) -> Any:
    """Return a fresh array; Python integers become int32 and Python floats float32.

    Args:
      value: Number, nested list or array.
      dtype: Dtype; if None, that of an array, or of the arrays in a list, whatever numbers are
        beside them.
      shape: Shape to fill or reshape to; None for that of `value`.

    Raises:
      ValueError: An integer does not fit the dtype; values never wrap around. Or something in
        `value` is neither a number nor a string, such as None.
      TypeError: A Python float for an integer dtype.

    Example:
      >>> constant([1, 2]).dtype, constant([np.float32(1), 2.5]).dtype
      (dtype('int32'), dtype('float32'))
      >>> constant(2**40, "int64")
      array(1099511627776)
    """
    try:
        array = np.array(value)
    except ValueError as error:
        if "setting an array element" not in str(error):
            raise  # what it is of has said why it is not an array, and what to do
        reason = str(error).rstrip(".")
        raise ValueError(
            f"expected numbers, got {value!r:.70} ({type(value).__name__}): {reason}. In an array "
            "all rows have one length: pad them."
        ) from None
    is_typed = has_dtype(value)
    if dtype is None and is_typed and isinstance(value, list | tuple):
        list_dtype = find_dtype(value)  # numbers in the list take it
        if list_dtype.kind in "iuf" and array.dtype.kind in "iuf":
            dtype, is_typed = list_dtype, False
    # An integer beyond int64 makes an array of another kind, but it was meant as an integer.
    is_large = array.dtype.kind in "uO" and all(isinstance(x, int) for x in array.ravel().tolist())
    if array.dtype.kind == "O" and not is_large:
        raise ValueError(f"expected numbers, got {value!r:.70} ({type(value).__name__}).")
    if dtype is None and not is_typed:
        dtype = np.int32 if is_large else NARROW.get(array.dtype.kind)
    array = array if dtype is None else convert_dtype(array, as_dtype(dtype, "constant"), is_typed)
    if shape is None:
        return array
    return np.full(shape, array) if array.size == 1 else array.reshape(shape)


def has_dtype(value: Any) -> bool:
    """Return whether `value` has a dtype, or an element of a list has one."""
    if isinstance(value, list | tuple):
        return any(map(has_dtype, value))
    return hasattr(value, "dtype")


def find_dtype(value: Any) -> Any:
    """Return the dtype of `value`, or of the tensors in it if it is a list; None without any."""
    if isinstance(value, list | tuple):
        dtypes = {find_dtype(part) for part in value} - {None}
        return np.result_type(*dtypes) if dtypes else None
    return getattr(value, "dtype", None)


def convert_operands(operands: Sequence[Any]) -> list[Any]:
    """Return `operands` as arrays; Python numbers and lists of them have the dtype of the tensors.

    Raises:
      TypeError: A Python float beside tensors of integers.

    Example:
      >>> [array.dtype.name for array in convert_operands([np.int64(1), 2, [3, 4]])]
      ['int64', 'int64', 'int64']
    """
    dtype = find_dtype(list(operands))
    if dtype is None:  # integers are float32 beside floats, as they are in one list
        tensors = list(map(constant, operands))
        has_both_kinds = {array.dtype for array in tensors} == {*map(np.dtype, NARROW.values())}
        return [array.astype(np.float32) for array in tensors] if has_both_kinds else tensors
    number_dtype = dtype if dtype.kind in "biufcV" else None
    return [
        np.asarray(operand)
        if hasattr(operand, "dtype")
        else constant(operand, None if has_dtype(operand) else number_dtype)
        for operand in operands
    ]


def convert_dtype(array: Any, dtype: np.dtype[Any], is_typed: bool) -> Any:
    """Return an array as `dtype`; integers that do not fit are an error.

    Args:
      array: The array.
      dtype: The dtype.
      is_typed: It is a tensor's, not made of Python numbers, of which floats are not integers.

    Raises:
      ValueError: An integer does not fit.
      TypeError: Python floats, for integers.
    """
    if dtype.kind in "iu" and array.size:
        if array.dtype.kind == "f" and not is_typed:
            raise TypeError(
                f"a Python float was given for dtype {dtype}; it would be cut off. Write an "
                "integer, or cast(value, dtype) if that is meant."
            )
        if array.dtype.kind in "iuO":
            _check_range(array, dtype)
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, as it is there
        return array.astype(dtype)


def _check_range(array: Any, dtype: np.dtype[Any]) -> None:
    limits, minimum, maximum = np.iinfo(dtype), array.min(), array.max()
    if minimum < limits.min or maximum > limits.max:
        raise ValueError(
            f"{maximum if maximum > limits.max else minimum} does not fit {dtype} ({limits.min} to "
            f"{limits.max}); Python integers become int32 unless dtype= says otherwise, such as "
            "dtype=tf.int64."
        )


def check_floating(call_name: str, tensor: Any) -> Any:
    """Return a tensor of floating point or complex numbers unchanged.

    Args:
      call_name: The call that needs the tensor, for the error.
      tensor: An array.

    Raises:
      TypeError: It is of integers or of bool.
    """
    if tensor.dtype.kind in "iub":
        raise TypeError(f"{call_name}: expected floating point, got {tensor.dtype}; cast it first.")
    return tensor


def as_tuple(argument_name: str, values: Any) -> tuple[Any, ...]:
    """Return a list as a tuple.

    Args:
      argument_name: The name of the argument, for errors.
      values: The list.

    Raises:
      ValueError: It is a number.
    """
    if np.ndim(values) != 1:
        raise ValueError(
            f"{argument_name}: expected a list, such as [{values!r:.40}], got {values!r:.40}."
        )
    return tuple(values)


def check_shape(call_name: str, tensor: Any, shape: Any) -> Any:
    """Return a tensor, whose shape is checked.

    Args:
      call_name: The call that needs the tensor, for the error.
      tensor: The tensor.
      shape: Its shape, where None is any size; None for any shape.

    Raises:
      ValueError: It has another shape.
    """
    expected_shape = tensor.shape if shape is None else arrays.as_shape(call_name, shape)
    has_rank = len(expected_shape) == tensor.ndim
    if not has_rank or any(
        w not in (None, s) for w, s in zip(expected_shape, tensor.shape, strict=True)
    ):
        raise ValueError(f"{call_name}: expected shape {expected_shape}, got {tensor.shape}.")
    return tensor


def convert_to_tensor(value: Any, dtype: Any = None, dtype_hint: Any = None) -> Any:
    """Return `value` as `constant` does; an array that has the dtype is not copied.

    Args:
      value: See `constant`.
      dtype: See there.
      dtype_hint: The dtype of Python numbers, if `dtype` is None and they convert to it.
    """
    if dtype is None and dtype_hint is not None and not has_dtype(value):
        with contextlib.suppress(TypeError, ValueError):
            return constant(value, dtype_hint)
    dtype = None if dtype is None else as_dtype(dtype, "convert_to_tensor")
    if isinstance(value, np.ndarray) and dtype in (None, value.dtype):
        return value
    return constant(value, dtype)


def _create_variable(
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
    # A refused argument on one rank is an error on all ranks.
    with current_strategy()._replicas.lockstep.validating_collectively("Variable"):
        required_shape = _check_arguments(validate_shape, constraint, shape)
        dtype = None if dtype is None else as_dtype(dtype, "Variable")

    def value() -> Any:
        initial = initial_value() if callable(initial_value) else initial_value
        # The variable itself converts or refuses a value that has a dtype.
        requested_dtype = None if has_dtype(initial) else dtype
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


_create_variable.__qualname__ = "Variable"  # as Python names it where arguments do not fit


def _check_arguments(validate_shape: bool, constraint: Any, shape: Any) -> tuple[int, ...] | None:
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
    required_shape = None if shape is None else as_shape("Variable", shape)
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
        return _create_variable(*args, **kwargs)


class _OrVariable(Kind):
    """A metaclass as `Kind`, where variables of several replicas count too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether `instance` is of one of the classes, or a variable with replicas."""
        if not isinstance(instance, CoreVariable):
            return super().__instancecheck__(instance)
        return instance.strategy._replicas.view is not SINGLE_REPLICA and cls._includes(instance)

    def _includes(cls, variable: CoreVariable) -> bool:
        return True


class _OrMirrored(_OrVariable):
    """The variables whose copies are always equal."""

    def _includes(cls, variable: CoreVariable) -> bool:
        return not variable._is_on_read


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
