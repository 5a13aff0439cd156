"""Conversion of inputs: any array-like object becomes a NumPy view of it.

No copy is made here unless bytes must be swapped, or are not aligned for their dtype. Values that
cannot be sent to other ranks raise an error that names the leaf.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import numbers
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from mpistrat.errors import DataError, LeafTypeError, MpistratError, text_of

Array = npt.NDArray[Any]

_SENDABLE_KINDS = frozenset("biufc")
# Numbers of x87 have 80 bits; the rest is padding.
_LONGDOUBLE_NBYTES = 10 if np.finfo(np.longdouble).nmant == 63 else np.dtype(np.longdouble).itemsize
# By the package that a class is from: the `ArrayKind` of its arrays, imported when one comes.
_ARRAY_KIND_MODULES = {
    "jax": "mpistrat.jax.arrays",
    "jaxlib": "mpistrat.jax.arrays",
    "torch": "mpistrat.torch.tensors",
}


def is_masked(value: object) -> bool:
    """Tell whether a value is a masked array, without importing `numpy.ma`.

    Example:
      >>> is_masked(np.ma.masked_less([1, 2], 2)), is_masked(np.ones(2))
      (True, False)
    """
    # A program with such an array has imported the module; another thread may be importing it.
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return kind is not None and isinstance(value, kind)


class ArrayKind(Protocol):
    """The handling of another library's arrays: a module with these functions."""

    @staticmethod
    def as_array(value: object, path: str) -> Array:
        """Return a view of the memory of a value, as `as_array` does, or raise LeafTypeError."""

    @staticmethod
    def convert_like(result: Array, like: object) -> Any:
        """Return `result` as an array of the library of `like`, in its memory if possible."""

    @staticmethod
    def as_buffer(array: Array) -> Any:
        """Return an object for which `as_array` returns that very array."""

    @staticmethod
    def parts_of(value: Any) -> Mapping[str, Any] | None:
        """Return the parts of an object that a checkpoint saves; None for unknown objects."""

    @staticmethod
    def rows_of(dataset: Any) -> Any:
        """Return a dataset of the library as a tree of arrays to be read by rows, or None."""

    @staticmethod
    def spec(value: Any, path: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape, or raise LeafTypeError; nothing of the contents is looked at."""


def find_array_kind(value: object) -> ArrayKind | None:
    """Return the `ArrayKind` of an array of another library; None for NumPy's and other values."""
    cls: Any = type(value)
    kind: ArrayKind | None = _kind_of_class(cls)
    return kind


@functools.lru_cache(maxsize=256)
def _kind_of_class(cls: type) -> Any:
    packages = (base.__module__.partition(".")[0] for base in cls.__mro__)
    module_name = next(
        (_ARRAY_KIND_MODULES[package] for package in packages if package in _ARRAY_KIND_MODULES),
        None,
    )
    return None if module_name is None else importlib.import_module(module_name)


def label(path: str) -> str:
    """Return how a message names the leaf at `path` of a tree."""
    return f"leaf {path!r}" if path else "the value"


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Tell whether `dtype` is the bfloat16 of ml_dtypes (also used by JAX and TensorFlow)."""
    return dtype_name(dtype) == "bfloat16"


def is_foreign(dtype: np.dtype[Any]) -> bool:
    """Tell whether `dtype` is of another package than NumPy, which may call its kind what it likes.

    Example:
      >>> is_foreign(np.dtype(np.float32))
      False
    """
    return dtype.num >= 256  # NPY_USERDEF


def is_scalar(value: object) -> bool:
    """Tell whether `value` is a Python or NumPy number, as opposed to a 0-d array."""
    return isinstance(value, np.generic | numbers.Number)


def as_array(value: object, path: str = "", accepts_lists: bool = False) -> Array:
    """Return an aligned, native-endian NumPy view of `value`.

    Args:
      value: NumPy array or scalar of any layout, alignment and byte order, Python number, anything
        with ``__array__``, DLPack or the buffer protocol (memmap, pandas, CPU tensors of torch and
        JAX, variables of mpistrat).
      path: The name of the leaf, for errors.
      accepts_lists: Take lists and tuples of numbers, too, as NumPy does.

    Returns:
      An `ndarray`; shares memory with `value` where that is possible. Not to be written to.

    Raises:
      LeafTypeError: `value` is not an array, is masked, or has a dtype that cannot be sent between
        ranks: objects, strings, dates, structures.

    Example:
      >>> as_array(np.array([1, 2], ">i4")).dtype.isnative
      True
    """
    if type(value) is np.ndarray:
        dtype = value.dtype
        if dtype.isbuiltin == 1 and dtype.kind in _SENDABLE_KINDS and value.flags.aligned:
            return value  # as most are; NumPy's own dtypes are native then
    if is_masked(value):
        raise LeafTypeError(
            f"{label(path)} is a masked array, and its mask would be lost. Pass "
            "value.filled(...) and, for a mean, the number of valid elements as weight."
        )
    array = _convert(value, path, accepts_lists)
    check_sendable(array.dtype, path, value)
    if array.dtype.isnative and array.flags.aligned:
        return array
    return array.astype(array.dtype.newbyteorder("="))  # MPI cannot take what is not aligned either


def check_sendable(dtype: np.dtype[Any], path: str, value: object = None) -> None:
    """Raise LeafTypeError unless numbers of `dtype` can be sent between ranks.

    Args:
      dtype: Any.
      path: The name of the leaf, for errors.
      value: The leaf, if it is at hand.
    """
    # Types of other packages, such as float8, may call themselves floats; MPI does not know them.
    if (dtype.kind in _SENDABLE_KINDS and not is_foreign(dtype)) or is_bfloat16(dtype):
        return
    description = f"has dtype {dtype}, which"
    if dtype.kind == "O" and is_scalar(value):  # a fraction, an integer of more than 64 bits
        description = f"is a number ({type(value).__name__}) that fits no dtype of NumPy, and"
    raise LeafTypeError(
        f"{label(path)} {description} cannot be sent between ranks. "
        "Numbers can: integers, floating point, complex, bool (gathers only)."
    )


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Tell whether numbers of `dtype` may be NaN: floating point, bfloat16 too, or complex.

    Example:
      >>> is_inexact(np.dtype(np.float16)), is_inexact(np.dtype(int))
      (True, False)
    """
    return dtype.kind in "fc" or is_bfloat16(dtype)


def as_dtype(dtype_like: npt.DTypeLike, caller: str = "") -> np.dtype[Any]:
    """Return the dtype that a program has named.

    Args:
      dtype_like: A dtype as NumPy accepts it: a class of scalars, a name, a dtype.
      caller: The name of the call in errors.

    Raises:
      LeafTypeError: NumPy does not know it. The name ``"bfloat16"`` it knows when ``ml_dtypes`` has
        been imported.

    Example:
      >>> as_dtype("float32")
      dtype('float32')
    """
    try:
        dtype: np.dtype[Any] = np.dtype(dtype_like)
    except (TypeError, ValueError, SyntaxError):  # as of "f4,", which it takes for a list
        text = f"{dtype_like!r:.60} is not a dtype; pass one such as np.float32."
        if isinstance(dtype_like, str) and dtype_like == "bfloat16":
            text = "expected a dtype, got 'bfloat16'; import ml_dtypes and pass ml_dtypes.bfloat16."
        raise LeafTypeError(f"{caller}: {text}" if caller else text) from None
    return dtype


def _convert(value: Any, path: str, accepts_lists: bool) -> Array:
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray) if type(value) is not np.ndarray else value
    is_list = accepts_lists and isinstance(value, list | tuple)
    kind = None if is_list else find_array_kind(value)
    if kind is not None:
        return kind.as_array(value, path)
    try:
        if is_list or is_scalar(value) or hasattr(value, "__array__"):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        if is_buffer(value):
            return np.asarray(memoryview(value))
    # Errors of mpistrat are clearer, such as those about a mixture of strategies.
    except (MpistratError, MemoryError):
        raise
    except Exception as error:  # whatever `__array__` of a class raises
        raise LeafTypeError(
            f"{label(path)} ({type(value).__name__}) cannot be converted to an array: "
            f"{text_of(error)}"
        ) from error
    if hasattr(value, "toarray"):
        raise LeafTypeError(
            f"{label(path)} is a sparse matrix ({type(value).__name__}); expected an array or a "
            "number. Give toarray() of it; or for some rows, as of an embedding, "
            "mpistrat.IndexedSlices(rows, indices)."
        )
    raise LeafTypeError(
        f"{label(path)} is {value!r:.60} ({type(value).__name__}); expected an array or a number."
        f"{_conversion_advice(value)}"
    )


