"""What follows from the variables of a call of `Optimizer.apply_gradients`, found out once."""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.communication import WIRES
from mpistrat.collectives.dtypes import wire_type
from mpistrat.collectives.inter_node import MOST, compile_wire
from mpistrat.collectives.layout import Placed
from mpistrat.collectives.plan import PlanOptions, ReductionPlan
from mpistrat.kernels.ops import ReduceOp
from mpistrat.optim import passes
from mpistrat.optim.base import limit_of
from mpistrat.optim.fused import FusedSmallVariables, Take
from mpistrat.optim.state import State, Target
from mpistrat.optim.updating import THREADS
from mpistrat.shm.arena import SharedBuffers

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = ["Division", "Places", "UpdatePlan"]


@final
class UpdatePlan:
    """What is the same in all calls that update these variables in this way.

    Args:
      optimizer: The optimizer.
      state: Its state.
      text: Of the call.
      dense: The variables with gradients of all elements.
      sparse: The variables with gradients of some rows.

    Attributes:
      plain: There is no more to do than to update: gradients one after the other, by this thread
        alone.
      take: What is done to gradients then.
      guard: A gradient that is not finite is an error.
      decay: How much of moving averages stays.
      needs_rates: The text has to tell the learning rates of each step: of functions no text tells
        all.
      division: Which gradients are updated as one, if all of them can be read.
      plan: The call, without the learning rates of a step.
      reads_rows: Gradients that every rank can read where they are, are read there.
    """

    def __init__(
        self,
        optimizer: OptimizerSettings,
        state: State,
        text: str,
        dense: list[Target],
        sparse: list[Target],
    ):
        """Find out what follows from the variables."""
        simple = [t.slices is None and t.rule.measure is None and t.w.size < THREADS for t in dense]
        self.plain = not (sparse or optimizer.looks or optimizer.accumulate > 1) and all(simple)
        self.take, self.decay = Take(limit=limit_of(optimizer.clip)), optimizer.ema or 0.0
        self.guard = optimizer.nonfinite == "raise"
        self._optimizer, self._fused = optimizer, state.fused
        self.dense, self.sparse = dense, sparse
        self.needs_rates = _has_rates(optimizer) and state.strategy.replicas.lockstep.comm.size > 1
        self.division = self.divide(range(len(dense)))
        dtypes = [wire_type(ReduceOp.MEAN, t.variable.dtype) for t in dense]
        shapes = [t.variable.shape for t in dense]
        names = [t.variable.spec() for t in dense]
        rows = [f"rows of {t.variable.spec()}" for t in sparse]
        self.start = f"{text} {', '.join([*names, *rows])}"
        options = PlanOptions(is_weighting=True)
        self.plan = ReductionPlan(self.start, ReduceOp.MEAN, dtypes, shapes, options)
        self.reduction = state.strategy.replicas.reduction(self.plan)
        self.optimizers = list({id(t.optimizer): t.optimizer for t in (*dense, *sparse)}.values())
        self._spans = _spans([*dense, *sparse])
        # Some memory that is updated here belongs to other ranks too.
        self.shared = any(t.shared for t in (*dense, *sparse))
        # Some of it on other nodes.
        self.spread = any(t.slices for t in (*dense, *sparse))
        self.worth_compiling = passes.compiles(sum(t.variable.size for t in dense))
        # From one large variable on it pays to have all gradients where every rank can read them.
        self.large = any(target.shared for target in dense)
        # Where small variables are updated as one, what is given for them is reduced as one.
        has_fused_parts = any([group.parts for group, _ in self.division.fused])
        self.reads_rows = self.plan.is_worth_a_place and (self.large or not has_fused_parts)
        self.compiled = False
        # Of gradients by their identities; of those that are put into memory of the state, by none.
        self.places: dict[tuple[int, ...], Places] = {}
        self.buffers: list[Array] = []

    def divide(self, readable_indices: Container[int]) -> Division:
        """Return which gradients are updated as one, and which by themselves.

        Args:
          readable_indices: The numbers of the gradients that can be read as arrays.
        """
        index = {id(target): i for i, target in enumerate(self.dense)}
        pairs = [(group, [index.get(id(t), -1) for t in group.targets]) for group in self._fused]
        fused = [pair for pair in pairs if all(i in readable_indices for i in pair[1])]
        fused_indices = {i for _, places in fused for i in places}
        return Division(fused, [i for i in range(len(self.dense)) if i not in fused_indices])

    def rates_text(self, step: int) -> str:
        """Return the end of the text of the call at a step: learning rates that are functions."""
        if not self.needs_rates:
            return ""
        rates = {id(optimizer): optimizer.rate(step) for optimizer in self.optimizers}
        return f", by {_rates_text([(rates[key], first) for key, first in self._spans])}"

    def compile(self, wire: str) -> None:
        """Compile the loops that this call needs, before its handshake.

        Args:
          wire: What float32 travels as between nodes.
        """
        if not self.compiled and self.worth_compiling:
            kinds = {(t.variable.dtype, t.optimizer.rule.update): t for t in self.dense}
            for target in kinds.values():
                _compile_for(self._optimizer, target)
                if wire != WIRES[0]:
                    compile_wire(target.variable.dtype, MOST)
        self.compiled = True


