"""What happens once, when the first strategy of a communicator is made."""

from __future__ import annotations

from mpistrat.collectives.exits import exits
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.collectives.preflight import preflight

__all__ = ["begin"]


def begin(lockstep: Lockstep) -> None:
    """Compare what the ranks run, and lead their ways out through the last proof.

    Collective the first time that a session is given, if it has more than one rank.

    Raises:
      PreflightError: The ranks run different versions or options.
    """
    session = lockstep.session
    if session.begun:
        return
    session.begun = True
    if session.comm.name == "MPI":
        exits().arm(session)
    if session.comm.size > 1:
        preflight(lockstep)
