"""Conversion of tensors: inputs become NumPy views, and results become tensors.

This module is the `ArrayKind` of PyTorch: `mpistrat.arrays` imports it when it meets the first
tensor.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import torch

from mpistrat.arrays import Array, is_bfloat16, label
from mpistrat.errors import LeafTypeError
from mpistrat.torch.items import rows_of
from mpistrat.torch.states import parts_of

__all__ = [
    "as_array",
    "as_buffer",
    "as_tensor",
    "convert_like",
    "parts_of",
    "permute_to_storage_order",
    "rows_of",
    "spec",
]

_BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_HOST_ADVICE = "value.cpu(), or take mpistrat.torch.all_reduce or all_gather with stage='host'"
# Tensors of `Strategy.buffers` by identity, each with the array that has its memory.
_ARRAYS_OF_BUFFERS: dict[int, tuple[weakref.ref[Any], Array]] = {}


def as_array(value: Any, path: str = "") -> Array:
    """Return an array with the memory of a tensor.

    Args:
      value: A dense tensor of the CPU that does not require grad.
      path: The name of the leaf, for errors.

    Raises:
      LeafTypeError: `value` is something else, or has a dtype that NumPy does not know.
    """
    buffer_entry, tensor = _ARRAYS_OF_BUFFERS.get(id(value)), value
    if buffer_entry is not None and buffer_entry[0]() is value:
        array = buffer_entry[1]
        if tensor.data_ptr() == array.ctypes.data and tuple(tensor.shape) == array.shape:
            return array
    _check_in_memory(value, path)
    if value.requires_grad:
        raise LeafTypeError(
            f"{label(path)} is a tensor that requires grad, and no gradient passes here. Give "
            "value.detach(), which has the same memory; mpistrat.torch.all_reduce and all_gather "
            "pass gradients; a whole model is for mpistrat.torch.replicate(model)."
        )
    resolved = value.resolve_conj().resolve_neg()
    try:
        if resolved.dtype is torch.bfloat16:
            array = resolved.view(torch.uint16).numpy().view(_BFLOAT16)
        else:
            array = np.asarray(resolved.numpy())
    except (TypeError, RuntimeError, ValueError) as error:
        raise LeafTypeError(
            f"{label(path)} is a tensor of {value.dtype} that NumPy cannot see: {error}. Give "
            "it in another dtype, such as value.float()."
        ) from error
    return array


def _check_in_memory(value: object, path: str) -> None:
    """Raise LeafTypeError unless a value is a tensor that is in the memory of this process."""
    if not isinstance(value, torch.Tensor):
        advice = "model.state_dict(), or mpistrat.torch.replicate(model)"
        suggestion = advice if isinstance(value, torch.nn.Module) else "a tensor"
        raise LeafTypeError(f"{label(path)} is {type(value).__name__} of torch; give {suggestion}.")
    if value.layout is not torch.strided:
        raise LeafTypeError(
            f"{label(path)} is a tensor of layout {value.layout}; give value.to_dense(), or of "
            "rows mpistrat.IndexedSlices(values, indices)."
        )
    if value.device.type != "cpu":
        problem = "has no contents" if value.is_meta else "is not in the memory that ranks see"
        raise LeafTypeError(
            f"{label(path)} is a tensor of device {value.device}, which {problem}. Give "
            f"{'one with contents' if value.is_meta else _HOST_ADVICE}."
        )


def convert_like(result: Any, like: Any) -> Any:
    """Return a tensor with the memory of `result`.

    Args:
      result: An array; if it is read-only, the tensor has a copy.
      like: The input; a tensor.
    """
    return as_tensor(np.asarray(result))


def as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor with the memory of an array that is writable; else one with a copy."""
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def permute_to_storage_order(tensor: torch.Tensor) -> tuple[Any, list[int]]:
    """Return a tensor with its dimensions in the order of memory, and the order to restore it.

    Args:
      tensor: A tensor without gaps in its memory, in any order of dimensions.

    Returns:
      The contiguous tensor, and the order by which `permute` gives the original one.
    """
    order = sorted(range(tensor.ndim), key=lambda i: -tensor.stride(i))
    if tensor.is_contiguous() or not tensor.permute(order).is_contiguous():
        order = list(range(tensor.ndim))
    return tensor.permute(order).contiguous(), [order.index(i) for i in range(tensor.ndim)]


def as_buffer(array: Array) -> Any:
    """Return a tensor with the memory of an array; `as_array` returns that very array for it.

    Args:
      array: An array of a buffer that is known by its identity; writable, in C order.
    """
    tensor = as_tensor(array)
    key = id(tensor)
    _ARRAYS_OF_BUFFERS[key] = (
        weakref.ref(tensor, lambda _: _ARRAYS_OF_BUFFERS.pop(key, None)),
        array,
    )
    return tensor


@functools.lru_cache(maxsize=64)
def _convert_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    if dtype is torch.bfloat16:
        return _BFLOAT16
    numpy_dtype: np.dtype[Any] = torch.empty(0, dtype=dtype).numpy().dtype
    return numpy_dtype


def spec(value: Any, path: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of a tensor of any device; it may require grad.

    Args:
      value: The tensor.
      path: The name of the leaf, for errors.

    Raises:
      LeafTypeError: `value` is not a tensor, or has a dtype that NumPy does not know.
    """
    if not isinstance(value, torch.Tensor):
        _check_in_memory(value, path)
    try:
        return _convert_dtype(value.dtype), tuple(value.shape)
    except (TypeError, RuntimeError) as error:
        raise LeafTypeError(
            f"{label(path)} has dtype {value.dtype}, which cannot be sent between ranks."
        ) from error