class Division(NamedTuple):
    """Which gradients are used as one, and which by themselves.

    Attributes:
      fused: The variables that are updated as one, and the numbers of their gradients.
      apart: The numbers of all others.
    """

    fused: list[tuple[FusedSmallVariables, list[int]]]
    apart: list[int]


class Places(NamedTuple):
    """Where gradients are that are reduced in place.

    Attributes:
      generation: That of the arena; it has changed if an array has come or gone.
      suffix: What the text of the call says of it.
      matrices: The matrices with a row for each rank: the block of each, and its number there.
      rows: Of each gradient: which matrix, its first column, and whether it is reduced into the
        first row before it is read from there.
      far: The numbers of those of these that are so when they are fetched, part by part.
      placed: All others of these; None without any.
      runs: Which others every rank reduces as one, in memory of its own: of which matrix, from
        which column to which; and of each its number, and where it begins and ends there.
      division: Which gradients are updated as one: single arrays, and those of runs.
    """

    generation: int
    suffix: str
    matrices: list[tuple[weakref.ref[SharedBuffers], int]]
    rows: list[tuple[int, int, bool]]
    far: list[int]
    placed: Placed | None
    runs: list[tuple[int, int, int, list[tuple[int, int, int]]]]
    division: Division


def _has_rates(optimizer: OptimizerSettings) -> bool:
    """Return whether a learning rate is a function of the program."""
    rates = [optimizer.learning_rate, *[g.changes.get("learning_rate") for g in optimizer.groups]]
    return any(callable(rate) for rate in rates)


def _spans(targets: Sequence[Target]) -> list[tuple[int, str]]:
    """Return where the variables of one optimizer begin, in the order of the call.

    Returns:
      The identity of the optimizer, and which variable is the first, of each span of variables
      that follow one another and have one optimizer.
    """
    spans: list[tuple[int, str]] = []
    for i, target in enumerate(targets):
        if not spans or spans[-1][0] != id(target.optimizer):
            spans.append((id(target.optimizer), f"no. {i} ({target.variable.name!r})"))
    return spans


def _rates_text(spans: Sequence[tuple[float, str]]) -> str:
    """Return learning rates as a text that is equal on two ranks exactly if all rates are.

    Args:
      spans: A rate, and the first variable that it is for, in the order of the call.

    Example:
      >>> _rates_text([(0.1, "no. 0"), (0.1, "no. 1"), (0.2, "no. 2")])
      '0.1 from no. 0 on, 0.2 from no. 2 on'
      >>> _rates_text([(0.1, "no. 0")])
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
        passes.measure(rule, g, sample, slots, target.optimizer.scalars(0), np.zeros((2, 1)))
    passes.update(rule, g, sample, slots, target.optimizer.scalars(0), ema, optimizer.ema or 0.0)
