"""The backend of torch.distributed by the name of ``"mpistrat"``, and how its ranks meet.

The process group that torch.distributed calls.
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
from typing import Any, final
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
from mpistrat.config import child_environment, launched_by, set_missing_variables
from mpistrat.errors import StrategyError
from mpistrat.lockstep.ending import end_job
from mpistrat.lockstep.exits import exits
from mpistrat.lockstep.startup import begin, meeting_of
from mpistrat.shm.nodes import find_nodes
from mpistrat.torch.process_group.channel import GroupChannel
from mpistrat.torch.process_group.group_calls import GroupCalls
from mpistrat.torch.process_group.point_to_point import PointToPoint, PostWork
from mpistrat.torch.process_group.work import AnyWork, CallWork, Finished
from mpistrat.torch.views import Tensors
from mpistrat.watchdog.exchange import threads_allowed
from mpistrat.watchdog.observer import HUNG
from mpistrat.watchdog.status_board import say

__all__ = [
    "NAME",
    "NAMES",
    "MPIProcessGroup",
    "init_process_group",
    "register",
]


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


NAME = "mpistrat"
_INITS = "call init_process_group"
_PATIENCE = 2.0  # seconds that a program which fails waits for what it has begun


@final
class _AllGroups:
    """What all groups of this process are made from; made with the first of them.

    Attributes:
      base: The ranks as MPI counts them, for making groups.
      main: The channel and messages of the group of all ranks, in the order of torch's ranks.
      stores: What this process serves for the others, for as long as it lives.
      host: The address of rank 0.
      variables: The environment variables that this has set; no launcher has.
    """

    def __init__(self) -> None:
        """Begin; collective over all ranks, as it duplicates their communicator."""
        parent = find_default_parent()
        if isinstance(parent, LoopbackComm):
            raise StrategyError(
                "the backend 'mpistrat' of torch.distributed is for processes, started by mpiexec, "
                "srun or `mpistrat run`; ranks that are threads have no torch.distributed."
            )
        with meeting_of(parent.rank, ranks_of(parent), _INITS):
            self.base = MPIComm(parent)
        self.main: tuple[GroupChannel, PointToPoint, int] | None = None
        self.ordered = self.base
        self.host = _host_of_rank_0(self.base)
        self.variables: set[str] = set()
        self.stores: list[Any] = []
        self.channels: list[GroupChannel] = []
        self.messages: list[PointToPoint] = []
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        reason = "a forked process is no rank. Call torch.distributed in its parent only."
        for channel in self.channels:
            channel.lose(reason)
        for messages in self.messages:
            messages.lose(reason)
        self.channels.clear()
        self.messages.clear()

    def all_ranks(self, options: Any) -> tuple[GroupChannel, PointToPoint]:
        """Return the channel and messages of the group of all ranks; the same ones each time."""
        rank, size, seconds = options.group_rank, options.group_size, _seconds(options)
        if size != self.base.size:
            raise StrategyError(
                f"torch.distributed counts {size} ranks, and MPI {self.base.size}. Start the "
                "program with mpiexec, srun or `mpistrat run` (not torchrun), and leave rank and "
                "world_size to it: mpistrat.torch.init_process_group()."
            )
        if self.main is None:
            atexit.register(self.last)  # after the ways out, which `begin` arms
            # Torch may count the ranks in another order than MPI does.
            with meeting_of(self.base.rank, ranks_of(self.base.mpi), _INITS):
                self.ordered = self.base.split(0, rank)
                channel, messages = self._create_channels(self.ordered, "", seconds)
            self.channels.append(channel)
            begin(channel.lockstep)
            messages.warn = channel.session.options.warn
            channel.worker.crowded = channel.session.team is None
            atexit.register(self.leave)
            self.main = channel, messages, rank
            self._set_variables(channel)
            _say_inline(channel)
        channel, messages, recorded_rank = self.main
        if recorded_rank != rank:
            raise StrategyError(
                f"torch.distributed calls this rank {rank}, and has called it {recorded_rank} "
                "before. Keep the order of the ranks for as long as the program runs."
            )
        _allow(channel, messages, seconds)
        channel.arrivals.store = options.store
        return channel, messages

    def _set_variables(self, channel: GroupChannel) -> None:
        """Set what `torchrun` sets, for this process, where it is absent. Collective."""
        nodes = find_nodes(self.ordered, channel.session.options.ranks_per_node)
        numbers = {
            "RANK": self.ordered.rank,
            "WORLD_SIZE": self.ordered.size,
            "LOCAL_RANK": nodes.node.rank,
            "LOCAL_WORLD_SIZE": nodes.node.size,
        }
        nodes.free()
        texts = {name: str(number) for name, number in numbers.items()}
        self.variables = set_missing_variables({**texts, "MASTER_ADDR": self.host})

    def some_ranks(self, options: Any) -> tuple[GroupChannel, PointToPoint]:
        """Return the channel and messages of a new group of ranks. Collective over them."""
        if self.main is None:
            raise StrategyError(
                "the group of all ranks has another backend than 'mpistrat', and only over it are "
                "there groups of 'mpistrat'. Begin with mpistrat.torch.init_process_group(), and "
                "make groups of the other backend with new_group(backend=...)."
            )
        ranks = options.global_ranks_in_group
        # Torch's own name may differ between ranks if only members make the group.
        name = f"the group of {ranks_text(ranks)}"
        tag = int.from_bytes(hashlib.blake2b(str(ranks).encode(), digest_size=4).digest(), "big")
        in_job = ranks_of(self.ordered.mpi)
        group_rank, call_text = ranks.index(self.ordered.rank), f"make {name} (new_group)"
        with meeting_of(group_rank, [in_job[rank] for rank in ranks], call_text):
            comm = self.ordered.create_group(ranks, tag)
            channel, messages = self._create_channels(comm, name, _seconds(options))
        channel.session.options = self.main[0].session.options
        channel.lockstep.ranks = tuple(ranks)  # as messages name them
        messages.warn = channel.session.options.warn
        channel.worker.crowded = self.main[0].worker.crowded
        channel.arrivals.store = options.store
        messages.ranks = channel.lockstep.ranks
        _allow(channel, messages, _seconds(options))
        return channel, messages

    def _create_channels(
        self, comm: MPIComm, name: str, seconds: float
    ) -> tuple[GroupChannel, PointToPoint]:
        posts = MessageChannel(MPIComm(comm.mpi))
        channel = GroupChannel(MPIComm(comm.mpi) if comm is self.ordered else comm, name, seconds)
        messages = PointToPoint(posts, name, seconds, channel.session.options.warn)
        self.messages.append(messages)
        if name:
            self.channels.append(channel)
        return channel, messages

    def end(self, channel: GroupChannel, messages: PointToPoint) -> None:
        """End a group of some ranks."""
        # Where the program fails, the others may still be in its calls, and are told at exit.
        if sys.exc_info()[0] is not None or channel.is_abandoned:
            return
        if channel.drain() and messages.drain(0):  # else it ends with the program
            messages.free()
            channel.free()
            self.channels.remove(channel)
            self.messages.remove(messages)

    def leave(self) -> None:
        """Let what was begun come to its end, and errors be heard, when the program ends."""
        failing = exits().failure is not None
        for channel in self.channels:
            # A rank that is to come may be waiting for this one elsewhere.
            if not channel.drain(_PATIENCE if failing else None) or channel.is_abandoned:
                channel.session.is_freed = True
            error = channel.unheard()
            if error is not None and not failing:
                exits().failure = error
        for messages in self.messages:
            messages.drain(0)

    def last(self) -> None:
        """End the job if a call was given up: MPI would wait for it forever."""
        if any(channel.session.is_freed or channel.is_abandoned for channel in self.channels):
            if exits().failure is None:
                say("mpistrat: a call of torch.distributed was given up; ending the job.")
            end_job(HUNG)


@functools.cache
def _job() -> _AllGroups:
    return _AllGroups()


def _seconds(options: Any) -> float:
    return float(options.timeout.total_seconds())


def _allow(channel: GroupChannel, messages: PointToPoint, seconds: float) -> None:
    channel.seconds = messages.seconds = seconds
    # Torch's own timeout comes first, and raises; the watchdog ends what that does not.
    channel.lockstep.seconds = seconds + 30


def _say_inline(channel: GroupChannel) -> None:
    if not threads_allowed() and channel.comm.rank == 0:
        say(
            "mpistrat: MPI was started without THREAD_MULTIPLE, so collectives with async_op=True "
            "are done at once, by the thread that calls them."
        )


def _create(options: Any, _: Any) -> MPIProcessGroup:
    """Make a process group, as torch asks its backends to."""
    job = _job()
    if not options.global_ranks_in_group:
        return MPIProcessGroup(options.store, *job.all_ranks(options))
    channel, messages = job.some_ranks(options)
    group = MPIProcessGroup(options.store, channel, messages)
    group.ends(functools.partial(job.end, channel, messages))
    return group


def _rendezvous(
    url: str, timeout: timedelta | None = None, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield a store, this rank and the number of ranks, which MPI knows."""
    job = _job()
    comm = job.base
    query = dict(part.partition("=")[::2] for part in urlparse(url).query.split("&"))
    for name, mpi_value in (("rank", comm.rank), ("world_size", comm.size)):
        if query.get(name, str(mpi_value)) != str(mpi_value):
            raise ValueError(
                f"{name}={query[name]} was given, and MPI says {mpi_value}. Leave {name} to MPI."
            )
    with meeting_of(comm.rank, ranks_of(comm.mpi), _INITS):
        store = _store(comm, job.host, timeout or timedelta(minutes=5))
    job.stores.append(store)
    yield store, comm.rank, comm.size
    raise RuntimeError("ranks started by MPI cannot rendezvous again")


