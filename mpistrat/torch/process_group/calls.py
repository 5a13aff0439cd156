"""The collective calls of torch.distributed, each a check and what moves after it.

They run where `mpistrat.torch.process_group.channel` lets them. Tensors are C-ordered and of the
CPU by then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.allreduce import AllReduce
from mpistrat.collectives.dtypes import wire_type
from mpistrat.collectives.plan import PlanOptions, ReductionInputs, ReductionPlan
from mpistrat.errors import LeafTypeError
from mpistrat.kernels.loops import fold_rows
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.handshake import Lockstep, digest_of
from mpistrat.torch.process_group.channel import GroupChannel
from mpistrat.torch.views import address_of, bytes_of, deal, dtype_of, numbers_of

__all__ = [
    "SmallReduction",
    "all_gather",
    "all_gather_apart",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "op_name",
    "rides",
    "scatter",
]

_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.MEAN,
    "PRODUCT": ReduceOp.PROD,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
}
# What adding, multiplying and so on mean for bool: what torch does with NCCL.
_OF_BOOLS = {"SUM": "MAX", "PRODUCT": "MIN", "BAND": "MIN", "BOR": "MAX"}
# What is reduced where it came, if it is small.
_UFUNCS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
}
_RIDES = {torch.float32, torch.float64, torch.int32, torch.int64}
_BITWISE: dict[str, np.ufunc] = {
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def op_name(op: Any) -> str:
    """Return the name of an operation of torch, such as ``"SUM"``.

    Raises:
      NotImplementedError: The operation is a scaled sum, which torch has for GPUs only.
    """
    name: str = getattr(op, "op", op).name
    if name not in _OPS and name not in _BITWISE:
        supported_names = ", ".join([*_OPS, *_BITWISE])
        raise NotImplementedError(
            f"the backend 'mpistrat' has no ReduceOp.{name}. It has {supported_names}; scale "
            "before or after."
        )
    return name


def barrier(channel: GroupChannel, text: str) -> None:
    """Wait for all ranks."""
    channel.lockstep.handshake(text)


def all_reduce(channel: GroupChannel, text: str, op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Reduce each tensor over all ranks, in place."""
    kinds = {_kind(t) for t in tensors}
    if len(kinds) > 1:
        for t in tensors:
            all_reduce(channel, f"{text}, one by one", op, [t])
        return
    if kinds == {"bool"}:
        op = _OF_BOOLS.get(op, op)
    if op == "AVG" and kinds == {"integer"}:
        all_reduce(channel, text, "SUM", tensors)
        for t in tensors:
            _divide_integers(numbers_of(t)[0], channel.comm.size)
        return
    if op in _BITWISE:
        _reduce_bits(channel, text, op, tensors)
        return
    reduce_op = _OPS[op]
    if len(tensors) == 1 and rides(channel, op, tensors[0]):
        SmallReduction(channel, text, op, tensors[0]).reduce(tensors[0])
        return
    with channel.lockstep.preparing(text):
        if op == "AVG":
            _refuse_bools(tensors)
        array_room_pairs = [numbers_of(tensor) for tensor in tensors]
        arrays = [array for array, _ in array_room_pairs]
        dtypes = [wire_type(reduce_op, array.dtype) for array in arrays]
        shapes = [array.shape for array in arrays]
        plan = ReductionPlan(text, reduce_op, dtypes, shapes, PlanOptions(has_equal_weights=True))
    AllReduce(channel.reducer, plan)(ReductionInputs(arrays, outs=arrays))
    for tensor, (_, room) in zip(tensors, array_room_pairs, strict=True):
        if room is not tensor:
            tensor.copy_(room)


