"""The ways to exit this process; all of them make the last handshake.

`Exits` is armed when the first session on MPI is made: an exception hook notes the exception that
ends the program, ``sys.exit`` notes its code, and at exit every session takes part in its last
handshake. Then all ranks leave with the code that they agreed on. An exception that all ranks have
raised alike is printed once.

A rank that comes to leave sleeps until all others have, or until one makes a call that must fail:
MPI libraries poll while they wait, and the other trials of a sweep may take an hour more. Ranks
leave each of their sessions. Where one of these is a part of the job, it prints its own end, and
the code of the job is the largest that any part has agreed on. A rank that fails while others wait
for it in MPI calls of their own ends the job after ``MPISTRAT_GRACE`` seconds in which no other
rank has made a call of this library on any communicator.
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
    end_job,
    exit_at_once,
    flush_streams,
    get_exit_code,
    last_line,
    leave_job,
    wait_for_other_groups,
)
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import CallState, KeptInterrupt
from mpistrat.lockstep.shutdown import LEAVE, Agreement, extract_exit_text
from mpistrat.lockstep.tracebacks import describe_failure, shortened
from mpistrat.watchdog.exchange import has_thread_multiple
from mpistrat.watchdog.status_board import say

# Seconds after which an exception is printed although the other ranks have not come to leave.
_PRINT_SECONDS = 3.0
_LOOK_SECONDS = 1.0  # between two looks at the other ranks meanwhile
# For the watching thread to start, at most: it may have died of MemoryError.
_START_SECONDS = 1.0
# Called with an exception that ends the program, before it is sent to the other ranks. They may add
# hints to its text.
explainers: list[Callable[[BaseException], None]] = []


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


_CODE: Any = SystemExit.__dict__["code"]


class NotedExit(SystemExit):
    """The exception of ``sys.exit``; it notes whether it ends the program."""

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
        """Return the arguments of a plain SystemExit, for another process."""
        return SystemExit, self.args


# Messages and tracebacks show the name of the built-in exception.
NotedExit.__name__ = NotedExit.__qualname__ = "SystemExit"
NotedExit.__module__ = "builtins"


@final
class _FailedCell:
    """A cell of IPython that failed on this rank; ranks compare it as a write.

    Attributes:
      digest: The same on all ranks whose cells failed.
    """

    digest = b"a failed cell..."

    def text(self) -> str:
        """Return what messages say of it."""
        return "a cell that failed on this rank; run the next cell on all engines again"

    def undo(self) -> None:
        """Do nothing."""


_FAILED_CELL = _FailedCell()


@final
class Exits:
    """The ways to exit one process.

    Attributes:
      sessions: The sessions that are left at exit.
      failure: The exception that ends the program, if one does.
      recorder: Called on rank 0 with the agreed exit code, if the launcher wants it.
      kept_interrupt: A Ctrl-C that waits to be raised, in any session.
    """

    def __init__(self) -> None:
        """Create it without any session."""
        self.sessions: list[Session] = []
        self.failure: BaseException | None = None
        self.recorder: Callable[[int], None] | None = None
        self.kept_interrupt = KeptInterrupt()  # armed before MPI makes others wait for this rank
        self._is_armed = False
        self._pid = os.getpid()
        self._print_lock = threading.Lock()
        self._excepthook = sys.excepthook  # the program's own, if it has one
        self._group_agreement: tuple[Comm, Agreement] | None = None
        self._is_planned = False

    def arm(self, session: Session) -> None:
        """Lead the ways out of this process through the last handshake of `session` too."""
        if any(armed_session is session for armed_session in self.sessions):
            return
        # This list must not keep the memory of sessions that were freed meanwhile.
        self.sessions = [
            armed_session for armed_session in self.sessions if not armed_session.is_freed
        ]
        self.sessions.append(session)
        session.get_instance(CallState).kept_interrupt = self.kept_interrupt
        if self._is_armed:
            return
        self._is_armed = True
        atexit.register(self.at_exit)
        if _is_interactive():
            self._follow_cells()
        else:
            sys.excepthook = self.note_uncaught
            sys.exit = self.exit

    def _follow_cells(self) -> None:
        """Hear of the end of each cell, in IPython.

        An interrupt is meant for the cell that runs, and must not end a later one. And the calls of
        a cell that failed on some ranks only are not those of the next cell.
        """
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
        shell = None if get_ipython is None else get_ipython()
        if shell is not None:
            shell.events.register("post_execute", self.kept_interrupt.drop)
            shell.events.register("post_run_cell", self._note_failed_cell)

    def _note_failed_cell(self, result: Any) -> None:
        """Let the next call be another one than on ranks whose last cell did not fail."""
        if result.success:
            return
        for session in self.sessions:
            writes = session.get_instance(CallState).pending_writes
            if session.comm.size > 1 and _FAILED_CELL not in writes:
                writes.append(_FAILED_CELL)

    def arm_alone(self) -> None:
        """Print the exception that ends the program without frames of the library, without MPI."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not _is_interactive() and sys.excepthook is self._excepthook:
            sys.excepthook = self._print_alone

    def _print_alone(
        self, exception_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with shortened(error):
            self._excepthook(exception_type, error, error.__traceback__)
        if sys.excepthook == self._print_alone:  # else the program's own hook has called this one
            flush_streams()
            say(describe_failure(int(rank_text() or 0), error))

    def exit(self, status: Any = None, /) -> NoReturn:
        """Do the same as ``sys.exit``; it is noted if it ends the program."""
        is_main = threading.current_thread() is threading.main_thread()
        # Python ignores a SystemExit that ends another thread.
        raise NotedExit(status) if is_main else SystemExit(status)

    def _find_printed_error(self) -> BaseException | None:
        """Return the error that has ended the program if its own hook has printed it, else None."""
        # At a prompt, or in a notebook, an error ends one input, and not the program.
        last_error = None if _is_interactive() else getattr(sys, "last_value", None)
        trace = None if last_error is None else last_error.__traceback__
        if trace is None or trace.tb_frame.f_back is not None:  # it was caught further up
            return None
        self._print_lock.acquire(blocking=False)  # by that hook
        return last_error

    def note_uncaught(
        self, exception_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Remember the exception that ends the program; it is printed at exit."""
        if isinstance(error, SystemExit) and self.failure is not None:
            return  # with PYTHONINSPECT Python does not exit, and passes it here
        for explain in explainers:
            explain(error)
        self.failure = error.with_traceback(trace)

    def handle_end(self, failure: BaseException) -> None:
        """Do the same as Python at the end of a program: pass the exception to its hook, if any."""
        self.failure, hook = None, sys.excepthook
        if not (
            hook == self.note_uncaught
            or hook is self._excepthook
            or isinstance(failure, SystemExit)
        ):
            try:
                hook(type(failure), failure, failure.__traceback__)
                if self.failure is None:  # else the hook has passed it on to `note_uncaught`
                    self._print_lock.acquire(blocking=False)
            except Exception:
                traceback.print_exc()
        self.failure = failure

    def _print_failure(self, header: str = "") -> None:
        failure = self.failure
        if failure is None or isinstance(failure, SystemExit):
            return
        if not self._print_lock.acquire(blocking=False):
            return
        try:
            with shortened(failure):
                self._print_exception(failure, header)
        except BaseException:  # the others wait for this rank, even if a hook or a stream fails
            with suppress(BaseException):
                sys.__excepthook__(type(failure), failure, failure.__traceback__)
        flush_streams()

    def _print_exception(self, failure: BaseException, header: str) -> None:
        exception_fields = type(failure), failure, failure.__traceback__
        is_one_piece = bool(header) and self._excepthook is sys.__excepthook__
        if is_one_piece:  # or lines that two ranks print at once would be mixed
            header += "".join(traceback.format_exception(*exception_fields))
        print(header, end="", file=sys.stderr, flush=True)
        if not is_one_piece:
            with suppress(SystemExit):  # a hook may end with it
                self._excepthook(*exception_fields)

    def _print_once(self, text: str) -> None:
        if self._print_lock.acquire(blocking=False):
            say(text)

    def at_exit(self) -> None:
        """Take part in the last handshake of every session, and leave with the agreed code."""
        self.failure = self._find_printed_error() if self.failure is None else self.failure
        if self.failure is None and self.kept_interrupt.is_pending:
            # No further call could raise it.
            self.failure = self.kept_interrupt.kept_error or KeyboardInterrupt()
        code = get_exit_code(self.failure)
        if os.getpid() != self._pid:  # a forked child: MPI_Finalize is its parent's business
            self._print_failure()
            exit_at_once(code)
        self.sessions = [session for session in self.sessions if not session.is_freed]
        # The session of all ranks comes first, if any: it collects the codes of the others.
        self.sessions.sort(key=lambda session: -session.comm.size)
        if not mpi.is_mpi_running() or not self.sessions:
            self._print_failure()
            if self.sessions:  # the program has finalized MPI, which waits for all ranks
                self._record(code)
            return
        try:
            have_left = self._start_watching(code)
            agreed = self._leave_sessions(code)
        except BaseException as error:
            # Such as MemoryError, or the program's own handler of a signal: the others wait for
            # this rank in the last handshake.
            if self.sessions[0].comm.size > 1:
                with suppress(BaseException):
                    traceback.print_exc()
                end_job(code or get_exit_code(error) or 1)
            raise
        have_left.set()
        # Before MPI is finalized no watchdog may be inside it any more.
        are_closed = [session.board.close() for session in self.sessions]
        self._record(agreed or code)
        leave_job(self.sessions[0], agreed or code, self._is_planned and all(are_closed))
        if not all(are_closed):
            exit_at_once(code)
        wait_for_other_groups(self.sessions[0], agreed or code)

    def _record(self, code: int) -> None:
        if self.recorder is not None and self.sessions[0].comm.rank == 0:
            self.recorder(code)

    def _start_watching(self, code: int) -> threading.Event:
        """Start a thread for `_watch_leaving`; return the event that ends it."""
        is_watching, have_left = threading.Event(), threading.Event()
        # Not by `Thread.start`, which waits forever if the thread dies of MemoryError at its start.
        with suppress(RuntimeError):  # no thread can be started: it continues without
            _thread.start_new_thread(self._watch_leaving, (code, is_watching, have_left))
            # If it first ran after Python has freed its state, the process would end by SIGSEGV.
            is_watching.wait(_START_SECONDS)
        return have_left

    def _watch_leaving(
        self, code: int, is_watching: threading.Event, have_left: threading.Event
    ) -> None:
        """Report the end of the program if the others do not come to leave; end the job at last.

        Args:
          code: The exit code that this rank would leave with.
          is_watching: Is set by this thread when it runs.
          have_left: Is set when the last handshakes are over.
        """
        is_watching.set()
        start = time.monotonic_ns()
        self._measure_quiet(start)  # the second look is the first to show whether others compute
        if have_left.wait(min(_PRINT_SECONDS, self.sessions[0].options.grace)):
            return
        if not self._print_group_agreement():
            self._print_failure()
        elif code and self._group_agreement is not None and self._group_agreement[1].is_speaker:
            say("mpistrat: the other ranks of the job continue; these sleep until all have ended.")
        while code:
            quiet_seconds, patience, name = self._measure_quiet(start)
            if quiet_seconds >= patience:
                self._give_up(code, f"{patience:g} s ({name})")
                return
            if have_left.wait(min(patience - quiet_seconds, _LOOK_SECONDS)):
                return

    def _measure_quiet(self, start: int) -> tuple[float, float, str]:
        """Return for how long the others have been quiet, how long they may be, and the variable.

        They may wait for this rank in MPI calls of their own, which no handshake ends. Ranks of
        another group, such as a trial, may have nothing to do with this rank: they are not quiet
        while their Python code continues. A rank that computes in one line may also wait, as MPI
        polls; it has the longer time.

        Args:
          start: When this rank came to leave, monotonic ns.
        """
        first, *other_sessions = self.sessions
        moved_ns = max(start, *(session.board.last_move() for session in self.sessions))
        stack_changed_ns, computed_ns = first.board.signs()
        patience, name = first.options.grace, "MPISTRAT_GRACE"
        has_groups = any(session.comm.size < first.comm.size for session in other_sessions)
        if has_groups or first.board.has_groups():
            moved_ns = max(moved_ns, stack_changed_ns)
            is_computing = time.monotonic_ns() - computed_ns < patience * 1e9
            if is_computing and first.options.timeout > patience:
                patience, name = first.options.timeout, "MPISTRAT_TIMEOUT"
        return (time.monotonic_ns() - moved_ns) / 1e9, patience, name

    def _give_up(self, code: int, patience: str) -> None:
        # Else a watchdog of this rank may end the job with its own code meanwhile.
        for session in self.sessions:
            session.board.stop_watching()
        self._print_failure()
        comm = self.sessions[0].comm
        say(
            f"mpistrat: rank {comm.rank} of {comm.size} failed, and the others have not come to a "
            f"call of mpistrat for {patience}; ending the job."
        )
        if self.failure is not None:
            last_line.text = describe_failure(mpi.ranks_in_job(comm)[comm.rank], self.failure)
        end_job(code)

    def _leave_sessions(self, code: int) -> int:
        """Take part in the last handshakes of all sessions at once: others may be in calls of each.

        Returns:
          The largest code that they agreed on.
        """
        first, *other_sessions = self.sessions
        exit_codes: list[int] = []

        def leave_group(session: Session) -> None:
            _await_others(session)
            exit_codes.append(self._leave_session(session, code))

        threads: list[threading.Thread] = []
        with suppress(RuntimeError):  # no thread can be started: one after the other then
            for session in other_sessions if has_thread_multiple() else ():
                thread = threading.Thread(target=leave_group, args=(session,), daemon=True)
                thread.start()
                threads.append(thread)
        if _await_others(first):
            # All ranks have come to leave, so the other sessions end soon.
            for thread in threads:
                thread.join()
        exit_codes.append(
            self._leave_session(first, max(exit_codes, default=code), bool(exit_codes))
        )
        for thread in threads:
            thread.join()
        for session in other_sessions[len(threads) :]:
            leave_group(session)
        return max(exit_codes)

    def _leave_session(self, session: Session, code: int, of_group: bool = False) -> int:
        comm, state = session.comm, session.get_instance(CallState)
        if state.closing_error is None:
            agreement = Lockstep(session).leave_program(code, self.failure, of_group)
            if session is self.sessions[0]:
                self._is_planned = agreement.is_planned
            if session is not self.sessions[0]:
                if self._group_agreement is None or self._group_agreement[0].size < comm.size:
                    self._group_agreement = comm, agreement
            elif (
                self._group_agreement is None
                or self._group_agreement[0].size == 1
                or not self._print_group_agreement()
            ):
                self._print_agreement(comm, agreement)
            return agreement.code
        is_caught = self.failure is None or isinstance(self.failure, SystemExit)
        if is_caught and isinstance(state.closing_error, LockstepError) and state.is_speaker:
            # Otherwise the job would end with a code and no reason.
            self.failure = state.closing_error
            self._print_failure(
                f"mpistrat: rank {comm.rank} of {comm.size} caught this exception, after which "
                "nothing could be called any more:\n"
            )
        # The rank that left prints its exception itself; an echo needs no second traceback.
        if self.failure is state.closing_error and isinstance(state.closing_error, RemoteError):
            self._print_lock.acquire(blocking=False)
        elif self.failure is not state.closing_error or state.is_speaker:
            self._print_failure(f"mpistrat: on rank {comm.rank} of {comm.size}:\n")
        return state.exit_code or code

    def _print_group_agreement(self) -> bool:
        """Print the agreement of the largest group below all ranks; tell whether there is one."""
        if self._group_agreement is not None:
            self._print_agreement(*self._group_agreement)
        return self._group_agreement is not None

    def _print_agreement(self, comm: Comm, agreement: Agreement) -> None:
        """Print the exception of this rank, if it speaks for all that leave with the same."""
        if self.failure is None:
            return
        if not agreement.is_speaker:
            self._print_lock.acquire(blocking=False)  # the speaker prints it
            return
        leavers_text = agreement.describe_leavers(comm, mpi.ranks_in_job(comm))
        self._print_failure(f"mpistrat: on {leavers_text}:\n" if mpi.world_size() > 1 else "")
        if isinstance(self.failure, SystemExit) and agreement.code and mpi.world_size() > 1:
            code, exit_message = get_exit_code(self.failure), extract_exit_text(self.failure)
            self._print_once(
                f"mpistrat: {leavers_text} left with exit code {code}"
                f"{': ' if exit_message else '.'}{exit_message}"
            )


def _await_others(session: Session) -> bool:
    """Sleep until all ranks have come to leave, or one makes a call; tell whether all have."""
    closing_error = session.get_instance(CallState).closing_error
    return closing_error is None and session.board.await_departure(session.calls + 1, LEAVE)


@functools.cache
def exits() -> Exits:
    """Return the single `Exits` of this process."""
    return Exits()
