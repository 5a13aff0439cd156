"""One update of all variables of a call: norms first, if they are wanted, then weights and state.

Each rank does its parts (`mpistrat.optim.state.Target`); where the ranks of a node share memory,
they tell each other sums of squares, and wait for one another at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

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
      works: What is updated.
      rows: Variables of which some rows are.
      node: The ranks that share memory; None if nobody reads what another one writes.
      team: The threads of this rank; None for this one alone.
    """

    def __init__(
        self,
        optimizer: OptimizerSettings,
        progress: Progress,
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
        self._compiled = passes.compiles(sum(w.target.variable.size for w in works))
        # Sums of squares: shared variables first, so that what the node adds up is one run.
        order = sorted(range(len(works)), key=lambda i: not works[i].target.shared)
        self._at, self._width, self._common = [0] * len(works), 0, 0
        for i in order:
            self._at[i] = self._width
            self._width += blocks(works[i].target.variable.size)
            self._common += blocks(works[i].target.variable.size) * works[i].target.shared

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
        sums = np.zeros((1, self._width))
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
        first = self._first_bad_rows() if self._guard else _NOBODY
        norms = self._measured()
        if self._guard:
            not_finite = [i for i, pair in enumerate(norms) if not math.isfinite(sum(pair))]
            first = min([first, *not_finite])
        if first != _NOBODY:  # known to all, before a weight has changed
            self.close()
            return first
        for some in self._groups():
            target, gradient = self._works[some[0]]
            if len(some) > 1:
                bad = self._updated_together([self._works[i] for i in some])
            else:
                bad = self._updated(target, gradient, norms[some[0]])
            first = min(first, some[0]) if bad else first
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

    def _measured(self) -> list[tuple[float, float]]:
        """Return the norms of weights and directions, for rules that want them; else ones."""
        norms = [(1.0, 1.0)] * len(self._works)
        measured = [i for i, w in enumerate(self._works) if w.target.optimizer.rule.measure]
        if not measured:
            return norms
        sums = np.zeros((2, self._width))
        for i in measured:
            self._measure(self._works[i], self._place(sums, i))
        sums = self._exchange(sums)
        for i in measured:
            one, two = (norm_of(row.tolist()) for row in self._whole(sums, i))
            norms[i] = one, two
        return norms

    def _measure(self, work: Work, sums: Array) -> None:
        target, gradient = work
        rule, s = target.optimizer.rule, target.optimizer.scalars(self._step)

        def measure(g: Gradient, low: int, high: int) -> None:
            found = np.zeros((2, blocks(high - low)))
            slots = tuple(slot[low:high] for slot in target.mine)
            how = (s, found, self._guard, self._compiled)
            passes.measure(rule, g, target.w[low:high], slots, *how)
            sums[:, low // BLOCK : low // BLOCK + found.shape[1]] = found

        self._parts(target.w, measure, gradient)

    def _groups(self) -> list[list[int]]:
        """Return which variables are updated together."""
        groups: dict[Any, list[int]] = {}
        for i, (target, gradient) in enumerate(self._works):
            key: Any = i
            if target.tiny:
                key = (target.w.dtype.char, id(target.optimizer), len(gradient.rows))
            groups.setdefault(key, []).append(i)
        return list(groups.values())

    def _updated_together(self, works: Sequence[Work]) -> int:
        """Update tiny variables as one: to copy them costs less than to call for each."""
        optimizer, gradient = works[0].target.optimizer, works[0].gradient
        # Of the optimizer's slots those of its rule, and the average, if there is one, as the last.
        parts = [(t.w, *t.mine, *([] if t.ema is None else [t.ema])) for t, _ in works]
        joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
        rows = [g.rows[:, g.start : g.start + t.w.size] for t, g in works]
        gradient = gradient._replace(rows=np.concatenate(rows, axis=1), start=0)
        count = len(optimizer.rule.slots) + 1
        ema = joined[count] if len(joined) > count else None
        s, slots = optimizer.scalars(self._step), tuple(joined[1:count])
        how = (ema, optimizer.ema or 0.0, self._guard, self._compiled)
        bad = passes.update(optimizer.rule, gradient, joined[0], slots, s, *how)
        at = 0
        for part in parts:
            size = part[0].size
            for place, flat in zip(part, joined, strict=True):
                place[:] = flat[at : at + size]
            at += size
        return bad

    def _updated(self, target: Target, gradient: Gradient, norms: tuple[float, float]) -> int:
        """Update this rank's part of a variable; return how many blocks were left out."""
        optimizer = target.optimizer
        s, bad = optimizer.scalars(self._step, norms), []

        def update(g: Gradient, low: int, high: int) -> None:
            slots = tuple(slot[low:high] for slot in target.mine)
            ema = None if target.ema is None else target.ema[low:high]
            how = (ema, optimizer.ema or 0.0, self._guard, self._compiled)
            bad.append(passes.update(optimizer.rule, g, target.w[low:high], slots, s, *how))

        self._parts(target.w, update, gradient)
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
            part(0, size)
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
    slots = [target.slots[name].storage.part(width)[1] for name in optimizer.rule.slots]
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
        optimizer.rule, gradient, copies[0], tuple(copies[1:]), s, guard=False, compiled=compiled
    )
    for place, copy in zip(places, copies, strict=True):
        place[where] = copy.reshape(len(where), *shape[1:])


def compile_for(optimizer: OptimizerSettings, target: Target) -> None:
    """Have the loops compiled that a variable of this dtype needs; before a proof."""
    one = np.zeros(1, target.variable.dtype)
    rule = target.optimizer.rule
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
