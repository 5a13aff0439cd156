"""The ranks that make one sequence of calls, the state of their calls, and Ctrl-C in them.

`Ranks` are the ranks of one session in the order of one strategy, with the small exchanges that
explain a failure. `CallState` is the state of the calls of a session, shared by all its strategies;
`RunState` that of ``Strategy.run`` in one thread. `WatchedComm` is the communicator as the status
board sees it used.

`KeptInterrupt`: Ctrl-C never lands between a handshake and its payload, and is never lost. A
KeyboardInterrupt there would take one rank out of a call that the others have entered. So while the
running code is the library's own, the signal is kept, and raised where the program calls the
library next, or where a function that ``run`` has called returns. From there the other ranks hear
of it as of any exception. In the program's code it raises at once.

The exception of a handler of the program's own (a timer that runs out, SIGTERM that calls
``sys.exit``) is kept in the same way in a job of several ranks: handlers that are set by
``signal.signal``, before or after the first strategy, are called by a `GuardedHandler`.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, final

import numpy as np
import xxhash

from mpistrat.arrays import Array
from mpistrat.comm import callsite
from mpistrat.comm.base import Comm, OrderedComm
from mpistrat.comm.session import Session
from mpistrat.config import Options
from mpistrat.lockstep.frame import FRAME_RANKS

_STANDARD = str(Path(os.__file__).parent)
_RESEND_SECONDS = 0.05  # seconds until the signal is looked at again
_Handler: TypeAlias = "Callable[[int, FrameType | None], Any]"


def is_in_library(frame: FrameType | None) -> bool:
    """Tell whether the code that runs in `frame` is called by mpistrat, not by the program.

    Code of NumPy and of the standard library belongs to its caller.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if callsite.is_library_file(name) or module.split(".")[0] == "mpistrat":
            return True
        # The code of a named tuple has no file; it belongs to the code that makes one.
        is_named_tuple_code = module.startswith("namedtuple_")
        if not is_named_tuple_code and not name.startswith("<frozen") and not _is_third_party(name):
            return False
        frame = frame.f_back
    return False


def _is_in_torch_call(frame: FrameType | None) -> bool:
    """Tell whether a call of torch.distributed runs, which abandons its group if interrupted."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("mpistrat.torch."):
            return True
        frame = frame.f_back
    return False


def _unwrap_handler(handler: Any) -> Any:
    return handler.handler if isinstance(handler, GuardedHandler) else handler


def _is_third_party(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(_STANDARD)


@final
class GuardedHandler:
    """A handler of the program's own whose exception is kept while the library runs.

    Attributes:
      handler: The handler that the program has set.
    """

    def __init__(self, handler: _Handler, kept_interrupt: KeptInterrupt):
        """Guard a handler."""
        self.handler, self._kept_interrupt = handler, kept_interrupt

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Call the handler; raise its exception, or keep that while the library runs."""
        kept_interrupt = self._kept_interrupt
        if kept_interrupt.is_own_signal:  # the signal is this library's own
            kept_interrupt.handle_resent_signal(number, frame)
            return
        try:
            self.handler(number, frame)
        except BaseException as error:
            if not is_in_library(frame) or _is_in_torch_call(frame):
                raise
            kept_interrupt.keep_error(error)
            kept_interrupt.resend_later(number)


