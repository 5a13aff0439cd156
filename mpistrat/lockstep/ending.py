"""How the processes of a job exit, so that the launcher has one exit code.

Failures after the handshake of a call, while the other ranks wait inside the same call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NoReturn, final

from mpistrat.comm import mpi
from mpistrat.comm.callsite import ranks_text
from mpistrat.comm.session import Session
from mpistrat.config import passes_on_exit_code
from mpistrat.errors import LockstepError, PreflightError
from mpistrat.lockstep import mismatch
from mpistrat.lockstep.ranks import Ranks
from mpistrat.lockstep.shutdown import MISMATCH
from mpistrat.lockstep.tracebacks import line_of, traceback_of
from mpistrat.watchdog.processes import ended, look, machine
from mpistrat.watchdog.status_board import say

# The exit code of a job whose ranks are not equipped alike.
PREFLIGHT = 78
# Seconds that launchers get to pass on what the ranks have printed; an abort may cut it off.
_LAST_WORDS = 0.2
# Seconds that SIGALRM comes after the thread that prints the stack of a rank and ends it.
_SIGNAL_DELAY_SECONDS = 2.0
# Seconds in which processes end that have finalized MPI: those of other nodes, which cannot be
# looked at; and at most, those of this one.
_OTHER_NODES_SECONDS, _OWN_NODE_SECONDS = 1.0, 5.0


def code_of(failure: BaseException | None) -> int:
    """Return the exit code that Python gives to a program that ends with `failure`.

    Example:
      >>> code_of(SystemExit(3)), code_of(SystemExit("text")), code_of(KeyError()), code_of(None)
      (3, 1, 1, 0)
      >>> code_of(SystemExit(256)), code_of(SystemExit(-1))
      (1, 255)
    """
    if failure is None:
        return 0
    if isinstance(failure, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(failure, LockstepError):
        return MISMATCH
    if isinstance(failure, PreflightError):
        return PREFLIGHT
    if isinstance(failure, SystemExit) and isinstance(failure.code, int | None):
        # The system keeps eight bits; a failure must not become a success by that.
        code = failure.code or 0
        return code & 255 or (1 if code else 0)
    return 1


@final
class LastLine:
    """The line that says why the job ends, behind all else that it prints.

    Attributes:
      text: The line; empty for none.
      takers: Called with the line; what returns True prints it when the launcher has ended.
    """

    def __init__(self) -> None:
        """Create it without a text."""
        self.text = ""
        self.takers: list[Callable[[str], bool]] = []

    def print_line(self) -> None:
        """Print the line, unless somebody else does."""
        if self.text and not any(taker(self.text) for taker in self.takers):
            say(self.text)


last_line = LastLine()


def end_job(code: int) -> None:
    """End all ranks with an exit code, when launchers have passed on what was printed.

    After `last_line` the line of MPICH about the abort, which this process prints, is left out.
    """
    time.sleep(_LAST_WORDS)
    if last_line.text:
        last_line.print_line()
        time.sleep(_LAST_WORDS)
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    mpi.abort(code)


def flush() -> None:
    """Pass on what was printed, as far as somebody takes it: that may not keep a rank from leaving.

    Streams are None in a process without a terminal, closed by the program, on a full disk, or of a
    class of the program's own.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def leave_at_once(code: int) -> NoReturn:
    """End this process, without MPI and without what other modules do at exit."""
    flush()
    os._exit(code)


def leave(session: Session, code: int, planned: bool) -> None:
    """End a job of several ranks with a code other than 0; return if there is nothing to do.

    Collective, after the last handshake. A process that has not ended a timeout later prints its
    stack and ends: what hangs while Python goes down keeps all ranks in MPI_Finalize.

    Args:
      session: That of all ranks of the job; of another one nothing is done.
      code: The exit code of the job.
      planned: All ranks leave by themselves with that code, and MPI may be finalized.
    """
    comm, ranks = session.comm, Ranks(session)
    all_leave = comm.size >= mpi.world_size()
    if mpi.world_size() > 1:  # ranks wait for each other in MPI_Finalize
        _end_after(session.options.timeout, all_leave)
    flush()
    last_line.text = ranks.state.cause
    if not (code and all_leave and comm.size > 1):
        if comm.rank == 0:
            last_line.print_line()
        return
    if planned and passes_on_exit_code():
        _in_order(ranks, code)
    # Launchers do not pass on codes of several ranks: MPICH's kills the others when the first
    # leaves with one, and then reports the kill. An abort, once all have said what they had to
    # say, is passed on by all of them.
    ranks.texts(b"")
    if comm.rank == 0:
        end_job(code)
    ranks.texts(b"")


