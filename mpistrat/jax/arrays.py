"""Conversion of JAX arrays: inputs become NumPy views, results JAX arrays.

`mpistrat.arrays` imports this module when it meets the first one.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mpistrat.arrays import Array, is_scalar, label
from mpistrat.errors import LeafTypeError, StructureError

__all__ = [
    "LINE",
    "as_array",
    "as_buffer",
    "convert_like",
    "is_key",
    "parts_of",
    "place_results",
    "spec",
]

# JAX takes memory without a copy if it begins at a multiple of so many bytes.
LINE = 64


def as_array(value: Any, path: str = "") -> Array:
    """Return a read-only array with the memory of a JAX array, once that has been computed.

    Args:
      value: A JAX array, all of which this process can see. One of another device is copied.
      path: The name of the leaf, for errors.

    Raises:
      LeafTypeError: It is traced by a transformation, a key, or no array.
    """
    if isinstance(value, jax.core.Tracer):
        raise LeafTypeError(
            f"{label(path)} is traced by a JAX transformation, such as jit, grad or vmap, so "
            "it has no value yet. In the traced function call mpistrat.jax.all_reduce, "
            "all_gather or broadcast; all other calls of mpistrat belong outside of it."
        )
    if is_scalar(value):  # a number of Python's that JAX has given a dtype
        return np.asarray(value, getattr(value, "dtype", None))
    if not isinstance(value, jax.Array):
        raise LeafTypeError(
            f"{label(path)} is {value!r:.60} ({type(value).__name__}); expected an array or a "
            "number."
        )
    if is_key(value):
        raise LeafTypeError(
            f"{label(path)} has dtype {value.dtype}, which NumPy does not know. Give "
            "jax.random.key_data(key); mpistrat.jax.broadcast and replicate take keys as they are."
        )
    try:
        return np.asarray(value)
    except jax.errors.JaxRuntimeError:  # an error of the computation, not of the memory
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise LeafTypeError(
            f"{label(path)} is a JAX array that NumPy cannot see: {error}"
        ) from error


def convert_like(result: Array, like: Any) -> Any:
    """Return a JAX array with the memory of `result`, which nobody may write to any more.

    Args:
      result: An array; the JAX array has a copy where its memory begins within a line of 64 bytes,
        or with 64-bit numbers that JAX has not been told to keep.
      like: The input; if it is a JAX array, the result is on its device.
    """
    return place_results([result], [like])[0]


def place_results(results: list[Any], likes: list[Any]) -> list[Any]:
    """Return several JAX arrays at once; see `as_given`."""
    devices = [_find_device(like) for like in likes]
    if any(device is not None for device in devices):
        pairs = zip(results, devices, strict=True)
        return [jax.device_put(result, device, may_alias=True) for result, device in pairs]
    jax_arrays: list[Any] = jax.device_put(results, may_alias=True)
    return jax_arrays


def _find_device(like: Any) -> Any:
    """Return the device of a result; None if JAX chooses it."""
    if not (isinstance(like, jax.Array) and getattr(like, "committed", False)):
        return None
    devices = like.devices()
    return next(iter(devices)) if len(devices) == 1 else None


def is_key(value: Any) -> bool:
    """Return whether `value` is an array of keys, as ``jax.random.key`` makes them."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def as_buffer(array: Array) -> Any:
    """Return the array itself: the program writes to it, and no JAX array allows that."""
    return array


def parts_of(value: Any) -> None:
    """Raise for a JAX array in a checkpoint, since it cannot take restored values.

    Args:
      value: An object that a checkpoint was given.

    Raises:
      StructureError: It is a JAX array.
    """
    if isinstance(value, jax.Array):
        raise StructureError(
            f"a checkpoint was given a JAX array ({value.dtype}{list(value.shape)}), which cannot "
            "be written to when it is restored. Give mpistrat.jax.TrainState(tree)."
        )


def spec(value: Any, path: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of a JAX array or a ``ShapeDtypeStruct``, traced or not.

    Args:
      value: The array.
      path: The name of the leaf, for errors.

    Raises:
      LeafTypeError: It has none.
    """
    try:
        return np.dtype(value.dtype), tuple(int(size) for size in value.shape)
    except (AttributeError, TypeError, ValueError):
        raise LeafTypeError(
            f"{label(path)} is {value!r:.60} ({type(value).__name__}), without dtype and shape of "
            "NumPy's."
        ) from None
