"""The parts that make a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mpistrat.collectives.begin import begin
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.collectives.plans import Plans
from mpistrat.collectives.reducer import Reducer
from mpistrat.comm.session import Session
from mpistrat.comm.world import alone, default_parent
from mpistrat.distribute.regroup import Regroup
from mpistrat.distribute.views import ALONE, View

__all__ = ["Parts"]


@final
@dataclass(frozen=True)
class Parts:
    """What a strategy is made of; a new strategy is another choice of parts.

    Attributes:
      view: How much of the other replicas' values cross-replica code sees.
      lockstep: Proves that all ranks make the same call.
      plans: All-reduces that were made before.
      reducer: Makes the values of the replicas one.
      regroup: Makes one value of the replicas' trees, as the view shows them.
    """

    view: View
    lockstep: Lockstep
    plans: Plans
    reducer: Reducer
    regroup: Regroup

    @staticmethod
    def over(view: View, parent: Any = None) -> Parts:
        """Return parts over the ranks of `parent`.

        Collective over `parent`, the first time.

        Args:
          view: The row of `views`.
          parent: An mpi4py intracommunicator or a `Comm`; None for the world. Not looked at by the
            view that never communicates.
        """
        if view is ALONE:
            session = Session(alone(), owned=False)
        else:
            session = Session.on(default_parent() if parent is None else parent)
        lockstep = Lockstep(session)
        begin(lockstep)
        reducer = Reducer(lockstep)
        plans = Plans(lockstep, reducer.node)
        return Parts(view, lockstep, plans, reducer, Regroup(lockstep, view))
