"""Sessions: the state that all strategies on one communicator share; and the default communicator.

All strategies on one parent communicator share one session: one private duplicate, one sequence of
calls, one owning thread. So strategies can be made and dropped in any order, and a thousand of them
cost one duplicate (MPICH runs out of contexts after 2,046). The session is an attribute of the MPI
communicator that it duplicates, and is freed with it, or by MPI at exit.

`find_default_parent` returns the group of a strategy whose maker named none. `check_not_child`
refuses processes that are no ranks: children of multiprocessing, and programs that a rank has
started.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar, final

from mpistrat.comm.base import Comm
from mpistrat.comm.loopback import LoopbackComm, LoopbackWorld
from mpistrat.comm.mpi import MPIComm, is_communicator, is_mpi_running, library
from mpistrat.config import (
    Options,
    forget_launcher,
    job_size,
    launched_by,
    parent_rank,
    read_or_default,
    torchrun_size,
)
from mpistrat.errors import PreflightError, StrategyError
from mpistrat.kernels.threads import Team

T = TypeVar("T")

_NO_THREAD, _FORKED = -1, -2  # no thread has these numbers

_sessions_lock = threading.Lock()
# Replaced as a whole, so that a watchdog may look while the program makes another.
_sessions: tuple[weakref.ref[Session], ...] = ()


_ENDED_TEXT = (
    "MPI has been finalized in this process, so no strategy can be made any more. Leave "
    "MPI.Finalize to mpi4py, which does it at exit."
)
_NOT_BEGUN_TEXT = (
    "MPI has not begun in this process: mpi4py.rc.initialize is False. Call MPI.Init_thread() "
    "before the first strategy is made, or leave that to mpi4py."
)


def _disown_sessions() -> None:
    """Take note in a forked process that the sessions it has copied are not its own."""
    for session_ref in _sessions:
        session = session_ref()
        if session is not None and session._owner is not None:
            session._owner = _FORKED


os.register_at_fork(after_in_child=_disown_sessions)


class StatusBoard:
    """The place where a rank notes its calls.

    Nobody watches this one; the watchdog's `Board` is watched.

    Attributes:
      enter: ``enter(number, text)``: this rank makes that call.
      resume: It enters the next part of the same call, such as the payload after the handshake.
      leave: It is done with the call, or the part.
    """

    def __init__(self) -> None:
        """Create a board that takes no notice of calls."""
        self.enter: Callable[[int, str], None] = lambda number, text: None
        self.resume: Callable[[], None] = lambda: None
        self.leave: Callable[[], None] = lambda: None

    def long_operation(self, name: str, max_seconds: float) -> AbstractContextManager[None]:
        """Declare that the body may keep other ranks waiting for up to `max_seconds`.

        Raises:
          ValueError: `max_seconds` is not positive.
        """
        if not max_seconds > 0:
            raise ValueError(f"long_operation({name!r}) wants max_seconds > 0, not {max_seconds}.")
        return nullcontext()

    def allow(self, seconds: float | None) -> None:
        """Set how many seconds each following call may take; None for the default."""

    @property
    def call(self) -> str:
        """The text of the call that this rank is inside of; empty if it is in none."""
        return ""

    @property
    def deadline(self) -> int:
        """The end of the operation that this rank has declared, monotonic ns; 0 without one."""
        return 0

    def spent(self) -> tuple[float, float]:
        """Return seconds that this rank waited for others, and that it communicated, so far."""
        return 0.0, 0.0

    def await_departure(self, number: int, text: str) -> bool:
        """Sleep until all ranks have come to leave, or one makes a call that this rank must join.

        Args:
          number: The number of the call by which this rank leaves.
          text: Its text.

        Returns:
          Whether all ranks have come to leave; False also where that cannot be seen.
        """
        return False

    def last_move(self) -> int:
        """Return when a rank that has not come to leave last did something, monotonic ns.

        0 if all have come, or if it is not known.
        """
        return 0

    def signs(self) -> tuple[int, int]:
        """Return when a rank that has not come to leave last showed another sign of life.

        Returns:
          When its Python stack last changed, and when it was last seen to compute; monotonic ns, 0
          if it is not known.
        """
        return 0, 0

    def has_groups(self) -> bool:
        """Tell whether a rank of this node has made calls on another communicator."""
        return False

    def stop_watching(self) -> None:
        """Never end the job from now on: this rank does it, for a reason of its own."""

    def close(self) -> bool:
        """Stop watching; tell whether MPI may be finalized."""
        return True

    def free(self) -> None:
        """Close, and give back what it holds. Collective."""


@final
class Session:
    """The private communicator of one parent, and how far its sequence of calls has come.

    Attributes:
      comm: The private communicator.
      calls: How many calls have been checked so far; equal on all ranks.
      board: The notes of this rank about its calls, for the watchdog.
      options: The options; the defaults until the session has begun.
      is_freed: The parent has been freed.
      is_initialized: The first steps of the session have been done.
      groups: Parts of the communicator by their purpose; each has a ``free``.
      team: The threads of the kernels; None if this rank has but one.
      await_borrowers: Called in the owning thread before each of its calls, if other threads may
        make calls too (`allow_thread`): waits until none of these will make an earlier call.
    """

    def __init__(self, comm: Comm, is_owned: bool = True):
        """Create a session on `comm`, owned by the calling thread unless it never communicates."""
        self.comm = comm
        self.calls = 0
        self.is_initialized = False
        self.options = Options()
        self.is_freed = False
        self.board = StatusBoard()
        self.groups: dict[object, Any] = {}
        self.team: Team | None = None
        self.await_borrowers: Callable[[], None] | None = None
        self._borrower: int | None = None
        self._lending = threading.Lock()
        self._instances: dict[type[Any], Any] = {}
        self._owner: int | None = get_ident() if is_owned else None
        self._thread = threading.current_thread()
        self._pid = os.getpid()
        global _sessions
        with _sessions_lock:
            _sessions = (
                *(session_ref for session_ref in _sessions if session_ref() is not None),
                weakref.ref(self),
            )

    def get_instance(self, instance_class: type[T]) -> T:
        """Return the one `instance_class` of this session, made at the first call.

        Other parts of the library have one of them in each session, such as their counters.
        """
        instance: T | None = self._instances.get(instance_class)
        if instance is None:
            instance = self._instances[instance_class] = instance_class()
        return instance

    def describe_other_sessions(self) -> tuple[int, str, int]:
        """Return the state of this process in its other sessions, for the watchdog of this one.

        Returns:
          The number of its calls in them; the text of the call that it is inside of there, or an
          empty text; the end of the operation that it has declared there, monotonic ns, or 0.
        """
        other_sessions = [
            session for ref in _sessions if (session := ref()) is not None and session is not self
        ]
        text = next((call for session in other_sessions if (call := session.board.call)), "")
        latest_deadline = max((session.board.deadline for session in other_sessions), default=0)
        return sum(session.calls for session in other_sessions), text, latest_deadline

    @staticmethod
    def of_parent(
        parent: Any,
        meeting: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    ) -> Session:
        """Return the session of a parent communicator, made at the first call.

        Collective: the first call for a parent is, over it.

        Args:
          parent: An mpi4py intracommunicator, or a `Comm`.
          meeting: Returns, for `parent`, a context in which all its ranks meet.

        Raises:
          TypeError: `parent` is neither.
          StrategyError: MPI is not running, or this process is in no group.
        """
        if isinstance(parent, Comm):
            if "session" not in vars(parent):
                vars(parent)["session"] = Session(parent)
            session: Session = vars(parent)["session"]
            session.claim()
            return session
        if is_communicator(parent) and parent == library().COMM_NULL:
            raise StrategyError(
                "the communicator is MPI.COMM_NULL, which Split returns on ranks with the "
                "color UNDEFINED. Make no strategy on this rank, or give it a color."
            )
        if is_communicator(parent):
            if not is_mpi_running():
                raise StrategyError(_ENDED_TEXT if library().Is_finalized() else _NOT_BEGUN_TEXT)
            cached: Session | None = parent.Get_attr(_session_keyval())
            if cached is None:
                with meeting(parent):
                    cached = Session(MPIComm(parent))
                parent.Set_attr(_session_keyval(), cached)
            cached.claim()
            return cached
        raise TypeError(
            f"comm must be an mpi4py intracommunicator or an mpistrat Comm, not {parent!r}."
        )

    def release(self) -> None:
        """Let the session belong to the thread that next asks for it; this one only began it."""
        self._owner = _NO_THREAD

    def claim(self) -> None:
        """Note that a thread makes a strategy; a session without an owner becomes its own."""
        if self._owner == _NO_THREAD:
            self._owner = get_ident()
            self._thread = threading.current_thread()

    @staticmethod
    def find_largest_size() -> int:
        """Return how many ranks the largest session has that a living thread owns, or 1.

        Any thread may ask, of all threads of this process.
        """
        living_sessions = [
            session
            for ref in _sessions
            if (session := ref()) is not None and session._thread.is_alive()
        ]
        return max((session.comm.size for session in living_sessions), default=1)

    def check(self) -> None:
        """Raise StrategyError unless this thread and process own the session."""
        is_other_thread = get_ident() != self._owner
        if (
            is_other_thread
            or self.is_freed
            or self.await_borrowers is not None
            or self.comm.is_ended()
        ):
            self._check_thoroughly()

    def _check_thoroughly(self) -> None:
        """Do as `check` does, where more than the calling thread matters."""
        if self._owner is None:
            return
        thread_id, is_ended = get_ident(), self.is_freed or self.comm.is_ended()
        if os.getpid() == self._pid and not is_ended:
            if thread_id == self._borrower:
                return
            if thread_id == self._owner:
                if self.await_borrowers is not None:
                    self.await_borrowers()
                return
        raise StrategyError(self._describe_refusal())

    @contextmanager
    def allow_thread(self) -> Iterator[None]:
        """Allow this thread to make calls, as a part of a call of the owning thread.

        It may be a thread that another library made for it, or the owning thread itself; whoever
        lends says in `await_borrowers` how the owner waits, so that calls have one order.

        Raises:
          StrategyError: It is another thread of the program's own.
        """
        thread = threading.current_thread()
        foreign = isinstance(thread, threading._DummyThread)  # not made by Python
        if self._owner not in (None, thread.ident) and not foreign:
            raise StrategyError(self._describe_refusal())
        with self._lending:
            self._borrower = thread.ident
            try:
                yield
            finally:
                self._borrower = None

    def _describe_refusal(self) -> str:
        if self.is_freed:
            return (
                f"rank {self.comm.rank}: the program has freed the communicator of this strategy, "
                "so the strategy cannot be used any more. Free it after the last call, or make a "
                "new strategy on another one."
            )
        if self.comm.is_ended():
            return (
                f"rank {self.comm.rank}: MPI has been finalized, so strategies cannot be used any "
                "more. Leave MPI.Finalize to mpi4py, which does it at exit."
            )
        if get_ident() != self._owner != _FORKED:
            return (
                f"rank {self.comm.rank}: a collective was called from thread "
                f"{threading.current_thread().name!r}, but all strategies of these ranks belong to "
                f"{self._thread.name!r}, which made the first. Make and call them all in one "
                "thread."
            )
        return (
            f"rank {self.comm.rank}: this process was forked after MPI had started; it is "
            "not a rank and may not communicate. Let it compute, and its parent call strategies."
        )


@functools.cache
def _session_keyval() -> int:
    # MPI's own attribute caching ties the session to the life of its parent: when the program
    # frees the parent (collective), the duplicate goes with it; at exit MPI_Finalize does the rest.
    def freed(parent: Any, key: int, session: Session) -> None:
        if parent != library().COMM_WORLD and parent != library().COMM_SELF:
            session.is_freed = True
            session.board.free()
            for group in session.groups.values():
                group.free()
            if session.team is not None:
                session.team.free()
            session.comm.free()

    return int(library().Comm.Create_keyval(delete_fn=freed))


_POOL_END_SECONDS = 10.0  # seconds in which a pool ends its workers

_default_world: contextvars.ContextVar[Comm | None] = contextvars.ContextVar(
    "mpistrat_world", default=None
)


def make_single_rank_comm() -> LoopbackComm:
    """Return a new group of one rank, which never communicates."""
    return LoopbackComm(LoopbackWorld(1), 0)


@contextlib.contextmanager
def default_group(comm: Comm) -> Iterator[None]:
    """Make `comm` the default group of this context; how tests run N ranks in one process."""
    token = _default_world.set(comm)
    try:
        yield
    finally:
        _default_world.reset(token)


def find_default_parent() -> Any:
    """Return the group that a strategy uses if its maker named none.

    That is the group set by `default_group`, else ``MPI.COMM_WORLD``. Where no MPI library can be
    loaded and no launcher is seen either, it is a group of one rank, so that
    ``python train.py`` works on a laptop without MPI.

    Raises:
      StrategyError: As of `check_not_child`.
      ImportError: mpi4py finds no MPI library, although a launcher started this process.
      PreflightError: So did torchrun, as one of several.
    """
    default_world = _default_world.get()
    if default_world is not None:
        return default_world
    check_not_child()
    try:
        return library().COMM_WORLD
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if not read_or_default().ranks and (by_torchrun := find_torchrun_error(1)) is not None:
            raise by_torchrun from error
        launcher = launched_by()
        if launcher is not None:
            raise ImportError(
                f"{launcher} started this process, but mpi4py cannot load an MPI library "
                f"({reason}). Install one into this environment, for example: pip install mpich"
            ) from error
        warnings.warn(
            f"no MPI library can be loaded ({reason}); continuing with one rank. "
            "For more: pip install mpich",
            stacklevel=3,
        )
        comm = make_single_rank_comm()
        _default_world.set(comm)
        return comm


def check_not_child() -> None:
    """Refuse a process that multiprocessing, or a rank, has started: it is no rank itself.

    A program that a rank has started runs alone, on one rank, with ``MPISTRAT_RANKS=1``, and if the
    job has no other rank.

    Raises:
      StrategyError: It is one.
    """
    if _is_child():
        raise StrategyError(_child_error_text())
    parent = parent_rank()
    if parent is None:
        return
    if "mpi4py.MPI" not in sys.modules and 1 in (read_or_default().ranks, job_size()):
        forget_launcher()
        return
    raise StrategyError(
        f"this process (pid {os.getpid()}) was started by rank {parent.rank} of a job (pid "
        f"{parent.pid}), and is not a rank: it has inherited the variables of {launched_by()}, so "
        f"MPI would take it for rank {parent.rank}, and calls of the job would come apart. To run "
        "it alone, as one rank, start it with MPISTRAT_RANKS=1, for example by subprocess.run("
        'command, env={**os.environ, "MPISTRAT_RANKS": "1"}), and let it make its strategy before '
        "it imports mpi4py.MPI, which starts MPI."
    )


def find_torchrun_error(size: int) -> PreflightError | None:
    """Return the error of a process that torchrun has started as one of more, or fewer, than MPI.

    Args:
      size: The number of ranks that MPI says.
    """
    started = torchrun_size()
    if started is None or started == size:
        return None
    return PreflightError(
        f"torchrun started {started} processes, but MPI says that this job has {size}: processes "
        "of torchrun are no MPI ranks, and each would train by itself. Start the program by "
        f"`mpistrat run -n {started} train.py`, mpiexec or srun. If jobs of one rank are intended, "
        "set MPISTRAT_RANKS=1."
    )


def _is_child() -> bool:
    """Tell whether multiprocessing has started this process.

    MPI must not be started in it: it has the variables that the launcher gave to its parent, and
    would take the parent's place.
    """
    # Not imported for it: a child has it, and a socket module, loaded already.
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None:
        return False
    if multiprocessing.parent_process() is not None:
        return True
    # While a spawned child imports the main module, its parent has not been set yet. This is how
    # multiprocessing itself finds out (`spawn._check_not_importing_main`).
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _child_error_text() -> str:
    import multiprocessing

    name = multiprocessing.current_process().name
    # A spawned child has its own name by now. A fork server has not: from Python 3.14 on it imports
    # the main module itself, before there is any worker, and ends with what that raises. The pool
    # then says no more than that the connection is lost.
    serves = name == "MainProcess"
    name = "the fork server" if serves else name
    message = (
        f"this process ({name}) was started by multiprocessing and is not a rank, so no strategy "
        "can be made here. A child imports the main module again: put what makes strategies, and "
        'MPI, under `if __name__ == "__main__":`, which children do not run.'
    )
    if serves:
        print(f"mpistrat: {message}", file=sys.stderr, flush=True)
    if "PoolWorker" not in name or multiprocessing.parent_process() is not None:
        return message
    # A worker that dies on import is replaced at once, and so is that one, forever. It is said
    # first, as the pool takes its workers with it.
    message = f"{message} A pool would start workers forever, so its process is interrupted."
    print(f"mpistrat: {message}", file=sys.stderr, flush=True)
    _interrupt_pool(_find_pool(name))
    return message


def _find_pool(name: str) -> int:
    """Return the process whose pool this worker is of: a fork server starts workers for others."""
    parent = os.getppid()
    if not name.startswith("ForkServer"):
        return parent
    return int(Path(f"/proc/{parent}/stat").read_bytes().rpartition(b")")[2].split()[1])


def _interrupt_pool(pool: int) -> None:
    import socket

    # Once, whatever the number of workers: a second signal would disturb the pool's own end. The
    # name goes with the process that has it, and this one waits to be ended by the pool.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as lock_socket:
        lock_socket.bind(f"\0mpistrat interrupts {pool}")
        # Processes that a shell starts in the background ignore Ctrl-C, and so do their children.
        ignores_interrupt = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        os.kill(pool, signal.SIGTERM if ignores_interrupt else signal.SIGINT)
        time.sleep(_POOL_END_SECONDS)
        # A library may have made SIGINT such that it interrupts no wait (polars 2.1 does).
        os.kill(pool, signal.SIGTERM)


def known_job_size() -> int:
    """Return the number of ranks of this job as far as it is known without starting MPI.

    It is that of the default group, or of a larger one that a strategy was made over: ranks that
    joined later, or threads that are ranks.
    """
    default_world = _default_world.get()
    if default_world is not None:
        return default_world.size
    known_size = int(library().COMM_WORLD.size) if is_mpi_running() else job_size() or 1
    return max(known_size, Session.find_largest_size())
