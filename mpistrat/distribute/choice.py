"""Reductions by a class of the program, in place of the library's algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, as_array, digest
from mpistrat.collectives.communication import CommunicationOptions
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import put
from mpistrat.distribute.mode import Mode, current
from mpistrat.distribute.regroup import Regroup, select
from mpistrat.distribute.slices import arrays_of
from mpistrat.distribute.views import GLOBAL
from mpistrat.distribute.writes import prove_same
from mpistrat.errors import StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import multiply
from mpistrat.lockstep.ranks import Caught


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
