"""What follows from the variables of a call of `Optimizer.apply_gradients`, found out once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from mpistrat.arena.arena import Block
from mpistrat.arrays import Array
from mpistrat.collectives.communication import WIRES
from mpistrat.collectives.dtypes import wire_type
from mpistrat.collectives.lanes import MOST, compile_wire
from mpistrat.collectives.plan import PlanOptions, ReductionInputs, ReductionPlan
from mpistrat.collectives.segments import Placed
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.kernels.ops import ReduceOp
from mpistrat.optim import passes
from mpistrat.optim.state import Target
from mpistrat.optim.together import Together
from mpistrat.optim.updating import THREADS

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = ["Known", "Places"]


@final
class Known:
    """What is the same in all calls that update these variables in this way.

    Args:
      text: Of the call.
      dense: The variables with gradients of all elements.
      sparse: The variables with gradients of some rows.
      step: Whether the text has to tell the learning rates of each step.
      together: What is updated in one call each, where all gradients of it are given.
      plain: There is no more to do than to update.

    Attributes:
      plain: Gradients are updated one after the other, by this thread alone.
      together: What is updated in one call each, and which of the gradients it takes.
      apart: Which others there are.
    """

    def __init__(
        self,
        text: str,
        dense: list[Target],
        sparse: list[Target],
        step: bool,
        together: Sequence[Together],
        plain: bool,
    ):
        """Find out what follows from the variables."""
        alone = [t.slices is None and t.rule.measure is None and t.w.size < THREADS for t in dense]
        self.plain = plain and all(alone)
        place = {id(target): i for i, target in enumerate(dense)}
        pairs = [(one, [place.get(id(t), -1) for t in one.targets]) for one in together]
        self.together = [(one, places) for one, places in pairs if min(places) >= 0]
        some = {i for _, places in self.together for i in places}
        self.apart = [i for i in range(len(dense)) if i not in some]
        self.dense, self.sparse, self._tells = dense, sparse, step
        dtypes = [wire_type(ReduceOp.MEAN, t.variable.dtype) for t in dense]
        shapes = [t.variable.shape for t in dense]
        names = [t.variable.spec() for t in dense]
        rows = [f"rows of {t.variable.spec()}" for t in sparse]
        self.start = f"{text} {', '.join([*names, *rows])}"
        options = PlanOptions(is_weighting=True)
        self._what = ReductionPlan(self.start, ReduceOp.MEAN, dtypes, shapes, options)
        self._reduction: tuple[ReductionPlan, Any] | None = None
        self._scalars: dict[int, tuple[float, ...]] = {}
        self._by_rates = self._what
        self.optimizers = list({id(t.optimizer): t.optimizer for t in (*dense, *sparse)}.values())
        self._spans = _spans([*dense, *sparse])
        # Some memory that is updated here belongs to other ranks too.
        self.shared = any(t.shared for t in (*dense, *sparse))
        # Some of it on other nodes.
        self.spread = any(t.slices for t in (*dense, *sparse))
        self.worth_compiling = passes.compiles(sum(t.variable.size for t in dense))
        # From one large variable on it pays to have all gradients where every rank can read them.
        self.large = any(target.shared for target in dense)
        self.compiled = False
        # Of gradients by their identities; of those that are put into memory of the state, by none.
        self.places: dict[tuple[int, ...], Places] = {}
        self.buffers: list[Array] = []

    def groups(
        self, means: Sequence[Array | None], alone: bool
    ) -> tuple[list[tuple[Together, list[int], list[Any]]], list[int]]:
        """Return what is updated as one, with its gradients, and which others there are.

        Args:
          means: The gradients; None where one is still to be made.
          alone: Whether a single variable counts as a group.
        """
        groups, apart = [], self.apart
        for one, places in self.together:
            gradients: list[Any] = [*map(means.__getitem__, places)]
            if (one.parts or alone) and not any([mean is None for mean in gradients]):
                groups.append((one, places, gradients))
            else:
                apart = [*apart, *places]
        return groups, apart

    def what(
        self, step: int, scalars: dict[int, tuple[float, ...]], several: bool
    ) -> ReductionPlan:
        """Return the call as it is at a step, with these numbers, and with `several` ranks."""
        if not (several and self._tells):
            return self._what
        if scalars != self._scalars:  # as long as they stay, so does what there is to say of them
            self._scalars = scalars
            rates = {id(one): one.rate(step) for one in self.optimizers}
            text = _rates_text([(rates[key], first) for key, first in self._spans])
            self._by_rates = self._what.with_text(f", by {text}")
        return self._by_rates

    def reduction(
        self, group: ReplicaGroup, plan: ReductionPlan
    ) -> Callable[[ReductionInputs], list[Any]]:
        """Return the reduction of a plan, with the algorithms that its last call has chosen."""
        if self._reduction is None or self._reduction[0] is not plan:
            self._reduction = plan, group.reduction(plan)
        return self._reduction[1]

    def compile(self, optimizer: OptimizerSettings, wire: str) -> None:
        """Compile the loops that this call needs, before its handshake.

        Args:
          optimizer: Whose call it is.
          wire: What float32 travels as between nodes.
        """
        if not self.compiled and self.worth_compiling:
            kinds = {(t.variable.dtype, t.optimizer.rule.update): t for t in self.dense}
            for target in kinds.values():
                _compile_for(optimizer, target)
                if wire != WIRES[0]:
                    compile_wire(target.variable.dtype, MOST)
        self.compiled = True


class Places(NamedTuple):
    """Where gradients lie that are reduced in place.

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
    """

    generation: int
    suffix: str
    matrices: list[tuple[weakref.ref[Block], int]]
    rows: list[tuple[int, int, bool]]
    far: list[int]
    placed: Placed | None
    runs: list[tuple[int, int, int, list[tuple[int, int, int]]]]


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
    one = np.zeros(1, target.variable.dtype)
    rule = target.optimizer.rule
    slots = tuple(one.copy() for _ in rule.slots)
    pending = None if target.pending is None else one.copy()
    ema = None if target.ema is None else one.copy()
    g = passes.Gradient(np.zeros((1, 1), one.dtype), divisor=2.0, pending=pending)
    if pending is not None:
        passes.accumulate(g)
    passes.measure_norm(g, 1, np.zeros(1))
    if rule.measure is not None:
        passes.measure(rule, g, one, slots, target.optimizer.scalars(0), np.zeros((2, 1)))
    passes.update(rule, g, one, slots, target.optimizer.scalars(0), ema, optimizer.ema or 0.0)
