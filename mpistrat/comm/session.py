"""One life of this process in the job.

All strategies on one parent communicator share one session: one private duplicate, one sequence of
calls, one owning thread. So strategies can be made and dropped in any order, and a thousand of them
cost one duplicate (MPICH runs out of contexts after 2,046).
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, final
from weakref import WeakValueDictionary

from mpistrat.comm.base import Comm
from mpistrat.comm.loopback import LoopbackComm
from mpistrat.comm.mpi import MPIComm, is_communicator, library
from mpistrat.errors import StrategyError
from mpistrat.kernels.threads import Team
from mpistrat.options import Options
from mpistrat.sharedmem.pool import Pool

__all__ = ["Interrupted", "RunState", "Session", "StatusBoard", "Unproved", "Unwatched"]

_NOBODY = -1  # no thread has this number

_adding = threading.Lock()
# Replaced as a whole, so that a watchdog may look while the program makes another.
_alive: tuple[weakref.ref[Session], ...] = ()


class StatusBoard(Protocol):
    """Where a rank says what it is doing; see `mpistrat.board.board.Board`."""

    @property
    def enter(self) -> Callable[[int, str], None]:
        """Say that this rank makes the call of that number and text."""

    @property
    def resume(self) -> Callable[[], None]:
        """Say that it enters the next part of the same call."""

    @property
    def leave(self) -> Callable[[], None]:
        """Say that it is done with the call, or the part."""

    def long_operation(self, name: str, max_seconds: float) -> AbstractContextManager[None]:
        """Declare that the body may keep other ranks waiting."""

    def allow(self, seconds: float | None) -> None:
        """Let the calls that come take so many seconds; None for what is allowed to every call."""

    @property
    def call(self) -> str:
        """The text of the call that this rank is inside of; empty if it is in none."""

    def await_departure(self, number: int, text: str) -> bool:
        """Sleep until all ranks have come to leave, or one makes a call; tell whether all have."""

    def last_move(self) -> int:
        """Return when a rank that has not come to leave last did something, ns; 0 if unknown."""

    def close(self) -> bool:
        """Stop watching; tell whether MPI may be finalized."""

    def free(self) -> None:
        """Close, and give back what it holds. Collective."""


@final
class Unwatched:
    """The board of ranks that nobody watches: one alone, or threads of one process."""

    def __init__(self) -> None:
        """Take no notice of anything."""
        self.enter: Callable[[int, str], None] = lambda number, text: None
        self.resume: Callable[[], None] = lambda: None
        self.leave: Callable[[], None] = lambda: None

    def long_operation(self, name: str, max_seconds: float) -> AbstractContextManager[None]:
        """Check the arguments as a watched board does, and do nothing."""
        if not max_seconds > 0:
            raise ValueError(f"long_operation({name!r}) wants max_seconds > 0, not {max_seconds}.")
        return nullcontext()

    def allow(self, seconds: float | None) -> None:
        """Do nothing: nobody looks how long a call takes."""

    @property
    def call(self) -> str:
        """Always empty."""
        return ""

    def await_departure(self, number: int, text: str) -> bool:
        """Return False at once: nothing is known of the others."""
        return False

    def last_move(self) -> int:
        """Return 0: nothing is known of the others."""
        return 0

    def close(self) -> bool:
        """Return True."""
        return True

    def free(self) -> None:
        """Do nothing."""


@final
class Interrupted:
    """A Ctrl-C that came while the library ran.

    Attributes:
      pending: It has not been raised yet.
      again: The signal that comes next is not from outside; it only looks once more.
    """

    pending = False
    again = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if one is pending."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


class RunState(threading.local):
    """Whether this thread is inside ``Strategy.run``.

    Attributes:
      depth: How many it is inside of.
      failed: The exception that closed them, if one did.
      handles: All-reduces that were begun, and that nobody has waited for yet.
    """

    depth = 0
    failed: BaseException | None = None

    def __init__(self) -> None:
        """Be in no run."""
        self.handles: list[Any] = []


class Unproved(Protocol):
    """A write that this rank has made, and that the next handshake shows to be alike on all.

    Attributes:
      digest: 24 bytes that are equal on all ranks exactly if they have done alike.
    """

    digest: bytes

    def text(self) -> str:
        """Return what was done, for messages."""

    def undo(self) -> None:
        """Put back what was there before."""


@final
class Session:
    """The private communicator of one parent, and how far its sequence of calls has come.

    Attributes:
      comm: The private communicator.
      calls: How many calls have been proved so far; equal on all ranks.
      board: Where this rank says what it is doing, for the watchdog.
      allowed: Seconds that the board says a call may take; None for what is allowed to every call.
      options: The knobs; the defaults until the session has begun.
      raised: The last exception that every rank has raised.
      freed: The parent has been freed.
      begun: What happens once for a session has happened.
      run: The ``Strategy.run`` that this rank is inside of.
      gone: The error that told that ranks have left the program, if they have.
      speaks: This rank is the one to print that error.
      exit_code: What the ranks agreed to leave with, once one has left.
      unproved: Small writes that the next handshake will show to be alike on all ranks, or undo.
      variables: How many variables have been created; equal on all ranks.
      initial_values_that_differ: By rank and kind of variable, by replica 0's initial value: that
        of the rank, and the number of the variable; equal on all ranks.
      on_fn: Called on the way into the function of a ``run``; for tests of faults.
      on_moved: Called with the results of an all-reduce that moved more than its proof; for tests
        of faults.
      on_moving: Called after the proof of an all-reduce through shared memory; for tests of faults.
      sharing: An all-reduce is on its way through shared memory.
      datasets: How many datasets have been distributed; equal on all ranks.
      interrupted: Whether Ctrl-C is waiting to be raised.
      steps: How many ``Strategy.run`` have ended well; equal on all ranks.
      copies: The mirrored variables by number, as long as they live.
      holders: All variables by the identity of their array, as long as they live.
      groups: Parts of the communicator, by what they are for; each has a ``free``.
      compiled: The dtypes whose folds some call has had compiled; equal on all ranks.
      pool: Memory for large results.
      team: The threads of the kernels; None if this rank has but one.
    """

    def __init__(self, comm: Comm, owned: bool = True):
        """Begin a life on `comm`, owned by the calling thread unless it never communicates."""
        self.comm = comm
        self.calls = 0
        self.begun = False
        self.options = Options()
        self.raised: BaseException | None = None
        self.freed = False
        self.board: StatusBoard = Unwatched()
        self.allowed: float | None = None
        # Per thread: a strategy that never communicates may be used by any.
        self.run = RunState()
        self.gone: BaseException | None = None
        self.speaks = False
        self.exit_code = 0
        self.unproved: list[Unproved] = []
        self.variables = 0
        self.initial_values_that_differ: dict[tuple[int, str], dict[bytes, tuple[bytes, int]]] = {}
        self.datasets = 0
        self.on_fn: Callable[[], None] | None = None
        self.on_moved: Callable[[list[Any]], None] | None = None
        self.on_moving: Callable[[], None] | None = None
        self.sharing = False
        self.interrupted = Interrupted()
        self.steps = 0
        self.copies: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.holders: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.groups: dict[object, Any] = {}
        self.pool = Pool()
        self.compiled: set[Any] = set()
        self.team: Team | None = None
        self._owner: int | None = threading.get_ident() if owned else None
        self._thread = threading.current_thread()
        self._pid = os.getpid()
        global _alive
        with _adding:
            _alive = (*(one for one in _alive if one() is not None), weakref.ref(self))

    def others(self) -> tuple[int, str]:
        """Return what this process does in its other sessions, for the watchdog of this one.

        Returns:
          How many calls it has made in them, and the text of the call that it is inside of there;
          empty if it is in none.
        """
        found = [one for ref in _alive if (one := ref()) is not None and one is not self]
        return sum(one.calls for one in found), next(
            (c for one in found if (c := one.board.call)), ""
        )

    @staticmethod
    def on(parent: Any) -> Session:
        """Return the session of a parent communicator, made at the first call.

        Collective: the first call for a parent is, over it.

        Args:
          parent: An mpi4py intracommunicator, or a `Comm`.

        Raises:
          TypeError: `parent` is neither.
        """
        if isinstance(parent, LoopbackComm):
            if "session" not in vars(parent):
                vars(parent)["session"] = Session(parent)
            found: Session = vars(parent)["session"]
            found.claim()
            return found
        if is_communicator(parent) and parent == library().COMM_NULL:
            raise StrategyError(
                "this process is in no group: the communicator is MPI.COMM_NULL, as Split gives it "
                "to ranks with the color UNDEFINED. Make no strategy here, or give it a color."
            )
        if is_communicator(parent):
            cached: Session | None = parent.Get_attr(_attribute())
            if cached is None:
                cached = Session(MPIComm(parent))
                parent.Set_attr(_attribute(), cached)
            cached.claim()
            return cached
        raise TypeError(
            f"comm must be an mpi4py intracommunicator or an mpistrat Comm, not {parent!r}."
        )

    def release(self) -> None:
        """Let the session belong to the thread that next asks for it; this one only began it."""
        self._owner = _NOBODY

    def claim(self) -> None:
        """Note that a thread makes a strategy, and let the session be its if it is nobody's."""
        if self._owner == _NOBODY:
            self._owner = threading.get_ident()
            self._thread = threading.current_thread()

    @staticmethod
    def largest() -> int:
        """Return how many ranks the largest session has that a living thread owns, or 1.

        Any thread may ask, of all threads of this process.
        """
        found = [one for ref in _alive if (one := ref()) is not None and one._thread.is_alive()]
        return max((one.comm.size for one in found), default=1)

    def check(self) -> None:
        """Raise StrategyError unless this thread and process own the session."""
        if self._owner is None:
            return
        theirs = threading.get_ident() != self._owner or os.getpid() != self._pid
        if theirs or self.freed or self.comm.ended:
            raise StrategyError(self._refusal())

    def _refusal(self) -> str:
        if self.freed:
            return (
                "the communicator of this strategy has been freed by the program, so the strategy "
                "cannot be used any more."
            )
        if self.comm.ended:
            return (
                f"rank {self.comm.rank}: MPI has been finalized, so strategies cannot be used any "
                "more. Leave MPI.Finalize to mpi4py, which does it at exit."
            )
        if threading.get_ident() != self._owner:
            return (
                f"rank {self.comm.rank}: a collective was called from thread "
                f"{threading.current_thread().name!r}, but all strategies of these ranks belong to "
                f"{self._thread.name!r}, which made the first. Make and call them all in one "
                "thread."
            )
        return (
            f"rank {self.comm.rank}: this process was forked after MPI had started; it is no rank "
            "and may not communicate. Let it compute, and its parent call strategies."
        )


@functools.cache
def _attribute() -> int:
    # MPI's own attribute caching ties the session to the life of its parent: when the program
    # frees the parent (collective), the duplicate goes with it; at exit MPI_Finalize does the rest.
    def freed(parent: Any, key: int, session: Session) -> None:
        if parent != library().COMM_WORLD and parent != library().COMM_SELF:
            session.freed = True
            session.board.free()
            for group in session.groups.values():
                group.free()
            if session.team is not None:
                session.team.free()
            session.comm.free()

    return int(library().Comm.Create_keyval(delete_fn=freed))
