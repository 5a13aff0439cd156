"""Passes over memory that take gradients of several ranks and change weights, block by block.

All memory is flat, contiguous and of one dtype, float32 or float64. A variable, or the slice of it
that a rank updates, is cut into blocks of `BLOCK` elements. For each block a pass reduces the rows
of the ranks into a scratch array that stays in the fastest cache, divides, scales and clips the
gradient, and calls the loop of the optimizer; so the reduced gradient never goes to memory::

    for low in range(0, w.size, BLOCK):
        g = reduction of rows[:, start + low : start + high], over divisor, times scale, clipped
        update(w, g, slots, s, low, high)               # in place
        ema += (1 - decay) * (w - ema)                  # if wanted

Passes of an update, with R ranks on the node, in bytes of the weights (Adam, float32):

=============  ==========================  =====================================================
call           reads and writes            when
=============  ==========================  =====================================================
`accumulate`   R + 2                       instead of all others, in calls that do not update
`measure_norm` R, + 1 if kept              for `ClipByGlobalNorm` and ``nonfinite="skip"``
`measure`      R + what the slots take     for rules that have a `Rule.measure` (LAMB, LARS)
`update`       R + 6                       always
=============  ==========================  =====================================================

**Slices.** The update of an element depends on that element alone, so slices of ranks and threads
may be cut anywhere. Only sums of squares cover several elements: they are made for each block, in
float64, in 512 lanes that are then added in pairs. If slices begin at multiples of `BLOCK`, counted
from the start of the variable, every division into slices has the same blocks;
`mpistrat.optim.base.norm_of` adds up the blocks of all ranks, rounded once. So norms, and with them
weights, have the same bits at any number of ranks and threads (the reduction of R gradients rounds
by R, as every mean does).

**Loops and their references** give the same bits, except for those of a NaN: neither contracts a
product and a sum into one operation, and both have the same order. So each rank may choose by
itself;
`is_worth_compiling` says from which size on a compiler pays. Callers of references switch NumPy's
warnings off, once for all variables. A reference processes 16 blocks at once; only where a gradient
in them is not finite it goes part by part, so that the same parts are left out. A rule that guards
(`Rule.can_guard`) checks each element of the gradient in its loop, and leaves out single elements;
its reference leaves out the same ones.

**Rows.** A `Gradient` lists the terms of a gradient. One row is a gradient that has been
reduced before, or that of the only rank. 16-bit gradients are reduced into a row of the dtype of
the weights first. With ``should_keep=True`` `measure_norm` writes the reduced gradient to the first
row; then ``gradient.kept_gradient()`` reads that row alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpistrat.kernels import jit
from mpistrat.kernels.loops import sum_rows
from mpistrat.optim.blocks import (
    LANES,
    Guarded,
    add,
    average,
    clip,
    is_all_finite,
    mean_rows,
    scale,
    sum_squares,
)

if TYPE_CHECKING:
    from mpistrat.optim.base import Rule

    step: Any = None  # the loop of an optimizer; `_bind_step` binds it

__all__ = [
    *("BLOCK", "PART", "REFERENCE_SPAN", "Gradient", "accumulate", "as_loop_numbers"),
    *("count_blocks", "is_worth_compiling", "measure", "measure_norm", "update"),
]

Array: TypeAlias = NDArray[Any]

BLOCK = 4096  # elements; of float32 16 KiB, a third of a first-level cache
# So many elements are left out together if one of their gradients is not finite.
PART = 512
_COMPILE = 1 << 18  # elements of all variables from which on a compiler is worth it
# So many elements a reference processes at once, to pay the cost of a call of NumPy but once.
REFERENCE_SPAN = 16 * BLOCK


# The small arrays that loops take are made once for all variables and nearly all steps; loops do
# not write to them.


@functools.lru_cache(maxsize=256)
def as_loop_numbers(scalars: tuple[float, ...], dtype: np.dtype[Any]) -> Array:
    """Return the numbers of a step as an array for loops, which nobody may write to."""
    return np.array(scalars, dtype)


@functools.lru_cache(maxsize=256)
def _ones(count: int, dtype: np.dtype[Any]) -> Array:
    return np.ones(count, dtype)


@functools.lru_cache(maxsize=16)
def _empty_array(dtype: np.dtype[Any]) -> Array:
    return np.empty(0, dtype)


class Gradient(NamedTuple):
    """The terms of the gradient of a slice of a variable.

    Formula: ``clip((sum(factors * rows) + pending) / divisor * scale)``.

    Attributes:
      rows: C-ordered matrix, one row for each rank, of the dtype of the weights.
      start: The column of the first element of the slice.
      factors: The factor of each row, in the dtype of the rows; a row with factor 0 is not read.
        None for ones.
      divisor: The sum of all weights, for a mean; those of accumulated calls too.
      scale: What to multiply by: one over the loss scale, times the factor of the clipping.
      limit: The largest absolute value; infinite for no `ClipByValue`.
      pending: The slot of accumulated gradients, of the size of the slice; None for none.
      should_clip_infinities: Whether infinities are clipped, too; else they stay, so that the check
        for them sees them.
    """

    rows: Array
    start: int = 0
    factors: Array | None = None
    divisor: float = 1.0
    scale: float = 1.0
    limit: float = math.inf
    pending: Array | None = None
    should_clip_infinities: bool = False

    def kept_gradient(self, scale: float = 1.0) -> Gradient:
        """Return the gradient that `measure_norm` has written to the first row.

        Args:
          scale: A factor beside `Gradient.scale`, which the row has in it.
        """
        return Gradient(
            self.rows[:1],
            self.start,
            None,
            1.0,
            scale,
            self.limit,
            None,
            self.should_clip_infinities,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the gradient is the row itself."""
        is_unscaled = self.factors is None and self.pending is None and self.divisor == 1.0
        return is_unscaled and self.scale == 1.0 and self.limit == math.inf and len(self.rows) == 1

    def _loop_arguments(self) -> tuple[Array, int, Array, Array, Array, bool]:
        """Return the arguments of loops: all numbers in the dtype of the rows, and `is_plain`."""
        rows, start, factors, divisor, scale, limit, pending, should_clip_infinities = self
        dtype = rows.dtype
        largest = (
            math.inf if should_clip_infinities or limit == math.inf else float(np.finfo(dtype).max)
        )
        numbers = as_loop_numbers((divisor, 1.0, scale, limit, largest), dtype)
        factors = _ones(len(rows), dtype) if factors is None else factors
        pending = _empty_array(dtype) if pending is None else pending
        return rows, start, factors, numbers, pending, self.is_plain


