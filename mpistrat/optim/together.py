"""Small variables updated as one, so that what a call of NumPy or Numba costs, it costs but once.

Their slots lie side by side in memory. Gradients and weights are copied to lie so too, which for
these sizes is less than the calls that it saves; the bits are the same, as what an element becomes
depends on no other element.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.distribute.variables import move_to
from mpistrat.optim import passes
from mpistrat.optim.blocks import finite
from mpistrat.optim.passes import Gradient

__all__ = ["Together", "together"]

_SMALL = 16 * 1024  # bytes of a variable that are sooner copied than updated by calls of their own
_MOST = 256 * 1024  # bytes of all that are updated as one, so that they stay in the cache


class Together(NamedTuple):
    """Small variables of one dtype that have one optimizer.

    Attributes:
      targets: The variables, as `mpistrat.optim.state.Target`, with their slots where they lie now.
      optimizer: Theirs.
      rule: That of the optimizer.
      weights: Those of each.
      parts: The room for the weights of each.
      starts: Where each begins among the elements of all, and where the last one ends.
      g: Room for the gradients.
      gradient: The same, as loops take it.
      w: Room for the weights.
      slots: Memory of the slots of the rule.
      ema: That of the average, if there is one.
    """

    targets: Sequence[Any]
    optimizer: Any
    rule: Any
    weights: list[Array]
    parts: list[Array]
    starts: list[int]
    g: Array
    gradient: Gradient
    w: Array
    slots: tuple[Array, ...]
    ema: Array | None

    def update(
        self,
        gradients: Sequence[Array],
        limit: float,
        scalars: tuple[float, ...],
        guard: bool,
        compiled: bool,
    ) -> int | None:
        """Update all of them, or none if a gradient is not finite and `guard` says to look.

        Args:
          gradients: One for each, of the dtype of the weights.
          limit: The largest absolute value; infinite for no `ClipByValue`.
          scalars: The numbers of the step.
          guard: Whether to look.
          compiled: Whether to use compiled loops.

        Returns:
          None; or the first variable whose gradient is not finite.
        """
        np.concatenate(gradients, axis=None, out=self.g)
        if guard and not (finite(self.g) if compiled else finite.twin(self.g)):
            bad = int(np.argmin(np.isfinite(self.g)))
            return bisect.bisect(self.starts, bad) - 1
        if limit < np.inf:
            np.clip(self.g, -limit, limit, out=self.g)
        np.concatenate(self.weights, out=self.w)
        decay = self.optimizer.ema or 0.0
        how = (scalars, self.ema, decay, False, compiled)
        passes.update(self.rule, self.gradient, self.w, self.slots, *how)
        for w, part in zip(self.weights, self.parts, strict=True):
            w[:] = part
        return None


def together(targets: Iterable[Any]) -> list[Together]:
    """Return which of these variables are updated as one, and let their slots lie side by side.

    Args:
      targets: Variables whose slots nobody has seen yet.
    """
    groups: dict[Any, list[Any]] = {}
    for target in targets:
        w, optimizer = target.w, target.optimizer
        alone = target.shared or target.pending is not None or target.rule.measure is not None
        if not alone and w.nbytes <= _SMALL:
            groups.setdefault((id(optimizer), w.dtype), []).append(target)
    made = []
    for members in groups.values():
        each = max(target.w.nbytes for target in members)
        count = max(2, _MOST // max(each, 1))
        for first in range(0, len(members), count):
            if len(some := members[first : first + count]) > 1:
                made.append(_side_by_side(some))
    return made


def _side_by_side(targets: list[Any]) -> Together:
    starts = [0, *itertools.accumulate(target.w.size for target in targets)]
    dtype, memory = targets[0].w.dtype, {}
    names, found = targets[0].rule.slots, []
    for name in targets[0].slots:
        memory[name] = np.empty(starts[-1], dtype)
    for target, (low, high) in zip(targets, itertools.pairwise(starts), strict=True):
        mine = {name: whole[low:high] for name, whole in memory.items()}
        for name, part in mine.items():
            move_to(target.slots[name], part)
        parts = tuple(mine[name] for name in names)
        found.append(target._replace(mine=parts, ema=mine.get("ema")))
    g, w = (np.empty(starts[-1], dtype) for _ in range(2))
    slots = tuple(memory[name] for name in names)
    ws, rooms = [target.w for target in found], np.split(w, starts[1:-1])
    first = targets[0].optimizer
    gradient, ema = Gradient(g.reshape(1, -1)), memory.get("ema")
    return Together(found, first, first.rule, ws, rooms, starts, g, gradient, w, slots, ema)
