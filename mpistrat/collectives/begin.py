"""What happens once, when the first strategy of a communicator is made."""

from __future__ import annotations

import numpy as np

from mpistrat import options
from mpistrat.board.board import Board
from mpistrat.board.observer import Limits
from mpistrat.cluster.cores import MASK_BYTES, cores_of, mask_of, quota
from mpistrat.cluster.detect import launched_by
from mpistrat.collectives.exits import exits
from mpistrat.collectives.inject import Injection, parse
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.collectives.preflight import preflight
from mpistrat.comm.base import Comm
from mpistrat.comm.mpi import MPIComm, world_size
from mpistrat.comm.session import Unwatched
from mpistrat.errors import OptionError
from mpistrat.kernels.threads import Team

__all__ = ["begin"]


def begin(lockstep: Lockstep) -> None:
    """Watch the ranks, compare what they run, and lead their ways out through the last proof.

    Collective the first time that a session is given, if it has more than one rank.

    Raises:
      OptionError: A variable ``MPISTRAT_*`` cannot be used.
      PreflightError: The ranks run different versions or options.
    """
    session = lockstep.session
    if session.begun:
        return
    parallel = session.comm.size > 1
    failure: Exception | None = None
    fault = None
    try:
        session.options = options.read()
        fault = parse(session.options.fault, _world(session.comm))
    except OptionError as error:
        # Not raised yet: the ways out come first, or the other ranks would never hear of it.
        failure = error
    if isinstance(session.comm, MPIComm):
        if parallel and isinstance(session.board, Unwatched):
            timeout = session.options.timeout
            # Who is named when the job ends has been named before.
            limits = Limits(warn=min(session.options.warn, timeout / 2), timeout=timeout)
            launched = launched_by() is not None
            each = session.options.ranks_per_node
            node = session.comm.split(session.comm.rank // each).mpi if each else None
            session.board = Board.on(session.comm.mpi, limits, node, launched, session.others)
        # After the board: what is registered last is called first at exit.
        exits().arm(session)
    if fault is not None and _world(session.comm):
        Injection(session, fault)
    if failure is not None or parallel:
        lockstep.prove("read the options", failure=failure)
    if parallel:
        preflight(lockstep)
    # The options are equal on all ranks by now, so either all ask their neighbours or none does.
    threads = session.options.threads or _cores(session.comm)
    session.team = Team(threads) if threads > 1 else None
    session.begun = True


def _cores(comm: Comm) -> int:
    """Return how many cores are this rank's. Collective, once in a session: it finds the node."""
    if not isinstance(comm, MPIComm):  # threads of one process, which may use the same cores
        return cores_of([mask_of()] * comm.size, comm.rank, quota())
    node = comm.by_node()
    mine = np.frombuffer(mask_of().to_bytes(MASK_BYTES, "little"), np.uint8)
    every = np.empty((node.size, MASK_BYTES), np.uint8)
    node.allgather(mine, every)
    masks = [int.from_bytes(row.tobytes(), "little") for row in every]
    found = cores_of(masks, node.rank, quota())
    if node is not comm:
        node.free()
    return found


def _world(comm: Comm) -> Comm | None:
    """Return `comm` if its ranks are those of the job, of whom ``MPISTRAT_FAULT`` speaks."""
    return comm if isinstance(comm, MPIComm) and comm.size == world_size() else None
