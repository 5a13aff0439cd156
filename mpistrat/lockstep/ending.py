"""The end of the processes of a job: one exit code for the launcher, and aborts in broken calls.

`leave_job` ends a job after the last handshake. A job of several ranks that fails ends by MPI_Abort
with the agreed code, once all ranks have printed their messages. Launchers do not pass on exit
codes of several ranks reliably (MPICH's kills the others at the first). Codes: 1 exception, 70
success that not all ranks confirm, 75 hang, 76 launcher lost, 77 ranks made different calls, 78
ranks run different things, 130 interrupt.

`abort` ends a job in which a call has failed after its handshake, mostly for lack of memory, while
the other ranks wait inside the same call and cannot learn of it.
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
from mpistrat.lockstep.tracebacks import describe_failure, format_traceback
from mpistrat.watchdog.processes import get_machine_id, is_process_finished, read_process
from mpistrat.watchdog.status_board import say

# The exit code of a job whose ranks are not equipped alike.
PREFLIGHT = 78
# Seconds in which launchers pass on the output of the ranks; an abort may cut it off.
_OUTPUT_SECONDS = 0.2
# Seconds that SIGALRM comes after the thread that prints the stack of a rank and ends it.
_SIGNAL_DELAY_SECONDS = 2.0
# Seconds in which processes end that have finalized MPI: those of other nodes, which cannot be
# seen; and at most, those of this node.
_OTHER_NODES_SECONDS, _OWN_NODE_SECONDS = 1.0, 5.0


def get_exit_code(failure: BaseException | None) -> int:
    """Return the exit code that Python gives to a program that ends with `failure`.

    Example:
      >>> failures = (SystemExit(3), SystemExit("text"), KeyError(), None)
      >>> [get_exit_code(failure) for failure in failures]
      [3, 1, 1, 0]
      >>> get_exit_code(SystemExit(256)), get_exit_code(SystemExit(-1))
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
        # The system keeps eight bits, which must not make a success of a failure.
        code = failure.code or 0
        return code & 255 or (1 if code else 0)
    return 1


@final
class LastLine:
    """The line with the cause of the end of a job, below all its other output.

    Attributes:
      text: The line; empty for none.
      printers: Called with the line; one that returns True prints it when the launcher has ended.
    """

    def __init__(self) -> None:
        """Create a line without a text."""
        self.text = ""
        self.printers: list[Callable[[str], bool]] = []

    def print_line(self) -> None:
        """Print the line, unless one of the printers does."""
        if self.text and not any(printer(self.text) for printer in self.printers):
            say(self.text)


last_line = LastLine()


def end_job(code: int) -> None:
    """End all ranks with an exit code, when launchers have passed on their output.

    After `last_line`, MPICH's own line about the abort, which this process prints, is suppressed.
    """
    time.sleep(_OUTPUT_SECONDS)
    if last_line.text:
        last_line.print_line()
        time.sleep(_OUTPUT_SECONDS)
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    mpi.abort(code)


def flush_streams() -> None:
    """Flush the standard streams; failures are ignored, as they may not keep a rank from leaving.

    Streams are None in a process without a terminal, closed by the program, on a full disk, or of a
    class of the program's own.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def exit_at_once(code: int) -> NoReturn:
    """End this process, without MPI and without the exit handlers of other modules."""
    flush_streams()
    os._exit(code)


def leave_job(session: Session, code: int, is_planned: bool) -> None:
    """End a job of several ranks with a code other than 0; return if there is nothing to do.

    Collective, after the last handshake. A process that has not ended a timeout later prints its
    stack and ends: a hang while Python shuts down keeps all ranks in MPI_Finalize.

    Args:
      session: The session of all ranks of the job; nothing is done for another one.
      code: The exit code of the job.
      is_planned: All ranks leave by themselves with that code, and MPI may be finalized.
    """
    comm, ranks = session.comm, Ranks(session)
    all_leave = comm.size >= mpi.world_size()
    if mpi.world_size() > 1:  # ranks wait for each other in MPI_Finalize
        _end_after(session.options.timeout, all_leave)
    flush_streams()
    last_line.text = ranks.state.cause_text
    if not (code and all_leave and comm.size > 1):
        if comm.rank == 0:
            last_line.print_line()
        return
    if is_planned and passes_on_exit_code():
        _exit_in_order(ranks, code)
    # Launchers do not pass on codes of several ranks: MPICH's kills the others when the first
    # leaves with one, and then reports the kill. All launchers pass on the code of an abort, which
    # comes once all ranks have printed their messages.
    ranks.comm.barrier()
    if comm.rank == 0:
        end_job(code)
    ranks.comm.barrier()


def wait_for_other_groups(session: Session, code: int) -> None:
    """Wait for the other ranks of the job if this part of it has failed; end the job at last.

    Without a strategy of all ranks nobody sees the state of the others. They may wait for this rank
    in MPI calls of their own, and in MPI_Finalize no Python runs here that could report it later.

    Args:
      session: The largest session of this rank; nothing is done if it has all ranks of the job.
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
    # If two end at once, launchers report how they have ended the other.
    _end_after(seconds if comm.rank == 0 else seconds + _SIGNAL_DELAY_SECONDS)
    _wait_for_ranks_of_other_groups()


