"""Which group of ranks a strategy gets when none is named."""

from __future__ import annotations

import contextlib
import contextvars
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from mpistrat.cluster.detect import launched_by
from mpistrat.cluster.job import job_size
from mpistrat.comm.base import Comm
from mpistrat.comm.loopback import LoopbackComm, LoopbackWorld
from mpistrat.comm.mpi import initialized, library
from mpistrat.errors import StrategyError

__all__ = ["alone", "as_world", "default_parent", "size_of_job"]

_here: contextvars.ContextVar[Comm | None] = contextvars.ContextVar("mpistrat_world", default=None)


def alone() -> LoopbackComm:
    """Return a new group of one rank, which never communicates."""
    return LoopbackComm(LoopbackWorld(1), 0)


@contextlib.contextmanager
def as_world(comm: Comm) -> Iterator[None]:
    """Make `comm` the default group of this context; how tests run N ranks in one process."""
    token = _here.set(comm)
    try:
        yield
    finally:
        _here.reset(token)


def default_parent() -> Any:
    """Return the group that a strategy uses if its maker named none.

    That is the group set by `as_world`, else ``MPI.COMM_WORLD``. Where no MPI library can be
    loaded and no launcher is seen either, it is a group of one rank, so that
    ``python train.py`` works on a laptop without MPI.

    Raises:
      StrategyError: This is a child that multiprocessing has started.
      ImportError: mpi4py finds no MPI library, although a launcher started this process.
    """
    here = _here.get()
    if here is not None:
        return here
    if "multiprocessing" in sys.modules and multiprocessing.parent_process() is not None:
        raise StrategyError(
            "this process was started by multiprocessing and is no rank. Make strategies "
            'only under `if __name__ == "__main__":`, which children do not run.'
        )
    try:
        return library().COMM_WORLD
    except (ImportError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        launcher = launched_by()
        if launcher is not None:
            raise ImportError(
                f"{launcher} started this process, but mpi4py cannot load an MPI library ({why}). "
                "Install one into this environment, for example: pip install mpich"
            ) from error
        warnings.warn(
            f"no MPI library can be loaded ({why}); going on with one rank. "
            "For more: pip install mpich",
            stacklevel=3,
        )
        return _single()


def _single() -> LoopbackComm:
    comm = alone()
    _here.set(comm)
    return comm


def size_of_job() -> int:
    """Return the number of ranks of this job as far as it is known without starting MPI."""
    here = _here.get()
    if here is not None:
        return here.size
    if initialized():
        return int(library().COMM_WORLD.size)
    return job_size() or 1
