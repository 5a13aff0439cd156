"""Failures after the handshake of a call, while the other ranks wait inside the same call."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn

from mpistrat.comm import mpi
from mpistrat.comm.session import Session
from mpistrat.lockstep import mismatch
from mpistrat.lockstep.ending import code_of, end_job, last_line
from mpistrat.lockstep.ranks import Ranks
from mpistrat.lockstep.tracebacks import line_of, traceback_of

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
