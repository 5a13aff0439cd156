"""The ranks that make one sequence of calls, and the state of their calls.

Ctrl-C never lands between a handshake and its payload, and is never lost.

A KeyboardInterrupt there would take one rank out of a call that the others have entered. So while
the running code is the library's own, the signal is kept, and raised where the program calls the
library next, or where a function that ``run`` has called returns: from both the other ranks hear of
it as of any exception. In the program's code it raises at once.

What a handler of the program's own raises (a timer that runs out, SIGTERM that calls ``sys.exit``)
is kept likewise in a job of several ranks: handlers that are set by ``signal.signal``, before or
after the first strategy, are called in a guard.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm import callsite
from mpistrat.comm.base import Comm, OrderedComm
from mpistrat.comm.session import Session
from mpistrat.config import Options
from mpistrat.lockstep.frame import FRAME_RANKS

_STANDARD = str(Path(os.__file__).parent)
_RESEND_SECONDS = 0.05  # seconds until the signal is looked at again
_Handler: TypeAlias = "Callable[[int, FrameType | None], Any]"


def in_library(frame: FrameType | None) -> bool:
    """Return whether the code that runs in `frame` is called by mpistrat, not by the program.

    Code of NumPy and of the standard library belongs to whoever called it.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if callsite.is_library_file(name) or module.split(".")[0] == "mpistrat":
            return True
        # The code of a named tuple has no file; it belongs to the code that makes one.
        is_named_tuple_code = module.startswith("namedtuple_")
        if not is_named_tuple_code and not name.startswith("<frozen") and not _third_party(name):
            return False
        frame = frame.f_back
    return False


def _is_in_torch_call(frame: FrameType | None) -> bool:
    """Tell whether a call of torch.distributed runs, which gives up its group if interrupted."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("mpistrat.torch."):
            return True
        frame = frame.f_back
    return False


def _unguarded(handler: Any) -> Any:
    return handler.handler if isinstance(handler, GuardedHandler) else handler


def _third_party(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(_STANDARD)


@final
class GuardedHandler:
    """A handler of the program's own whose exception is kept while the library runs.

    Attributes:
      handler: What the program has set.
    """

    def __init__(self, handler: _Handler, interrupted: Interrupted):
        """Guard a handler."""
        self.handler, self._interrupted = handler, interrupted

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Call it, and raise its exception, or keep that while the library runs."""
        interrupted = self._interrupted
        if interrupted.is_own_signal:  # the signal is this library's own
            interrupted.look_again(number, frame)
            return
        try:
            self.handler(number, frame)
        except BaseException as error:
            if not in_library(frame) or _is_in_torch_call(frame):
                raise
            interrupted.keep(error)
            interrupted.look_later(number)


