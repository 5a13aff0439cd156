"""One update of all variables of a call: norms first, if they are wanted, then weights and state.

Each rank does its parts (`mpistrat.optim.state.Target`); where the ranks of a node share memory,
they tell each other sums of squares, and wait for one another at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.base import Comm
from mpistrat.kernels.threads import Team
from mpistrat.optim import passes
from mpistrat.optim.clipping import ClipByGlobalNorm, norm_of
from mpistrat.optim.passes import BLOCK, Gradient, blocks
from mpistrat.optim.progress import Progress
from mpistrat.optim.state import Target

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = ["Rows", "Update", "Work", "compile_for"]

_PART = 1 << 19  # elements that are worth a thread
_KEEP = 3  # from so many rows on a folded gradient that is needed twice is written down
_NOBODY = np.iinfo(np.int64).max


class Work(NamedTuple):
    """A variable, and the gradient of this rank's part of it.

    Attributes:
      target: The variable.
      gradient: Its `start` is the first element of the part.
    """

    target: Target
    gradient: Gradient


class Rows(NamedTuple):
    """A variable of which some rows are updated.

    Attributes:
      target: The variable.
      rows: Which rows; each once.
      values: Their gradients; of the dtype of the variable, the same on all ranks.
    """

    target: Target
    rows: Array
    values: Array


@final
class Update:
    """One call that changes variables or accumulates, once its gradients can be read.

    Args:
      optimizer: The optimizer.
      progress: Its counters before the call.
      scalars: The numbers of this step, without norms, by the identity of optimizers.
      compiled: Whether so many elements are worth a compiler.
      works: What is updated.
      rows: Variables of which some rows are.
      node: The ranks that share memory; None if nobody reads what another one writes.
      team: The threads of this rank; None for this one alone.
    """

    def __init__(
        self,
        optimizer: OptimizerSettings,
        progress: Progress,
        scalars: dict[int, tuple[float, ...]],
        compiled: bool,
        works: Sequence[Work],
        rows: Sequence[Rows],
        node: Comm | None,
        team: Team | None,
    ):
        """Change nothing yet."""
        self._optimizer, self._step = optimizer, progress.step
        self._works, self._rows = list(works), list(rows)
        self._node, self._team = node, team
        self._guard = optimizer.nonfinite == "raise"
        self._scalars, self._compiled = scalars, compiled
        self._at, self._width, self._common = [0] * len(works), 0, 0

    def _sums(self, rows: int) -> Array:
        """Return room for sums of squares of each block of all works, and note where each lies."""
        # Shared variables come first, so that what the node adds up is one run.
        self._width = self._common = 0
        for i in sorted(range(len(self._works)), key=lambda i: not self._works[i].target.shared):
            target = self._works[i].target
            self._at[i] = self._width
            self._width += blocks(target.variable.size)
            self._common += blocks(target.variable.size) * target.shared
        return np.zeros((rows, self._width))

    def accumulate(self) -> None:
        """Add the gradients to the slots that wait for the update, and end the call."""
        for work in self._works:
            one = work.gradient
            self._parts(one.pending, lambda g, low, high: passes.accumulate(g, self._compiled), one)
        self.close()

    def forget(self) -> None:
        """Put zeros into the slots that wait for an update that is left out, and end the call."""
        for work in self._works:
            if work.target.pending is not None:
                work.target.pending[:] = 0
        self.close()

    def close(self) -> None:
        """Wait for the node, if its ranks share memory."""
        if self._node is not None:
            self._node.barrier()

    @property
    def looks(self) -> bool:
        """Whether `norm` has to come before `apply`."""
        clips = isinstance(self._optimizer.clip, ClipByGlobalNorm)
        return clips or self._optimizer.nonfinite == "skip"

    def norm(self) -> float:
        """Return the norm of all gradients; not finite exactly if one of them is not.

        Collective over the node.
        """
        sums = self._sums(1)
        for i in range(len(self._works)):
            self._measure_norm(i, self._place(sums, i)[0])
        found = self._exchange(sums)[0].tolist()
        for one in self._rows:
            flat = one.values.reshape(1, -1)
            more = np.zeros(blocks(flat.size))
            passes.measure_norm(Gradient(flat), flat.size, more, False, self._compiled)
            found += more.tolist()
        norm = norm_of(found)
        if isinstance(self._optimizer.clip, ClipByGlobalNorm):
            self._scale(self._optimizer.clip.factor(norm))
        if math.isfinite(norm):
            self._guard = False  # so are all that are in it
        return norm

    def _measure_norm(self, i: int, sums: Array) -> None:
        target, gradient = self._works[i]
        # No other rank reads this rank's columns of what is shared.
        keep = target.shared and len(gradient.rows) >= _KEEP

        def measure(g: Gradient, low: int, high: int) -> None:
            into = sums[low // BLOCK : low // BLOCK + blocks(high - low)]
            passes.measure_norm(g, high - low, into, keep, self._compiled)

        self._parts(target.w, measure, gradient)
        if keep:
            self._works[i] = Work(target, gradient.kept())

    def _scale(self, factor: float) -> None:
        for i, (target, gradient) in enumerate(self._works):
            self._works[i] = Work(target, gradient._replace(scale=gradient.scale * factor))
        self._rows = [
            one._replace(values=one.values * one.values.dtype.type(factor)) for one in self._rows
        ]

    def apply(self) -> int | None:
        """Update weights and slots, and end the call.

        Collective over the node.

        Returns:
          None; or which of the works has a gradient that is not finite, the first of them, alike on
          all ranks. Works come first, rows after them.
        """
        first = self._first_bad_rows() if self._guard and self._rows else _NOBODY
        norms, scalars = self._measured(), self._scalars
        if self._guard and norms:
            not_finite = [i for i, pair in norms.items() if not math.isfinite(sum(pair))]
            first = min([first, *not_finite])
        if first != _NOBODY:  # known to all, before a weight has changed
            self.close()
            return first
        for i, (target, gradient) in enumerate(self._works):
            optimizer = target.optimizer
            measures = target.rule.measure is not None
            s = optimizer.scalars(self._step, norms[i]) if measures else scalars[id(optimizer)]
            if self._updated(target, gradient, s):
                first = min(first, i)
        for one in self._rows:
            _update_rows(one, self._step, self._compiled)
        if self._guard and self._node is not None:
            told = np.empty(1, np.int64)
            self._node.allreduce(np.array([first]), told, "MIN")  # a barrier as well
            first = int(told[0])
        else:
            self.close()
        return None if first == _NOBODY else first

    def _first_bad_rows(self) -> int:
        bad = (i for i, one in enumerate(self._rows) if not np.isfinite(one.values).all())
        found = next(bad, None)
        return _NOBODY if found is None else len(self._works) + found

    def _measured(self) -> dict[int, tuple[float, float]]:
        """Return the norms of weights and directions, for rules that want them."""
        norms: dict[int, tuple[float, float]] = {}
        measured = [i for i, w in enumerate(self._works) if w.target.rule.measure]
        if not measured:
            return norms
        sums = self._sums(2)
        for i in measured:
            self._measure(self._works[i], self._place(sums, i))
        sums = self._exchange(sums)
        for i in measured:
            one, two = (norm_of(row.tolist()) for row in self._whole(sums, i))
            norms[i] = one, two
        return norms

    def _measure(self, work: Work, sums: Array) -> None:
        target, gradient = work
        rule, s = target.rule, target.optimizer.scalars(self._step)

        def measure(g: Gradient, low: int, high: int) -> None:
            found = np.zeros((2, blocks(high - low)))
            slots = tuple(slot[low:high] for slot in target.mine)
            how = (s, found, self._guard, self._compiled)
            passes.measure(rule, g, target.w[low:high], slots, *how)
            sums[:, low // BLOCK : low // BLOCK + found.shape[1]] = found

        self._parts(target.w, measure, gradient)

    def _updated(self, target: Target, gradient: Gradient, s: tuple[float, ...]) -> int:
        """Update this rank's part of a variable; return how many blocks were left out."""
        _, optimizer, _, _, _, w, slots, _, ema, rule = target
        how, bad = (optimizer.ema or 0.0, self._guard, self._compiled), []
        if self._team is None or w.size < 2 * _PART:
            return passes.update(rule, gradient, w, slots, s, ema, *how)

        def update(g: Gradient, low: int, high: int) -> None:
            parts = tuple(slot[low:high] for slot in slots)
            mean = None if ema is None else ema[low:high]
            bad.append(passes.update(rule, g, w[low:high], parts, s, mean, *how))

        self._parts(w, update, gradient)
        return sum(bad)

    def _parts(
        self, like: Array | None, work: Callable[[Gradient, int, int], None], g: Gradient
    ) -> None:
        """Let the threads do a part of `like` each."""
        size = 0 if like is None else like.size

        def part(low: int, high: int) -> None:
            pending = None if g.pending is None else g.pending[low:high]
            work(g._replace(start=g.start + low, pending=pending), low, high)

        if self._team is None or size < 2 * _PART:
            work(g, 0, size)
        else:
            self._team.run(part, 0, size, size // _PART, BLOCK)

    def _whole(self, sums: Array, i: int) -> Array:
        at = self._at[i]
        return sums[:, at : at + blocks(self._works[i].target.variable.size)]

    def _place(self, sums: Array, i: int) -> Array:
        """Return where the sums of this rank's part of a variable go."""
        return self._whole(sums, i)[:, self._works[i].target.low // BLOCK :]

    def _exchange(self, sums: Array) -> Array:
        """Return the sums of all ranks of the node: of each block one rank has it, others 0."""
        if self._node is None or not self._common:
            return sums
        mine = np.ascontiguousarray(sums[:, : self._common])
        told = np.empty_like(mine)
        self._node.allreduce(mine, told, "SUM")
        sums[:, : self._common] = told
        return sums


def _update_rows(one: Rows, step: int, compiled: bool) -> None:
    """Update this rank's part of some rows of a variable; no others change."""
    target, optimizer = one.target, one.target.optimizer
    shape = (-1, *target.variable.shape[1:])
    width = max(1, one.values[0].size if len(one.values) else 1)
    low, w = target.variable.storage.part(width)
    slots = [target.slots[name].storage.part(width)[1] for name in target.rule.slots]
    first, count = low // width, w.size // width
    mine = (one.rows >= first) & (one.rows < first + count)
    where = one.rows[mine] - first
    if not where.size:
        return
    places = [part.reshape(shape) for part in (w, *slots)]
    copies = [place[where].reshape(-1) for place in places]
    gradient = Gradient(np.ascontiguousarray(one.values[mine]).reshape(1, -1))
    s = optimizer.scalars(step)
    passes.update(
        target.rule, gradient, copies[0], tuple(copies[1:]), s, guard=False, compiled=compiled
    )
    for place, copy in zip(places, copies, strict=True):
        place[where] = copy.reshape(len(where), *shape[1:])


def compile_for(optimizer: OptimizerSettings, target: Target) -> None:
    """Have the loops compiled that a variable of this dtype needs; before a proof."""
    one = np.zeros(1, target.variable.dtype)
    rule = target.rule
    slots = tuple(one.copy() for _ in rule.slots)
    pending = None if target.pending is None else one.copy()
    ema = None if target.ema is None else one.copy()
    g = Gradient(np.zeros((1, 1), one.dtype), divisor=2.0, pending=pending)
    if pending is not None:
        passes.accumulate(g)
    passes.measure_norm(g, 1, np.zeros(1))
    if rule.measure is not None:
        passes.measure(rule, g, one, slots, target.optimizer.scalars(0), np.zeros((2, 1)))
    passes.update(rule, g, one, slots, target.optimizer.scalars(0), ema, optimizer.ema or 0.0)