@final
class KeptInterrupt:
    """A Ctrl-C that came while the library ran, kept until it can be raised.

    The handler of the signal keeps a reference to an armed one.

    Attributes:
      is_pending: It has not been raised yet.
      kept_error: The exception to raise in its place, from a handler of the program's own.
      is_own_signal: The next signal is this library's own, to raise the interrupt if it can.
    """

    is_pending = False
    is_own_signal = False
    kept_error: BaseException | None = None
    _is_guarding = False

    def guard_handlers(self) -> None:
        """Keep exceptions of handlers, of present and future ones, while the library runs."""
        if self._is_guarding or threading.current_thread() is not threading.main_thread():
            return
        self._is_guarding = True
        set_handler, get_handler = signal.signal, signal.getsignal

        @functools.wraps(get_handler)
        def getsignal(signalnum: int) -> Any:
            return _unwrap_handler(get_handler(signalnum))

        @functools.wraps(set_handler)
        def set_guarded(signalnum: int, handler: Any) -> Any:
            return _unwrap_handler(set_handler(signalnum, self._guard_handler(handler)))

        for number in signal.valid_signals():
            handler = get_handler(number)
            if callable(handler) and handler != self._handle_interrupt:
                set_handler(number, self._guard_handler(handler))
        setattr(signal, "signal", set_guarded)  # noqa: B010  # of another type to mypy
        setattr(signal, "getsignal", getsignal)  # noqa: B010

    def _guard_handler(self, handler: Any) -> Any:
        # The library's own handler, and values such as SIG_DFL, raise nothing.
        if (
            not callable(handler)
            or isinstance(handler, signal.Handlers)
            or handler == self._handle_interrupt
        ):
            return handler
        return GuardedHandler(handler, self)

    def keep_error(self, error: BaseException) -> None:
        """Keep the first exception of handlers for `raise_pending`."""
        self.kept_error, self.is_pending = self.kept_error or error, True

    def handle_resent_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise the pending exception if the program's code runs; else resend the signal later."""
        self.is_own_signal = False
        if not self.is_pending:
            return  # it has been raised meanwhile
        if is_in_library(frame):
            self.resend_later(number)
        else:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt if one is pending, or the error that was kept."""
        if self.is_pending:
            pending_error, self.kept_error, self.is_pending = self.kept_error, None, False
            raise KeyboardInterrupt if pending_error is None else pending_error

    def drop(self) -> None:
        """Forget what is pending: the code that it should end has ended."""
        self.kept_error, self.is_pending = None, False

    def try_keep(self, error: BaseException, is_exchanged: bool) -> bool:
        """Keep an exception that a signal handler raised in a handshake, if that can continue.

        Args:
          error: The exception out of a call of MPI.
          is_exchanged: That call has done its work all the same.

        Returns:
          Whether it is kept, so that this rank continues the call, as the others do.
        """
        if not is_exchanged or type(error).__module__ == "mpi4py.MPI":
            return False
        self.keep_error(error)
        return True

    def arm(self, has_other_ranks: bool = False) -> None:
        """Take the signal over, unless the program handles it itself.

        Args:
          has_other_ranks: There are other ranks, so the program's own handlers are guarded too.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle_interrupt)
        if has_other_ranks:
            self.guard_handlers()

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_own_signal:
            self.handle_resent_signal(number, frame)
            return
        if not is_in_library(frame):
            self.is_pending = self.kept_error is not None
            raise KeyboardInterrupt
        # It is raised at the next call, or by a later signal if the program computes for long.
        self.is_pending = True
        self.resend_later(number)

    def resend_later(self, number: int) -> None:
        """Send this process the signal once more, soon, to `handle_resent_signal`."""
        timer = threading.Timer(_RESEND_SECONDS, self._resend_signal, (number,))
        timer.daemon = True
        timer.start()

    def _resend_signal(self, number: int) -> None:
        if not self.is_pending:
            return  # it has been raised meanwhile
        self.is_own_signal = True
        os.kill(os.getpid(), number)


