"""The collective calls that torch.distributed makes of a group, as it makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpistrat.torch.process_group import calls
from mpistrat.torch.process_group.channel import GroupChannel
from mpistrat.torch.process_group.work import CallWork, Finished, seconds_of
from mpistrat.torch.views import (
    Tensors,
    bytes_of,
    checked,
    deal,
    fits,
    parts_of,
    rooms,
    rows_of,
    settle,
    spec,
    specs,
)

__all__ = ["GroupCalls"]

# Torch writes each method's many forms down; only the one of them is called that is here.
_Base: Any = dist.ProcessGroup

_DONE = Finished()
_NONE, _EXPLICIT_TIMEOUT = timedelta(0), timedelta(1)


class GroupCalls(_Base):
    """A group's collectives: what torch gives, as texts that are checked and memory that moves.

    Args:
      channel: Makes the calls.
    """

    def __init__(self, channel: GroupChannel):
        """Call nothing yet."""
        comm = channel.comm
        super().__init__(comm.rank, comm.size)  # the only one that Python can stand behind
        self.channel = channel
        self._small: dict[Any, calls.SmallReduction] = {}

    def _call(
        self,
        text: str,
        inputs: Tensors,
        outputs: Tensors,
        opts: Any,
        make: Callable[[str, list[torch.Tensor], list[torch.Tensor]], None],
    ) -> CallWork:
        """Make a collective call of tensors, whatever their layout.

        Args:
          text: The call in words; equal on all ranks.
          inputs: The tensors that are only read.
          outputs: The tensors that are written to.
          opts: As torch gives them.
          make: Is given the text, inputs and outputs, which are C-ordered.
        """
        text = self._add_group_name(text)
        try:
            input_tensors, output_tensors = checked(inputs), checked(outputs)
        except Exception as error:
            self.channel.refuse(text, error)
            raise

        def run() -> None:
            with torch.inference_mode():  # which may write to tensors that were made in it
                with self.channel.lockstep.validating_collectively(text):
                    input_rooms, output_rooms = rooms(input_tensors), rooms(output_tensors)
                make(text, input_rooms, output_rooms)
                settle(output_tensors, output_rooms)

        is_async, timeout = getattr(opts, "asyncOp", True), getattr(opts, "timeout", _NONE)
        return self.channel.call(text, run, list(outputs), bool(is_async), seconds_of(timeout))

    def _add_group_name(self, text: str) -> str:
        return f"{text} in {self.channel.name}" if self.channel.name else text

    def _operation(self, name: str, op: Any, tensors: Tensors) -> tuple[str, str]:
        """Return the name of an operation, and the text of a call that reduces by it."""
        try:
            op_name = calls.op_name(op)
        except Exception as error:
            self.channel.refuse(name, error)
            raise
        return op_name, f"{name}({op_name}) of {specs(tensors)}"

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = getattr(opts, "reduceOp", opts or dist.ReduceOp.SUM)
        lone = (
            len(tensors) == 1
            and opts is not None
            and getattr(opts, "timeout", _EXPLICIT_TIMEOUT) < _NONE
        )
        if lone:
            work = self._try_small_reduction(op, tensors[0], opts)
            if work is not None:
                return work
        op_name, text = self._operation("all_reduce", op, tensors)
        channel = self.channel
        if lone and calls.rides(channel, op_name, tensors[0]):
            key = getattr(op, "op", op), tensors[0].dtype, tensors[0].shape
            self._small[key] = calls.SmallReduction(
                channel, self._add_group_name(text), op_name, tensors[0]
            )
        return self._call(
            text,
            (),
            tensors,
            opts,
            lambda call_text, _, out: calls.all_reduce(channel, call_text, op_name, out),
        )

    def _try_small_reduction(self, op: Any, tensor: torch.Tensor, opts: Any) -> dist.Work | None:
        """Reduce a small tensor of a kind that has come before; return None if that cannot be."""
        small = self._small.get((getattr(op, "op", op), tensor.dtype, tensor.shape))
        if small is None or not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
            return None
        if not opts.asyncOp:
            make = functools.partial(small.reduce, tensor)
            return _DONE if self.channel.at_once(small.text, make) else None
        # As it is now: the program may give the tensor other memory before the call is made.
        make = functools.partial(small.reduce, tensor.detach())
        return self.channel.call(small.text, make, (tensor,), beside=True, seconds=None)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors in one call."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> CallWork:
        """Give all ranks what the root has."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = int(getattr(opts, "rootRank", opts or 0))
        text = f"broadcast({specs(tensors)}, src={self.channel.named(root)})"

        def make(call_text: str, _: Any, out: list[torch.Tensor]) -> None:
            for tensor in out:
                calls.broadcast(self.channel, call_text, tensor, root)

        return self._call(text, (), tensors, opts, make)

    def reduce(self, tensors: Tensors, opts: Any) -> CallWork:
        """Reduce tensors over all ranks, into those of the root."""
        op_name, name = self._operation("reduce", opts.reduceOp, tensors)
        root, channel = int(opts.rootRank), self.channel
        is_root = channel.comm.rank == root

        def make(
            call_text: str, input_tensors: list[torch.Tensor], out: list[torch.Tensor]
        ) -> None:
            reduced = out if is_root else [tensor.clone() for tensor in input_tensors]
            calls.all_reduce(channel, call_text, op_name, reduced)

        text = f"{name}, dst={self.channel.named(root)}"
        return self._call(text, () if is_root else tensors, tensors if is_root else (), opts, make)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> CallWork:
        """Give all ranks the tensors of all, which may differ in size."""
        (output_list,), (local_input,) = outputs, inputs
        text = f"all_gather({specs(output_list)})"
        counts = [t.numel() * t.element_size() for t in output_list]

        def make(
            call_text: str, input_tensors: list[torch.Tensor], out: list[torch.Tensor]
        ) -> None:
            with self.channel.lockstep.validating_collectively(call_text):
                rank = self.channel.comm.rank
                fits(counts[rank], out[rank].dtype, self.channel.rank, input_tensors[0])
            calls.all_gather_apart(self.channel, call_text, input_tensors[0], counts, out)

        return self._call(text, [local_input], output_list, opts, make)

    def all_gather_single(
        self, output: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> CallWork:
        """Give all ranks the tensors of all, one behind the other."""
        return self.all_gather_single_coalesced(
            [output], [input_tensor], opts, "all_gather_into_tensor"
        )

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, name: str = ""
    ) -> CallWork:
        """Do the same with several tensors in one call."""
        channel = self.channel
        text = f"{name or 'all_gather_into_tensor, coalesced'}({specs(inputs)})"

        def make(
            call_text: str, input_tensors: list[torch.Tensor], out: list[torch.Tensor]
        ) -> None:
            for tensor, output_tensor in zip(input_tensors, out, strict=True):
                room, size = bytes_of(output_tensor), bytes_of(tensor).size
                counts = [size] * channel.comm.size
                with channel.lockstep.validating_collectively(call_text):
                    fits(sum(counts), tensor.dtype, channel.rank, output_tensor)
                calls.all_gather(channel, call_text, tensor, counts, room)

        return self._call(text, inputs, outputs, opts, make)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> CallWork:
        """Give all ranks the lists of tensors of all: list r is that of rank r."""
        text = f"all_gather, coalesced({specs(inputs)})"
        flat = [tensor for row in outputs for tensor in row]

        def make(
            call_text: str, input_tensors: list[torch.Tensor], out: list[torch.Tensor]
        ) -> None:
            for number, tensor in enumerate(input_tensors):
                counts = [tensor.numel() * tensor.element_size()] * self.channel.comm.size
                calls.all_gather_apart(
                    self.channel, call_text, tensor, counts, out[number :: len(input_tensors)]
                )

        return self._call(text, inputs, flat, opts, make)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> CallWork:
        """Give the root the tensors of all."""
        (local_input,) = inputs
        root, channel = int(opts.rootRank), self.channel
        output_list = outputs[0] if outputs else []

        def make(
            call_text: str, input_tensors: list[torch.Tensor], out: list[torch.Tensor]
        ) -> None:
            size = bytes_of(input_tensors[0]).size
            with channel.lockstep.validating_collectively(call_text):
                channel.check_tensor_per_rank("gather_list", out, root)
                for tensor in out:
                    fits(size, input_tensors[0].dtype, channel.rank, tensor)
            room = np.empty(size * len(out), np.uint8) if channel.comm.rank == root else None
            calls.gather(channel, call_text, input_tensors[0], room, root)
            for number, tensor in enumerate(out):
                assert room is not None
                bytes_of(tensor)[...] = room[number * size : (number + 1) * size]

        return self._call(
            f"gather({spec(local_input)}, dst={self.channel.named(root)})",
            [local_input],
            output_list,
            opts,
            make,
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> CallWork:
        """Give each rank its one of the root's tensors."""
        (local_output,) = outputs
        root, channel = int(opts.rootRank), self.channel

        def make(
            call_text: str, input_tensors: list[torch.Tensor], out: list[torch.Tensor]
        ) -> None:
            recv = bytes_of(out[0])
            with channel.lockstep.validating_collectively(call_text):
                channel.check_tensor_per_rank("scatter_list", input_tensors, root)
                for tensor in input_tensors:
                    fits(recv.size, out[0].dtype, channel.rank, tensor)
            send = np.concatenate([bytes_of(t) for t in input_tensors]) if input_tensors else None
            calls.scatter(channel, call_text, send, recv, root)

        listed = inputs[0] if inputs else []
        return self._call(
            f"scatter({spec(local_output)}, src={self.channel.named(root)})",
            listed,
            outputs,
            opts,
            make,
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> CallWork:
        """Reduce lists of tensors over all ranks; rank r gets the r-th."""
        return self._scattered("reduce_scatter", list(outputs), [list(inputs[0])], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> CallWork:
        """Reduce a tensor over all ranks; rank r gets its r-th part."""
        return self._scattered("reduce_scatter_tensor", [output], [[input_tensor]], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> CallWork:
        """Do the same with several tensors in one call."""
        lists = [[tensor] for tensor in inputs]
        return self._scattered("reduce_scatter_tensor, coalesced", list(outputs), lists, opts)

    def _scattered(
        self, name: str, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> CallWork:
        flat = [tensor for row in inputs for tensor in row]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        op_name, text = self._operation(name, op, flat)
        channel, row_length = self.channel, len(inputs[0])
        rank, size = channel.comm.rank, channel.comm.size

        def make(
            call_text: str, input_tensors: list[torch.Tensor], out: list[torch.Tensor]
        ) -> None:
            rows = [
                input_tensors[at : at + row_length]
                for at in range(0, len(input_tensors), row_length)
            ]
            sums = [torch.cat([tensor.reshape(-1) for tensor in row]) for row in rows]
            with channel.lockstep.validating_collectively(call_text):
                pairs = zip(rows, sums, strict=True)
                parts = [total.split(parts_of(size, row)) for row, total in pairs]
                for part, tensor in zip(parts, out, strict=True):
                    fits(part[rank].nbytes, part[rank].dtype, channel.rank, tensor)
            calls.all_reduce(channel, call_text, op_name, sums)
            for part, tensor in zip(parts, out, strict=True):
                tensor.view(-1).copy_(part[rank])

        return self._call(text, flat, outputs, opts, make)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CallWork:
        """Give each rank its one of this rank's tensors, and get one of each."""

        def make(
            call_text: str, input_tensors: list[torch.Tensor], out: list[torch.Tensor]
        ) -> None:
            send_counts, recv_counts = (
                [bytes_of(t).size for t in tensors] for tensors in (input_tensors, out)
            )
            send = np.concatenate([bytes_of(t) for t in input_tensors])
            recv = np.empty(sum(recv_counts), np.uint8)
            calls.all_to_all(self.channel, call_text, send, send_counts, recv, recv_counts)
            deal(recv, recv_counts, out)

        return self._call(f"all_to_all of {inputs[0].dtype}", inputs, outputs, opts, make)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> CallWork:
        """Give each rank its rows of a tensor, and get rows of each."""
        split = functools.partial(rows_of, self.channel.comm.size)

        def make(call_text: str, inputs: list[torch.Tensor], out: list[torch.Tensor]) -> None:
            with self.channel.lockstep.validating_collectively(call_text):
                send_counts = split(inputs[0], list(input_splits or ()))
                recv_counts = split(out[0], list(output_splits or ()))
            send, recv = bytes_of(inputs[0]), bytes_of(out[0])
            calls.all_to_all(self.channel, call_text, send, send_counts, recv, recv_counts)

        return self._call(
            f"all_to_all_single of {input_tensor.dtype}", [input_tensor], [output], opts, make
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> CallWork:
        """Wait for all ranks."""
        return self._call(
            "barrier()", (), (), opts, lambda said, _, out: calls.barrier(self.channel, said)
        )