def _host_of_rank_0(comm: MPIComm) -> str:
    """Return an address of rank 0 that all ranks can reach. Collective."""
    hosts = comm.mpi.allgather(platform.node().encode())
    return "127.0.0.1" if len(set(hosts)) == 1 else hosts[0].decode()


def _store(comm: MPIComm, host: str, waits: timedelta) -> Any:
    """Return torch's store, which rank 0 serves. Collective."""
    store: Any = None
    port_and_error = (0, "")
    if comm.rank == 0:
        try:
            store = TCPStore(host, 0, comm.size, True, waits, wait_for_workers=False)
            port_and_error = store.port, ""
        except Exception as error:
            port_and_error = 0, str(error)
    port, error_text = comm.mpi.allgather(port_and_error)[0]
    if error_text:
        raise StrategyError(
            f"rank {comm.rank}: rank 0 cannot open the store of torch: {error_text}"
        )
    if store is None:
        store = TCPStore(host, port, comm.size, False, waits, wait_for_workers=False)
    return store


def _rendezvous_or_env(url: str, **given: Any) -> Iterator[Any]:
    """Do as torch does, but where this backend is asked for and only MPI knows the ranks."""
    names = child_environment({})
    by_mpi = launched_by(names) is not None and ("RANK" not in names or _has_set("RANK"))
    if by_mpi and not urlparse(url).query and _names_this_backend(sys._getframe(1)):
        return _rendezvous(url, **given)
    return iter(_env(url, **given))


