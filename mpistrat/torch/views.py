"""Tensors of torch as NumPy arrays over the same memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
import torch

from mpistrat.arrays import Array
from mpistrat.errors import LeafTypeError

__all__ = [
    "Tensors",
    "address_of",
    "bytes_of",
    "checked",
    "deal",
    "dtype_of",
    "fits",
    "numbers_of",
    "parts_of",
    "rooms",
    "rows_of",
    "settle",
    "spec",
    "specs",
]

Tensors = Sequence[torch.Tensor]


def spec(tensor: torch.Tensor) -> str:
    """Return dtype and shape in words, as texts of calls show them.

    Example:
      >>> spec(torch.zeros(2, 3))
      'float32[2,3]'
    """
    return f"{str(tensor.dtype)[6:]}[{','.join(map(str, tensor.shape))}]"


def specs(tensors: Sequence[torch.Tensor]) -> str:
    """Return the `spec` of each tensor; many equal ones appear once, with their number."""
    texts = [spec(tensor) for tensor in tensors]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} x {texts[0]}"
    return ", ".join(texts)


def checked(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors outside of autograd, if this backend can move them.

    Raises:
      LeafTypeError: One is not in the memory of the processor, or has another layout.
    """
    detached = []
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise LeafTypeError(
                f"the backend 'mpistrat' moves tensors of the CPU, and this one is on "
                f"{tensor.device}. Move it with .cpu(), or take another backend for that device."
            )
        if tensor.layout is not torch.strided:
            raise LeafTypeError(
                f"the backend 'mpistrat' has no collectives of tensors of layout {tensor.layout}. "
                "Give tensor.to_dense()."
            )
        detached.append(tensor.detach())
    return detached


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its memory, in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def rooms(tensors: Iterable[torch.Tensor], read: bool = True) -> list[torch.Tensor]:
    """Return tensors whose memory is C-ordered: themselves, or others of the same shapes.

    Args:
      tensors: As `checked` returns them.
      read: Whether their contents are needed.

    Raises:
      LeafTypeError: One has no memory.
    """
    buffers = []
    for tensor in tensors:
        address_of(tensor)
        if is_plain(tensor):
            buffers.append(tensor)
        elif read:
            buffers.append(tensor.resolve_conj().resolve_neg().contiguous())
        else:
            buffers.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    return buffers


def address_of(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins.

    Raises:
      LeafTypeError: It has none. To read there would end the process.
    """
    try:
        address = int(tensor.data_ptr())
    except Exception:  # within torch.func, and of a FakeTensor where warnings are errors
        address = 0
    if not address and tensor.numel():
        raise LeafTypeError(
            f"{spec(tensor)}, a {type(tensor).__name__}, has no memory of its own that could be "
            "sent: it stands for other tensors or for none (as DTensor, FakeTensor and those of "
            "torch.func do), or its storage was freed. Give the tensor that it stands for, such as "
            "to_local()."
        )
    return address


def settle(tensors: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
    """Copy the contents of the buffers into the tensors that they stand for."""
    with torch.inference_mode():  # which may write to tensors that were made in it
        for tensor, room in zip(tensors, buffers, strict=True):
            if tensor is not room:
                tensor.copy_(room)


def bytes_of(room: torch.Tensor) -> Array:
    """Return the memory of a C-ordered tensor, whatever its dtype, as uint8."""
    if type(room) is torch.Tensor:
        return np.asarray(_Memory(room))
    # One element, or none, may have any strides, with which torch has no view of its bytes.
    memory: Array = room.as_strided((room.numel(),), (1,)).view(torch.uint8).numpy()
    return memory


@final
class _Memory:
    """The bytes of a C-ordered tensor, as NumPy asks for them.

    ``Tensor.numpy()`` forbids ever after to resize the memory, which FullyShardedDataParallel does.
    """

    def __init__(self, room: torch.Tensor):
        """Hold the tensor."""
        self._room = room
        self.__array_interface__ = {
            "data": (address_of(room), False),
            "shape": (room.numel() * room.element_size(),),
            "typestr": "|u1",
            "version": 3,
        }


@functools.cache
def dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the NumPy dtype of a dtype of torch.

    Raises:
      TypeError: NumPy does not know it.
    """
    numpy_dtype: np.dtype[Any] = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return numpy_dtype


def numbers_of(room: torch.Tensor) -> tuple[Array, torch.Tensor]:
    """Return a C-ordered tensor as an array that can be reduced, and the tensor that holds it.

    bool is reduced as uint8, and bfloat16, which NumPy does not know, as a float32 copy.

    Raises:
      LeafTypeError: It is of another dtype that NumPy does not know.
    """
    if room.dtype is torch.bfloat16:
        room = room.float()
    try:
        dtype = np.dtype(np.uint8) if room.dtype is torch.bool else dtype_of(room.dtype)
    except TypeError as error:
        raise LeafTypeError(
            f"{spec(room)} cannot be reduced, as NumPy does not know its dtype: {error}. Reduce "
            "tensor.float(), or gather the tensors, which takes every dtype."
        ) from error
    return bytes_of(room).view(dtype).reshape(room.shape), room


def fits(expected_nbytes: int, dtype: torch.dtype, rank: int, tensor: torch.Tensor) -> None:
    """Raise ValueError unless a tensor has the bytes and dtype of what it stands for, on a rank."""
    size = tensor.numel() * tensor.element_size()
    if size != expected_nbytes or tensor.dtype is not dtype:
        raise ValueError(
            f"rank {rank}: {spec(tensor)} has {size} bytes, and the other side of this call has "
            f"{expected_nbytes} of {str(dtype)[6:]} for it. Tensors that stand for each other must "
            "have the same size and dtype."
        )


def deal(room: Array, counts: Sequence[int], out: Sequence[torch.Tensor]) -> None:
    """Copy bytes that lie side by side into the tensors that they are for."""
    at = 0
    for count, tensor in zip(counts, out, strict=True):
        bytes_of(tensor)[...] = room[at : at + count]
        at += count


def parts_of(size: int, row: Tensors) -> list[int]:
    """Return how many elements of a row of tensors are for each rank: a tensor, or a part of one.

    Raises:
      ValueError: There are as many neither of tensors nor of parts.
    """
    counts = [tensor.numel() for tensor in row]
    if len(row) == 1 and counts[0] % size == 0:
        return [counts[0] // size] * size
    if len(row) != size:
        raise ValueError(f"{specs(row)} cannot be split evenly among {size} ranks.")
    return counts


def rows_of(size: int, tensor: torch.Tensor, splits: list[int]) -> list[int]:
    """Return how many bytes of a tensor are for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"{spec(tensor)} cannot be split evenly among {size} ranks.")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(f"splits {splits} are not {size} numbers that add up to {rows} rows.")
    row = tensor.numel() * tensor.element_size() // rows if rows else 0
    return [count * row for count in splits]
