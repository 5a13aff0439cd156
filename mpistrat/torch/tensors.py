"""Conversion of tensors: inputs become NumPy views, results tensors.

`mpistrat.arrays` imports this module when it meets the first tensor.
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
    "convert_like",
    "in_storage_order",
    "parts_of",
    "rows_of",
    "spec",
    "tensor_of",
]

_BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_HOST_ADVICE = "value.cpu(), or take mpistrat.torch.all_reduce or all_gather with stage='host'"
# By identity: tensors of `Strategy.buffers`, and the arrays that are known by theirs.
_OF_BUFFERS: dict[int, tuple[weakref.ref[Any], Array]] = {}


def as_array(value: Any, path: str = "") -> Array:
    """Return an array with the memory of a tensor.

    Args:
      value: A dense tensor of the CPU that does not require grad.
      path: The name of the leaf, for errors.

    Raises:
      LeafTypeError: It is anything else, or of a dtype that NumPy does not know.
    """
    buffer_entry, tensor = _OF_BUFFERS.get(id(value)), value
    if buffer_entry is not None and buffer_entry[0]() is value:
        array = buffer_entry[1]
        if tensor.data_ptr() == array.ctypes.data and tuple(tensor.shape) == array.shape:
            return array
    _check(value, path)
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


def _check(value: Any, path: str) -> None:
    """Raise LeafTypeError unless a value is a tensor that is in the memory of this process."""
    if not isinstance(value, torch.Tensor):
        advice = "model.state_dict(), or mpistrat.torch.replicate(model)"
        named = advice if isinstance(value, torch.nn.Module) else "a tensor"
        raise LeafTypeError(f"{label(path)} is {type(value).__name__} of torch; give {named}.")
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
      like: What went in; a tensor.
    """
    return tensor_of(np.asarray(result))


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor with the memory of an array that is writable; else one with a copy."""
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def in_storage_order(tensor: Any) -> tuple[Any, list[int]]:
    """Return a tensor with its dimensions in the order of memory, and the way back.

    Args:
      tensor: One that is in memory without gaps, in whatever order of dimensions.

    Returns:
      The tensor, contiguous, and the order to `permute` it by to have the one that was given.
    """
    order = sorted(range(tensor.ndim), key=lambda i: -tensor.stride(i))
    if tensor.is_contiguous() or not tensor.permute(order).is_contiguous():
        order = list(range(tensor.ndim))
    return tensor.permute(order).contiguous(), [order.index(i) for i in range(tensor.ndim)]


def as_buffer(array: Array) -> Any:
    """Return a tensor with the memory of an array, which `as_array` gives for it.

    Args:
      array: One of a block that is known by its identity; writable, C-ordered.
    """
    tensor = tensor_of(array)
    key = id(tensor)
    _OF_BUFFERS[key] = (weakref.ref(tensor, lambda _: _OF_BUFFERS.pop(key, None)), array)
    return tensor


@functools.lru_cache(maxsize=64)
def _dtype(dtype: torch.dtype) -> np.dtype[Any]:
    if dtype is torch.bfloat16:
        return _BFLOAT16
    numpy_dtype: np.dtype[Any] = torch.empty(0, dtype=dtype).numpy().dtype
    return numpy_dtype


def spec(value: Any, path: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of a tensor, wherever it lies; it may require grad.

    Args:
      value: The tensor.
      path: The name of the leaf, for errors.

    Raises:
      LeafTypeError: It is not a tensor, or of a dtype that NumPy does not know.
    """
    if not isinstance(value, torch.Tensor):
        _check(value, path)
    try:
        return _dtype(value.dtype), tuple(value.shape)
    except (TypeError, RuntimeError) as error:
        raise LeafTypeError(
            f"{label(path)} has dtype {value.dtype}, which cannot be sent between ranks."
        ) from error
