"""The collective calls of torch.distributed: a handshake, and then the transfer.

`mpistrat.torch.process_group.channel` decides in which thread they run. Tensors are on the CPU and
in C order. ``reduce`` and ``reduce_scatter`` are all-reduces of which a rank keeps a part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.allreduce import AllReduce
from mpistrat.collectives.dtypes import choose_wire_type
from mpistrat.collectives.plan import PlanOptions, ReductionInputs, ReductionPlan
from mpistrat.errors import LeafTypeError
from mpistrat.kernels.loops import fold_rows
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.handshake import Lockstep, digest_call
from mpistrat.torch.process_group.channel import GroupChannel
from mpistrat.torch.views import convert_dtype, get_address, unpack_bytes, view_bytes, view_numbers

__all__ = [
    "SmallReduction",
    "all_gather",
    "all_gather_to_tensors",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "fits_handshake",
    "gather",
    "get_op_name",
    "scatter",
]

_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.MEAN,
    "PRODUCT": ReduceOp.PROD,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
}
# The operations for bool, as torch defines them for NCCL.
_BOOL_OPS = {"SUM": "MAX", "PRODUCT": "MIN", "BAND": "MIN", "BOR": "MAX"}
# The operations that reduce the payloads of a handshake.
_UFUNCS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
}
_SMALL_DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64}
_BITWISE: dict[str, np.ufunc] = {
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def get_op_name(op: Any) -> str:
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
    dtype_classes = {_classify_dtype(t) for t in tensors}
    if len(dtype_classes) > 1:
        for t in tensors:
            all_reduce(channel, f"{text}, one by one", op, [t])
        return
    if dtype_classes == {"bool"}:
        op = _BOOL_OPS.get(op, op)
    if op == "AVG" and dtype_classes == {"integer"}:
        all_reduce(channel, text, "SUM", tensors)
        for t in tensors:
            _divide_integers(view_numbers(t)[0], channel.comm.size)
        return
    if op in _BITWISE:
        _reduce_bits(channel, text, op, tensors)
        return
    reduce_op = _OPS[op]
    if len(tensors) == 1 and fits_handshake(channel, op, tensors[0]):
        SmallReduction(channel, text, op, tensors[0]).reduce(tensors[0])
        return
    with channel.lockstep.validating_collectively(text):
        if op == "AVG":
            _check_no_bools(tensors)
        array_room_pairs = [view_numbers(tensor) for tensor in tensors]
        arrays = [array for array, _ in array_room_pairs]
        dtypes = [choose_wire_type(reduce_op, array.dtype) for array in arrays]
        shapes = [array.shape for array in arrays]
        plan = ReductionPlan(text, reduce_op, dtypes, shapes, PlanOptions(has_equal_weights=True))
    AllReduce(channel.reducer, plan)(ReductionInputs(arrays, outs=arrays))
    for tensor, (_, room) in zip(tensors, array_room_pairs, strict=True):
        if room is not tensor:
            tensor.copy_(room)


def fits_handshake(channel: GroupChannel, op: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is small enough to be sent with the handshake of its reduction."""
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.dtype in _SMALL_DTYPES and op in _UFUNCS and channel.lockstep.can_carry(nbytes)


@final
class SmallReduction:
    """The all-reduce of a small tensor of one dtype and shape, which the handshake carries.

    Args:
      channel: Makes the call.
      text: The call in words; equal on all ranks.
      op: The name of the operation.
      tensor: A tensor of this dtype and shape.

    Attributes:
      text: As the argument.
    """

    def __init__(self, channel: GroupChannel, text: str, op: str, tensor: torch.Tensor):
        """Prepare the call."""
        dtype, lockstep = convert_dtype(tensor.dtype), channel.lockstep
        self.text, self._digest = text, digest_call(text)
        self._handshake, self._refuse_call = lockstep.handshake, lockstep.fail_collectively
        self._nbytes = tensor.numel() * dtype.itemsize
        self._ufunc = _UFUNCS[op]
        self._rows = [row[: self._nbytes].view(dtype) for row in lockstep.received_payloads]
        self._total = np.empty(tensor.numel(), dtype)
        self._total_address = self._total.ctypes.data

    def reduce(self, tensor: torch.Tensor) -> None:
        """Reduce a tensor in place, in rank order, in one exchange. Collective.

        Args:
          tensor: A tensor in C order.
        """
        # An array over the memory of the tensor would take longer than all the rest.
        nbytes = self._nbytes
        try:
            memory_address = get_address(tensor)
        except Exception as error:
            self._refuse_call(self.text, error)
        payload = ctypes.string_at(memory_address, nbytes)
        self._handshake(self.text, payload, digest=self._digest)
        quiet().run(fold_rows, self._ufunc, self._rows, self._total)
        ctypes.memmove(memory_address, self._total_address, nbytes)