def count_blocks(element_count: int) -> int:
    """Return how many blocks a slice of so many elements has."""
    return -(-element_count // BLOCK)


def is_worth_compiling(element_count: int) -> bool:
    """Return whether compiled loops pay for updates of so many elements of all variables."""
    return element_count >= _COMPILE


# Loops over blocks. They run compiled and in Python, so they use only operations that are the same
# in both.


def _reduce_block(
    rows: Array,
    start: int,
    factors: Array,
    numbers: Array,
    pending: Array,
    is_plain: bool,
    low: int,
    high: int,
    scratch: Array,
) -> Array:
    first, last = start + low, start + high
    if is_plain:
        return rows[0, first:last]
    divisor, factor, limit = numbers[0], numbers[2], numbers[3]
    g = scratch[0, : high - low]
    if pending.size == 0:
        sum_rows(rows, scratch, first, last, factors, numbers[0:1], first, False)
    else:
        sum_rows(rows, scratch, first, last, factors, numbers[1:2], first, False)
        add(g, pending[low:high], divisor)
    if factor != 1:
        scale(g, factor)
    if limit != np.inf:
        clip(g, limit, numbers[4])
    return g


_reduced_block = jit.driver(_reduce_block)


@jit.driver
def _accumulate_blocks(
    rows: Array, start: int, factors: Array, numbers: Array, pending: Array, is_plain: bool
) -> None:
    scratch = np.empty((1, BLOCK), rows.dtype)
    for low in range(0, pending.size, BLOCK):
        high = min(low + BLOCK, pending.size)
        first, last = start + low, start + high
        sum_rows(rows, scratch, first, last, factors, numbers[1:2], first, False)
        add(pending[low:high], scratch[0, : high - low], numbers[1])


@jit.driver
def _norm_blocks(
    rows: Array,
    start: int,
    factors: Array,
    numbers: Array,
    pending: Array,
    is_plain: bool,
    size: int,
    sums: Array,
    keep: bool,
) -> None:
    scratch, lanes = np.empty((1, BLOCK), rows.dtype), np.empty(LANES)
    for low in range(0, size, BLOCK):
        high = min(low + BLOCK, size)
        g = _reduced_block(rows, start, factors, numbers, pending, is_plain, low, high, scratch)
        sums[low // BLOCK] = sum_squares(g, lanes)
        if keep:
            rows[0, start + low : start + high] = g
            if pending.size:
                pending[low:high] = 0


def _measure_blocks(
    rows: Array,
    start: int,
    factors: Array,
    numbers: Array,
    pending: Array,
    is_plain: bool,
    w: Array,
    slots: tuple[Array, ...],
    s: Array,
    sums: Array,
    last: bool,
    guard: bool,
) -> int:
    scratch, lanes = np.empty((1, BLOCK), w.dtype), np.empty(LANES)
    out, nonfinite_blocks = np.empty(BLOCK, w.dtype), 0
    for low in range(0, w.size, BLOCK):
        high = min(low + BLOCK, w.size)
        g = _reduced_block(rows, start, factors, numbers, pending, is_plain, low, high, scratch)
        if last and pending.size:
            pending[low:high] = 0
        if guard and not is_all_finite(g):
            nonfinite_blocks += 1
            sums[:, low // BLOCK] = np.nan
            continue
        step(w, g, slots, s, low, high, out[: high - low])
        sums[0, low // BLOCK] = sum_squares(w[low:high], lanes)
        sums[1, low // BLOCK] = sum_squares(out[: high - low], lanes)
    return nonfinite_blocks


def _update_in_parts(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool
) -> bool:
    if not guard or is_all_finite(g):  # nearly always
        step(w, g, slots, s, low, high)
        return False
    for first in range(low, high, PART):
        last = min(first + PART, high)
        x = g[first - low : last - low]
        if is_all_finite(x):
            step(w, x, slots, s, first, last)
    return True


def _update_blocks(
    rows: Array,
    start: int,
    factors: Array,
    numbers: Array,
    pending: Array,
    is_plain: bool,
    w: Array,
    slots: tuple[Array, ...],
    s: Array,
    ema: Array,
    new: float,
    reads: bool,
    guard: bool,
    span: int,
) -> int:
    scratch, skipped_blocks = np.empty((1, 0 if is_plain else min(span, w.size)), w.dtype), 0
    for low in range(0, w.size, span):
        high = min(low + span, w.size)
        g = scratch[0, : high - low]
        if reads:
            g = _reduced_block(rows, start, factors, numbers, pending, is_plain, low, high, scratch)
            if pending.size:
                pending[low:high] = 0
        skipped_blocks += step(w, g, slots, s, low, high, guard)
        if ema.size:
            average(w[low:high], ema[low:high], new)
    return skipped_blocks


@functools.cache
def _bind_step(block_loop: Callable[..., int], step: jit.Kernel[..., Any]) -> jit.Kernel[..., Any]:
    return jit.driver(block_loop, step=step)


def _run_kernel(kernel: jit.Kernel[..., Any], is_compiled: bool, *arguments: object) -> Any:
    return kernel(*arguments) if is_compiled else kernel.reference(*arguments)


def accumulate(gradient: Gradient, is_compiled: bool = True) -> None:
    """Add the rows of the ranks, times their factors, to ``gradient.pending``.

    Args:
      gradient: With `pending`; divisor, scale and limit wait for the update.
      is_compiled: Whether to use compiled loops, as `is_worth_compiling` says; it changes no bits.

    Cost: One pass over rows and slot.
    """
    _run_kernel(_accumulate_blocks, is_compiled, *gradient._loop_arguments())


def measure_norm(
    gradient: Gradient, size: int, sums: Array, should_keep: bool = False, is_compiled: bool = True
) -> None:
    """Write the sums of squares of a gradient, block by block, for `mpistrat.optim.base.norm_of`.

    A sum that is not finite shows that the gradient is not (or, in float64, has numbers beyond
    1e154).

    Args:
      gradient: The terms of the gradient; its `limit` should be infinite.
      size: Elements of the slice.
      sums: float64, flat, one for each block.
      should_keep: Whether to write the gradient to the first row, for `Gradient.kept_gradient`, and
        zeros to the slot `pending`. No other rank may read these columns of the first row then.
      is_compiled: As in `accumulate`.

    Cost: One pass over the rows, and one row written with `should_keep`, which pays from 3 rows on.
    """
    _run_kernel(_norm_blocks, is_compiled, *gradient._loop_arguments(), size, sums, should_keep)


def measure(
    rule: Rule,
    gradient: Gradient,
    w: Array,
    slots: tuple[Array, ...],
    s: Sequence[float] | Array,
    *,
    sums: Array,
    is_guarded: bool = True,
    is_compiled: bool = True,
) -> int:
    """Make the first pass of a rule that needs norms of weights and of its direction.

    Args:
      rule: One with a `measure`.
      gradient: As in `update`.
      w: As in `update`; not written.
      slots: As in `update`.
      s: As in `update`, made without norms.
      sums: float64, of two rows, weights and direction, and a column for each block.
      is_guarded: Whether to leave out blocks whose gradient is not finite.
      is_compiled: As in `accumulate`.

    Returns:
      How many blocks were left out; with any, `update` must not follow.

    Cost: One pass over rows, weights and slots.
    """
    assert rule.measure is not None
    numbers = as_loop_numbers(tuple(s), w.dtype)
    arguments = (
        *gradient._loop_arguments(),
        w,
        slots,
        numbers,
        sums,
        not rule.needs_gradient,
        is_guarded,
    )
    return int(_run_kernel(_bind_step(_measure_blocks, rule.measure), is_compiled, *arguments))


def update(
    rule: Rule,
    gradient: Gradient,
    w: Array,
    slots: tuple[Array, ...],
    s: Sequence[float] | Array,
    *,
    ema: Array | None = None,
    decay: float = 0.0,
    is_guarded: bool = True,
    is_compiled: bool = True,
) -> int:
    """Update a slice of a variable and of its slots, in place.

    Args:
      rule: Of the optimizer of this variable.
      gradient: The terms of the gradient of the slice. Its slot `pending` is 0 afterwards.
      w: The slice of the weights.
      slots: The slices of its slots, in the order of ``rule.slots``.
      s: `Optimizer.scalars` of the step; with norms, if `measure` came before.
      ema: The slice of the moving average; None for none.
      decay: How much of the average stays.
      is_guarded: Whether to leave out parts of `PART` elements whose gradient is not finite; or
        these elements alone, if the rule guards.
      is_compiled: As in `accumulate`.

    Returns:
      How many blocks have elements that were left out.

    Cost: One pass over all arguments. New dtypes compile for some seconds, once per cache on
      disk.
    """
    dtype, size = w.dtype, w.size
    numbers = as_loop_numbers(tuple(s), dtype)
    rows, start, factors, divisor, scale, limit, pending, _ = gradient
    is_unscaled = pending is None and scale == 1.0 and limit == math.inf
    if is_unscaled and not is_compiled and size <= REFERENCE_SPAN and rule.needs_gradient:
        # The same as the reference of the loop, without its cost for small variables.
        needs_mean = len(rows) > 1 or divisor != 1.0 or factors is not None
        g = rows[:, start : start + size]
        g = mean_rows(g, divisor, factors) if needs_mean else g[0]
        if not (is_guarded or needs_mean) or is_all_finite.reference(g):
            reference: Any = rule.update.reference
            reference = reference.unguarded if type(reference) is Guarded else reference
            reference(w, g, slots, numbers, 0, size)
            if ema is not None:
                average.reference(w, ema, dtype.type(1.0 - decay))
            return 0
    new, reads = dtype.type(1.0 - decay), rule.needs_gradient
    average_slot = _empty_array(dtype) if ema is None else ema
    step = rule.update if rule.can_guard else _bind_step(_update_in_parts, rule.update)
    span = BLOCK if is_compiled and jit.is_compiling() else REFERENCE_SPAN
    loop = _bind_step(_update_blocks, step)
    arguments = (w, slots, numbers, average_slot, new, reads, is_guarded and reads, span)
    return int(_run_kernel(loop, is_compiled, *gradient._loop_arguments(), *arguments))
