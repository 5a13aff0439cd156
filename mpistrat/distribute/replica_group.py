"""`ReplicaGroup`: the ranks of a strategy, and what moves values between them; `StrategyBase`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from mpistrat.arrays import Array
from mpistrat.collectives.allreduce import all_reduce
from mpistrat.collectives.call import ONES, Call, Contribution
from mpistrat.collectives.calls import Calls
from mpistrat.collectives.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
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
      calls: All-reduces that were compiled before.
      reducer: Makes the values of the replicas one.
      regroup: Makes one value of the replicas' trees, as the view shows them.
      delegate: The class of the program that makes them one instead, if it gave one.
      ops: The `CrossDeviceOps` that the program chose, if any.
      options: Time and the dtype between nodes, as it chose them.
    """

    view: View
    lockstep: Lockstep
    calls: Calls
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
        return ReplicaGroup(view, lockstep, Calls(reducer), reducer, regroup)

    def by(
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
        by = "" if mover is None else f" by {kind.__module__}.{kind.__qualname__}, {merged}"
        reducer = Reducer(self.lockstep, merged.wire, merged.timeout_seconds, by)
        delegate = None if mover is None else Delegate(reducer, mover, merged)
        return replace(group, reducer=reducer, calls=Calls(reducer), delegate=delegate)

    @property
    def in_place(self) -> bool:
        """Whether values may be reduced in place: no class of the program reduces them."""
        return self.delegate is None

    def all_reduce(
        self,
        call: Call,
        values: Sequence[Any],
        weights: Sequence[float] = ONES,
        outs: Sequence[Array] | None = None,
    ) -> list[Any]:
        """Reduce leaves over all ranks, or let the class of the program do it. Collective.

        See `mpistrat.collectives.allreduce.all_reduce`.
        """
        if self.delegate is not None:
            return self.delegate.all_reduce(call, values, weights, outs)
        return all_reduce(self.reducer, call, values, weights, outs)

    def all_reduce_given(
        self,
        name: str,
        op: ReduceOp,
        given: Sequence[Contribution],
        weigh: bool = False,
        of: str = "",
    ) -> list[Array]:
        """Reduce what each rank contributes, each leaf by a weight of its own; as `all_reduce`.

        Collective.

        Args:
          name: The text of the call; shapes and dtypes are added to it.
          op: The operation. MEAN divides by the sum of the weights.
          given: One per leaf; equal shapes and dtypes on all ranks.
          weigh: Multiply the values by their weights first; otherwise they are sums over their
            examples already.
          of: More of the text, which is another each time.
        """
        with self.lockstep.preparing(name):
            call = self.calls.given(name, op, given, weigh)
            call.of, call.alarm = of, self.reducer.alarm(name, given)
        values, weights = [one.value for one in given], [one.weight for one in given]
        return self.all_reduce(call, values, weights)


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