@final
class Interrupted:
    """A Ctrl-C that came while the library ran, kept until it can be raised.

    One that is armed is kept by the handler of the signal.

    Attributes:
      pending: It has not been raised yet.
      kept_error: What is to be raised in its place: what a handler of the program's own has raised.
      is_own_signal: The signal that comes next is not from outside; it only looks once more.
    """

    pending = False
    is_own_signal = False
    kept_error: BaseException | None = None
    _guards = False

    def guard(self) -> None:
        """Keep what handlers raise while the library runs; also those that are set from now on."""
        if self._guards or threading.current_thread() is not threading.main_thread():
            return
        self._guards = True
        set_handler, get_handler = signal.signal, signal.getsignal

        @functools.wraps(get_handler)
        def getsignal(signalnum: int) -> Any:
            return _unguarded(get_handler(signalnum))

        @functools.wraps(set_handler)
        def set_guarded(signalnum: int, handler: Any) -> Any:
            return _unguarded(set_handler(signalnum, self._guarded(handler)))

        for number in signal.valid_signals():
            handler = get_handler(number)
            if callable(handler) and handler != self._handle:
                set_handler(number, self._guarded(handler))
        setattr(signal, "signal", set_guarded)  # noqa: B010  # of another type to mypy
        setattr(signal, "getsignal", getsignal)  # noqa: B010

    def _guarded(self, handler: Any) -> Any:
        # What the library sets, and what is no function, such as SIG_DFL, raises nothing.
        if not callable(handler) or isinstance(handler, signal.Handlers) or handler == self._handle:
            return handler
        return GuardedHandler(handler, self)

    def keep(self, error: BaseException) -> None:
        """Keep the first exception of handlers for `check`."""
        self.kept_error, self.pending = self.kept_error or error, True

    def look_again(self, number: int, frame: FrameType | None) -> None:
        """Raise what is pending if the program's code runs; else look later once more."""
        self.is_own_signal = False
        if not self.pending:
            return  # it has been raised meanwhile
        if in_library(frame):
            self.look_later(number)
        else:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if one is pending, or the error that was kept."""
        if self.pending:
            pending_error, self.kept_error, self.pending = self.kept_error, None, False
            raise KeyboardInterrupt if pending_error is None else pending_error

    def can_continue(self, error: BaseException, exchanged: bool) -> bool:
        """Keep an exception that a signal handler raised in a handshake, if that can go on.

        Args:
          error: What a call of MPI has raised.
          exchanged: It has done its work all the same.

        Returns:
          Whether it is kept, so that this rank continues the call, as the others do.
        """
        if not exchanged or type(error).__module__ == "mpi4py.MPI":
            return False
        self.keep(error)
        return True

    def arm(self, has_other_ranks: bool = False) -> None:
        """Take the signal over, unless the program handles it itself.

        Args:
          has_other_ranks: There are other ranks, so the program's own handlers are guarded too.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
        if has_other_ranks:
            self.guard()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_own_signal:
            self.look_again(number, frame)
            return
        if not in_library(frame):
            self.pending = self.kept_error is not None
            raise KeyboardInterrupt
        # It is raised at the next call; or here, if the program computes for long before that.
        self.pending = True
        self.look_later(number)

    def look_later(self, number: int) -> None:
        """Send this process the signal once more, soon, to `look_again`."""
        timer = threading.Timer(_RESEND_SECONDS, self._resend_signal, (number,))
        timer.daemon = True
        timer.start()

    def _resend_signal(self, number: int) -> None:
        if not self.pending:
            return  # it has been raised meanwhile
        self.is_own_signal = True
        os.kill(os.getpid(), number)


T = TypeVar("T")


class Unproved(Protocol):
    """A write that this rank has made, and that the next handshake shows to be alike on all.

    Attributes:
      digest: 16 bytes that are equal on all ranks exactly if they have done alike.
    """

    digest: bytes

    def text(self) -> str:
        """Return what was done, for messages."""

    def undo(self) -> None:
        """Put back what was there before."""


Writes: TypeAlias = list[Unproved]

# How many different texts an explanation has, whatever the number of ranks.
MAX_SPEAKERS = 16


class DistinctTexts(NamedTuple):
    """The different texts of all ranks, of which each has travelled once; equal on all ranks.

    Attributes:
      ranks_by_text: The ranks of the session that have each of at most `MAX_SPEAKERS` texts, in
        the order of the lowest of these ranks.
      other_ranks: The ranks that have further texts.
    """

    ranks_by_text: dict[bytes, list[int]]
    other_ranks: list[int]


class RunState(threading.local):
    """Whether this thread is inside ``Strategy.run``.

    Attributes:
      depth: How many it is inside of.
      failed: The exception that closed them, if one did.
      handles: All-reduces that were begun, and that nobody has waited for yet.
      carriers: Exceptions of other libraries, in whose texts they pass on those of their callbacks.
      uneven: The replicas were given different numbers of rows of one batch.
      batch_digest: Of the batch of a dataset that is not distributed which `fn` was given; empty
        if it was given none.
    """

    depth = 0
    uneven = False
    batch_digest = b""
    carriers: tuple[type[BaseException], ...] = ()
    failed: BaseException | None = None

    def __init__(self) -> None:
        """Create the state outside of any run."""
        self.handles: list[Any] = []


@final
class Caught:
    """Keeps what its body raises, for a handshake that tells it to all ranks.

    Args:
      kind: Which exceptions; a way out of the program too, if not said otherwise.

    Attributes:
      failure: What was raised, or None.
    """

    def __init__(self, kind: type[BaseException] = BaseException):
        """Keep exceptions of a `kind`; others leave the body."""
        self._kind = kind
        self.failure: BaseException | None = None

    def __enter__(self) -> Caught:
        """Begin the body."""
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> bool:
        """Take what it raised."""
        self.failure = value if isinstance(value, self._kind) else None
        return self.failure is not None


