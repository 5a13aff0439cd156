"""`ReplicaGroup`: the ranks of a strategy, and what moves values between them; `StrategyBase`.

Reductions by a class of the program, in place of the library's algorithm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, as_array, digest
from mpistrat.collectives.allreduce import AllReduce
from mpistrat.collectives.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from mpistrat.collectives.plan import Contribution, ReductionInputs, ReductionPlan
from mpistrat.collectives.plan_cache import PlanCache
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import put
from mpistrat.comm.session import Session, make_single_rank_comm
from mpistrat.errors import StructureError
from mpistrat.kernels.elementwise import multiply
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import Caught
from mpistrat.lockstep.startup import begin, begun
from mpistrat.strategy.context_stack import Mode, current
from mpistrat.variables.indexed_slices import arrays_of
from mpistrat.variables.kinds import ALONE, GLOBAL, View
from mpistrat.variables.regroup import Regroup, select
from mpistrat.variables.writes import prove_same


class Ops:
    """What a strategy needs of a `CrossDeviceOps`, which says what its methods do.

    Attributes:
      mover: What reduces in place of the library's algorithm; None if nothing does.
      reduce: Reduces one value.
      batch_reduce: Reduces several values.
      broadcast: Gives replica 0's value to every replica.
    """

    @property
    def mover(self) -> Ops | None:
        """This class itself, unless a subclass says otherwise."""
        return self

    reduce: Callable[[Any, Any, Any, Any], Any]
    batch_reduce: Callable[[Any, Any, Any], list[Any]]
    broadcast: Callable[[Any, Any], Any]


@final
class Delegate:
    """Lets a class of the program move values.

    Before that it is shown that all ranks call it, and after that, that all got the same.

    Args:
      reducer: Proves calls.
      ops: The class's instance.
      options: What it is given as options.
    """

    def __init__(self, reducer: Reducer, ops: Ops, options: CommunicationOptions):
        """Reduce by `ops`."""
        self.ops, self._reducer, self._options = ops, reducer, options
        self._lockstep, self._regroup = reducer.lockstep, Regroup(reducer.lockstep, GLOBAL)

    def all_reduce(self, plan: ReductionPlan, inputs: ReductionInputs) -> list[Any]:
        """Reduce leaves over all ranks; see `mpistrat.collectives.allreduce.AllReduce`.

        Collective. Cost: two handshakes, and what the class does.
        """
        outs = inputs.outs
        with self._lockstep.preparing(plan.text):
            wires = plan.convert_to_wire(inputs.values, inputs.weights, fresh=True)
        text = plan.text + ("" if outs is None else ", out") + self._reducer.said
        with self._reducer.timed(), np.errstate(all="ignore"):
            weights = plan.pack_weights(inputs.weights)
            call_text = text + inputs.origin
            scales, _ = self._reducer.handshake(plan, call_text, weights, alarm=inputs.alarm)
            # A mean of values that count alike is theirs to make; of others, it is a sum.
            op, divisors = plan.op, scales.divisors
            has_divisors = plan.is_mean and not (plan.is_weighting or plan.has_equal_weights)
            if scales.table is None and not (has_divisors and (self._reducer.weights != 1).any()):
                divisors = None
            if divisors is not None:
                op = ReduceOp.SUM
            for i, wire in enumerate(wires):
                factors, _ = scales.of(i)
                if factors is not None:
                    multiply(wire, factors[self._reducer.comm.rank])
            totals = self._reduced(text, op, wires, lambda total, wire: like(self.ops, total, wire))
            return put(plan.restore_numbers(plan.finish_totals(totals, divisors)), outs)

    def by_class(
        self, call: str, op: ReduceOp, values: Sequence[Any], check: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Reduce values of any kind. Collective. Cost: two handshakes, and what the class does.

        Args:
          call: The text of the call; the name of the class is added to it.
          op: The operation.
          values: One per leaf.
          check: Makes the result of what the class returned, and the value; or raises.
        """
        text = f"{call}{self._reducer.said}"
        with self._reducer.timed():
            self._lockstep.handshake(text)
            return self._reduced(text, op, values, check)

    def _reduced(
        self, text: str, op: ReduceOp, inputs: Sequence[Any], check: Callable[[Any, Any], Any]
    ) -> list[Any]:
        if not inputs:
            return []
        totals, contents = [], b""
        with Caught(Exception) as caught:
            values = self._regroup.wrap_input(list(inputs))
            ruling = current()
            with nullcontext() if ruling is None else Mode(ruling.strategy):
                if len(values) == 1:
                    results = [self.ops.reduce(op, values[0], values[0], self._options)]
                else:
                    pairs = [(value, value) for value in values]
                    results = list(self.ops.batch_reduce(op, pairs, self._options))
            totals = [check(result, value) for result, value in zip(results, inputs, strict=True)]
            contents = b"".join([digest(arrays_of(total)) for total in totals])
        advice = "A CrossDeviceOps must return the same on every rank."
        compared_contents = {"what the class returned": contents}
        prove_same(self._lockstep, f"{text}, reduced", compared_contents, advice, caught.failure)
        return totals


def like(ops: Ops, result: Any, wire: Array) -> Array:
    """Return what a class made of a value, in the value's dtype.

    Args:
      ops: The class's instance, for messages.
      result: What it made.
      wire: The value, as the class was given it.

    Raises:
      StructureError: It is of another shape, or a dtype that does not convert.
    """
    total = np.array(as_array(select(result), "the result"), order="C")
    if total.shape != wire.shape:
        raise StructureError(
            f"{type(ops).__name__} returned shape {total.shape} for values of shape {wire.shape}."
        )
    if not np.can_cast(total.dtype, wire.dtype, "same_kind"):
        raise StructureError(
            f"{type(ops).__name__} returned {total.dtype} for values of {wire.dtype}."
        )
    return total.astype(wire.dtype, copy=False)


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
            session = Session(make_single_rank_comm(), is_owned=False)
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
