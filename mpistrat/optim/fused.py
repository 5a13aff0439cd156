"""Variables of this rank alone, updated with as few calls of NumPy or Numba as possible.

The slots of small variables are contiguous in memory. Their gradients and weights are copied to
contiguous memory for the call, which for these sizes costs less than the calls that it saves. The
bits are the same, since the update of an element depends on no other element. If one of the
gradients is not finite, none of the variables is updated. A larger variable is updated in place.
Accumulation, norms and the loss scale treat small variables as one, too. A rule that needs the norm
of each weight (`Rule.measure`) updates each variable by itself.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.optim import passes
from mpistrat.optim.blocks import LANES, Guarded, average, clip, is_all_finite
from mpistrat.optim.passes import REFERENCE_SPAN, Gradient, as_loop_numbers
from mpistrat.variables.variable import move_to_memory

if TYPE_CHECKING:
    from mpistrat.optim.base import Rule

__all__ = ["FusedSmallVariables", "GradientTransform", "SquareSums", "fuse_small_variables"]

_SMALL_NBYTES = 16 * 1024  # up to this size a copy costs less than calls of its own
_FUSED_NBYTES = 256 * 1024  # the largest size of variables that are updated as one; fits the cache


class GradientTransform(NamedTuple):
    """The transform of gradients before they are used.

    Formula: ``clip(g * factor)``; with a slot ``pending``, where several calls make one update,
    ``clip((weight * g + pending) / divisor * factor)``.

    Attributes:
      weight: That of this call.
      divisor: The weight of all calls of the update; used with ``pending`` only.
      factor: One over the loss scale, times that of clipping by the norm.
      limit: The largest absolute value then; infinite for no `ClipByValue`.
      should_clip_infinities: Whether infinities are clipped, too; else they stay, so that the check
        for them sees them.
    """

    weight: float = 1.0
    divisor: float = 1.0
    factor: float = 1.0
    limit: float = math.inf
    should_clip_infinities: bool = False


class FusedSmallVariables(NamedTuple):
    """Small variables of one dtype that have one optimizer; or one variable that is larger.

    Attributes:
      targets: The variables, as `mpistrat.optim.state.Target`, with their slots in the new memory.
      optimizer: The optimizer of all of them.
      weights: The weights of each variable.
      parts: The part of `w` of each variable; empty for a single variable, which is not copied.
      starts: The first element of each variable in `w`, and the end of the last one.
      g: Memory for the gradients.
      w: Memory for the weights; the weights themselves of a single variable.
      slots: Memory of the slots of the rule.
      ema: Memory of the average, if there is one.
      rule: The rule of the optimizer.
      reference: The NumPy version of its update, for gradients that are known to be finite.
      pending: Memory of the slot of accumulated gradients, if there is one.
      square_sums: The sums of squares of the gradients, if the optimizer needs their norm.
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
    rule: Rule
    reference: Callable[..., Any]
    pending: Array | None = None
    square_sums: SquareSums | None = None

    def _gather(self, gradients: Sequence[Array], transform: GradientTransform) -> Array:
        """Write gradients side by side, and return all of them."""
        g, number = self.g, self.g.dtype.type
        np.concatenate(gradients, axis=None, out=g)
        if transform.weight != 1.0:
            g *= number(transform.weight)
        if self.pending is not None:
            g += self.pending
            if transform.divisor != 1.0:
                g /= number(transform.divisor)
        if transform.factor != 1.0:
            g *= number(transform.factor)
        return g

    def accumulate(self, gradients: Sequence[Array], transform: GradientTransform) -> None:
        """Add gradients to the slot `pending`; only for several variables."""
        assert self.pending is not None
        self.pending[:] = self._gather(gradients, transform._replace(divisor=1.0, factor=1.0))

    def compute_square_sums(
        self, gradients: Sequence[Array], transform: GradientTransform
    ) -> list[float]:
        """Return the sum of squares of each gradient; only for several variables, with norms."""
        g = self._gather(gradients, transform)
        if transform.limit != math.inf:
            clip.reference(
                g, transform.limit, float(np.finfo(g.dtype).max)
            )  # infinities stay, and are found
        assert self.square_sums is not None
        return self.square_sums.compute()

    def update(
        self,
        gradients: Sequence[Array],
        transform: GradientTransform,
        scalars: tuple[float, ...],
        is_guarded: bool,
        is_compiled: bool,
    ) -> int | None:
        """Update all variables, or none if `is_guarded` and a gradient is not finite.

        Args:
          gradients: One for each, of the dtype of the weights.
          transform: What is done to them; for a single variable only the limit counts.
          scalars: The numbers of the step.
          is_guarded: Whether to check that the gradients are finite.
          is_compiled: Whether to use compiled loops.

        Returns:
          None; or the index of the first variable whose gradient is not finite.
        """
        parts, w, ema = self.parts, self.w, self.ema
        g = self._gather(gradients, transform) if parts else gradients[0].reshape(-1)
        if self.pending is not None:
            self.pending[:] = 0
        if is_compiled:
            g = np.require(g, requirements=("A", "W"))
        if is_guarded and not (is_all_finite(g) if is_compiled else is_all_finite.reference(g)):
            return bisect.bisect(self.starts, int(np.argmin(np.isfinite(g)))) - 1
        if transform.limit != math.inf:
            g = np.clip(g, -transform.limit, transform.limit)
        if parts:
            np.concatenate(self.weights, out=w)
        if is_compiled:
            gradient, decay = Gradient(g.reshape(1, -1)), self.optimizer.ema or 0.0
            passes.update(
                self.rule, gradient, w, self.slots, scalars, ema=ema, decay=decay, is_guarded=False
            )
        else:
            numbers = as_loop_numbers(scalars, w.dtype)
            self.reference(w, g, self.slots, numbers, 0, self.starts[-1])
            if ema is not None:
                average.reference(w, ema, w.dtype.type(1.0 - self.optimizer.ema))
        if parts:
            for weight_array, part in zip(self.weights, parts, strict=True):
                weight_array[:] = part
        return None


