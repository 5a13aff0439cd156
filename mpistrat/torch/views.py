"""The memory of tensors, as the backend of torch.distributed moves and reduces it."""

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
    "check_size_and_dtype",
    "convert_dtype",
    "copy_back",
    "count_bytes_per_rank",
    "count_elements_per_rank",
    "describe_tensor",
    "describe_tensors",
    "detach_cpu_tensors",
    "get_address",
    "make_contiguous",
    "unpack_bytes",
    "view_bytes",
    "view_numbers",
]

Tensors = Sequence[torch.Tensor]


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return dtype and shape in words, as texts of calls show them.

    Example:
      >>> describe_tensor(torch.zeros(2, 3))
      'float32[2,3]'
    """
    return f"{str(tensor.dtype)[6:]}[{','.join(map(str, tensor.shape))}]"


def describe_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Return dtypes and shapes in words; many equal ones appear once, with their number."""
    texts = [describe_tensor(tensor) for tensor in tensors]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} x {texts[0]}"
    return ", ".join(texts)


def detach_cpu_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors detached from autograd.

    Raises:
      LeafTypeError: A tensor is not on the CPU, or has another layout than torch.strided.
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
    """Return whether the elements of a tensor are its memory, in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def make_contiguous(
    tensors: Iterable[torch.Tensor], needs_contents: bool = True
) -> list[torch.Tensor]:
    """Return tensors in C order: the given ones, or new ones of the same shapes.

    Args:
      tensors: Results of `detach_cpu_tensors`.
      needs_contents: Whether new tensors get the contents.

    Raises:
      LeafTypeError: A tensor has no memory.
    """
    buffers = []
    for tensor in tensors:
        get_address(tensor)
        if is_plain(tensor):
            buffers.append(tensor)
        elif needs_contents:
            buffers.append(tensor.resolve_conj().resolve_neg().contiguous())
        else:
            buffers.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    return buffers


def get_address(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a tensor.

    Raises:
      LeafTypeError: The tensor has no memory. To read there would end the process.
    """
    try:
        address = int(tensor.data_ptr())
    except Exception:  # within torch.func, and of a FakeTensor where warnings are errors
        address = 0
    if not address and tensor.numel():
        raise LeafTypeError(
            f"{describe_tensor(tensor)}, a {type(tensor).__name__}, has no memory of its own that "
            "could be sent: it stands for other tensors or for none (as DTensor, FakeTensor and "
            "those of torch.func do), or its storage was freed. Give the tensor that it stands "
            "for, such as to_local()."
        )
    return address


def copy_back(tensors: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
    """Copy the contents of buffers into the tensors that `make_contiguous` made them for."""
    with torch.inference_mode():  # the only mode in which inference tensors are writable
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if tensor is not buffer:
                tensor.copy_(buffer)


def view_bytes(buffer: torch.Tensor) -> Array:
    """Return the memory of a C-ordered tensor of any dtype as an array of uint8."""
    if type(buffer) is torch.Tensor:
        return np.asarray(_Memory(buffer))
    # A tensor of up to one element may have strides with which torch makes no view of its bytes.
    memory: Array = buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8).numpy()
    return memory


@final
class _Memory:
    """The bytes of a C-ordered tensor, through NumPy's array interface.

    After ``Tensor.numpy()`` the memory cannot be resized, which FullyShardedDataParallel does.
    """

    def __init__(self, buffer: torch.Tensor):
        """Keep the tensor alive."""
        self._tensor = buffer
        self.__array_interface__ = {
            "data": (get_address(buffer), False),
            "shape": (buffer.numel() * buffer.element_size(),),
            "typestr": "|u1",
            "version": 3,
        }


@functools.cache
def convert_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the NumPy dtype of a dtype of torch.

    Raises:
      TypeError: NumPy does not know it.
    """
    numpy_dtype: np.dtype[Any] = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return numpy_dtype


def view_numbers(buffer: torch.Tensor) -> tuple[Array, torch.Tensor]:
    """Return a C-ordered tensor as an array that can be reduced, and the tensor that holds it.

    bool is reduced as uint8, and bfloat16, which NumPy does not know, as a float32 copy.

    Raises:
      LeafTypeError: NumPy does not know the dtype.
    """
    if buffer.dtype is torch.bfloat16:
        buffer = buffer.float()
    try:
        dtype = np.dtype(np.uint8) if buffer.dtype is torch.bool else convert_dtype(buffer.dtype)
    except TypeError as error:
        raise LeafTypeError(
            f"{describe_tensor(buffer)} cannot be reduced, as NumPy does not know its dtype: "
            f"{error}. Reduce tensor.float(), or gather the tensors, which takes every dtype."
        ) from error
    return view_bytes(buffer).view(dtype).reshape(buffer.shape), buffer


def check_size_and_dtype(
    expected_nbytes: int, dtype: torch.dtype, rank: int, tensor: torch.Tensor
) -> None:
    """Raise ValueError, naming a rank, unless a tensor has the expected size and dtype."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes != expected_nbytes or tensor.dtype is not dtype:
        raise ValueError(
            f"rank {rank}: {describe_tensor(tensor)} has {nbytes} bytes, and the other side of "
            f"this call has {expected_nbytes} of {str(dtype)[6:]} for it. Tensors that stand for "
            "each other must have the same size and dtype."
        )


def unpack_bytes(
    packed_bytes: Array, counts: Sequence[int], tensors: Sequence[torch.Tensor]
) -> None:
    """Copy adjacent blocks of bytes, one for each tensor, into the tensors."""
    start = 0
    for count, tensor in zip(counts, tensors, strict=True):
        view_bytes(tensor)[...] = packed_bytes[start : start + count]
        start += count


def count_elements_per_rank(rank_count: int, tensors: Tensors) -> list[int]:
    """Return the number of elements for each rank: of its tensor, or of its part of the only one.

    Raises:
      ValueError: The tensors are not one for each rank, nor one that can be split evenly.
    """
    counts = [tensor.numel() for tensor in tensors]
    if len(tensors) == 1 and counts[0] % rank_count == 0:
        return [counts[0] // rank_count] * rank_count
    if len(tensors) != rank_count:
        raise ValueError(
            f"{describe_tensors(tensors)} cannot be split evenly among {rank_count} ranks."
        )
    return counts


def count_bytes_per_rank(rank_count: int, tensor: torch.Tensor, splits: list[int]) -> list[int]:
    """Return the number of bytes of a tensor for each rank."""
    row_count = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if row_count % rank_count:
            raise ValueError(
                f"{describe_tensor(tensor)} cannot be split evenly among {rank_count} ranks."
            )
        splits = [row_count // rank_count] * rank_count
    if len(splits) != rank_count or sum(splits) != row_count:
        raise ValueError(
            f"splits {splits} are not {rank_count} numbers that add up to {row_count} rows."
        )
    row_nbytes = tensor.numel() * tensor.element_size() // row_count if row_count else 0
    return [count * row_nbytes for count in splits]
