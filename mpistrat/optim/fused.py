"""Variables of this rank alone, updated with the least calls of NumPy or Numba.

The slots of small ones lie side by side in memory. Gradients and weights are copied to lie so too,
which for these sizes is less than the calls that it saves; the bits are the same, as what an
element becomes depends on no other element. A larger one is updated in place.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.optim import passes
from mpistrat.optim.blocks import LANES, Guarded, average, clip, finite
from mpistrat.optim.passes import AT_ONCE, Gradient, numbers_of
from mpistrat.variables.variable import move_to

__all__ = ["FusedSmallVariables", "Squares", "Take", "fuse_small_variables"]

_SMALL = 16 * 1024  # bytes of a variable that are sooner copied than updated by calls of their own
_FUSED_NBYTES = 256 * 1024  # bytes of all that are updated as one, so that they stay in the cache


class Take(NamedTuple):
    """What is done to gradients before they are used.

    Formula: ``clip(g * factor)``; with a slot ``pending``, where several calls make one update,
    ``clip((weight * g + pending) / divisor * factor)``.

    Attributes:
      weight: That of this call.
      divisor: The weight of all calls of the update; used with ``pending`` only.
      factor: One over the loss scale, times that of clipping by the norm.
      limit: The largest absolute value then; infinite for no `ClipByValue`.
      ignore: Whether infinities are clipped, too; else they stay, for those who look for them.
    """

    weight: float = 1.0
    divisor: float = 1.0
    factor: float = 1.0
    limit: float = math.inf
    ignore: bool = False


class FusedSmallVariables(NamedTuple):
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
      reference: The NumPy version of its update, for gradients that are known to be finite.
      pending: Memory of the slot of accumulated gradients, if there is one.
      sums: Of squares of the gradients, if they are wanted.
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
    reference: Callable[..., Any]
    pending: Array | None = None
    sums: Squares | None = None

    def _gather(self, gradients: Sequence[Array], take: Take) -> Array:
        """Write gradients side by side, and return all of them."""
        g, number = self.g, self.g.dtype.type
        np.concatenate(gradients, axis=None, out=g)
        if take.weight != 1.0:
            g *= number(take.weight)
        if self.pending is not None:
            g += self.pending
            if take.divisor != 1.0:
                g /= number(take.divisor)
        if take.factor != 1.0:
            g *= number(take.factor)
        return g

    def accumulate(self, gradients: Sequence[Array], take: Take) -> None:
        """Add gradients to those that wait for the update; only of several variables."""
        assert self.pending is not None
        self.pending[:] = self._gather(gradients, take._replace(divisor=1.0, factor=1.0))

    def squares(self, gradients: Sequence[Array], take: Take) -> list[float]:
        """Return the sum of squares of each gradient; only of several, where norms are wanted."""
        g = self._gather(gradients, take)
        if take.limit != math.inf:
            clip.reference(g, take.limit, float(np.finfo(g.dtype).max))  # infinities are looked for
        assert self.sums is not None
        return self.sums.now()

    def update(
        self,
        gradients: Sequence[Array],
        take: Take,
        scalars: tuple[float, ...],
        guard: bool,
        compiled: bool,
    ) -> int | None:
        """Update all of them, or none if a gradient is not finite and `guard` says to look.

        Args:
          gradients: One for each, of the dtype of the weights.
          take: What is done to them; of a single one nothing but the limit.
          scalars: The numbers of the step.
          guard: Whether to look.
          compiled: Whether to use compiled loops.

        Returns:
          None; or the first variable whose gradient is not finite.
        """
        _, optimizer, weights, parts, starts, _, w, slots, ema, rule, reference, pending, _ = self
        g = self._gather(gradients, take) if parts else gradients[0].reshape(-1)
        if pending is not None:
            pending[:] = 0
        if compiled:
            g = np.require(g, requirements=("A", "W"))
        if guard and not (finite(g) if compiled else finite.reference(g)):
            return bisect.bisect(starts, int(np.argmin(np.isfinite(g)))) - 1
        if take.limit != math.inf:
            g = np.clip(g, -take.limit, take.limit)
        if parts:
            np.concatenate(weights, out=w)
        if compiled:
            update_arguments = (scalars, ema, optimizer.ema or 0.0, False)
            passes.update(rule, Gradient(g.reshape(1, -1)), w, slots, *update_arguments)
        else:
            reference(w, g, slots, numbers_of(scalars, w.dtype), 0, starts[-1])
            if ema is not None:
                average.reference(w, ema, w.dtype.type(1.0 - optimizer.ema))
        if parts:
            for weight_array, part in zip(weights, parts, strict=True):
                weight_array[:] = part
        return None


@final
class Squares:
    """Sums of squares of small arrays, with the bits of `blocks.sum_squares` of each.

    Each array is written to rows of a matrix, and all are added up as that does it: rows of one
    array, then lanes in pairs. Zeros between arrays, and lanes that none reaches, change no sum.

    Args:
      parts: The arrays, flat, of one block at most.
    """

    def __init__(self, parts: Sequence[Array]):
        """Take memory."""
        largest_size = max(part.size for part in parts)
        self._parts, self._width = parts, min(LANES, 1 << max(0, largest_size - 1).bit_length())
        counts = [max(1, -(-part.size // self._width)) for part in parts]
        starts = [0, *itertools.accumulate(counts)]
        self._rows = np.zeros((starts[-1], self._width))
        flat, begins = self._rows.reshape(-1), [first * self._width for first in starts[:-1]]
        self._rooms = [flat[at : at + x.size] for at, x in zip(begins, parts, strict=True)]
        # Of the arrays with more rows than 0, than 1 and so on, the first row.
        pairs = list(zip(starts[:-1], counts, strict=True))
        self._heads = [np.array([s for s, n in pairs if n > k]) for k in range(max(counts))]

    def now(self) -> list[float]:
        """Return the current sum of squares of each array."""
        for room, part in zip(self._rooms, self._parts, strict=True):
            room[:] = part
        lanes, half = self._rows * self._rows, self._width // 2
        for k, heads in enumerate(self._heads[1:], 1):
            lanes[heads] += lanes[heads + k]
        lanes = lanes[self._heads[0]]
        while half:
            lanes[:, :half] += lanes[:, half : 2 * half]
            half //= 2
        totals: list[float] = lanes[:, 0].tolist()
        return totals


def fuse_small_variables(targets: Iterable[Any]) -> list[FusedSmallVariables]:
    """Return groups of variables that are updated as one, and put their slots side by side.

    Args:
      targets: Variables whose slots nobody has seen yet.
    """
    groups: dict[Any, list[Any]] = {}
    for target in targets:
        w, optimizer = target.w, target.optimizer
        if target.shared or target.rule.measure is not None:
            continue
        if w.nbytes <= _SMALL:
            groups.setdefault((id(optimizer), w.dtype), []).append(target)
        elif w.size <= AT_ONCE:
            groups[id(target)] = [target]
    fused_groups = []
    for members in groups.values():
        largest_nbytes = max(target.w.nbytes for target in members)
        count = max(2, _FUSED_NBYTES // max(largest_nbytes, 1))
        for first in range(0, len(members), count):
            chunk = members[first : first + count]
            fused_groups.append(_side_by_side(chunk) if len(chunk) > 1 else _single(chunk[0]))
    return fused_groups


def _single(target: Any) -> FusedSmallVariables:
    w, none = target.w, np.empty(0, target.w.dtype)
    remaining_fields = (target.mine, target.ema, target.rule, _reference_of(target.rule))
    return FusedSmallVariables(
        [target], target.optimizer, [w], [], [0, w.size], none, w, *remaining_fields
    )


def _side_by_side(targets: list[Any]) -> FusedSmallVariables:
    starts = [0, *itertools.accumulate(target.w.size for target in targets)]
    dtype, memory = targets[0].w.dtype, {}
    names, moved_targets = targets[0].rule.slots, []
    for name in targets[0].slots:
        memory[name] = np.empty(starts[-1], dtype)
    for target, (low, high) in zip(targets, itertools.pairwise(starts), strict=True):
        target_slots = {name: slot_memory[low:high] for name, slot_memory in memory.items()}
        for name, part in target_slots.items():
            move_to(target.slots[name], part)
        parts = tuple(target_slots[name] for name in names)
        ema, pending = target_slots.get("ema"), target_slots.get("pending")
        moved_targets.append(target._replace(mine=parts, ema=ema, pending=pending))
    g, w = (np.empty(starts[-1], dtype) for _ in range(2))
    ws, rooms = [target.w for target in moved_targets], np.split(w, starts[1:-1])
    optimizer, slots = targets[0].optimizer, tuple(memory[name] for name in names)
    sums = Squares(np.split(g, starts[1:-1])) if optimizer.looks else None
    rule = targets[0].rule
    remaining_fields = (memory.get("ema"), rule, _reference_of(rule), memory.get("pending"), sums)
    return FusedSmallVariables(
        moved_targets, optimizer, ws, rooms, starts, g, w, slots, *remaining_fields
    )


def _reference_of(rule: Any) -> Callable[..., Any]:
    reference: Callable[..., Any] = rule.update.reference
    return reference.unguarded if isinstance(reference, Guarded) else reference