@final
class SquareSums:
    """Sums of squares of small arrays, with the bits of `blocks.sum_squares` of each.

    Each array is written to rows of a matrix, and all are added up in the order of that loop: rows
    of one array, then lanes in pairs. Zeros between arrays, and unused lanes, change no sum.

    Args:
      parts: The arrays, flat, of one block at most.
    """

    def __init__(self, parts: Sequence[Array]):
        """Allocate the matrix."""
        largest_size = max(part.size for part in parts)
        self._parts, self._width = parts, min(LANES, 1 << max(0, largest_size - 1).bit_length())
        counts = [max(1, -(-part.size // self._width)) for part in parts]
        starts = [0, *itertools.accumulate(counts)]
        self._padded_matrix = np.zeros((starts[-1], self._width))
        flat, first_elements = (
            self._padded_matrix.reshape(-1),
            [first * self._width for first in starts[:-1]],
        )
        self._destinations = [
            flat[at : at + x.size] for at, x in zip(first_elements, parts, strict=True)
        ]
        # The first row of each array with more than 0 rows, with more than 1 row, and so on.
        pairs = list(zip(starts[:-1], counts, strict=True))
        self._heads = [np.array([s for s, n in pairs if n > k]) for k in range(max(counts))]

    def compute(self) -> list[float]:
        """Return the current sum of squares of each array."""
        for destination, part in zip(self._destinations, self._parts, strict=True):
            destination[:] = part
        lanes, half = self._padded_matrix * self._padded_matrix, self._width // 2
        for k, heads in enumerate(self._heads[1:], 1):
            lanes[heads] += lanes[heads + k]
        lanes = lanes[self._heads[0]]
        while half:
            lanes[:, :half] += lanes[:, half : 2 * half]
            half //= 2
        totals: list[float] = lanes[:, 0].tolist()
        return totals


def fuse_small_variables(targets: Iterable[Any]) -> list[FusedSmallVariables]:
    """Return groups of variables that are updated as one, and make their slots contiguous.

    Args:
      targets: Variables whose slots no program has seen yet.
    """
    groups: dict[Any, list[Any]] = {}
    for target in targets:
        w, optimizer = target.w, target.optimizer
        if target.is_shared or target.rule.measure is not None:
            continue
        if w.nbytes <= _SMALL_NBYTES:
            groups.setdefault((id(optimizer), w.dtype), []).append(target)
        elif w.size <= REFERENCE_SPAN:
            groups[id(target)] = [target]
    fused_groups = []
    for members in groups.values():
        largest_nbytes = max(target.w.nbytes for target in members)
        count = max(2, _FUSED_NBYTES // max(largest_nbytes, 1))
        for first in range(0, len(members), count):
            chunk = members[first : first + count]
            fused_groups.append(
                _fuse_contiguously(chunk) if len(chunk) > 1 else _wrap_single(chunk[0])
            )
    return fused_groups


def _wrap_single(target: Any) -> FusedSmallVariables:
    w, no_gradients = target.w, np.empty(0, target.w.dtype)
    remaining_fields = (target.slot_parts, target.ema, target.rule, _get_reference(target.rule))
    return FusedSmallVariables(
        [target], target.optimizer, [w], [], [0, w.size], no_gradients, w, *remaining_fields
    )


def _fuse_contiguously(targets: list[Any]) -> FusedSmallVariables:
    starts = [0, *itertools.accumulate(target.w.size for target in targets)]
    dtype, memory = targets[0].w.dtype, {}
    names, moved_targets = targets[0].rule.slots, []
    for name in targets[0].slots:
        memory[name] = np.empty(starts[-1], dtype)
    for target, (low, high) in zip(targets, itertools.pairwise(starts), strict=True):
        target_slots = {name: slot_memory[low:high] for name, slot_memory in memory.items()}
        for name, part in target_slots.items():
            move_to_memory(target.slots[name], part)
        parts = tuple(target_slots[name] for name in names)
        ema, pending = target_slots.get("ema"), target_slots.get("pending")
        moved_targets.append(target._replace(slot_parts=parts, ema=ema, pending=pending))
    g, w = (np.empty(starts[-1], dtype) for _ in range(2))
    weights = [target.w for target in moved_targets]
    optimizer, slots = targets[0].optimizer, tuple(memory[name] for name in names)
    square_sums = SquareSums(np.split(g, starts[1:-1])) if optimizer.needs_global_norm else None
    rule = targets[0].rule
    remaining_fields = (
        memory.get("ema"),
        rule,
        _get_reference(rule),
        memory.get("pending"),
        square_sums,
    )
    return FusedSmallVariables(
        moved_targets,
        optimizer,
        weights,
        np.split(w, starts[1:-1]),
        starts,
        g,
        w,
        slots,
        *remaining_fields,
    )


def _get_reference(rule: Rule) -> Callable[..., Any]:
    reference: Callable[..., Any] = rule.update.reference
    return reference.unguarded if isinstance(reference, Guarded) else reference
