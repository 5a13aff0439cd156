"""The plan of calls of `Optimizer.apply_gradients`: facts that depend only on their variables.

The text of a call has all options of the optimizer that differ from the defaults, and the learning
rates of the step where they are functions of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.communication import WIRES
from mpistrat.collectives.dtypes import choose_wire_type
from mpistrat.collectives.inter_node import MAX_EXCHANGE_ELEMENTS, compile_wire_casts
from mpistrat.collectives.layout import InPlaceColumns
from mpistrat.collectives.plan import PlanOptions, ReductionPlan
from mpistrat.kernels.ops import ReduceOp
from mpistrat.optim import passes
from mpistrat.optim.base import limit_of
from mpistrat.optim.fused import FusedSmallVariables, GradientTransform
from mpistrat.optim.state import State, Target
from mpistrat.optim.updating import THREADS
from mpistrat.shm.arena import SharedBuffers

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = [
    "Division",
    "GradientColumn",
    "GradientRun",
    "InPlaceGradients",
    "RunMember",
    "UpdatePlan",
]


@final
class UpdatePlan:
    """The plan of all calls that update these variables in this way.

    Args:
      state: The state of the optimizer.
      text: The beginning of the text of the call.
      dense: The variables with gradients of all elements.
      sparse: The variables with gradients of some rows.

    Attributes:
      optimizer: The optimizer.
      dense: The variables with gradients of all elements.
      sparse: The variables with gradients of some rows.
      is_direct: The call only updates, one gradient after the other, in this thread.
      transform: The transform of gradients in such a call.
      is_guarded: A gradient that is not finite is an error.
      decay: How much of moving averages stays.
      needs_rates: The text has the learning rates of each step, since no text describes a function.
      division: The division of the gradients, if all of them can be read.
      plan: The plan of the reduction, without the learning rates of a step.
      reads_rows: Gradients in memory that every rank can read are read there.
      is_shared: Some of the updated memory belongs to other ranks, too.
      is_spread: Some of it belongs to ranks on other nodes.
      has_large: A variable is large, so gradients that every rank can read pay.
      has_compiled: `compile` has run.
      in_place_gradients: Where gradients are, by their identities; by an empty tuple for gradients
        in memory of the state.
      buffers: The memory of the state for gradients, if it is used.
    """

    def __init__(self, state: State, text: str, dense: list[Target], sparse: list[Target]):
        """Make the plan."""
        optimizer = state.optimizer
        simple = [t.slices is None and t.rule.measure is None and t.w.size < THREADS for t in dense]
        needs_more = sparse or optimizer.needs_global_norm or optimizer.accumulate > 1
        self.is_direct = not needs_more and all(simple)
        self.transform = GradientTransform(limit=limit_of(optimizer.clip))
        self.decay = optimizer.ema or 0.0
        self.is_guarded = optimizer.nonfinite == "raise"
        self.optimizer, self._fused = optimizer, state.fused
        self.dense, self.sparse = dense, sparse
        self.needs_rates = has_rates(optimizer) and state.strategy._replicas.lockstep.comm.size > 1
        self.division = self.divide(range(len(dense)))
        dtypes = [choose_wire_type(ReduceOp.MEAN, t.variable.dtype) for t in dense]
        shapes = [t.variable.shape for t in dense]
        names = [t.variable._spec() for t in dense]
        rows = [f"rows of {t.variable._spec()}" for t in sparse]
        self.start = f"{text} {', '.join([*names, *rows])}"
        options = PlanOptions(is_weighting=True)
        self.plan = ReductionPlan(self.start, ReduceOp.MEAN, dtypes, shapes, options)
        self.reduction = state.strategy._replicas.make_reduction(self.plan)
        self.optimizers = list({id(t.optimizer): t.optimizer for t in (*dense, *sparse)}.values())
        self._spans = _list_spans([*dense, *sparse])
        self.is_shared = any(t.is_shared for t in (*dense, *sparse))
        self.is_spread = any(t.slices for t in (*dense, *sparse))
        self.is_worth_compiling = passes.is_worth_compiling(sum(t.variable.size for t in dense))
        self.has_large = any(target.is_shared for target in dense)
        # Where small variables are updated as one, their gradients are reduced as one.
        has_fused_parts = any([group.parts for group, _ in self.division.fused])
        self.reads_rows = self.plan.can_reduce_in_place and (self.has_large or not has_fused_parts)
        self.has_compiled = False
        self.in_place_gradients: dict[tuple[int, ...], InPlaceGradients] = {}
        self.buffers: list[Array] = []

    def divide(self, readable_indices: Container[int]) -> Division:
        """Return the division of the gradients.

        Args:
          readable_indices: The indices of the gradients that can be read as arrays.
        """
        index = {id(target): i for i, target in enumerate(self.dense)}
        pairs = [(group, [index.get(id(t), -1) for t in group.targets]) for group in self._fused]
        fused = [pair for pair in pairs if all(i in readable_indices for i in pair[1])]
        fused_indices = {i for _, indices in fused for i in indices}
        return Division(fused, [i for i in range(len(self.dense)) if i not in fused_indices])

    def format_rates(self, step: int) -> str:
        """Return the end of the text of the call at a step: learning rates that are functions."""
        if not self.needs_rates:
            return ""
        rates = {id(optimizer): optimizer.rate(step) for optimizer in self.optimizers}
        return f", by {_format_rates([(rates[key], first) for key, first in self._spans])}"

    def compile(self, wire: str) -> None:
        """Compile the loops that this call needs, before its handshake.

        Args:
          wire: The dtype of float32 data between nodes.
        """
        if not self.has_compiled and self.is_worth_compiling:
            kinds = {(t.variable.dtype, t.optimizer.rule.update): t for t in self.dense}
            for target in kinds.values():
                _compile_for(self.optimizer, target)
                if wire != WIRES[0]:
                    compile_wire_casts(target.variable.dtype, MAX_EXCHANGE_ELEMENTS)
        self.has_compiled = True


class Division(NamedTuple):
    """A division of gradients into those that are updated as one and all others.

    Attributes:
      fused: The variables that are updated as one, and the indices of their gradients.
      separate_indices: The indices of all others.
    """

    fused: list[tuple[FusedSmallVariables, list[int]]]
    separate_indices: list[int]


class GradientColumn(NamedTuple):
    """Where a gradient is in a matrix that has a row for each rank.

    Attributes:
      matrix_index: Which of `InPlaceGradients.matrices`.
      start: Its first column.
      is_reduced: Whether it is reduced into the first row before it is read from there.
    """

    matrix_index: int
    start: int
    is_reduced: bool


class RunMember(NamedTuple):
    """A gradient in a run.

    Attributes:
      gradient_index: The index of the gradient.
      begin: Its first column, counted from the first of the run.
      end: The column after its last one.
    """

    gradient_index: int
    begin: int
    end: int


class GradientRun(NamedTuple):
    """Neighbours in a matrix, which every rank reduces as one.

    Attributes:
      matrix_index: Which of `InPlaceGradients.matrices`.
      low: The first column.
      high: The column after the last one.
      members: The gradients.
    """

    matrix_index: int
    low: int
    high: int
    members: list[RunMember]


class InPlaceGradients(NamedTuple):
    """Where gradients are that are reduced in place.

    Attributes:
      generation: The generation of shared memory; it changes with each array that is made or freed.
      suffix: The end of the text of the call.
      matrices: The matrices with a row for each rank: the block of each, and its index there.
      columns: The columns of each gradient.
      remote_indices: The indices of reduced gradients that are so when they are fetched, part by
        part.
      placed: All other reduced gradients; None without any.
      runs: The runs of other gradients, which every rank reduces in memory of its own.
      division: The division of the gradients; members of runs and single arrays are readable.
    """

    generation: int
    suffix: str
    matrices: list[tuple[weakref.ref[SharedBuffers], int]]
    columns: list[GradientColumn]
    remote_indices: list[int]
    placed: InPlaceColumns | None
    runs: list[GradientRun]
    division: Division


def has_rates(optimizer: OptimizerSettings) -> bool:
    """Return whether a learning rate is a function of the program."""
    rates = [optimizer.learning_rate, *[g.changes.get("learning_rate") for g in optimizer.groups]]
    return any(callable(rate) for rate in rates)


def _list_spans(targets: Sequence[Target]) -> list[tuple[int, str]]:
    """Return the spans of neighbouring variables that have one optimizer, in the order of the call.

    Returns:
      The identity of the optimizer of each span, and a text for its first variable.
    """
    spans: list[tuple[int, str]] = []
    for i, target in enumerate(targets):
        if not spans or spans[-1][0] != id(target.optimizer):
            spans.append((id(target.optimizer), f"no. {i} ({target.variable.name!r})"))
    return spans


def _format_rates(spans: Sequence[tuple[float, str]]) -> str:
    """Return learning rates as a text that is equal on two ranks exactly if all rates are.

    Args:
      spans: A rate, and the first variable that it is for, in the order of the call.

    Example:
      >>> _format_rates([(0.1, "no. 0"), (0.1, "no. 1"), (0.2, "no. 2")])
      '0.1 from no. 0 on, 0.2 from no. 2 on'
      >>> _format_rates([(0.1, "no. 0")])
      '0.1'
    """
    rates_before = [None, *(rate for rate, _ in spans)]
    changes = [span for span, rate in zip(spans, rates_before, strict=False) if span[0] != rate]
    if len(changes) == 1:
        return repr(changes[0][0])
    return ", ".join(f"{rate!r} from {first} on" for rate, first in changes)


def _compile_for(optimizer: OptimizerSettings, target: Target) -> None:
    """Compile the loops that a variable of this dtype needs; before a handshake."""
    sample = np.zeros(1, target.variable.dtype)
    rule = target.optimizer.rule
    slots = tuple(sample.copy() for _ in rule.slots)
    pending = None if target.pending is None else sample.copy()
    ema = None if target.ema is None else sample.copy()
    g = passes.Gradient(np.zeros((1, 1), sample.dtype), divisor=2.0, pending=pending)
    if pending is not None:
        passes.accumulate(g)
    passes.measure_norm(g, 1, np.zeros(1))
    if rule.measure is not None:
        passes.measure(rule, g, sample, slots, target.optimizer.scalars(0), sums=np.zeros((2, 1)))
    scalars, decay = target.optimizer.scalars(0), optimizer.ema or 0.0
    passes.update(rule, g, sample, slots, scalars, ema=ema, decay=decay)