def is_interrupt_unhandled() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt: the program neither handles nor ignores it."""
    handler = signal.getsignal(signal.SIGINT)
    owner = getattr(handler, "__self__", None)
    return handler is signal.default_int_handler or isinstance(owner, KeptInterrupt)


T = TypeVar("T")


class PendingWrite(Protocol):
    """A write of this rank that the ranks have not compared yet; the next handshake does.

    Attributes:
      digest: 16 bytes that are equal on all ranks exactly if their writes are alike.
    """

    digest: bytes

    def text(self) -> str:
        """Return the text of the write, for messages."""

    def undo(self) -> None:
        """Restore the contents before the write."""


PendingWrites: TypeAlias = list[PendingWrite]

# The most texts that an explanation has, whatever the number of ranks.
MAX_SPEAKERS = 16


class DistinctTexts(NamedTuple):
    """The different texts of all ranks, each sent once; equal on all ranks.

    Attributes:
      ranks_by_text: The ranks of the session that have each of at most `MAX_SPEAKERS` texts, in
        the order of the lowest of these ranks; a range if all have the same.
      other_ranks: The ranks that have further texts.
    """

    ranks_by_text: dict[bytes, Sequence[int]]
    other_ranks: list[int]


class RunState(threading.local):
    """The calls of ``Strategy.run`` that this thread is inside of.

    Attributes:
      depth: Their number.
      failure: The exception that closed them, if one did.
      pending_handles: All-reduces that were begun, and that nobody has waited for yet.
      carrier_types: Exceptions of other libraries whose texts contain those of their callbacks.
      uneven_row_count: How many rows this replica was given of a batch of which the replicas have
        different numbers; None without such a batch.
      batch_digest: The digest of an argument of `fn` that is a batch of a dataset that is not
        distributed; empty without one.
    """

    depth = 0
    uneven_row_count: int | None = None
    batch_digest = b""
    carrier_types: tuple[type[BaseException], ...] = ()
    failure: BaseException | None = None

    def __init__(self) -> None:
        """Create the state outside of any run."""
        self.pending_handles: list[Any] = []


@final
class FailureCatcher:
    """Catches the exception of its body, for a handshake that passes it on to all ranks.

    Args:
      exception_type: Exceptions to catch; by default also those that leave the program.

    Attributes:
      failure: The exception of the body, or None.
    """

    def __init__(self, exception_type: type[BaseException] = BaseException):
        """Catch exceptions of this type; others leave the body."""
        self._exception_type = exception_type
        self.failure: BaseException | None = None

    def __enter__(self) -> FailureCatcher:
        """Begin the body."""
        return self

    def __exit__(self, exception_type: object, error: BaseException | None, trace: object) -> bool:
        """Catch the exception of the body."""
        self.failure = error if isinstance(error, self._exception_type) else None
        return self.failure is not None


@final
class CollectiveValidation(ContextDecorator):
    """Raises on every rank the exception of its body, or of a function that it decorates.

    Many calls enter one, so it is not a generator, which takes three times as long.

    Args:
      fail_collectively: Takes part in the handshake of a call that failed, and raises its error.
      name: The name of the call.
    """

    def __init__(self, fail_collectively: Callable[[str, Exception], NoReturn], name: str):
        """Create it for the call of that name."""
        self._fail_collectively, self._name = fail_collectively, name

    def __enter__(self) -> None:
        """Begin the body."""

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take part in the handshake, if the body has raised."""
        if not isinstance(error, Exception):
            return
        try:
            self._fail_collectively(self._name, error)
        except BaseException as raised_error:
            if raised_error is not error:
                raise
            error.__traceback__ = trace  # without the frames of the handshake


@final
class FaultHooks:
    """Functions by which faults are injected; see `mpistrat.lockstep.inject`.

    Attributes:
      on_fn: Called on the way into the function of a ``run``.
      on_moved: Called with the results of an all-reduce that moved more than its handshake.
      on_moving: Called after the handshake of an all-reduce through shared memory.
      is_sharing: Shared memory is being made, or an all-reduce is in transit through it.
    """

    def __init__(self) -> None:
        """Create it without hooks."""
        self.on_fn: Callable[[], None] | None = None
        self.on_moved: Callable[[list[Any]], None] | None = None
        self.on_moving: Callable[[], None] | None = None
        self.is_sharing = False

    def __enter__(self) -> None:
        """Begin to make shared memory, or to move data through it."""
        self.is_sharing = True

    def __exit__(self, *_: object) -> None:
        """End that."""
        self.is_sharing = False