@final
class Preparing(ContextDecorator):
    """Raises on every rank what its body, or a function that it decorates, raises on this one.

    Many calls enter one, so it is not a generator, which takes three times as long.

    Args:
      refuse: Takes part in the handshake of a call that failed, and raises why.
      name: The call.
    """

    def __init__(self, refuse: Callable[[str, Exception], NoReturn], name: str):
        """Refuse the call of that name, if the body fails."""
        self._refuse, self._name = refuse, name

    def __enter__(self) -> None:
        """Begin the body."""

    def __exit__(self, kind: object, error: BaseException | None, trace: Any) -> None:
        """Take part in the handshake, if it raised."""
        if not isinstance(error, Exception):
            return
        try:
            self._refuse(self._name, error)
        except BaseException as raised:
            if raised is not error:
                raise
            error.__traceback__ = trace  # without the frames of the handshake


@final
class Hooks:
    """Where faults come in on purpose; see `mpistrat.lockstep.inject`.

    Attributes:
      on_fn: Called on the way into the function of a ``run``.
      on_moved: Called with the results of an all-reduce that moved more than its handshake.
      on_moving: Called after the handshake of an all-reduce through shared memory.
      sharing: Shared memory is being made, or an all-reduce is in transit through it.
    """

    def __init__(self) -> None:
        """Create it without hooks."""
        self.on_fn: Callable[[], None] | None = None
        self.on_moved: Callable[[list[Any]], None] | None = None
        self.on_moving: Callable[[], None] | None = None
        self.sharing = False

    def __enter__(self) -> None:
        """Begin what makes shared memory, or moves data through it."""
        self.sharing = True

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.sharing = False


@final
class CallState:
    """What the calls of one session have come to; one per session, whatever its strategies.

    Attributes:
      allowed: Seconds that the board says a call may take; None for what is allowed to every call.
      raised: The last exception that every rank has raised.
      run: The ``Strategy.run`` that this rank is inside of.
      steps: How many ``Strategy.run`` have ended well; equal on all ranks.
      passes: How many backward passes replicated models of PyTorch have made; equal on all ranks.
      unproved: Small writes that the next handshake will show to be alike on all ranks, or undo.
      interrupted: Whether Ctrl-C is waiting to be raised.
      gone: The error that told that ranks have left the program, if they have.
      speaks: This rank is the one to print that error.
      exit_code: What the ranks agreed to leave with, once one has left.
      cause: The line about the exception that has ended the program, once one has left.
      uneven: The batch that an iterator has given last, and its leaves, if replicas have different
        numbers of its rows.
      unweighted: There was a warning of a mean without a weight over such a batch.
      formatted: There was a warning of a value per replica in a text.
      asked: A rank has asked in the last `compare_payloads` that all ranks look at something.
      batches_compared: Ranks have looked at batches of a dataset that is not distributed.
      batches_sought: The runs of this rank whose arguments were searched for such a batch.
      broken: Called with what was raised inside of a call, while other ranks are in the same call.
    """

    def __init__(self) -> None:
        """Create the state before the first call."""
        self.allowed: float | None = None
        self.raised: BaseException | None = None
        # Per thread: a strategy that never communicates may be used by any.
        self.run = RunState()
        self.steps = self.passes = 0
        self.unproved: list[Unproved] = []
        self.interrupted = Interrupted()
        self.gone: BaseException | None = None
        self.speaks = False
        self.exit_code = 0
        self.cause = ""
        self.uneven: Sequence[Any] = ()
        self.unweighted = self.formatted = False
        self.asked = self.batches_compared = False
        self.batches_sought = 0
        self.broken: Callable[[Session, BaseException], None] = lambda session, error: None


def _create_watched_method(name: str) -> Callable[..., Any]:
    """Return a method of `Comm` that tells the board before and after."""

    def move(self: Watched, *args: Any) -> Any:
        self.session.board.resume()
        try:
            return getattr(self.inner, name)(*args)
        except BaseException as error:
            self.session.get_instance(CallState).broken(self.session, error)
            raise
        finally:
            self.session.board.leave()

    move.__doc__ = getattr(Comm, name).__doc__
    return move


