"""`ReplicaGroup`: the ranks of a strategy, and the objects that move values between them.

A `CrossDeviceOps` of the program's own makes another group, whose `Delegate` asks that class
instead of the library's algorithm, above `mpistrat.collectives`. The class is part of the text that
handshakes compare, so different classes on different ranks are an error, and a second handshake
shows that all ranks got the same. Names of tf.distribute's algorithms are accepted and choose
nothing: there is one all-reduce, and it was quicker than a ring or a root wherever it was measured.

`StrategyBase` is a strategy as functions of this package take one.
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
from mpistrat.collectives.results import write_outs
from mpistrat.comm.session import Session, make_single_rank_comm
from mpistrat.errors import StructureError
from mpistrat.kernels.elementwise import multiply
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import FailureCatcher
from mpistrat.lockstep.startup import begin_lockstep, begin_session
from mpistrat.strategy.context_stack import CodeContext, current_context
from mpistrat.variables.indexed_slices import list_arrays
from mpistrat.variables.kinds import GLOBAL_VIEW, SINGLE_REPLICA, View
from mpistrat.variables.regroup import Regrouper, select_local
from mpistrat.variables.writes import check_same_contents


class CrossDeviceOpsBase:
    """The part of `CrossDeviceOps` that a strategy needs; its methods are documented there.

    Attributes:
      _replacement: The object that reduces in place of the library's algorithm; None if none does.
      reduce: Reduces one value.
      batch_reduce: Reduces several values.
      broadcast: Gives replica 0's value to every replica.
    """

    @property
    def _replacement(self) -> CrossDeviceOpsBase | None:
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
      reducer: Checks calls.
      ops: The class's instance.
      options: The options that its methods get.
    """

    def __init__(self, reducer: Reducer, ops: CrossDeviceOpsBase, options: CommunicationOptions):
        """Reduce by `ops`."""
        self.ops, self._reducer, self._options = ops, reducer, options
        self._lockstep, self._regrouper = reducer.lockstep, Regrouper(reducer.lockstep, GLOBAL_VIEW)

    def all_reduce(self, plan: ReductionPlan, inputs: ReductionInputs) -> list[Any]:
        """Reduce leaves over all ranks; see `mpistrat.collectives.allreduce.AllReduce`.

        Collective. Cost: two handshakes, and what the class does.
        """
        outs = inputs.outs
        with self._lockstep.validating_collectively(plan.text):
            wires = plan.convert_to_wire(inputs.values, inputs.weights, needs_copies=True)
        text = plan.text + ("" if outs is None else ", out") + self._reducer.options_text
        with self._reducer.limit_seconds(), np.errstate(all="ignore"):
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
                factors, _ = scales.select_leaf(i)
                if factors is not None:
                    multiply(wire, factors[self._reducer.comm.rank])
            totals = self._reduce_by_ops(
                text, op, wires, lambda total, wire: check_returned_array(self.ops, total, wire)
            )
            return write_outs(plan.restore_numbers(plan.finish_totals(totals, divisors)), outs)

    def reduce_values(
        self,
        call: str,
        op: ReduceOp,
        values: Sequence[Any],
        check_result: Callable[[Any, Any], Any],
    ) -> list[Any]:
        """Reduce values of any kind. Collective. Cost: two handshakes, and what the class does.

        Args:
          call: The text of the call; the name of the class is added to it.
          op: The operation.
          values: One per leaf.
          check_result: Returns the result, given what the class returned and the value; or raises.
        """
        text = f"{call}{self._reducer.options_text}"
        with self._reducer.limit_seconds():
            self._lockstep.handshake(text)
            return self._reduce_by_ops(text, op, values, check_result)

    def _reduce_by_ops(
        self,
        text: str,
        op: ReduceOp,
        values: Sequence[Any],
        check_result: Callable[[Any, Any], Any],
    ) -> list[Any]:
        if not values:
            return []
        totals, contents = [], b""
        with FailureCatcher(Exception) as caught:
            wrapped_values = self._regrouper.wrap_input(list(values))
            context = current_context()
            with nullcontext() if context is None else CodeContext(context.strategy):
                if len(wrapped_values) == 1:
                    results = [
                        self.ops.reduce(op, wrapped_values[0], wrapped_values[0], self._options)
                    ]
                else:
                    pairs = [(value, value) for value in wrapped_values]
                    results = list(self.ops.batch_reduce(op, pairs, self._options))
            totals = [
                check_result(result, value) for result, value in zip(results, values, strict=True)
            ]
            contents = b"".join([digest(list_arrays(total)) for total in totals])
        advice = "A CrossDeviceOps must return the same on every rank."
        check_same_contents(
            self._lockstep,
            f"{text}, reduced",
            {"what the class returned": contents},
            advice,
            failure=caught.failure,
        )
        return totals