def _conversion_advice(value: object) -> str:
    """Return advice about an object that holds values but is no tree; or an empty text."""
    converter = (
        "dict" if isinstance(value, Mapping) else "vars" if is_dataclass(type(value)) else ""
    )
    return converter and f" Trees are made of dicts, lists and tuples: give {converter}(...) of it."


def is_buffer(value: Any) -> bool:
    """Tell whether `value` lends its memory; bytes do, but are taken for text."""
    try:
        memoryview(value).release()
    except TypeError:  # "a bytes-like object is required" says nothing of arrays and numbers
        return False
    return not isinstance(value, bytes)


def restore_kind(result: Array, like: object) -> Any:
    """Return `result` as the caller's kind: a NumPy scalar where a number went in.

    An array of another library, where one went in that `find_array_kind` knows.

    Example:
      >>> restore_kind(np.array(2.5), 1.0)
      np.float64(2.5)
    """
    if type(like) is np.ndarray:
        return result
    kind = find_array_kind(like)
    if kind is not None:
        return kind.convert_like(result, like)
    return result[()] if result.ndim == 0 and is_scalar(like) else result


# ``quiet().run(fn, *args)`` calls a function of NumPy without warnings, whatever the program has
# set: one that is turned into an exception must not stop one rank's write. The function sees no
# context variables of its caller. To copy a context takes a quarter of the time of np.errstate.
_quiet = contextvars.Context()
_quiet.run(np.seterr, all="ignore")
quiet = _quiet.copy


