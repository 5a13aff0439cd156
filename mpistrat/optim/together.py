"""Variables of this rank alone, updated with the least calls of NumPy or Numba.

The slots of small ones lie side by side in memory. Gradients and weights are copied to lie so too,
which for these sizes is less than the calls that it saves; the bits are the same, as what an
element becomes depends on no other element. A larger one is updated where it lies.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.distribute.variables import move_to
from mpistrat.optim import passes
from mpistrat.optim.blocks import average, finite
from mpistrat.optim.passes import AT_ONCE, Gradient, numbers_of

__all__ = ["Together", "together"]

_SMALL = 16 * 1024  # bytes of a variable that are sooner copied than updated by calls of their own
_MOST = 256 * 1024  # bytes of all that are updated as one, so that they stay in the cache


class Together(NamedTuple):
    """Small variables of one dtype that have one optimizer; or one variable that is larger.

    Attributes:
      targets: The variables, as `mpistrat.optim.state.Target`, with their slots where they lie now.
      optimizer: Theirs.
      weights: Those of each.
      parts: The room for the weights of each; of a single one none, as it needs no room.
      starts: Where each begins among the elements of all, and where the last one ends.
      g: Room for the gradients.
      w: Room for the weights; the weights themselves of a single one.
      slots: Memory of the slots of the rule.
      ema: That of the average, if there is one.
      rule: That of the optimizer.
    """

    targets: Sequence[Any]
    optimizer: Any
    weights: list[Array]
    parts: list[Array]
    starts: list[int]
    g: Array
    w: Array
    slots: tuple[Array, ...]
    ema: Array | None
    rule: Any

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
        _, optimizer, weights, parts, starts, g, w, slots, ema, rule = self
        if parts:
            np.concatenate(gradients, axis=None, out=g)
        else:
            g = gradients[0].reshape(-1)
        if compiled:
            g = np.require(g, requirements=("A", "W"))
        if guard and not (finite(g) if compiled else finite.twin(g)):
            return bisect.bisect(starts, int(np.argmin(np.isfinite(g)))) - 1
        if limit != math.inf:
            g = np.clip(g, -limit, limit)
        if parts:
            np.concatenate(weights, out=w)
        if compiled:
            how = (scalars, ema, optimizer.ema or 0.0, False)
            passes.update(rule, Gradient(g.reshape(1, -1)), w, slots, *how)
        else:
            rule.update.twin(w, g, slots, numbers_of(scalars, w.dtype), 0, starts[-1])
            if ema is not None:
                average.twin(w, ema, w.dtype.type(1.0 - optimizer.ema))
        if parts:
            for one, part in zip(weights, parts, strict=True):
                one[:] = part
        return None


def together(targets: Iterable[Any]) -> list[Together]:
    """Return which of these variables are updated as one, and let their slots lie side by side.

    Args:
      targets: Variables whose slots nobody has seen yet.
    """
    groups: dict[Any, list[Any]] = {}
    for target in targets:
        w, optimizer = target.w, target.optimizer
        if target.shared or target.pending is not None or target.rule.measure is not None:
            continue
        if w.nbytes <= _SMALL:
            groups.setdefault((id(optimizer), w.dtype), []).append(target)
        elif w.size <= AT_ONCE:
            groups[id(target)] = [target]
    made = []
    for members in groups.values():
        each = max(target.w.nbytes for target in members)
        count = max(2, _MOST // max(each, 1))
        for first in range(0, len(members), count):
            some = members[first : first + count]
            made.append(_side_by_side(some) if len(some) > 1 else _single(some[0]))
    return made


def _single(target: Any) -> Together:
    w, none = target.w, np.empty(0, target.w.dtype)
    more = (target.mine, target.ema, target.rule)
    return Together([target], target.optimizer, [w], [], [0, w.size], none, w, *more)


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
    more = (g, w, slots, memory.get("ema"), targets[0].rule)
    return Together(found, targets[0].optimizer, ws, rooms, starts, *more)
