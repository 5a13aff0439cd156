"""`ReplicaGroup`: the ranks of a strategy, and what moves values between them; `StrategyBase`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from mpistrat.arrays import Array
from mpistrat.collectives.allreduce import AllReduce
from mpistrat.collectives.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from mpistrat.collectives.plan import Contribution, ReductionInputs, ReductionPlan
from mpistrat.collectives.plan_cache import PlanCache
from mpistrat.collectives.reducer import Reducer
from mpistrat.comm.session import Session
from mpistrat.comm.world import alone
from mpistrat.distribute.choice import Delegate, Ops
from mpistrat.distribute.regroup import Regroup
from mpistrat.distribute.views import ALONE, View
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.startup import begin, begun


@final
@dataclass(frozen=True)
class ReplicaGroup:
    """The ranks of a strategy and what works on them; a new strategy is another choice of these.

    Attributes:
      view: How much of the other replicas' values cross-replica code sees.
      lockstep: Proves that all ranks make the same call.
      plans: The plans of all-reduces that were made before.
      reducer: Makes the values of the replicas one.
      regroup: Makes one value of the replicas' trees, as the view shows them.
      delegate: The class of the program that makes them one instead, if it gave one.
      ops: The `CrossDeviceOps` that the program chose, if any.
      options: Time and the dtype between nodes, as it chose them.
    """

    view: View
    lockstep: Lockstep
    plans: PlanCache
    reducer: Reducer
    regroup: Regroup
    delegate: Delegate | None = None
    ops: Ops | None = None
    options: CommunicationOptions = field(default_factory=CommunicationOptions)

    @staticmethod
    def over(view: View, parent: Any = None, order: Sequence[int] | None = None) -> ReplicaGroup:
        """Return a group over the ranks of `parent`.

        Collective over `parent`, the first time.

        Args:
          view: The row of `views`.
          parent: An mpi4py intracommunicator or a `Comm`; None for the world. Not looked at by the
            view that never communicates.
          order: Which rank is which replica; None for rank order.
        """
        if view is ALONE:
            session = Session(alone(), owned=False)
            begin(Lockstep(session))
        else:
            session = begun(parent).session
        lockstep = Lockstep(session, order=order)
        reducer, regroup = Reducer(lockstep), Regroup(lockstep, view)
        return ReplicaGroup(view, lockstep, PlanCache(reducer), reducer, regroup)

    def replace_options(
        self, options: CommunicationOptions | None = None, ops: Ops | None = None
    ) -> ReplicaGroup:
        """Return this group with these options, or another class that reduces.

        Not collective: what ranks have chosen is checked by each call. An algorithm that options
        name takes the place of a class that was chosen before: it is the library's own.

        Args:
          options: Time and the dtype between nodes; what is no default rules.
          ops: The `CrossDeviceOps`.

        Raises:
          ValueError: `options` is of another class.
        """
        merged = self.options.merge(options)
        auto = CommunicationImplementation.AUTO
        if ops is None and (options is None or options.implementation is auto):
            ops = self.ops
        if self.view is ALONE or (ops is self.ops and merged == self.options):
            return self
        group, mover = replace(self, ops=ops, options=merged), None if ops is None else ops.mover
        timing = merged.timeout_seconds, merged.wire
        if not (mover or self.delegate) and timing == (self.reducer.seconds, self.options.wire):
            return group  # names of algorithms choose nothing
        kind = type(ops)
        mover_text = "" if mover is None else f" by {kind.__module__}.{kind.__qualname__}, {merged}"
        reducer = Reducer(self.lockstep, merged.wire, merged.timeout_seconds, mover_text)
        delegate = None if mover is None else Delegate(reducer, mover, merged)
        return replace(group, reducer=reducer, plans=PlanCache(reducer), delegate=delegate)

    @property
    def in_place(self) -> bool:
        """Whether values may be reduced in place: no class of the program reduces them."""
        return self.delegate is None

    def reduction(self, plan: ReductionPlan) -> Callable[[ReductionInputs], list[Any]]:
        """Return what reduces leaves over all ranks, or lets the class of the program do it.

        Not collective, but each call of the result is; see `mpistrat.collectives.allreduce`.
        """
        if self.delegate is not None:
            return functools.partial(self.delegate.all_reduce, plan)
        return AllReduce(self.reducer, plan)

    def all_reduce_contributions(
        self,
        name: str,
        op: ReduceOp,
        contributions: Sequence[Contribution],
        is_weighting: bool = False,
        origin: str = "",
    ) -> list[Array]:
        """Reduce what each rank contributes, each leaf by a weight of its own; as `all_reduce`.

        Collective.

        Args:
          name: The text of the call; shapes and dtypes are added to it.
          op: The operation. MEAN divides by the sum of the weights.
          contributions: One per leaf; equal shapes and dtypes on all ranks.
          is_weighting: Multiply the values by their weights first; otherwise they are sums over
            their examples already.
          origin: More of the text, which is another each time.
        """
        try:
            reduction = self.plans.reduction_of(name, op, contributions, is_weighting)
            alarm = self.reducer.alarm(name, contributions)
        except Exception as error:
            self.lockstep.refuse(name, error)
        values, weights = [c.value for c in contributions], [c.weight for c in contributions]
        inputs = ReductionInputs(values, weights, None, origin, alarm)
        if self.delegate is not None:
            return self.delegate.all_reduce(reduction.plan, inputs)
        return reduction(inputs)


class StrategyBase:
    """A strategy, as functions of this package take one; `Strategy` says what its methods do.

    Attributes:
      replicas: What it is made of.
      device_labels: The labels of the replicas' devices.
      is_default: Whether it is the current one where no other does.
    """

    replicas: ReplicaGroup
    device_labels: tuple[str, ...]
    is_default = False

    scope: Callable[[], Any]
    run: Callable[..., Any]
    reduce: Callable[..., Any]
    experimental_local_results: Callable[[Any], tuple[Any, ...]]
    experimental_make_numpy_dataset: Callable[[Any], Any]