def check_returned_array(ops: CrossDeviceOpsBase, returned_value: object, wire: Array) -> Array:
    """Return the result of a class, in the dtype of the value that it was given.

    Args:
      ops: The class's instance, for messages.
      returned_value: The result.
      wire: The value, as the class was given it.

    Raises:
      StructureError: It is of another shape, or a dtype that does not convert.
    """
    total = np.array(as_array(select_local(returned_value), "the result"), order="C")
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
      lockstep: Checks that all ranks make the same call.
      plans: The plans of all-reduces that were made before.
      reducer: Makes the values of the replicas one.
      regrouper: Makes one value of the replicas' trees, as the view shows them.
      delegate: The class of the program that makes them one instead, if it gave one.
      ops: The `CrossDeviceOps` that the program chose, if any.
      options: Time and the dtype between nodes, as it chose them.
    """

    view: View
    lockstep: Lockstep
    plans: PlanCache
    reducer: Reducer
    regrouper: Regrouper
    delegate: Delegate | None = None
    ops: CrossDeviceOpsBase | None = None
    options: CommunicationOptions = field(default_factory=CommunicationOptions)

    @staticmethod
    def create(
        view: View, parent: object = None, order: Sequence[int] | None = None
    ) -> ReplicaGroup:
        """Return a group over the ranks of `parent`.

        Collective over `parent`, the first time.

        Args:
          view: The row of `views`.
          parent: An mpi4py intracommunicator or a `Comm`; None for the world. Not looked at by the
            view that never communicates.
          order: The rank of each replica; None for rank order.
        """
        if view is SINGLE_REPLICA:
            session = Session(make_single_rank_comm(), is_owned=False)
            begin_session(Lockstep(session))
        else:
            session = begin_lockstep(parent).session
        lockstep = Lockstep(session, order=order)
        reducer, regroup = Reducer(lockstep), Regrouper(lockstep, view)
        return ReplicaGroup(view, lockstep, PlanCache(reducer), reducer, regroup)

    def replace_options(
        self, options: CommunicationOptions | None = None, ops: CrossDeviceOpsBase | None = None
    ) -> ReplicaGroup:
        """Return this group with these options, or another class that reduces.

        Not collective: what ranks have chosen is checked by each call. An algorithm that options
        name takes the place of a class that was chosen before: it is the library's own.

        Args:
          options: Time and the dtype between nodes; values that are not the default take
            precedence.
          ops: The `CrossDeviceOps`.

        Raises:
          ValueError: `options` is of another class.
        """
        merged = self.options.merge(options)
        auto = CommunicationImplementation.AUTO
        if ops is None and (options is None or options.implementation is auto):
            ops = self.ops
        if self.view is SINGLE_REPLICA or (ops is self.ops and merged == self.options):
            return self
        group, replacement = (
            replace(self, ops=ops, options=merged),
            None if ops is None else ops._replacement,
        )
        timing = merged.timeout_seconds, merged.wire
        if not (replacement or self.delegate) and timing == (
            self.reducer.seconds,
            self.options.wire,
        ):
            return group  # names of algorithms choose nothing
        ops_class = type(ops)
        replacement_text = (
            ""
            if replacement is None
            else f" by {ops_class.__module__}.{ops_class.__qualname__}, {merged}"
        )
        reducer = Reducer(self.lockstep, merged.wire, merged.timeout_seconds, replacement_text)
        delegate = None if replacement is None else Delegate(reducer, replacement, merged)
        return replace(group, reducer=reducer, plans=PlanCache(reducer), delegate=delegate)

    @property
    def can_reduce_in_place(self) -> bool:
        """Whether values may be reduced in place: no class of the program reduces them."""
        return self.delegate is None

    def make_reduction(self, plan: ReductionPlan) -> Callable[[ReductionInputs], list[Any]]:
        """Return a function that reduces leaves over all ranks, by the class of the program if any.

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
            reduction = self.plans.find_weighted_reduction(name, op, contributions, is_weighting)
            alarm = self.reducer.describe_alarm(name, contributions)
        except Exception as error:
            self.lockstep.fail_collectively(name, error)
        values, weights = [c.value for c in contributions], [c.weight for c in contributions]
        inputs = ReductionInputs(values, weights, None, origin, alarm)
        if self.delegate is not None:
            return self.delegate.all_reduce(reduction.plan, inputs)
        return reduction(inputs)


class StrategyBase:
    """A strategy, as functions of this package take one; `Strategy` says what its methods do.

    Attributes:
      _replicas: Its ranks, and the objects that move values between them.
      _device_labels: The labels of the replicas' devices.
      _is_default: Whether it is the current one where no other does.
    """

    _replicas: ReplicaGroup
    _device_labels: tuple[str, ...]
    _is_default = False

    scope: Callable[[], Any]
    run: Callable[..., Any]
    reduce: Callable[..., Any]
    experimental_local_results: Callable[[Any], tuple[Any, ...]]
    experimental_make_numpy_dataset: Callable[[Any], Any]
