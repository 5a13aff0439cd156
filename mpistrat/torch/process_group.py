"""The process group that torch.distributed calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from mpistrat.torch.channel import GroupChannel
from mpistrat.torch.group_calls import GroupCalls
from mpistrat.torch.point_to_point import PointToPoint, PostWork
from mpistrat.torch.views import Tensors
from mpistrat.torch.work import AnyWork, CallWork, Finished

__all__ = ["NAMES", "MPIProcessGroup"]

# What else torch calls a method: Python of 2.13 and later by the first name, earlier versions and
# C++ by the second.
NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


_UNLIMITED = timedelta(0)  # what the group allows


class MPIProcessGroup(GroupCalls):
    """A group of ranks whose calls go through mpistrat.

    Args:
      store: The store of the group.
      channel: Makes the collective calls.
      messages: Sends and receives.
    """

    def __init__(self, store: Any, channel: GroupChannel, messages: PointToPoint):
        """Begin a group, whose communicators are there."""
        super().__init__(channel)
        self.messages = messages
        self._names = [channel.name, ""]
        self._store = store
        self._end: Callable[[], None] | None = None

    # What a group is.

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "mpistrat"

    _get_backend_name = name = getBackendName

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._names[0] = name

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._names[1] = desc

    @property
    def group_name(self) -> str:
        """The name that torch has given to the group."""
        return self._names[0]

    @property
    def group_desc(self) -> str:
        """What torch says that the group is for."""
        return self._names[1]

    @property
    def _device_types(self) -> list[torch.device]:
        # Torch 2.15 asks while it makes a group, and attaches a recorder that fails with groups of
        # Python; those have no devices there. Later they have: `async_save` asks.
        return [torch.device("cpu")] if self in _world.pg_map else []

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let calls that come take so long."""
        self.channel.seconds = self.messages.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are counted from the first on."""

    def _get_sequence_number_for_group(self) -> int:
        return self.channel.session.calls

    # PointToPoint.

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Begin to send a tensor."""
        return self.messages.send(_unpack_tensor(tensors), dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Begin to receive a tensor."""
        return self.messages.receive(_unpack_tensor(tensors), src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Begin to receive a tensor from any rank."""
        return self.messages.receive(_unpack_tensor(tensors), None, tag)

    # Its other calls, and its end.

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, as barrier() does, whose error names all ranks that have not come."""
        opts = dist.BarrierOptions()
        opts.asyncOp, opts.timeout = False, timeout or _UNLIMITED
        self.barrier(opts).wait()

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: new_group makes groups of some ranks."""
        raise NotImplementedError(
            "the backend 'mpistrat' has no split_group. Call torch.distributed.new_group, with "
            "use_local_synchronization=True if only members call it."
        )

    def shutdown(self) -> None:
        """End the group, once its calls are done."""
        end, self._end = self._end, None
        if end is not None:
            end()

    abort = shutdown

    def ends(self, end: Callable[[], None]) -> None:
        """Call `end` when the group ends."""
        self._end = end


for _new, _old in NAMES.items():
    setattr(MPIProcessGroup, _old, getattr(MPIProcessGroup, _new))


def _uncompiled(cls: type) -> None:
    """Leave the methods of a class, and all that they call, to Python in compiled functions.

    DistributedDataParallel calls its group in its forward pass, which a program may compile. (To
    call torch.compiler.disable imports the compiler, which takes seconds.) A torch without these
    names of its own compiles them, and everything else works.
    """
    try:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
    except AttributeError:
        return
    for method in vars(cls).values():
        if inspect.isfunction(method):
            exec_strategy = frames._FrameExecStrategy(skip, skip)
            frames.set_code_exec_strategy(method.__code__, exec_strategy)


for _class in (MPIProcessGroup, GroupCalls, AnyWork, CallWork, PostWork, Finished):
    _uncompiled(_class)


def _unpack_tensor(tensors: Tensors) -> torch.Tensor:
    (tensor,) = tensors
    return tensor