def _classify_dtype(tensor: torch.Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() or tensor.is_complex() else "integer"


def _divide_integers(sums: Array, count: int) -> None:
    """Divide integers in place, rounding towards 0, as NCCL does for `ReduceOp.AVG`."""
    if count > np.iinfo(sums.dtype).max:
        sums[...] = 0  # no sum in this dtype is as large; of -128, 128 ranks have -1
        return
    remainders = np.fmod(sums, sums.dtype.type(count))  # with the sign of the sum
    np.floor_divide(sums - remainders, sums.dtype.type(count), out=sums)


def _check_no_bools(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype is torch.bool:
            raise LeafTypeError("ReduceOp.AVG wants numbers, got torch.bool. Use BOR or BAND.")


def _reduce_bits(
    channel: GroupChannel, text: str, op: str, tensors: Sequence[torch.Tensor]
) -> None:
    with channel.lockstep.validating_collectively(text):
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                raise LeafTypeError(f"ReduceOp.{op} wants integers or bool, got {tensor.dtype}.")
    barrier(channel, text)
    ufunc = _BITWISE[op]
    with aborting(channel.lockstep, text):
        for tensor in tensors:
            local_bytes = view_bytes(tensor)
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
    """Copy the tensor of rank `root` to all ranks; the handshake carries a small one."""
    buffer = view_bytes(tensor)
    lockstep = channel.lockstep
    if lockstep.can_carry(buffer.size):
        payloads = lockstep.gather_payloads(text, buffer.tobytes())
        buffer[...] = np.frombuffer(payloads[root], np.uint8)
        return
    barrier(channel, text)
    with aborting(lockstep, text):
        channel.comm.bcast(buffer, root)


def all_gather(
    channel: GroupChannel, text: str, send: torch.Tensor, counts: Sequence[int], destination: Array
) -> None:
    """Gather the tensors of all ranks into `destination`: ``counts[r]`` bytes of rank r."""
    local_bytes = view_bytes(send)
    lockstep = channel.lockstep
    if lockstep.can_carry(max(counts)) and len(set(counts)) == 1:
        payloads = lockstep.gather_payloads(text, local_bytes.tobytes())
        destination[...] = np.frombuffer(b"".join(payloads), np.uint8)
        return
    barrier(channel, text)
    with aborting(lockstep, text):
        local_bytes = _copy_if_shared(local_bytes, destination)
        if len(set(counts)) == 1:
            channel.comm.allgather(local_bytes, destination)
        else:
            channel.comm.allgatherv(local_bytes, destination, counts)


def all_gather_to_tensors(
    channel: GroupChannel,
    text: str,
    send: torch.Tensor,
    counts: Sequence[int],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Gather the tensors of all ranks into one tensor for each rank."""
    packed_bytes = np.empty(sum(counts), np.uint8)
    all_gather(channel, text, send, counts, packed_bytes)
    unpack_bytes(packed_bytes, counts, tensors)


def gather(
    channel: GroupChannel, text: str, send: torch.Tensor, destination: Array | None, root: int
) -> None:
    """Gather the tensors of all ranks, all of one size, into `destination` on rank `root`."""
    local_bytes = _copy_if_shared(view_bytes(send), destination)
    barrier(channel, text)
    with aborting(channel.lockstep, text):
        channel.comm.gatherv(local_bytes, destination, [local_bytes.size] * channel.comm.size, root)


def all_to_all(
    channel: GroupChannel,
    text: str,
    send: Array,
    recv: Array,
    *,
    send_counts: list[int],
    recv_counts: list[int],
) -> None:
    """Send ``send_counts[r]`` bytes to rank r, and receive ``recv_counts[r]``.

    The counts of all ranks are compared first.

    Raises:
      ValueError: On all ranks, if a rank expects another number of bytes than its peer sends.
    """
    counts = _gather_counts(channel.lockstep, text, send_counts, recv_counts)
    rank_count = channel.comm.size
    for sender in range(rank_count):
        for receiver in range(rank_count):
            sent_nbytes, expected_nbytes = (
                int(counts[sender, 0, receiver]),
                int(counts[receiver, 1, sender]),
            )
            if sent_nbytes != expected_nbytes:
                ranks = channel.lockstep.ranks
                raise ValueError(
                    f"{text}: rank {ranks[sender]} gives {sent_nbytes} bytes to rank "
                    f"{ranks[receiver]}, which wants {expected_nbytes}. Each output split must be "
                    "what the other rank's input split says."
                )
    with aborting(channel.lockstep, text):
        channel.comm.alltoallv(_copy_if_shared(send, recv), recv, send_counts, recv_counts)


def scatter(channel: GroupChannel, text: str, send: Array | None, recv: Array, root: int) -> None:
    """Send each rank its part of the array of `root`; all parts have one size."""
    barrier(channel, text)
    rank_count, empty_bytes = channel.comm.size, np.empty(0, np.uint8)
    send_counts = [0 if send is None else recv.size] * rank_count
    recv_counts = [recv.size if rank == root else 0 for rank in range(rank_count)]
    with aborting(channel.lockstep, text):
        sent_bytes = empty_bytes if send is None else _copy_if_shared(send, recv)
        channel.comm.alltoallv(sent_bytes, recv, send_counts, recv_counts)


def _gather_counts(
    lockstep: Lockstep, text: str, send_counts: list[int], recv_counts: list[int]
) -> Array:
    local_counts = np.array([send_counts, recv_counts], np.int64).tobytes()
    payloads = lockstep.gather_payloads(text, local_counts)
    return np.array([np.frombuffer(payload, np.int64).reshape(2, -1) for payload in payloads])