def wait_for_other_groups(session: Session, code: int) -> None:
    """Wait for the other ranks of the job if this part of it has failed; end the job at last.

    Without a strategy of all ranks nobody sees what the others do. They may wait for this rank in
    calls of their own on MPI, and no Python runs here in MPI_Finalize that could say so later.

    Args:
      session: The largest of this rank; of that of all ranks of the job nothing is done.
      code: The exit code of this rank.
    """
    comm, seconds = session.comm, session.options.timeout
    if not code or comm.size >= mpi.world_size():
        return
    if comm.rank == 0:
        ranks = ranks_text(mpi.ranks_in_job(comm))
        say(
            f"mpistrat: {ranks} of the job failed, without a strategy of all ranks that would show "
            f"what the others do. If these have not ended {seconds:g} s later (MPISTRAT_TIMEOUT), "
            "the job ends. Make ms.MirroredStrategy() before the groups, or use `mpistrat run`: "
            "then groups that go on are waited for."
        )
    # Of two that end at once launchers report how they have ended the other.
    _end_after(seconds if comm.rank == 0 else seconds + _SIGNAL_DELAY_SECONDS)
    _wait_for_ranks_of_other_groups()


def _wait_for_ranks_of_other_groups() -> None:
    """End MPI. The name is what is read in the stack that is printed if the others do not come."""
    mpi.finalize()


def _end_after(seconds: float, all_leave: bool = True) -> None:
    """End this process, after printing its stack, unless it ends by itself within `seconds`.

    Before MPI_Finalize Python stops the thread that would print it. A rank may wait there for one
    that was stopped, or whose end the launcher has missed, so SIGALRM ends it a little later.

    Args:
      seconds: For how long it may go on.
      all_leave: All ranks of the job have come to leave. Else others may compute for hours, and
        this rank may wait for them in MPI_Finalize.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    if not all_leave:
        return
    with suppress(ValueError, OverflowError):  # not in the main thread; longer than timers count
        # The timer first: one of the program's own would end the process in between.
        signal.setitimer(signal.ITIMER_REAL, seconds + _SIGNAL_DELAY_SECONDS)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _in_order(ranks: Ranks, code: int) -> NoReturn:
    """Finalize MPI and end; rank 0 has the code, and ends when the others have."""
    process = look(os.getpid())
    own_process = [machine(), os.getpid(), process.born if process else 0]
    rows = [json.loads(row) for row in ranks.texts(json.dumps(own_process).encode())]
    mpi.finalize()
    if ranks.comm.rank:
        leave_at_once(0)
    local_processes = [
        (pid, born) for host, pid, born in rows[1:] if host == own_process[0] and born
    ]
    if len(local_processes) + 1 < len(rows):
        time.sleep(_OTHER_NODES_SECONDS)
    end = time.monotonic() + _OWN_NODE_SECONDS
    while time.monotonic() < end and not all(
        ended(look(pid), born) for pid, born in local_processes
    ):
        time.sleep(0.01)
    leave_at_once(code)


_ROOM = 200  # calls within each other that it takes to print a traceback, and to end the job


def abort(ranks: Ranks, call: str, error: BaseException) -> NoReturn:
    """Raise what failed after the handshake of `call`; end the job if others would wait forever.

    They are in MPI, where nobody can tell them. The usual causes are memory that cannot be
    allocated, and a handler of a signal of the program's own that raises, or calls ``sys.exit``.
    An error is only raised if all ranks have raised it, or one rank is alone, or the ranks are
    threads of one process.
    """
    comm = ranks.comm
    is_alone = comm.size == 1 or ranks.session.comm.name != mpi.MPIComm.name
    if is_alone or error is ranks.state.raised:
        raise error
    sys.setrecursionlimit(sys.getrecursionlimit() + _ROOM)  # the program may have reached it
    with contextlib.suppress(BaseException):  # there may be no memory for it
        text = traceback_of(error)
        print(
            f"mpistrat: rank {ranks.ranks[comm.rank]} of {comm.size} failed inside "
            f"{call:.300}. The other ranks are in the same call; aborting the job.\n{text}",
            file=sys.stderr,
            flush=True,
        )
        last_line.text = line_of(ranks.ranks[comm.rank], error)
    end_job(code_of(error) or 1)
    raise error


def encode_failure(ranks: Ranks, call: str, failure: BaseException | None) -> bytes:
    """Return what the others are to be told of a failure of this rank; empty without one."""
    if failure is None:
        return b""
    try:
        with mismatch.asking(ranks.state):
            return mismatch.report(failure)
    except BaseException as error:  # there may be no memory for it, and the others wait
        error.__context__ = failure
        abort(ranks, call, error)


def broken(session: Session, error: BaseException) -> None:
    """Do what `abort` does in the call that this rank is inside of, if that is to be complete."""
    if not session.comm.is_interruptible:
        abort(Ranks(session), session.board.call or "a call", error)


@contextlib.contextmanager
def aborting(ranks: Ranks, call: str) -> Iterator[None]:
    """Do what `abort` does with what the body raises."""
    try:
        yield
    except BaseException as error:
        abort(ranks, call, error)