def _has_set(name: str) -> bool:
    """Tell whether an environment variable is one that the first group has set."""
    return _job.cache_info().currsize > 0 and name in _job().variables


def _names_this_backend(frame: FrameType | None) -> bool:
    """Tell whether the call of init_process_group on the stack names this backend."""
    while frame is not None:
        if frame.f_code is _INIT:
            return NAME in str(frame.f_locals.get("backend", ""))
        frame = frame.f_back
    return False


_register_rendezvous: Any = register_rendezvous_handler
_env: Any = _rendezvous_handlers["env"]
_INIT = inspect.unwrap(dist.init_process_group).__code__
_MONITORED_BARRIER: Any = dist.monitored_barrier


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    process_group = dist.group.WORLD if group is None else group
    if isinstance(process_group, MPIProcessGroup):  # torch itself lets groups of gloo alone do this
        return process_group.monitored_barrier(timeout, wait_all_ranks)
    return _MONITORED_BARRIER(group, timeout, wait_all_ranks)


def register() -> None:
    """Make the backend known to torch, once."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    _register_rendezvous(NAME, _rendezvous)
    _rendezvous_handlers["env"] = _rendezvous_or_env
    replacement = functools.wraps(_MONITORED_BARRIER)(_monitored_barrier)
    dist.monitored_barrier = distributed_c10d.monitored_barrier = replacement


def init_process_group(timeout: timedelta | None = None, **given: Any) -> None:
    """Initialize torch.distributed over the ranks that MPI has started.

    Collective: all ranks call it. No address and no port are needed: rank and size come from
    ``mpirun``, ``srun`` or ``mpistrat run``. Afterwards `torch.distributed` works as with any other
    backend, on tensors of the CPU. The environment variables ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``MASTER_ADDR`` of this process are set where they are
    absent.

    Args:
      timeout: How long a call may wait for other ranks; None for torch's 30 minutes.
      given: Further arguments of `torch.distributed.init_process_group`, such as ``pg_options``.

    Raises:
      StrategyError: This process is not a rank that MPI has started, or was started as one of
        several by something else.
      PreflightError: That was torchrun.

    Example:
      >>> import torch
      >>> init_process_group()
      >>> total = torch.ones(3)
      >>> torch.distributed.all_reduce(total)
      >>> torch.distributed.destroy_process_group()
    """
    register()
    given.setdefault("backend", NAME)
    dist.init_process_group(init_method=f"{NAME}://", timeout=timeout, **given)