def seal(array: Array) -> Array:
    """Return a read-only view; NumPy refuses to make it, or any array it is a view of, writable.

    The object of its memoryview still reaches the memory. Any layout, and any dtype of a fixed
    size. Cost: a microsecond.

    Example:
      >>> seal(np.zeros(2)).setflags(write=True)
      Traceback (most recent call last):
      ...
      ValueError: cannot set WRITEABLE flag to True of this array
    """
    try:
        return np.asarray(array.data.toreadonly())
    except ValueError:  # bfloat16, dates, longdouble of another byte order: no buffer of their own
        return seal(array.view(f"V{array.itemsize}")).view(array.dtype)


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype; NumPy makes it again each time, in a microsecond."""
    return str(dtype.name)


def spec_text(array: Array) -> str:
    """Return dtype and shape as messages and handshakes show them.

    Example:
      >>> spec_text(np.zeros((2, 3), np.float32))
      'float32[2,3]'
    """
    return f"{dtype_name(array.dtype)}[{','.join(map(str, array.shape))}]"


DIGEST_NBYTES = 16  # bytes of a `digest`


def digest(arrays: Iterable[Array]) -> bytes:
    """Return 16 bytes that are equal for equal dtypes, shapes and contents, and hardly otherwise.

    Against accidents, not against forgery. Bits are compared, except for those that belong to no
    value, and byte order. Contents of object arrays are not compared.

    Args:
      arrays: Of any dtype, texts, dates and structures too.

    Cost:
      One pass, at about the speed of memory; a copy of an array that is not contiguous.

    Example:
      >>> digest([np.arange(3)]) == digest([np.arange(6)[:3]])
      True
    """
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(spec_text(array).encode())
        for part in _digested_parts(array):
            hasher.update(np.ascontiguousarray(as_bytes(part)).reshape(-1).data)
    return hasher.digest()


def _digested_parts(array: Array) -> list[Array]:
    if array.dtype.names:  # between fields there may be padding
        return [part for name in array.dtype.names for part in _digested_parts(array[name])]
    if array.dtype.hasobject or not array.nbytes:
        return []
    native = array.dtype.isnative
    return [array if native else array.astype(array.dtype.newbyteorder("="))]


def as_bytes(array: Array) -> Array:
    """Return the bytes of the elements: uint8 of shape (number of elements, bytes of one).

    For longdouble those that belong to the number; the others may differ where numbers do not.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    rows = flat.view(np.uint8).reshape(flat.size, flat.itemsize)
    if flat.dtype.char in "gG" and flat.size:
        numbers = rows.reshape(-1, np.dtype(np.longdouble).itemsize)[:, :_LONGDOUBLE_NBYTES]
        rows = numbers.reshape(flat.size, -1)
    return rows


