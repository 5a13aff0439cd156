"""The backend ``"mpistrat"`` of torch.distributed: its process group, and how the ranks meet.

`MPIProcessGroup` is the class whose methods torch.distributed calls. `_GroupFactory` makes the
communicators of all groups. `register` makes the backend known to torch, with a rendezvous over
MPI, so no program gives an address or a port.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol, final
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from mpistrat.comm.callsite import ranks_text
from mpistrat.comm.loopback import LoopbackComm
from mpistrat.comm.mpi import MPIComm, ranks_of
from mpistrat.comm.point_to_point import MessageChannel
from mpistrat.comm.session import find_default_parent
from mpistrat.config import (
    child_environment,
    launched_by,
    read_or_default,
    set_missing_variables,
)
from mpistrat.errors import StrategyError
from mpistrat.lockstep.ending import end_job
from mpistrat.lockstep.exits import exits
from mpistrat.lockstep.startup import begin_session, watching_meeting_of
from mpistrat.shm.nodes import find_nodes
from mpistrat.torch.process_group.channel import GroupChannel
from mpistrat.torch.process_group.group_calls import GroupCalls
from mpistrat.torch.process_group.point_to_point import MessageWork, PointToPoint
from mpistrat.torch.process_group.work import BaseWork, CallWork, FinishedWork
from mpistrat.torch.views import Tensors
from mpistrat.watchdog.exchange import has_thread_multiple
from mpistrat.watchdog.observer import HUNG
from mpistrat.watchdog.status_board import say

__all__ = [
    "METHOD_ALIASES",
    "NAME",
    "MPIProcessGroup",
    "init_process_group",
    "register",
]


NAME = "mpistrat"
_INIT_CALL = "call init_process_group"
_FAILING_DRAIN_SECONDS = 2.0  # seconds that a failing program waits for calls in transit

# Methods with two names: torch 2.13 and later call the first one in Python, earlier versions and
# C++ the second one.
METHOD_ALIASES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


_GROUP_TIMEOUT = timedelta(0)  # torch's word for the timeout of the group


class MPIProcessGroup(GroupCalls):
    """A group of ranks whose calls go through mpistrat.

    Args:
      store: The store of the group.
      channel: Makes the collective calls.
      messages: Sends and receives.
    """

    def __init__(self, store: dist.Store, channel: GroupChannel, messages: PointToPoint):
        """Begin a group over communicators that exist."""
        super().__init__(channel)
        self.messages = messages
        self._names = [channel.name, ""]
        self._store = store
        self._end_group: Callable[[], None] | None = None

    # The attributes of a group.

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
        """The purpose of the group, as torch describes it."""
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
        """Set how long later calls may take."""
        self.channel.seconds = self.messages.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are counted from the first on."""

    def _get_sequence_number_for_group(self) -> int:
        return self.channel.session.calls

    # Messages.

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Begin to send a tensor."""
        return self.messages.send(_unpack_tensor(tensors), dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Begin to receive a tensor."""
        return self.messages.receive(_unpack_tensor(tensors), src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Begin to receive a tensor from any rank."""
        return self.messages.receive(_unpack_tensor(tensors), None, tag)

    # Other calls, and the end of the group.

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; the error of a timeout names all ranks that have not come."""
        opts = dist.BarrierOptions()
        opts.asyncOp, opts.timeout = False, timeout or _GROUP_TIMEOUT
        self.barrier(opts).wait()

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: new_group makes groups of some ranks."""
        raise NotImplementedError(
            "the backend 'mpistrat' has no split_group. Call torch.distributed.new_group, with "
            "use_local_synchronization=True if only members call it."
        )

    def shutdown(self) -> None:
        """End the group, once its calls are done."""
        end_group, self._end_group = self._end_group, None
        if end_group is not None:
            end_group()

    abort = shutdown

    def call_at_end(self, end_group: Callable[[], None]) -> None:
        """Call `end_group` when the group ends."""
        self._end_group = end_group


for _new, _old in METHOD_ALIASES.items():
    setattr(MPIProcessGroup, _old, getattr(MPIProcessGroup, _new))


def _exclude_from_compilation(cls: type) -> None:
    """Exclude the methods of a class, and all functions that they call, from torch.compile.

    DistributedDataParallel calls its group in its forward pass, which a program may compile.
    (torch.compiler.disable would import the compiler, which takes seconds.) A version of torch
    without these private names compiles the methods, and everything else works.
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


for _class in (MPIProcessGroup, GroupCalls, BaseWork, CallWork, MessageWork, FinishedWork):
    _exclude_from_compilation(_class)


def _unpack_tensor(tensors: Tensors) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


class _GroupOptions(Protocol):
    """The description of a new group that torch gives to a backend."""

    store: dist.Store
    group_rank: int
    group_size: int
    timeout: timedelta
    global_ranks_in_group: list[int]


@final
class _GroupFactory:
    """Makes the communicators of all groups of this process.

    Attributes:
      mpi_comm: A communicator of all ranks in the order of MPI.
      ordered_comm: A communicator of all ranks in the order of torch.
      world: The channel, the messages and this rank in the group of all ranks; None before it.
      stores: The stores that this process keeps for as long as it lives.
      channels: The channels of all groups.
      messages: The messages of all groups.
      root_host: The address of rank 0.
      variable_names: The names of environment variables that this process has set; None before.
    """

    def __init__(self) -> None:
        """Duplicate the communicator of all ranks. Collective."""
        parent = find_default_parent()
        if isinstance(parent, LoopbackComm):
            raise StrategyError(
                "the backend 'mpistrat' of torch.distributed is for processes, started by mpiexec, "
                "srun or `mpistrat run`; ranks that are threads have no torch.distributed."
            )
        with watching_meeting_of(parent.rank, ranks_of(parent), _INIT_CALL):
            self.mpi_comm = MPIComm(parent)
        self.world: tuple[GroupChannel, PointToPoint, int] | None = None
        self.ordered_comm = self.mpi_comm
        self.root_host = _find_host_of_rank_0(self.mpi_comm)
        self.variable_names: set[str] | None = None
        self.stores: list[Any] = []
        self.channels: list[GroupChannel] = []
        self.messages: list[PointToPoint] = []
        os.register_at_fork(after_in_child=self._close_after_fork)

    def _close_after_fork(self) -> None:
        reason = "a forked process is no rank. Call torch.distributed in its parent only."
        for channel in self.channels:
            channel.close(reason)
        for messages in self.messages:
            messages.close(reason)
        self.channels.clear()
        self.messages.clear()

    def get_world_channels(self, group_options: _GroupOptions) -> tuple[GroupChannel, PointToPoint]:
        """Return the channel and messages of the group of all ranks; the same ones each time."""
        rank, size, seconds = (
            group_options.group_rank,
            group_options.group_size,
            _read_timeout(group_options),
        )
        if size != self.mpi_comm.size:
            raise StrategyError(
                f"torch.distributed counts {size} ranks, and MPI {self.mpi_comm.size}. Start the "
                "program with mpiexec, srun or `mpistrat run` (not torchrun), and leave rank and "
                "world_size to it: mpistrat.torch.init_process_group()."
            )
        if self.world is None:
            atexit.register(
                self.end_abandoned_job
            )  # runs after the exit handlers of `begin_session`
            # Torch may count the ranks in another order than MPI does.
            with watching_meeting_of(self.mpi_comm.rank, ranks_of(self.mpi_comm.mpi), _INIT_CALL):
                self.ordered_comm = self.mpi_comm.split(0, rank)
                channel, messages = self._open_channels(self.ordered_comm, "", seconds)
            self.channels.append(channel)
            begin_session(channel.lockstep)
            messages.warn_seconds = channel.session.options.warn
            channel.worker.has_one_core = channel.session.team is None
            atexit.register(self.drain_groups)
            self.world = channel, messages, rank
            self.set_variables()
            _warn_of_inline_calls(channel)
        channel, messages, recorded_rank = self.world
        if recorded_rank != rank:
            raise StrategyError(
                f"torch.distributed calls this rank {rank}, and has called it {recorded_rank} "
                "before. Keep the order of the ranks for as long as the program runs."
            )
        _set_timeouts(channel, messages, seconds)
        channel.arrivals.store = group_options.store
        return channel, messages

    def set_variables(self) -> None:
        """Set the environment variables of `torchrun` that are absent, once. Collective."""
        if self.variable_names is not None:
            return
        nodes = find_nodes(self.ordered_comm, read_or_default().ranks_per_node)
        values_by_name = {
            "RANK": self.ordered_comm.rank,
            "WORLD_SIZE": self.ordered_comm.size,
            "LOCAL_RANK": nodes.node.rank,
            "LOCAL_WORLD_SIZE": nodes.node.size,
        }
        nodes.free()
        texts = {name: str(number) for name, number in values_by_name.items()}
        self.variable_names = set_missing_variables({**texts, "MASTER_ADDR": self.root_host})

    def create_channels(self, group_options: _GroupOptions) -> tuple[GroupChannel, PointToPoint]:
        """Return the channel and messages of a new group of ranks. Collective over them."""
        if self.world is None:
            raise StrategyError(
                "the group of all ranks has another backend than 'mpistrat', and only over it are "
                "there groups of 'mpistrat'. Begin with mpistrat.torch.init_process_group(), and "
                "make groups of the other backend with new_group(backend=...)."
            )
        ranks = group_options.global_ranks_in_group
        # Torch's own name may differ between ranks if only members make the group.
        name = f"the group of {ranks_text(ranks)}"
        tag = int.from_bytes(hashlib.blake2b(str(ranks).encode(), digest_size=4).digest(), "big")
        job_ranks = ranks_of(self.ordered_comm.mpi)
        group_rank, call_text = ranks.index(self.ordered_comm.rank), f"make {name} (new_group)"
        with watching_meeting_of(group_rank, [job_ranks[rank] for rank in ranks], call_text):
            comm = self.ordered_comm.create_group(ranks, tag)
            channel, messages = self._open_channels(comm, name, _read_timeout(group_options))
        channel.session.options = self.world[0].session.options
        channel.lockstep.ranks = tuple(ranks)  # as messages name them
        messages.warn_seconds = channel.session.options.warn
        channel.worker.has_one_core = self.world[0].worker.has_one_core
        channel.arrivals.store = group_options.store
        messages.ranks = channel.lockstep.ranks
        _set_timeouts(channel, messages, _read_timeout(group_options))
        return channel, messages

    def _open_channels(
        self, comm: MPIComm, name: str, seconds: float
    ) -> tuple[GroupChannel, PointToPoint]:
        posts = MessageChannel(MPIComm(comm.mpi))
        channel = GroupChannel(
            MPIComm(comm.mpi) if comm is self.ordered_comm else comm, name, seconds
        )
        messages = PointToPoint(posts, name, seconds, channel.session.options.warn)
        self.messages.append(messages)
        if name:
            self.channels.append(channel)
        return channel, messages

    def end_group(self, channel: GroupChannel, messages: PointToPoint) -> None:
        """End a group of some ranks."""
        # If the program fails, others may still be in its calls; they get the error at exit.
        if sys.exc_info()[0] is not None or channel.is_abandoned:
            return
        if channel.drain() and messages.drain(0):  # else they end with the program
            messages.free()
            channel.free()
            self.channels.remove(channel)
            self.messages.remove(messages)

    def drain_groups(self) -> None:
        """Wait for calls in transit, and record errors, when the program ends."""
        is_failing = exits().failure is not None
        for channel in self.channels:
            # The rank that this one waits for may wait for this one elsewhere.
            if (
                not channel.drain(_FAILING_DRAIN_SECONDS if is_failing else None)
                or channel.is_abandoned
            ):
                channel.session.is_freed = True
            error = channel.take_unreported_error()
            if error is not None and not is_failing:
                exits().failure = error
        for messages in self.messages:
            messages.drain(0)

    def end_abandoned_job(self) -> None:
        """End the job if a call was given up, as MPI would wait for it forever."""
        if any(channel.session.is_freed or channel.is_abandoned for channel in self.channels):
            if exits().failure is None:
                say("mpistrat: a call of torch.distributed was given up; ending the job.")
            end_job(HUNG)


@functools.cache
def _get_factory() -> _GroupFactory:
    return _GroupFactory()


def _read_timeout(group_options: _GroupOptions) -> float:
    return float(group_options.timeout.total_seconds())


def _set_timeouts(channel: GroupChannel, messages: PointToPoint, seconds: float) -> None:
    channel.seconds = messages.seconds = seconds
    # The timeout of torch comes first, and raises; the watchdog ends the job if it does not.
    channel.lockstep.call_seconds = seconds + 30


def _warn_of_inline_calls(channel: GroupChannel) -> None:
    if not has_thread_multiple() and channel.comm.rank == 0:
        say(
            "mpistrat: MPI was started without THREAD_MULTIPLE, so collectives with async_op=True "
            "are done at once, by the thread that calls them."
        )


def _create_process_group(group_options: _GroupOptions, _: Any) -> MPIProcessGroup:
    """Make a process group, as torch asks its backends to."""
    factory = _get_factory()
    if not group_options.global_ranks_in_group:
        return MPIProcessGroup(group_options.store, *factory.get_world_channels(group_options))
    channel, messages = factory.create_channels(group_options)
    group = MPIProcessGroup(group_options.store, channel, messages)
    group.call_at_end(functools.partial(factory.end_group, channel, messages))
    return group


def _rendezvous(
    url: str, timeout: timedelta | None = None, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Iterate over one triple: a store, this rank and the number of ranks, by MPI."""
    factory = _get_factory()
    comm = factory.mpi_comm
    query = dict(part.partition("=")[::2] for part in urlparse(url).query.split("&"))
    for name, mpi_value in (("rank", comm.rank), ("world_size", comm.size)):
        if query.get(name, str(mpi_value)) != str(mpi_value):
            raise ValueError(
                f"{name}={query[name]} was given, and MPI says {mpi_value}. Leave {name} to MPI."
            )
    with watching_meeting_of(comm.rank, ranks_of(comm.mpi), _INIT_CALL):
        store = _open_store(comm, factory.root_host, timeout or timedelta(minutes=5))
    factory.stores.append(store)
    yield store, comm.rank, comm.size
    raise RuntimeError("ranks started by MPI cannot rendezvous again")


def _find_host_of_rank_0(comm: MPIComm) -> str:
    """Return an address of rank 0 that all ranks can reach. Collective."""
    hosts = comm.mpi.allgather(platform.node().encode())
    return "127.0.0.1" if len(set(hosts)) == 1 else hosts[0].decode()


def _open_store(comm: MPIComm, host: str, timeout: timedelta) -> Any:
    """Return torch's store, which rank 0 serves. Collective."""
    store: Any = None
    port_and_error = (0, "")
    if comm.rank == 0:
        try:
            store = TCPStore(host, 0, comm.size, True, timeout, wait_for_workers=False)
            port_and_error = store.port, ""
        except Exception as error:
            port_and_error = 0, str(error)
    port, error_text = comm.mpi.allgather(port_and_error)[0]
    if error_text:
        raise StrategyError(
            f"rank {comm.rank}: rank 0 cannot open the store of torch: {error_text}"
        )
    if store is None:
        store = TCPStore(host, port, comm.size, False, timeout, wait_for_workers=False)
    return store


def _rendezvous_or_env(url: str, **init_arguments: Any) -> Iterator[Any]:
    """Return the rendezvous over MPI if the program wants this backend; else that of torch.

    MPI is used only if the environment does not give the ranks.
    """
    variables_by_name = child_environment({})
    is_launched_by_mpi = launched_by(variables_by_name) is not None and (
        "RANK" not in variables_by_name or _was_set_here("RANK")
    )
    if is_launched_by_mpi and not urlparse(url).query and _names_this_backend(sys._getframe(1)):
        return _rendezvous(url, **init_arguments)
    return iter(_env_rendezvous(url, **init_arguments))


def _was_set_here(name: str) -> bool:
    """Return whether the first group has set an environment variable."""
    return _get_factory.cache_info().currsize > 0 and name in (_get_factory().variable_names or ())


def _names_this_backend(frame: FrameType | None) -> bool:
    """Return whether the call of init_process_group on the stack names this backend."""
    while frame is not None:
        if frame.f_code is _INIT_CODE:
            return NAME in str(frame.f_locals.get("backend", ""))
        frame = frame.f_back
    return False


_register_rendezvous: Any = register_rendezvous_handler
_env_rendezvous: Any = _rendezvous_handlers["env"]
_INIT_CODE = inspect.unwrap(dist.init_process_group).__code__
_MONITORED_BARRIER: Any = dist.monitored_barrier


def _monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> Any:
    process_group = dist.group.WORLD if group is None else group
    if isinstance(process_group, MPIProcessGroup):  # torch supports only groups of gloo
        return process_group.monitored_barrier(timeout, wait_all_ranks)
    return _MONITORED_BARRIER(group, timeout, wait_all_ranks)


def register() -> None:
    """Make the backend known to torch, once."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create_process_group, extended_api=True, devices=["cpu"])
    _register_rendezvous(NAME, _rendezvous)
    _rendezvous_handlers["env"] = _rendezvous_or_env
    replacement = functools.wraps(_MONITORED_BARRIER)(_monitored_barrier)
    dist.monitored_barrier = distributed_c10d.monitored_barrier = replacement


def init_process_group(timeout: timedelta | None = None, **init_arguments: Any) -> None:
    """Initialize torch.distributed over the ranks that MPI has started.

    Collective: all ranks call it. No address and no port are needed: rank and size come from
    ``mpirun``, ``srun`` or ``mpistrat run``. Afterwards `torch.distributed` works as with any other
    backend, on tensors of the CPU. The environment variables ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``MASTER_ADDR`` of this process are set where they are
    absent.

    Args:
      timeout: How long a call may wait for other ranks; None for torch's 30 minutes.
      init_arguments: Further arguments of `torch.distributed.init_process_group`, such as
        ``pg_options``; ``backend="gloo"`` makes a group of gloo over the same ranks, to compare.

    Raises:
      StrategyError: MPI has not started this process, or another launcher has started it as one
        of several.
      PreflightError: The launcher was torchrun.

    Example:
      >>> import torch
      >>> init_process_group()
      >>> total = torch.ones(3)
      >>> torch.distributed.all_reduce(total)
      >>> torch.distributed.destroy_process_group()
    """
    register()
    init_arguments.setdefault("backend", NAME)
    dist.init_process_group(init_method=f"{NAME}://", timeout=timeout, **init_arguments)
    _get_factory().set_variables()