@final
class Watched(Comm):
    """The communicator of a session, for what moves after a handshake.

    The board is told that this rank is in the next part of its call, so a rank that does not come
    to it is found out as one that does not come to the handshake. What is raised in it ends the job
    (`mpistrat.lockstep.ending`): the others would wait for this rank.

    Args:
      session: The session whose board this is.
      comm: The communicator, if not the session's own but a part of it.
    """

    def __init__(self, session: Session, comm: Comm | None = None):
        """Watch the communicator of `session`."""
        self.session, self.inner = session, comm or session.comm
        self.rank, self.size, self.name = self.inner.rank, self.inner.size, self.inner.name

    allgather = _create_watched_method("allgather")
    allgatherv = _create_watched_method("allgatherv")
    allreduce = _create_watched_method("allreduce")
    bcast = _create_watched_method("bcast")
    gatherv = _create_watched_method("gatherv")
    sendrecv = _create_watched_method("sendrecv")
    barrier = _create_watched_method("barrier")
    shared = _create_watched_method("shared")
    pages = _create_watched_method("pages")
    _split = _create_watched_method("split")
    _by_node = _create_watched_method("by_node")

    def split(self, color: int, key: int | None = None) -> Watched:
        """Return the ranks that give the same `color`, watched too."""
        return Watched(self.session, self._split(color, key))

    def by_node(self) -> Watched:
        """Return the ranks that share memory with this one, watched too."""
        node_comm = self._by_node()
        return self if node_comm is self.inner else Watched(self.session, node_comm)

    def free(self) -> None:
        """Free the communicator. Collective."""
        self.inner.free()