@final
class CallState:
    """The state of the calls of one session, shared by all its strategies.

    Attributes:
      board_seconds: Seconds that a call may take, as the status board has them; None for the time
        that every call may take.
      common_error: The last exception that every rank has raised.
      run: The ``Strategy.run`` that this rank is inside of.
      step_count: How many ``Strategy.run`` have ended well; equal on all ranks.
      backward_count: How many backward passes replicated models of PyTorch have made; equal on all
        ranks.
      pending_writes: Small writes that the next handshake compares, and undoes where they differ.
      kept_interrupt: A Ctrl-C that waits to be raised.
      closing_error: The error that reported that ranks have left the program, if they have.
      is_speaker: Whether this rank prints that error for all.
      exit_code: The agreed exit code, once a rank has left.
      cause_text: The line about the exception that has ended the program, once a rank has left.
      uneven_batch: The last batch of an iterator, and its leaves, if the replicas have different
        numbers of its rows.
      past_warnings: Names of the warnings of `warn_on_replica0` that have come; equal on all ranks.
      has_warned_formatted: There was a warning of a value per replica in a text.
      needs_comparison: A rank has asked in the last `compare_payloads` that all ranks compare their
        batches.
      has_compared_batches: Ranks have compared batches of a dataset that is not distributed.
      batch_search_count: The runs of this rank whose arguments were searched for such a batch.
      end_broken_call: Called with an exception out of a call that other ranks are inside of.
    """

    def __init__(self) -> None:
        """Create the state before the first call."""
        self.board_seconds: float | None = None
        self.common_error: BaseException | None = None
        # Per thread: a strategy that never communicates may be used by any.
        self.run = RunState()
        self.step_count = self.backward_count = 0
        self.pending_writes: list[PendingWrite] = []
        self.kept_interrupt = KeptInterrupt()
        self.closing_error: BaseException | None = None
        self.is_speaker = False
        self.exit_code = 0
        self.cause_text = ""
        self.uneven_batch: Sequence[Any] = ()
        self.past_warnings: set[str] = set()
        self.has_warned_formatted = False
        self.needs_comparison = self.has_compared_batches = False
        self.batch_search_count = 0
        self.end_broken_call: Callable[[Session, BaseException], None] = lambda session, error: None


def _create_watched_method(name: str) -> Callable[..., Any]:
    """Return a method of `Comm` that updates the status board before and after."""

    def move(self: WatchedComm, *args: Any) -> Any:
        self.session.board.resume()
        try:
            return getattr(self.inner, name)(*args)
        except BaseException as error:
            self.session.get_instance(CallState).end_broken_call(self.session, error)
            raise
        finally:
            self.session.board.leave()

    move.__doc__ = getattr(Comm, name).__doc__
    return move


