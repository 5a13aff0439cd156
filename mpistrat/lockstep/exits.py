"""The ways to exit this process; all of them make the last handshake.

Armed when the first session on MPI is made: an exception hook notes the exception that ends the
program, ``sys.exit`` notes its code, and at exit every session takes part in its last handshake.
Then all ranks leave with the code that they agreed on. An exception that all ranks raised alike is
printed once.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, final

from mpistrat.comm import mpi
from mpistrat.comm.base import Comm
from mpistrat.comm.session import Session
from mpistrat.config import rank_text
from mpistrat.errors import LockstepError, RemoteError
from mpistrat.lockstep.ending import (
    code_of,
    end_job,
    flush,
    last_line,
    leave,
    leave_at_once,
    wait_for_other_groups,
)
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import CallState, Interrupted
from mpistrat.lockstep.shutdown import LEAVE, Agreement, extract_exit_text
from mpistrat.lockstep.tracebacks import line_of, shortened
from mpistrat.watchdog.exchange import threads_allowed
from mpistrat.watchdog.status_board import say

# Seconds after which an exception is printed although the other ranks have not come to leave.
_PATIENCE = 3.0
_LOOK = 1.0  # seconds between two looks at what the others do meanwhile
# Called with an exception that ends the program, before it is told to the other ranks: they may
# add to its text what Python does not know.
explaining: list[Callable[[BaseException], None]] = []


def _interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


_CODE: Any = SystemExit.__dict__["code"]


class NotedExit(SystemExit):
    """What ``sys.exit`` raises: it notes whether it is what ends the program."""

    @property
    def code(self) -> Any:
        """The code or text; the interpreter asks for it when no Python code is left to run."""
        if sys._getframe().f_back is None:
            exits().failure = self
        return _CODE.__get__(self)

    @code.setter
    def code(self, value: Any) -> None:
        _CODE.__set__(self, value)

    def __reduce__(self) -> Any:
        """Return how to make a plain one, as in another process."""
        return SystemExit, self.args


# Messages and tracebacks show the exception that the program knows.
NotedExit.__name__ = NotedExit.__qualname__ = "SystemExit"
NotedExit.__module__ = "builtins"


@final
class Exits:
    """The way out of one process."""

    def __init__(self) -> None:
        """Create it without any session."""
        self.sessions: list[Session] = []
        self.failure: BaseException | None = None
        self.recorder: Callable[[int], None] | None = None
        self.interrupted = Interrupted()  # armed before MPI makes others wait for this rank
        self._armed = False
        self._pid = os.getpid()
        self._printed = threading.Lock()
        self._hook = sys.excepthook  # the program's own, if it has one
        self._group: tuple[Comm, Agreement] | None = None
        self._planned = False

    def arm(self, session: Session) -> None:
        """Lead the ways out of this process through the last handshake of `session` too."""
        if any(armed_session is session for armed_session in self.sessions):
            return
        # Sessions that were freed meanwhile must not keep their memory by being listed here.
        self.sessions = [
            armed_session for armed_session in self.sessions if not armed_session.is_freed
        ]
        self.sessions.append(session)
        session.get_instance(CallState).interrupted = self.interrupted
        if self._armed:
            return
        self._armed = True
        atexit.register(self.at_exit)
        if not _interactive():
            sys.excepthook = self.uncaught
            sys.exit = self.exit

    def arm_alone(self) -> None:
        """Print what ends the program without frames of the library, where there is no MPI."""
        main = threading.current_thread() is threading.main_thread()
        if main and not _interactive() and sys.excepthook is self._hook:
            sys.excepthook = self._print_alone

    def _print_alone(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        with shortened(value):
            self._hook(kind, value, value.__traceback__)
        if sys.excepthook == self._print_alone:  # else it is the program's own, which has called it
            flush()
            say(line_of(int(rank_text() or 0), value))

    def exit(self, status: Any = None, /) -> NoReturn:
        """Do what ``sys.exit`` does, so that it is noted if it ends the program."""
        main = threading.current_thread() is threading.main_thread()
        # Python passes over the very SystemExit that ends another thread.
        raise NotedExit(status) if main else SystemExit(status)

    def _unheard(self) -> BaseException | None:
        """Return the error that has ended the program if a hook of the program has printed it."""
        # At a prompt, or in a notebook, it has ended one input, and not the program.
        last_error = None if _interactive() else getattr(sys, "last_value", None)
        trace = None if last_error is None else last_error.__traceback__
        if trace is None or trace.tb_frame.f_back is not None:  # it was caught further up
            return None
        self._printed.acquire(blocking=False)  # by that hook
        return last_error

    def uncaught(self, kind: Any, value: BaseException, trace: TracebackType | None) -> None:
        """Remember the exception that ends the program; it is printed at exit."""
        if isinstance(value, SystemExit) and self.failure is not None:
            return  # with PYTHONINSPECT Python does not leave by it, and shows it here
        for explain in explaining:
            explain(value)
        self.failure = value.with_traceback(trace)

    def ended(self, failure: BaseException) -> None:
        """Do what Python does when an exception ends the program: tell a hook that this has set."""
        self.failure, hook = None, sys.excepthook
        if not (hook == self.uncaught or hook is self._hook or isinstance(failure, SystemExit)):
            try:
                hook(type(failure), failure, failure.__traceback__)
                if self.failure is None:  # else the hook has handed it on to `uncaught`
                    self._printed.acquire(blocking=False)
            except Exception:
                traceback.print_exc()
        self.failure = failure

    def _print(self, header: str = "") -> None:
        failure = self.failure
        if failure is None or isinstance(failure, SystemExit):
            return
        if not self._printed.acquire(blocking=False):
            return
        try:
            with shortened(failure):
                self._show(failure, header)
        except BaseException:  # the others wait for this rank, whatever a hook or a stream does
            with suppress(BaseException):
                sys.__excepthook__(type(failure), failure, failure.__traceback__)
        flush()

    def _show(self, failure: BaseException, header: str) -> None:
        exception_parts = type(failure), failure, failure.__traceback__
        is_one_piece = bool(header) and self._hook is sys.__excepthook__
        if is_one_piece:  # as one piece, or lines that two ranks print at once are mixed
            header += "".join(traceback.format_exception(*exception_parts))
        print(header, end="", file=sys.stderr, flush=True)
        if not is_one_piece:
            with suppress(SystemExit):  # with which a hook may end
                self._hook(*exception_parts)

    def _print_once(self, text: str) -> None:
        if self._printed.acquire(blocking=False):
            say(text)

    def at_exit(self) -> None:
        """Take part in the last handshake of every session, and leave with the agreed code."""
        self.failure = self._unheard() if self.failure is None else self.failure
        if self.failure is None and self.interrupted.pending:
            # No call has come any more that could raise it.
            self.failure = self.interrupted.kept_error or KeyboardInterrupt()
        code = code_of(self.failure)
        if os.getpid() != self._pid:  # a forked child: MPI_Finalize is its parent's business
            self._print()
            leave_at_once(code)
        self.sessions = [session for session in self.sessions if not session.is_freed]
        # That of all ranks first, if there is one: what the others agree on goes into it.
        self.sessions.sort(key=lambda session: -session.comm.size)
        if not mpi.is_mpi_running() or not self.sessions:
            self._print()
            if self.sessions:  # the program has finalized MPI, which waits for all of its ranks
                self._record(code)
            return
        left = threading.Event()
        # Not by `Thread.start`, which waits forever for one that dies of MemoryError as it begins.
        with suppress(RuntimeError):  # no thread can be started: it goes without
            _thread.start_new_thread(self._watch_leaving, (code, left))
        try:
            agreed = self._parts(code)
        except BaseException as error:
            # Such as MemoryError, or the program's own handler of a signal: the others wait for
            # this rank in the last handshake.
            if self.sessions[0].comm.size > 1:
                with suppress(BaseException):
                    traceback.print_exc()
                end_job(code or code_of(error) or 1)
            raise
        left.set()
        # Before MPI is finalized no watchdog may be inside it any more.
        calm = [session.board.close() for session in self.sessions]
        self._record(agreed or code)
        leave(self.sessions[0], agreed or code, self._planned and all(calm))
        if not all(calm):
            leave_at_once(code)
        wait_for_other_groups(self.sessions[0], agreed or code)

    def _record(self, code: int) -> None:
        if self.recorder is not None and self.sessions[0].comm.rank == 0:
            self.recorder(code)

    def _watch_leaving(self, code: int, left: threading.Event) -> None:
        """Say what ends the program if the others do not come to leave; end the job, at last.

        Args:
          code: What this rank would leave with.
          left: Is set when the last handshakes are over.
        """
        start = time.monotonic_ns()
        self._quiet(start)  # whether others compute is seen from the second look on
        if left.wait(min(_PATIENCE, self.sessions[0].options.grace)):
            return
        if not self._tell_for_group():
            self._print()
        elif code and self._group is not None and self._group[1].speaks:
            say("mpistrat: the other ranks of the job continue; these sleep until all have ended.")
        while code:
            quiet, patience, name = self._quiet(start)
            if quiet >= patience:
                self._give_up(code, f"{patience:g} s ({name})")
                return
            if left.wait(min(patience - quiet, _LOOK)):
                return

    def _quiet(self, start: int) -> tuple[float, float, str]:
        """Return for how long the others have been quiet, how long they may be, and its variable.

        They may be waiting for this rank in calls of their own on MPI, which no handshake ends.
        Those of another group, such as a trial, may have nothing to do with this rank: they are
        not quiet while their Python code goes on. One that computes in one line may wait as well,
        as MPI polls; it has the longer time.

        Args:
          start: When this rank came to leave, monotonic ns.
        """
        first, *other_sessions = self.sessions
        moved = max(start, *(session.board.last_move() for session in self.sessions))
        stirred, computed = first.board.signs()
        patience, name = first.options.grace, "MPISTRAT_GRACE"
        grouped = any(session.comm.size < first.comm.size for session in other_sessions)
        if grouped or first.board.has_groups():
            moved = max(moved, stirred)
            computes = time.monotonic_ns() - computed < patience * 1e9
            if computes and first.options.timeout > patience:
                patience, name = first.options.timeout, "MPISTRAT_TIMEOUT"
        return (time.monotonic_ns() - moved) / 1e9, patience, name

    def _give_up(self, code: int, patience: str) -> None:
        self._print()
        comm = self.sessions[0].comm
        say(
            f"mpistrat: rank {comm.rank} of {comm.size} failed, and the others have not come to a "
            f"call of mpistrat for {patience}; ending the job."
        )
        if self.failure is not None:
            last_line.text = line_of(mpi.ranks_in_job(comm)[comm.rank], self.failure)
        end_job(code)

    def _parts(self, code: int) -> int:
        """Take part in the last handshakes of all sessions at once: others may be in a call on any.

        Returns:
          The largest code that they agreed on.
        """
        first, *other_sessions = self.sessions
        exit_codes: list[int] = []

        def take(session: Session) -> None:
            _await_others(session)
            exit_codes.append(self._part(session, code))

        threads: list[threading.Thread] = []
        with suppress(RuntimeError):  # no thread can be started: one after the other then
            for session in other_sessions if threads_allowed() else ():
                thread = threading.Thread(target=take, args=(session,), daemon=True)
                thread.start()
                threads.append(thread)
        if _await_others(first):
            # All ranks have come to leave, so nothing keeps the other sessions any more.
            for thread in threads:
                thread.join()
        exit_codes.append(self._part(first, max(exit_codes, default=code), bool(exit_codes)))
        for thread in threads:
            thread.join()
        for session in other_sessions[len(threads) :]:
            take(session)
        return max(exit_codes)

    def _part(self, session: Session, code: int, of_group: bool = False) -> int:
        comm, state = session.comm, session.get_instance(CallState)
        if state.gone is None:
            agreement = Lockstep(session).leave(code, self.failure, of_group)
            if session is self.sessions[0]:
                self._planned = agreement.planned
            if session is not self.sessions[0]:
                if self._group is None or self._group[0].size < comm.size:
                    self._group = comm, agreement
            elif self._group is None or self._group[0].size == 1 or not self._tell_for_group():
                self._print_agreement(comm, agreement)
            return agreement.code
        caught = self.failure is None or isinstance(self.failure, SystemExit)
        if caught and isinstance(state.gone, LockstepError) and state.speaks:
            # Else the job would end with a code and no reason.
            self.failure = state.gone
            self._print(
                f"mpistrat: rank {comm.rank} of {comm.size} caught this exception, after which "
                "nothing could be called any more:\n"
            )
        # An echo of what the rank that left prints itself is not worth a second traceback.
        if self.failure is state.gone and isinstance(state.gone, RemoteError):
            self._printed.acquire(blocking=False)
        elif self.failure is not state.gone or state.speaks:
            self._print(f"mpistrat: on rank {comm.rank} of {comm.size}:\n")
        return state.exit_code or code

    def _tell_for_group(self) -> bool:
        """Print what the largest group below all ranks left with, if it has; tell whether so."""
        if self._group is not None:
            self._print_agreement(*self._group)
        return self._group is not None

    def _print_agreement(self, comm: Comm, agreement: Agreement) -> None:
        """Print what this rank leaves with, if it speaks for those that leave with the same."""
        if not agreement.speaks:
            self._printed.acquire(blocking=False)  # by the one that does
            return
        leavers_text = agreement.describe_leavers(comm, mpi.ranks_in_job(comm))
        self._print(f"mpistrat: on {leavers_text}:\n" if mpi.world_size() > 1 else "")
        if isinstance(self.failure, SystemExit) and agreement.code and mpi.world_size() > 1:
            code, exit_message = code_of(self.failure), extract_exit_text(self.failure)
            self._print_once(
                f"mpistrat: {leavers_text} left with exit code {code}"
                f"{': ' if exit_message else '.'}{exit_message}"
            )


def _await_others(session: Session) -> bool:
    """Sleep until all ranks have come to leave, or one makes a call; return if all have."""
    closing_error = session.get_instance(CallState).gone
    return closing_error is None and session.board.await_departure(session.calls + 1, LEAVE)


@functools.cache
def exits() -> Exits:
    """Return the one `Exits` of this process."""
    return Exits()