def _wait_for_ranks_of_other_groups() -> None:
    """End MPI. The stack that is printed if the others do not come shows this name."""
    mpi.finalize()


def _end_after(seconds: float, all_leave: bool = True) -> None:
    """End this process, after printing its stack, unless it ends by itself within `seconds`.

    Before MPI_Finalize Python stops the thread that would print it. A rank may wait there for one
    that was stopped, or whose end the launcher has missed, so SIGALRM ends it a little later.

    Args:
      seconds: For how long it may continue.
      all_leave: All ranks of the job have come to leave. Else others may compute for hours, and
        this rank may wait for them in MPI_Finalize.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    if not all_leave:
        return
    with suppress(ValueError, OverflowError):  # not in the main thread; longer than timers count
        # The timer comes first: one of the program's own would end the process in between.
        signal.setitimer(signal.ITIMER_REAL, seconds + _SIGNAL_DELAY_SECONDS)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _exit_in_order(ranks: Ranks, code: int) -> NoReturn:
    """Finalize MPI and end; rank 0 has the code, and ends when the others have."""
    process = read_process(os.getpid())
    own_process = [get_machine_id(), os.getpid(), process.start_ticks if process else 0]
    messages = ranks.gather_texts(json.dumps(own_process).encode())
    processes = [json.loads(message) for message in messages]
    mpi.finalize()
    if ranks.comm.rank:
        exit_at_once(0)
    local_processes = [
        (pid, start_ticks)
        for machine_id, pid, start_ticks in processes[1:]
        if machine_id == own_process[0] and start_ticks
    ]
    if len(local_processes) + 1 < len(processes):
        time.sleep(_OTHER_NODES_SECONDS)
    end = time.monotonic() + _OWN_NODE_SECONDS
    while time.monotonic() < end and not all(
        is_process_finished(read_process(pid), start_ticks) for pid, start_ticks in local_processes
    ):
        time.sleep(0.01)
    exit_at_once(code)


_EXTRA_FRAMES = (
    200  # calls within each other that it takes to print a traceback, and to end the job
)


def abort(ranks: Ranks, call: str, error: BaseException) -> NoReturn:
    """Raise an error after the handshake of `call`; end the job if others would wait forever.

    They are in MPI, where no message reaches them. The usual causes are memory that cannot be
    allocated, and a handler of a signal of the program's own that raises, or calls ``sys.exit``.
    The error is only raised if all ranks have raised it, or one rank is alone, or the ranks are
    threads of one process.
    """
    comm = ranks.comm
    can_raise = comm.size == 1 or ranks.session.comm.name != mpi.MPIComm.name
    if can_raise or error is ranks.state.common_error:
        raise error
    sys.setrecursionlimit(
        sys.getrecursionlimit() + _EXTRA_FRAMES
    )  # the program may have reached it
    with contextlib.suppress(BaseException):  # there may be no memory for it
        text = format_traceback(error)
        print(
            f"mpistrat: rank {ranks.ranks[comm.rank]} of {comm.size} failed inside "
            f"{call:.300}. The other ranks are in the same call; aborting the job.\n{text}",
            file=sys.stderr,
            flush=True,
        )
        last_line.text = describe_failure(ranks.ranks[comm.rank], error)
    end_job(get_exit_code(error) or 1)
    raise error


def encode_failure(ranks: Ranks, call: str, failure: BaseException | None) -> bytes:
    """Return the message to the others about a failure of this rank; empty without one."""
    if failure is None:
        return b""
    try:
        with mismatch.refusing_calls(ranks.state):
            return mismatch.encode_report(failure)
    except BaseException as error:  # there may be no memory for it, and the others wait
        error.__context__ = failure
        abort(ranks, call, error)


def end_broken_call(session: Session, error: BaseException) -> None:
    """Do the same as `abort` for the current call, unless its communicator is interruptible."""
    if not session.comm.is_interruptible:
        abort(Ranks(session), session.board.call or "a call", error)


@contextlib.contextmanager
def aborting(ranks: Ranks, call: str) -> Iterator[None]:
    """Pass an exception of the body to `abort`."""
    try:
        yield
    except BaseException as error:
        abort(ranks, call, error)