@final
class WatchedComm(Comm):
    """The communicator of a session, for data that move after a handshake.

    The status board shows that this rank is in the next part of its call, so a rank that does not
    come to it is named like one that does not come to the handshake. An exception in it ends the
    job (`mpistrat.lockstep.ending`): the others would wait for this rank.

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

    def split(self, color: int, key: int | None = None) -> WatchedComm:
        """Return the ranks that give the same `color`, watched too."""
        return WatchedComm(self.session, self._split(color, key))

    def by_node(self) -> WatchedComm:
        """Return the ranks that share memory with this one, watched too."""
        node_comm = self._by_node()
        return self if node_comm is self.inner else WatchedComm(self.session, node_comm)

    def free(self) -> None:
        """Free the communicator. Collective."""
        self.inner.free()


class Ranks:
    """The ranks of one session, in the order of one strategy's replicas.

    Attributes:
      session: Counts the calls.
      state: The state of the calls.
      order: The ranks in the order of the replicas; None for rank order.
      ranks: The same as numbers, for messages.
      hooks: Functions by which faults are injected.
      comm: Connects them; the status board shows when data move.
    """

    def __init__(self, session: Session, order: Sequence[int] | None = None):
        """Create the ranks of `session` in an order.

        Args:
          session: It has one sequence of calls, whatever the orders of its strategies.
          order: The ranks in the order of the replicas; None for rank order.
        """
        self.session = session
        self.state, self.hooks = session.get_instance(CallState), session.get_instance(FaultHooks)
        self.order = None if order is None else tuple(order)
        rank_order = range(session.comm.size)
        self.ranks: Sequence[int] = rank_order
        if order is not None and [*order] != [*rank_order]:
            self.ranks = tuple(order)
        self._raw_comm = session.comm if order is None else OrderedComm(session.comm, order)
        self.comm: Comm = WatchedComm(session, self._raw_comm)
        # Ranks that explain a failure may be in calls of strategies of different orders.
        self._unordered = self.comm if order is None else WatchedComm(session)

    @property
    def rank_text(self) -> str:
        """The number of this rank in words, for messages that all ranks raise."""
        return f"this is rank {self.ranks[self.comm.rank]} of {self.comm.size}"

    @property
    def options(self) -> Options:
        """The options of the session."""
        return self.session.options

    def get_shared(self, name: str, make: Callable[[], T], per_node: int = 0) -> T:
        """Return an object that strategies with this order of the ranks share, made once.

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

    def gather_texts(self, own_bytes: bytes) -> list[bytes]:
        """Return every rank's bytes, of any length. Collective, without a handshake."""
        size = self.comm.size
        counts = np.zeros(size, np.int64)
        self.comm.allgather(np.array([len(own_bytes)], np.int64), counts)
        try:
            gathered_bytes = np.empty(int(counts.sum()), np.uint8)
        except MemoryError as error:
            self.state.end_broken_call(self.session, error)
            raise
        self.comm.allgatherv(np.frombuffer(own_bytes, np.uint8), gathered_bytes, counts.tolist())
        ends = np.cumsum(counts).tolist()
        joined_bytes = gathered_bytes.tobytes()
        return [
            joined_bytes[end - count : end]
            for end, count in zip(ends, counts.tolist(), strict=True)
        ]

    def gather_distinct_texts(self, text: bytes) -> DistinctTexts:
        """Exchange texts of any length; the lowest rank that has one speaks for all that have it.

        Collective, without a handshake. Cost: one small reduction if all ranks have the same text,
        which then does not travel. Else above `FRAME_RANKS` ranks each receives at most
        `MAX_SPEAKERS` texts, and a bit for each rank and text; fewer ranks gather all.

        Args:
          text: The text of this rank; empty if it has none.
        """
        comm = self._unordered
        words = np.frombuffer(xxhash.xxh3_128_digest(text), np.uint64)
        candidate = np.array([comm.rank if text else comm.size], np.uint64)
        # The least words, the complements of the greatest, and the lowest rank that has a text.
        local_numbers = np.concatenate([words, ~words, candidate])
        least_numbers = self.reduce_numbers(local_numbers, np.minimum, "MIN")
        if np.array_equal(least_numbers[:2], ~least_numbers[2:4]):
            return DistinctTexts({text: range(comm.size)} if text else {}, [])
        if comm.size <= FRAME_RANKS:
            return self._gather_all_texts(text)
        return self._exchange_distinct_texts(text, int(least_numbers[4]))

    def _exchange_distinct_texts(self, text: bytes, first_speaker: int) -> DistinctTexts:
        """Let one rank speak for each text; see `gather_distinct_texts`. Collective."""
        texts: list[bytes] = []
        own_index = MAX_SPEAKERS
        speaker: int | None = first_speaker
        while speaker is not None:
            texts.append(self.broadcast_text(speaker, text))
            if own_index == MAX_SPEAKERS and texts[-1] == text:
                own_index = len(texts) - 1
            if len(texts) == MAX_SPEAKERS:
                break
            speaker = self.find_lowest_rank(bool(text) and own_index == MAX_SPEAKERS)
        *members, other_ranks = self._gather_members(
            min(own_index, len(texts)) if text else None, len(texts) + 1
        )
        return DistinctTexts(dict(zip(texts, members, strict=True)), other_ranks)

    def _gather_all_texts(self, text: bytes) -> DistinctTexts:
        ranks_by_text: dict[bytes, list[int]] = {}
        for rank, rank_text in sorted(zip(self.ranks, self.gather_texts(text), strict=True)):
            if rank_text:
                ranks_by_text.setdefault(rank_text, []).append(rank)
        hidden_texts = list(ranks_by_text)[MAX_SPEAKERS:]
        hidden = [rank for rank_text in hidden_texts for rank in ranks_by_text.pop(rank_text)]
        return DistinctTexts({**ranks_by_text}, sorted(hidden))

    def reduce_numbers(self, numbers: Array, ufunc: np.ufunc, op: str) -> Array:
        """Return a few numbers reduced over all ranks of the session.

        Collective, without a handshake. Few ranks gather, many reduce, as in the handshake.

        Args:
          numbers: An array of the same shape and dtype on all ranks.
          ufunc: Reduces two arrays.
          op: The same operation for `Comm.allreduce`.
        """
        comm = self._unordered
        if comm.size > FRAME_RANKS:
            reduced = np.empty_like(numbers)
            comm.allreduce(numbers, reduced, op)
            return reduced
        rows = np.empty((comm.size, *numbers.shape), numbers.dtype)
        comm.allgather(numbers, rows)
        return np.asarray(ufunc.reduce(rows, axis=0))

    def find_lowest_rank(self, is_candidate: bool) -> int | None:
        """Return the lowest rank of the session that is a candidate, or None. Collective."""
        comm = self._unordered
        candidate = np.array(comm.rank if is_candidate else comm.size)
        rank = int(self.reduce_numbers(candidate, np.minimum, "MIN"))
        return rank if rank < comm.size else None

    def find_first_replica(self, is_candidate: bool) -> tuple[int, bool]:
        """Return the rank of the first replica that is a candidate, and whether all are.

        Collective. The orders of the ranks may differ; each rank counts as the replica of its own.

        Args:
          is_candidate: Whether this rank is one; at least one has to be.
        """
        comm = self._unordered
        candidate = self.comm.rank * comm.size + comm.rank if is_candidate else comm.size**2
        local_numbers = np.array([candidate, is_candidate], np.int64)
        number, is_every = self.reduce_numbers(local_numbers, np.minimum, "MIN").tolist()
        return number % comm.size, bool(is_every)

    def find_ranks_with(self, is_true: bool) -> list[int]:
        """Return the ranks of the session that call this with True. Collective."""
        return self._gather_members(0 if is_true else None, 1)[0]

    def broadcast_text(self, speaker: int, text: bytes) -> bytes:
        """Return the `text` of one rank of the session. Collective, without a handshake."""
        comm = self._unordered
        nbytes = np.array([len(text)], np.int64)
        comm.bcast(nbytes, speaker)
        try:
            buffer = np.empty(int(nbytes[0]), np.uint8)
        except MemoryError as error:
            self.state.end_broken_call(self.session, error)
            raise
        if comm.rank == speaker:
            buffer[:] = np.frombuffer(text, np.uint8)
        comm.bcast(buffer, speaker)
        return buffer.tobytes()

    def _gather_members(self, set_index: int | None, set_count: int) -> list[list[int]]:
        """Return the ranks of the session in each of `set_count` sets; a rank is in at most one."""
        comm = self._unordered
        is_member = np.zeros((set_count, comm.size), bool)
        if set_index is not None:
            is_member[set_index, comm.rank] = True
        bits = self.reduce_numbers(np.packbits(is_member, axis=1), np.bitwise_or, "BOR")
        is_member = np.unpackbits(bits, axis=1, count=comm.size).astype(bool)
        return [np.flatnonzero(members).tolist() for members in is_member]