class Ranks:
    """The ranks of one session, in the order of one strategy's replicas.

    Attributes:
      session: Counts the calls.
      state: What they have come to.
      order: Which rank is the first replica, the second and so on; None for rank order.
      ranks: The same as numbers, for messages.
      hooks: Where faults come in on purpose.
      comm: Connects them; the board knows of what moves.
    """

    def __init__(self, session: Session, order: Sequence[int] | None = None):
        """Create the ranks of `session` in an order.

        Args:
          session: Whose sequence of calls it is, whatever the orders of its strategies.
          order: As the attribute.
        """
        self.session = session
        self.state, self.hooks = session.get_instance(CallState), session.get_instance(Hooks)
        self.order = None if order is None else tuple(order)
        self.ranks = tuple(order or range(session.comm.size))
        self._raw = session.comm if order is None else OrderedComm(session.comm, order)
        self.comm: Comm = Watched(session, self._raw)
        # Ranks that explain a failure may be in calls of strategies of different orders.
        self._unordered = self.comm if order is None else Watched(session)

    @property
    def here(self) -> str:
        """Which rank this is, in words, for messages that all ranks raise."""
        return f"this is rank {self.ranks[self.comm.rank]} of {self.comm.size}"

    @property
    def options(self) -> Options:
        """The options of the session."""
        return self.session.options

    def shared(self, name: str, make: Callable[[], T], per_node: int = 0) -> T:
        """Return the object that strategies with this order of the ranks share, made once.

        Args:
          name: Its name.
          make: Makes it, at the first call.
          per_node: How many ranks a node has for it; 0 for those that share memory.
        """
        groups, key = self.session.groups, (name, self.order, per_node)
        if key not in groups:
            groups[key] = make()
        shared_object: T = groups[key]
        return shared_object

    def texts(self, own_bytes: bytes) -> list[bytes]:
        """Return every rank's bytes, of any length. Collective; unproved."""
        size = self.comm.size
        counts = np.zeros(size, np.int64)
        self.comm.allgather(np.array([len(own_bytes)], np.int64), counts)
        try:
            gathered_bytes = np.empty(int(counts.sum()), np.uint8)
        except MemoryError as error:
            self.state.broken(self.session, error)
            raise
        self.comm.allgatherv(np.frombuffer(own_bytes, np.uint8), gathered_bytes, counts.tolist())
        ends = np.cumsum(counts).tolist()
        joined_bytes = gathered_bytes.tobytes()
        return [
            joined_bytes[end - count : end]
            for end, count in zip(ends, counts.tolist(), strict=True)
        ]

    def distinct_texts(self, text: bytes) -> DistinctTexts:
        """Exchange texts of any length; the lowest rank that has one speaks for all that have it.

        Collective; unproved. Of more than `FRAME_RANKS` ranks each receives at most `MAX_SPEAKERS`
        texts; fewer gather all.

        Args:
          text: That of this rank; empty if it has none.
        """
        if self.comm.size <= FRAME_RANKS:
            return self._gathered_texts(text)
        texts: list[bytes] = []
        row = MAX_SPEAKERS
        while len(texts) < MAX_SPEAKERS:
            speaker = self.lowest_rank(bool(text) and row == MAX_SPEAKERS)
            if speaker is None:
                break
            texts.append(self.text_from(speaker, text))
            if row == MAX_SPEAKERS and texts[-1] == text:
                row = len(texts) - 1
        if not texts:
            return DistinctTexts({}, [])
        *members, other_ranks = self._members(
            min(row, len(texts)) if text else None, len(texts) + 1
        )
        return DistinctTexts(dict(zip(texts, members, strict=True)), other_ranks)

    def _gathered_texts(self, text: bytes) -> DistinctTexts:
        ranks_by_text: dict[bytes, list[int]] = {}
        for rank, rank_text in sorted(zip(self.ranks, self.texts(text), strict=True)):
            if rank_text:
                ranks_by_text.setdefault(rank_text, []).append(rank)
        hidden_texts = list(ranks_by_text)[MAX_SPEAKERS:]
        hidden = [rank for rank_text in hidden_texts for rank in ranks_by_text.pop(rank_text)]
        return DistinctTexts(ranks_by_text, sorted(hidden))

    def reduce_numbers(self, numbers: Array, ufunc: np.ufunc, op: str) -> Array:
        """Reduce a few numbers of all ranks of the session. Collective; unproved.

        As the handshake does, few ranks gather, and many reduce.

        Args:
          numbers: Of the same shape and dtype on all ranks.
          ufunc: Reduces two of them.
          op: The same for `Comm.allreduce`.
        """
        comm = self._unordered
        if comm.size > FRAME_RANKS:
            result = np.empty_like(numbers)
            comm.allreduce(numbers, result, op)
            return result
        rows = np.empty((comm.size, *numbers.shape), numbers.dtype)
        comm.allgather(numbers, rows)
        return np.asarray(ufunc.reduce(rows, axis=0))

    def lowest_rank(self, is_candidate: bool) -> int | None:
        """Return the lowest rank of the session that is a candidate, or None. Collective."""
        comm = self._unordered
        candidate = np.array(comm.rank if is_candidate else comm.size)
        rank = int(self.reduce_numbers(candidate, np.minimum, "MIN"))
        return rank if rank < comm.size else None

    def ranks_with(self, holds: bool) -> list[int]:
        """Return the ranks of the session of which something holds. Collective."""
        return self._members(0 if holds else None, 1)[0]

    def text_from(self, speaker: int, text: bytes) -> bytes:
        """Return the `text` of one rank of the session. Collective; unproved."""
        comm = self._unordered
        nbytes = np.array([len(text)], np.int64)
        comm.bcast(nbytes, speaker)
        try:
            buffer = np.empty(int(nbytes[0]), np.uint8)
        except MemoryError as error:
            self.state.broken(self.session, error)
            raise
        if comm.rank == speaker:
            buffer[:] = np.frombuffer(text, np.uint8)
        comm.bcast(buffer, speaker)
        return buffer.tobytes()

    def _members(self, row: int | None, row_count: int) -> list[list[int]]:
        """Return the ranks of the session in each row, of which each rank is in one or in none."""
        comm = self._unordered
        is_member = np.zeros((row_count, comm.size), bool)
        if row is not None:
            is_member[row, comm.rank] = True
        bits = self.reduce_numbers(np.packbits(is_member, axis=1), np.bitwise_or, "BOR")
        is_member = np.unpackbits(bits, axis=1, count=comm.size).astype(bool)
        return [np.flatnonzero(members).tolist() for members in is_member]
