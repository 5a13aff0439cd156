"""What happens once, when the first strategy of a communicator is made."""

from __future__ import annotations

from mpistrat import options
from mpistrat.board.board import Board
from mpistrat.board.observer import Limits
from mpistrat.cluster.detect import launched_by
from mpistrat.collectives.exits import exits
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.collectives.preflight import preflight
from mpistrat.comm.mpi import MPIComm

__all__ = ["begin"]


def begin(lockstep: Lockstep) -> None:
    """Watch the ranks, compare what they run, and lead their ways out through the last proof.

    Collective the first time that a session is given, if it has more than one rank.

    Raises:
      PreflightError: The ranks run different versions or options.
    """
    session = lockstep.session
    if session.begun:
        return
    session.begun = True
    if isinstance(session.comm, MPIComm):
        if session.comm.size > 1:
            chosen = options.read()
            limits = Limits(warn=chosen.warn, timeout=chosen.timeout)
            launched = launched_by() is not None
            session.board = Board.on(session.comm.mpi, limits, launched=launched)
        # After the board: what is registered last is called first at exit.
        exits().arm(session)
    if session.comm.size > 1:
        preflight(lockstep)
