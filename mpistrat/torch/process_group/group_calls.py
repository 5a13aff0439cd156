"""The collective methods of a process group, with the signatures that torch.distributed calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from mpistrat.torch.process_group import calls
from mpistrat.torch.process_group.channel import GroupChannel
from mpistrat.torch.process_group.work import CallWork, FinishedWork, convert_timeout
from mpistrat.torch.views import (
    Tensors,
    check_size_and_dtype,
    copy_back,
    count_bytes_per_rank,
    count_elements_per_rank,
    describe_tensor,
    describe_tensors,
    detach_cpu_tensors,
    make_contiguous,
    unpack_bytes,
    view_bytes,
)

__all__ = ["GroupCalls"]

# Torch declares many overloads of each method, and calls only those that are here.
_Base: Any = dist.ProcessGroup

# Tensors in C order.
Buffers: TypeAlias = list[torch.Tensor]

_FINISHED = FinishedWork()
_NO_TIMEOUT, _EXPLICIT_TIMEOUT = timedelta(0), timedelta(1)


class GroupCalls(_Base):
    """The collectives of a group: each turns its arguments into a text and C-ordered tensors.

    Args:
      channel: Makes the calls.
    """

    def __init__(self, channel: GroupChannel):
        """Begin without calls."""
        comm = channel.comm
        super().__init__(comm.rank, comm.size)  # the only constructor for Python
        self.channel = channel
        self._small_reductions: dict[Any, calls.SmallReduction] = {}

    def _call_collective(
        self,
        text: str,
        input_tensors: Tensors,
        output_tensors: Tensors,
        opts: Any,
        collective: Callable[[str, Buffers, Buffers], None],
    ) -> CallWork:
        """Make a collective call of tensors in any order of dimensions.

        Args:
          text: The call in words; equal on all ranks.
          input_tensors: The tensors that are only read.
          output_tensors: The tensors that are written to.
          opts: The options of torch, with `asyncOp` and `timeout`.
          collective: Is called with the text, and the inputs and outputs in C order.
        """
        text = self._add_group_name(text)
        try:
            detached_inputs, detached_outputs = (
                detach_cpu_tensors(input_tensors),
                detach_cpu_tensors(output_tensors),
            )
        except Exception as error:
            self.channel.refuse(text, error)
            raise

        def run() -> None:
            with torch.inference_mode():  # the only mode in which inference tensors are writable
                with self.channel.lockstep.validating_collectively(text):
                    input_buffers, output_buffers = (
                        make_contiguous(detached_inputs),
                        make_contiguous(detached_outputs),
                    )
                collective(text, input_buffers, output_buffers)
                copy_back(detached_outputs, output_buffers)

        is_async, timeout = getattr(opts, "asyncOp", True), getattr(opts, "timeout", _NO_TIMEOUT)
        return self.channel.make_call(
            text, run, list(output_tensors), bool(is_async), convert_timeout(timeout)
        )

    def _add_group_name(self, text: str) -> str:
        return f"{text} in {self.channel.name}" if self.channel.name else text

    def _describe_operation(self, name: str, op: Any, tensors: Tensors) -> tuple[str, str]:
        """Return the name of an operation, and the text of a call that reduces by it."""
        try:
            op_name = calls.get_op_name(op)
        except Exception as error:
            self.channel.refuse(name, error)
            raise
        return op_name, f"{name}({op_name}) of {describe_tensors(tensors)}"

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = getattr(opts, "reduceOp", opts or dist.ReduceOp.SUM)
        is_small_candidate = (
            len(tensors) == 1
            and opts is not None
            and getattr(opts, "timeout", _EXPLICIT_TIMEOUT) < _NO_TIMEOUT
        )
        if is_small_candidate:
            work = self._try_small_reduction(op, tensors[0], opts)
            if work is not None:
                return work
        op_name, text = self._describe_operation("all_reduce", op, tensors)
        channel = self.channel
        if is_small_candidate and calls.fits_handshake(channel, op_name, tensors[0]):
            key = getattr(op, "op", op), tensors[0].dtype, tensors[0].shape
            self._small_reductions[key] = calls.SmallReduction(
                channel, self._add_group_name(text), op_name, tensors[0]
            )
        return self._call_collective(
            text,
            (),
            tensors,
            opts,
            lambda call_text, _, output_tensors: calls.all_reduce(
                channel, call_text, op_name, output_tensors
            ),
        )

    def _try_small_reduction(self, op: Any, tensor: torch.Tensor, opts: Any) -> dist.Work | None:
        """Reduce a small tensor of a dtype and shape that came before; return None for others."""
        small_reduction = self._small_reductions.get(
            (getattr(op, "op", op), tensor.dtype, tensor.shape)
        )
        if (
            small_reduction is None
            or not (tensor.is_cpu and tensor.is_contiguous())
            or tensor.is_neg()
        ):
            return None
        if not opts.asyncOp:
            collective = functools.partial(small_reduction.reduce, tensor)
            return (
                _FINISHED if self.channel.try_call_now(small_reduction.text, collective) else None
            )
        # `detach` keeps the memory: the program may give the tensor another before the call.
        collective = functools.partial(small_reduction.reduce, tensor.detach())
        return self.channel.make_call(
            small_reduction.text, collective, (tensor,), is_async=True, seconds=None
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any | None = None) -> dist.Work:
        """Reduce several tensors in one call."""
        return self.allreduce(tensors, opts)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> CallWork:
        """Copy the tensors of the root to all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = int(getattr(opts, "rootRank", opts or 0))
        text = f"broadcast({describe_tensors(tensors)}, src={self.channel.to_program_rank(root)})"

        def collective(call_text: str, _: Any, output_buffers: Buffers) -> None:
            for tensor in output_buffers:
                calls.broadcast(self.channel, call_text, tensor, root)

        return self._call_collective(text, (), tensors, opts, collective)

    def reduce(self, tensors: Tensors, opts: Any) -> CallWork:
        """Reduce tensors over all ranks, into those of the root."""
        op_name, name = self._describe_operation("reduce", opts.reduceOp, tensors)
        root, channel = int(opts.rootRank), self.channel
        is_root = channel.comm.rank == root

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            reduced = output_buffers if is_root else [tensor.clone() for tensor in input_buffers]
            calls.all_reduce(channel, call_text, op_name, reduced)

        text = f"{name}, dst={self.channel.to_program_rank(root)}"
        return self._call_collective(
            text, () if is_root else tensors, tensors if is_root else (), opts, collective
        )

    def allgather(
        self,
        output_lists: Sequence[Tensors],
        input_tensors: Tensors,
        opts: Any | None = None,
    ) -> CallWork:
        """Gather the tensors of all ranks, which may differ in size, on all ranks."""
        (output_list,), (local_input,) = output_lists, input_tensors
        text = f"all_gather({describe_tensors(output_list)})"
        counts = [t.numel() * t.element_size() for t in output_list]

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            with self.channel.lockstep.validating_collectively(call_text):
                rank = self.channel.comm.rank
                check_size_and_dtype(
                    counts[rank], output_buffers[rank].dtype, self.channel.rank, input_buffers[0]
                )
            calls.all_gather_to_tensors(
                self.channel, call_text, input_buffers[0], counts, output_buffers
            )

        return self._call_collective(text, [local_input], output_list, opts, collective)

    def all_gather_single(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        opts: Any | None = None,
    ) -> CallWork:
        """Gather the tensors of all ranks into one tensor on all ranks."""
        return self.all_gather_single_coalesced(
            [output_tensor], [input_tensor], opts, "all_gather_into_tensor"
        )

    def all_gather_single_coalesced(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any | None = None,
        name: str = "",
    ) -> CallWork:
        """Gather several tensors in one call."""
        channel = self.channel
        text = f"{name or 'all_gather_into_tensor, coalesced'}({describe_tensors(input_tensors)})"

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            for tensor, output_tensor in zip(input_buffers, output_buffers, strict=True):
                packed_bytes, size = view_bytes(output_tensor), view_bytes(tensor).size
                counts = [size] * channel.comm.size
                with channel.lockstep.validating_collectively(call_text):
                    check_size_and_dtype(sum(counts), tensor.dtype, channel.rank, output_tensor)
                calls.all_gather(channel, call_text, tensor, counts, packed_bytes)

        return self._call_collective(text, input_tensors, output_tensors, opts, collective)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Tensors],
        input_tensors: Tensors,
        opts: Any | None = None,
    ) -> CallWork:
        """Gather the lists of tensors of all ranks on all ranks: list r is from rank r."""
        text = f"all_gather, coalesced({describe_tensors(input_tensors)})"
        flat = [tensor for tensor_list in output_lists for tensor in tensor_list]

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            for index, tensor in enumerate(input_buffers):
                counts = [tensor.numel() * tensor.element_size()] * self.channel.comm.size
                calls.all_gather_to_tensors(
                    self.channel,
                    call_text,
                    tensor,
                    counts,
                    output_buffers[index :: len(input_buffers)],
                )

        return self._call_collective(text, input_tensors, flat, opts, collective)

    def gather(
        self, output_lists: Sequence[Tensors], input_tensors: Tensors, opts: Any
    ) -> CallWork:
        """Gather the tensors of all ranks on the root."""
        (local_input,) = input_tensors
        root, channel = int(opts.rootRank), self.channel
        output_list = output_lists[0] if output_lists else []

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            size = view_bytes(input_buffers[0]).size
            with channel.lockstep.validating_collectively(call_text):
                channel.check_tensor_per_rank("gather_list", output_buffers, root)
                for tensor in output_buffers:
                    check_size_and_dtype(size, input_buffers[0].dtype, channel.rank, tensor)
            packed_bytes = (
                np.empty(size * len(output_buffers), np.uint8)
                if channel.comm.rank == root
                else None
            )
            calls.gather(channel, call_text, input_buffers[0], packed_bytes, root)
            for index, tensor in enumerate(output_buffers):
                assert packed_bytes is not None
                view_bytes(tensor)[...] = packed_bytes[index * size : (index + 1) * size]

        return self._call_collective(
            f"gather({describe_tensor(local_input)}, dst={self.channel.to_program_rank(root)})",
            [local_input],
            output_list,
            opts,
            collective,
        )

    def scatter(
        self, output_tensors: Tensors, input_lists: Sequence[Tensors], opts: Any
    ) -> CallWork:
        """Send each rank one of the tensors of the root."""
        (local_output,) = output_tensors
        root, channel = int(opts.rootRank), self.channel

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            recv = view_bytes(output_buffers[0])
            with channel.lockstep.validating_collectively(call_text):
                channel.check_tensor_per_rank("scatter_list", input_buffers, root)
                for tensor in input_buffers:
                    check_size_and_dtype(recv.size, output_buffers[0].dtype, channel.rank, tensor)
            send = np.concatenate([view_bytes(t) for t in input_buffers]) if input_buffers else None
            calls.scatter(channel, call_text, send, recv, root)

        input_list = input_lists[0] if input_lists else []
        return self._call_collective(
            f"scatter({describe_tensor(local_output)}, src={self.channel.to_program_rank(root)})",
            input_list,
            output_tensors,
            opts,
            collective,
        )

    def reduce_scatter(
        self,
        output_tensors: Tensors,
        input_lists: Sequence[Tensors],
        opts: Any | None = None,
    ) -> CallWork:
        """Reduce lists of tensors over all ranks; rank r gets the r-th result."""
        return self._reduce_scatter(
            "reduce_scatter", list(output_tensors), [list(input_lists[0])], opts
        )

    def reduce_scatter_single(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        opts: Any | None = None,
    ) -> CallWork:
        """Reduce a tensor over all ranks; rank r gets the r-th part of the result."""
        return self._reduce_scatter(
            "reduce_scatter_tensor", [output_tensor], [[input_tensor]], opts
        )

    def reduce_scatter_single_coalesced(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any | None = None,
    ) -> CallWork:
        """Reduce several tensors in one call; rank r gets the r-th part of each."""
        lists = [[tensor] for tensor in input_tensors]
        return self._reduce_scatter(
            "reduce_scatter_tensor, coalesced", list(output_tensors), lists, opts
        )

    def _reduce_scatter(
        self,
        name: str,
        output_tensors: list[torch.Tensor],
        input_lists: list[list[torch.Tensor]],
        opts: Any | None,
    ) -> CallWork:
        flat = [tensor for tensor_list in input_lists for tensor in tensor_list]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        op_name, text = self._describe_operation(name, op, flat)
        channel, list_length = self.channel, len(input_lists[0])
        rank, size = channel.comm.rank, channel.comm.size

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            tensor_lists = [
                input_buffers[start : start + list_length]
                for start in range(0, len(input_buffers), list_length)
            ]
            sums = [
                torch.cat([tensor.reshape(-1) for tensor in tensor_list])
                for tensor_list in tensor_lists
            ]
            with channel.lockstep.validating_collectively(call_text):
                pairs = zip(tensor_lists, sums, strict=True)
                parts_of_sums = [
                    total.split(count_elements_per_rank(size, tensor_list))
                    for tensor_list, total in pairs
                ]
                for parts, tensor in zip(parts_of_sums, output_buffers, strict=True):
                    check_size_and_dtype(
                        parts[rank].nbytes, parts[rank].dtype, channel.rank, tensor
                    )
            calls.all_reduce(channel, call_text, op_name, sums)
            for parts, tensor in zip(parts_of_sums, output_buffers, strict=True):
                tensor.view(-1).copy_(parts[rank])

        return self._call_collective(text, flat, output_tensors, opts, collective)

    def alltoall(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any | None = None,
    ) -> CallWork:
        """Send each rank one of this rank's tensors, and receive one of each."""

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            send_counts, recv_counts = (
                [view_bytes(t).size for t in tensors] for tensors in (input_buffers, output_buffers)
            )
            send = np.concatenate([view_bytes(t) for t in input_buffers])
            recv = np.empty(sum(recv_counts), np.uint8)
            calls.all_to_all(
                self.channel,
                call_text,
                send,
                recv,
                send_counts=send_counts,
                recv_counts=recv_counts,
            )
            unpack_bytes(recv, recv_counts, output_buffers)

        return self._call_collective(
            f"all_to_all of {input_tensors[0].dtype}",
            input_tensors,
            output_tensors,
            opts,
            collective,
        )

    def all_to_all_single(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any | None = None,
    ) -> CallWork:
        """Send each rank its rows of a tensor, and receive rows of each."""
        split = functools.partial(count_bytes_per_rank, self.channel.comm.size)

        def collective(call_text: str, input_buffers: Buffers, output_buffers: Buffers) -> None:
            with self.channel.lockstep.validating_collectively(call_text):
                send_counts = split(input_buffers[0], list(input_splits or ()))
                recv_counts = split(output_buffers[0], list(output_splits or ()))
            send, recv = view_bytes(input_buffers[0]), view_bytes(output_buffers[0])
            calls.all_to_all(
                self.channel,
                call_text,
                send,
                recv,
                send_counts=send_counts,
                recv_counts=recv_counts,
            )

        return self._call_collective(
            f"all_to_all_single of {input_tensor.dtype}",
            [input_tensor],
            [output_tensor],
            opts,
            collective,
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> CallWork:
        """Wait for all ranks."""
        return self._call_collective(
            "barrier()",
            (),
            (),
            opts,
            lambda call_text, _, output_tensors: calls.barrier(self.channel, call_text),
        )
