"""Which group of ranks a strategy gets when none is named."""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpistrat.comm.base import Comm
from mpistrat.comm.loopback import LoopbackComm, LoopbackWorld
from mpistrat.comm.mpi import initialized, library
from mpistrat.comm.session import Session
from mpistrat.environment import (
    forget_launcher,
    job_size,
    launched_by,
    parent_rank,
    torchrun_size,
)
from mpistrat.errors import PreflightError, StrategyError
from mpistrat.options import patience

_ENDING = 10.0  # seconds in which a pool ends its workers

_default_world: contextvars.ContextVar[Comm | None] = contextvars.ContextVar(
    "mpistrat_world", default=None
)


def alone() -> LoopbackComm:
    """Return a new group of one rank, which never communicates."""
    return LoopbackComm(LoopbackWorld(1), 0)


@contextlib.contextmanager
def as_world(comm: Comm) -> Iterator[None]:
    """Make `comm` the default group of this context; how tests run N ranks in one process."""
    token = _default_world.set(comm)
    try:
        yield
    finally:
        _default_world.reset(token)


def default_parent() -> Any:
    """Return the group that a strategy uses if its maker named none.

    That is the group set by `as_world`, else ``MPI.COMM_WORLD``. Where no MPI library can be
    loaded and no launcher is seen either, it is a group of one rank, so that
    ``python train.py`` works on a laptop without MPI.

    Raises:
      StrategyError: As of `refuse_children`.
      ImportError: mpi4py finds no MPI library, although a launcher started this process.
      PreflightError: So did torchrun, as one of several.
    """
    default_world = _default_world.get()
    if default_world is not None:
        return default_world
    refuse_children()
    try:
        return library().COMM_WORLD
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if not patience().ranks and (by_torchrun := torchrun_error(1)) is not None:
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
        comm = alone()
        _default_world.set(comm)
        return comm


def refuse_children() -> None:
    """Refuse a process that multiprocessing, or a rank, has started: it is no rank itself.

    A program that a rank has started runs alone, on one rank, with ``MPISTRAT_RANKS=1``, and if the
    job has no other rank.

    Raises:
      StrategyError: It is one.
    """
    if _is_child():
        raise StrategyError(_refusal())
    parent = parent_rank()
    if parent is None:
        return
    if "mpi4py.MPI" not in sys.modules and 1 in (patience().ranks, job_size()):
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


def torchrun_error(size: int) -> PreflightError | None:
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


def _refusal() -> str:
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
    _interrupt(_pool(name))
    return message


def _pool(name: str) -> int:
    """Return the process whose pool this worker is of: a fork server starts workers for others."""
    parent = os.getppid()
    if not name.startswith("ForkServer"):
        return parent
    return int(Path(f"/proc/{parent}/stat").read_bytes().rpartition(b")")[2].split()[1])


def _interrupt(pool: int) -> None:
    import socket

    # Once, whatever the number of workers: a second signal would disturb the pool's own end. The
    # name goes with the process that has it, and this one waits to be ended by the pool.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0mpistrat interrupts {pool}")
        # What a shell starts in the background does not hear Ctrl-C, nor do its children.
        deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        os.kill(pool, signal.SIGTERM if deaf else signal.SIGINT)
        time.sleep(_ENDING)
        # A library may have made SIGINT such that it interrupts no wait (polars 2.1 does).
        os.kill(pool, signal.SIGTERM)


def size_of_job() -> int:
    """Return the number of ranks of this job as far as it is known without starting MPI.

    It is that of the default group, or of a larger one that a strategy was made over: ranks that
    joined later, or threads that are ranks.
    """
    default_world = _default_world.get()
    if default_world is not None:
        return default_world.size
    known_size = int(library().COMM_WORLD.size) if initialized() else job_size() or 1
    return max(known_size, Session.largest())
