"""The parts that make a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from mpistrat.collectives.communication import CommunicationOptions
from mpistrat.collectives.plans import Plans
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.reducing import Reducing
from mpistrat.comm.session import Session
from mpistrat.comm.world import alone, default_parent
from mpistrat.distribute.choice import Choice, Ops
from mpistrat.distribute.regroup import Regroup
from mpistrat.distribute.views import ALONE, View
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.startup import begin

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
      choice: How a program wants values to move, if it said so.
    """

    view: View
    lockstep: Lockstep
    plans: Plans
    reducer: Reducing
    regroup: Regroup
    choice: Choice | None = None

    @staticmethod
    def over(
        view: View,
        parent: Any = None,
        order: Sequence[int] | None = None,
        seconds: float | None = None,
    ) -> Parts:
        """Return parts over the ranks of `parent`.

        Collective over `parent`, the first time.

        Args:
          view: The row of `views`.
          parent: An mpi4py intracommunicator or a `Comm`; None for the world. Not looked at by the
            view that never communicates.
          order: Which rank is which replica; None for rank order.
          seconds: How long each call may take; None for what ``MPISTRAT_TIMEOUT`` says.
        """
        if view is ALONE:
            session = Session(alone(), owned=False)
        else:
            session = Session.on(default_parent() if parent is None else parent)
        begin(Lockstep(session))
        lockstep = Lockstep(session, order=order, seconds=seconds)
        reducer, regroup = Reducer(lockstep), Regroup(lockstep, view)
        plans = Plans(lockstep, reducer.node)
        return Parts(view, lockstep, plans, reducer, regroup, Choice(reducer))

    def by(
        self,
        options: CommunicationOptions | None = None,
        ops: Ops | None = None,
        labels: Sequence[str] = (),
    ) -> Parts:
        """Return these parts with another choice of how values move.

        Not collective: what ranks have chosen is proved by each call.

        Args:
          options: Sizes, time and algorithm; what is no default rules.
          ops: The class of the algorithm.
          labels: The labels of the replicas' devices.

        Raises:
          ValueError: `options` are none, or the root is no replica.
        """
        if (options is None and ops is None) or self.choice is None:
            return self
        choice = self.choice.but(ops, options)
        if self.view is ALONE:
            return self
        choice = replace(choice, labels=tuple(labels) or choice.labels)
        if not choice.made:
            return self
        # What is remembered of calls rides in the proof or in shared memory, which is no choice.
        plans = Plans(self.lockstep, choice.base.node, learns=False)
        return replace(self, reducer=choice.reducer(), plans=plans, choice=choice)