def as_int(value: Any) -> int | None:
    """Return an integer of any kind as Python's own; None for other values, also for bools.

    Example:
      >>> as_int(np.int8(3)), as_int(True), as_int(3.0), as_int("3")
      (3, None, None, None)
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def is_real(value: object) -> bool:
    """Tell whether `value` is a real number; bools are not taken for one.

    Example:
      >>> is_real(np.float32(0.5)), is_real(3), is_real(True), is_real("3")
      (True, True, False, False)
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_shape(call: str, shape: Any) -> tuple[Any, ...]:
    """Return a shape as a tuple of integers, and of None where it has that; 3 is ``(3,)``.

    Args:
      call: The name of the call in errors.
      shape: An integer, or a list of them.

    Raises:
      TypeError: It is something else.
    """
    try:
        dimensions = tuple(shape) if as_int(shape) is None else (shape,)
        return tuple(
            None if dimension is None else operator.index(dimension) for dimension in dimensions
        )
    except TypeError:
        raise TypeError(
            f"{call}: expected a shape, such as [2, 3], of integers; got {shape!r:.60}."
        ) from None


def check_bool(call: str, value: object) -> bool:
    """Return an argument that is True or False; no other value stands for one of them.

    Args:
      call: The name of the argument in errors.
      value: The argument.

    Raises:
      TypeError: It is something else.

    Example:
      >>> check_bool("batch(drop_remainder)", np.True_)
      True
    """
    if not isinstance(value, bool | np.bool_):
        kind = type(value).__name__
        raise TypeError(f"{call} must be True or False, got {value!r:.80} ({kind}).")
    return bool(value)


def check_callable(call: str, value: Any) -> Any:
    """Return an argument that can be called.

    Args:
      call: What to call it in errors.
      value: The argument.

    Raises:
      TypeError: It cannot be called.
    """
    if not callable(value):
        kind = type(value).__name__
        raise TypeError(f"{call} must get a function, got {value!r:.60} ({kind}).")
    return value


def check_int(
    call: str, value: object, minimum: int, error_class: type[Exception] = DataError
) -> int:
    """Return an argument as an int.

    Args:
      call: What to call it in errors.
      value: The argument.
      minimum: The smallest number allowed.
      error_class: The error to raise if it is too small.

    Raises:
      TypeError: It is not an integer; nor is a bool.

    Example:
      >>> check_int("take(count)", 3, 0)
      3
    """
    number = as_int(value)
    if number is None:
        raise TypeError(f"{call} must be an integer, got {value!r:.80} ({type(value).__name__}).")
    if number < minimum:
        raise error_class(f"{call} must be an integer of at least {minimum}, got {number}.")
    return number