def rides(channel: GroupChannel, op: str, tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is reduced from what is sent with the check."""
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.dtype in _RIDES and op in _UFUNCS and channel.lockstep.fits(nbytes)


@final
class SmallReduction:
    """The all-reduce of one small tensor of a dtype and shape, which is sent with the check.

    Args:
      channel: Makes the call.
      text: The call in words; equal on all ranks.
      op: The name of the operation.
      tensor: One such tensor.

    Attributes:
      text: As the argument.
    """

    def __init__(self, channel: GroupChannel, text: str, op: str, tensor: torch.Tensor):
        """Call nothing yet."""
        dtype, lockstep = dtype_of(tensor.dtype), channel.lockstep
        self.text, self._digest = text, digest_of(text)
        self._handshake, self._refuse = lockstep.handshake, lockstep.refuse
        self._nbytes = tensor.numel() * dtype.itemsize
        self._ufunc = _UFUNCS[op]
        self._rows = [row[: self._nbytes].view(dtype) for row in lockstep.received]
        self._total = np.empty(tensor.numel(), dtype)
        self._total_address = self._total.ctypes.data

    def reduce(self, tensor: torch.Tensor) -> None:
        """Reduce a tensor in place, in rank order, in one exchange. Collective.

        Args:
          tensor: C-ordered.
        """
        # Its address, since arrays over its memory take longer than all the rest.
        nbytes = self._nbytes
        try:
            address = address_of(tensor)
        except Exception as error:
            self._refuse(self.text, error)
        payload = ctypes.string_at(address, nbytes)
        self._handshake(self.text, payload, digest=self._digest)
        quiet().run(fold_rows, self._ufunc, self._rows, self._total)
        ctypes.memmove(address, self._total_address, nbytes)


def _kind(tensor: torch.Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() or tensor.is_complex() else "integer"


def _divide_integers(sums: Array, count: int) -> None:
    """Divide integers in place, rounded towards 0, as NCCL does for `ReduceOp.AVG`."""
    if count > np.iinfo(sums.dtype).max:
        sums[...] = 0  # no sum in this dtype is as large; of -128, 128 ranks have -1
        return
    remainders = np.fmod(sums, sums.dtype.type(count))  # with the sign of the sum
    np.floor_divide(sums - remainders, sums.dtype.type(count), out=sums)


def _refuse_bools(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype is torch.bool:
            raise LeafTypeError("ReduceOp.AVG wants numbers, got torch.bool. Use BOR or BAND.")


def _reduce_bits(
    channel: GroupChannel, text: str, op: str, tensors: Sequence[torch.Tensor]
) -> None:
    with channel.lockstep.preparing(text):
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                raise LeafTypeError(f"ReduceOp.{op} wants integers or bool, got {tensor.dtype}.")
    barrier(channel, text)
    ufunc = _BITWISE[op]
    with aborting(channel.lockstep, text):
        for tensor in tensors:
            local_bytes = bytes_of(tensor)
            rows = np.empty((channel.comm.size, local_bytes.size), np.uint8)
            channel.comm.allgather(local_bytes, rows)
            ufunc.reduce(rows, axis=0, out=local_bytes)


def _copy_if_shared(local_bytes: Array, destination: Array | None) -> Array:
    """Return the local bytes, or a copy if results go into the same memory."""
    return (
        local_bytes.copy()
        if destination is not None and np.may_share_memory(local_bytes, destination)
        else local_bytes
    )


def broadcast(channel: GroupChannel, text: str, tensor: torch.Tensor, root: int) -> None:
    """Copy the tensor of rank `root` to all; a small one is sent with the check."""
    buffer = bytes_of(tensor)
    lockstep = channel.lockstep
    if lockstep.fits(buffer.size):
        rows = lockstep.gather_payloads(text, buffer.tobytes())
        buffer[...] = np.frombuffer(rows[root], np.uint8)
        return
    barrier(channel, text)
    with aborting(lockstep, text):
        channel.comm.bcast(buffer, root)


def all_gather(
    channel: GroupChannel, text: str, send: torch.Tensor, counts: Sequence[int], destination: Array
) -> None:
    """Put every rank's tensor into `destination`, rank r giving ``counts[r]`` bytes."""
    local_bytes = bytes_of(send)
    lockstep = channel.lockstep
    if lockstep.fits(max(counts)) and len(set(counts)) == 1:
        rows = lockstep.gather_payloads(text, local_bytes.tobytes())
        destination[...] = np.frombuffer(b"".join(rows), np.uint8)
        return
    barrier(channel, text)
    with aborting(lockstep, text):
        local_bytes = _copy_if_shared(local_bytes, destination)
        if len(set(counts)) == 1:
            channel.comm.allgather(local_bytes, destination)
        else:
            channel.comm.allgatherv(local_bytes, destination, counts)


def all_gather_apart(
    channel: GroupChannel,
    text: str,
    send: torch.Tensor,
    counts: Sequence[int],
    out: Sequence[torch.Tensor],
) -> None:
    """Do what `all_gather` does, into a tensor for each rank."""
    room = np.empty(sum(counts), np.uint8)
    all_gather(channel, text, send, counts, room)
    deal(room, counts, out)


def gather(
    channel: GroupChannel, text: str, send: torch.Tensor, destination: Array | None, root: int
) -> None:
    """Put every rank's tensor, all of one size, into `destination` of `root`."""
    local_bytes = _copy_if_shared(bytes_of(send), destination)
    barrier(channel, text)
    with aborting(channel.lockstep, text):
        channel.comm.gatherv(local_bytes, destination, [local_bytes.size] * channel.comm.size, root)


def all_to_all(
    channel: GroupChannel,
    text: str,
    send: Array,
    send_counts: list[int],
    recv: Array,
    recv_counts: list[int],
) -> None:
    """Send ``send_counts[r]`` bytes to rank r, and receive ``recv_counts[r]``.

    The counts of all ranks are compared first.

    Raises:
      ValueError: On all ranks: a rank expects another number of bytes than its peer sends.
    """
    rows = _gather_counts(channel.lockstep, text, send_counts, recv_counts)
    size = channel.comm.size
    for giver in range(size):
        for taker in range(size):
            sent_nbytes, expected_nbytes = int(rows[giver, 0, taker]), int(rows[taker, 1, giver])
            if sent_nbytes != expected_nbytes:
                ranks = channel.lockstep.ranks
                raise ValueError(
                    f"{text}: rank {ranks[giver]} gives {sent_nbytes} bytes to rank "
                    f"{ranks[taker]}, which wants {expected_nbytes}. Each output split must be "
                    "what the other rank's input split says."
                )
    with aborting(channel.lockstep, text):
        channel.comm.alltoallv(_copy_if_shared(send, recv), recv, send_counts, recv_counts)


def scatter(channel: GroupChannel, text: str, send: Array | None, recv: Array, root: int) -> None:
    """Give each rank its piece of the array of `root`; all pieces have one size."""
    barrier(channel, text)
    size, empty_bytes = channel.comm.size, np.empty(0, np.uint8)
    send_counts = [0 if send is None else recv.size] * size
    recv_counts = [recv.size if rank == root else 0 for rank in range(size)]
    with aborting(channel.lockstep, text):
        sent_bytes = empty_bytes if send is None else _copy_if_shared(send, recv)
        channel.comm.alltoallv(sent_bytes, recv, send_counts, recv_counts)


def _gather_counts(
    lockstep: Lockstep, text: str, send_counts: list[int], recv_counts: list[int]
) -> Array:
    local_counts = np.array([send_counts, recv_counts], np.int64).tobytes()
    payloads = lockstep.gather_payloads(text, local_counts)
    return np.array([np.frombuffer(row, np.int64).reshape(2, -1) for row in payloads])
