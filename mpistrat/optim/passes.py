"""Passes over memory: gradients of several ranks in, weights and state changed, block by block.

All memory is flat, contiguous and of one dtype, float32 or float64. A variable, or the slice of it
that a rank updates, is cut into blocks of `BLOCK` elements. For each block a pass reduces the rows
of the ranks into a scratch array that stays in the fastest cache, does what is to be done to the
gradient, and hands it to the loop of the optimizer; so the reduced gradient never goes to memory::

    for low in range(0, w.size, BLOCK):
        g = reduction of rows[:, start + low : start + high], over divisor, times scale, clipped
        update(w, g, slots, s, low, high)               # in place
        ema += (1 - decay) * (w - ema)                  # if wanted

Passes of an update, with R ranks on the node, in bytes of the weights (Adam, float32):

=============  ==========================  =====================================================
call           reads and writes            when
=============  ==========================  =====================================================
`accumulate`   R + 2                       instead of all others, in calls that do not update
`measure_norm` R, + 1 with ``keep``        for `ClipByGlobalNorm` and ``nonfinite="skip"``
`measure`      R + what the slots take     for rules that have a `Rule.measure` (LAMB, LARS)
`update`       R + 6                       always
=============  ==========================  =====================================================

**Slices.** What an element becomes depends on that element alone, so slices of ranks and threads
may be cut anywhere. Only sums of squares look further: they are made for each block, in float64,
in 512 lanes that are then added in pairs. If slices begin at multiples of `BLOCK`, counted from the
start of the variable, they have the same blocks whoever makes them; `clipping.norm_of` adds up the
blocks of all ranks, rounded once. So norms, and with them weights, have the same bits however many
ranks and threads there are (the reduction of R gradients rounds by R, as every mean does).

**Loops and twins** have the same bits, except for what is in a NaN: neither contracts a product and
a sum into one operation, and both do them in the same order. So each rank may choose by itself;
`compiles` says from which size on a compiler is worth it. Callers of twins switch NumPy's warnings
off, once for all variables. A twin does 16 blocks at once; only where a gradient in them is not
finite it goes part by part, so that the same parts are left out. A rule that guards (`Rule.guards`)
looks at each gradient as it uses it, and leaves out single elements; its twin does so, too.

**Rows.** A `Gradient` says what the gradient is made of. One row is a gradient that has been
reduced before, or that of the only rank. 16-bit gradients are reduced into a row of the dtype of
the weights first. With ``keep=True`` `measure_norm` writes the reduced gradient to the first row;
then ``gradient.kept()`` reads that alone, and with one node more, the row can be exchanged in
between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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
    finite,
    mean_rows,
    scale,
    sum_squares,
)

if TYPE_CHECKING:
    from mpistrat.optim.base import Rule

    step: Any = None  # the loop of an optimizer, which `_bound` puts in

__all__ = [
    *("AT_ONCE", "BLOCK", "PART", "Gradient", "accumulate", "blocks", "compiles"),
    *("measure", "measure_norm", "numbers_of", "update"),
]

Array: TypeAlias = NDArray[Any]

BLOCK = 4096  # elements; of float32 16 KiB, a third of a first-level cache
# Elements of a block that are left out if one of their gradients is not finite.
PART = 512
_COMPILE = 1 << 18  # elements of all variables from which on a compiler is worth it
# So many elements a twin does at once: what a call of NumPy costs, it costs but once.
AT_ONCE = 16 * BLOCK


# What loops take is made once for all variables, and nearly all steps: they do not write to it.


@functools.lru_cache(maxsize=256)
def numbers_of(numbers: tuple[float, ...], dtype: np.dtype[Any]) -> Array:
    """Return the numbers of a step as loops take them; not to be written to."""
    return np.array(numbers, dtype)


@functools.lru_cache(maxsize=256)
def _ones(count: int, dtype: np.dtype[Any]) -> Array:
    return np.ones(count, dtype)


@functools.lru_cache(maxsize=16)
def _nothing(dtype: np.dtype[Any]) -> Array:
    return np.empty(0, dtype)


class Gradient(NamedTuple):
    """What the gradient of a slice of a variable is made of.

    Formula: ``clip((sum(factors * rows) + pending) / divisor * scale)``.

    Attributes:
      rows: C-ordered matrix, one row for each rank, of the dtype of the weights.
      start: The column of the first element of the slice.
      factors: What to multiply each row by, in its dtype; a row of 0 is not read. None for ones.
      divisor: The sum of all weights, for a mean; those of accumulated calls too.
      scale: What to multiply by: one over the loss scale, times the factor of the clipping.
      limit: The largest absolute value; infinite for no `ClipByValue`.
      pending: The slot of accumulated gradients, of the size of the slice; None for none.
      ignore: Whether infinities are clipped, too; else they stay, for those who look for them.
    """

    rows: Array
    start: int = 0
    factors: Array | None = None
    divisor: float = 1.0
    scale: float = 1.0
    limit: float = math.inf
    pending: Array | None = None
    ignore: bool = False

    def kept(self, scale: float = 1.0) -> Gradient:
        """Return the gradient that `measure_norm` has kept in the first row.

        Args:
          scale: What to multiply it by now; it was multiplied by `Gradient.scale` before.
        """
        return Gradient(self.rows[:1], self.start, None, 1.0, scale, self.limit, None, self.ignore)

    @property
    def plain(self) -> bool:
        """Whether the row is all there is."""
        is_unscaled = self.factors is None and self.pending is None and self.divisor == 1.0
        return is_unscaled and self.scale == 1.0 and self.limit == math.inf and len(self.rows) == 1

    def _forms(self) -> tuple[Array, int, Array, Array, Array, bool]:
        """Return what loops take: all numbers in the dtype of the rows; the row is all there is."""
        rows, start, factors, divisor, scale, limit, pending, ignore = self
        dtype = rows.dtype
        largest = math.inf if ignore or limit == math.inf else float(np.finfo(dtype).max)
        numbers = numbers_of((divisor, 1.0, scale, limit, largest), dtype)
        factors = _ones(len(rows), dtype) if factors is None else factors
        pending = _nothing(dtype) if pending is None else pending
        return rows, start, factors, numbers, pending, self.plain


def blocks(elements: int) -> int:
    """Return how many blocks a slice of so many elements has."""
    return -(-elements // BLOCK)


def compiles(elements: int) -> bool:
    """Tell whether updates of so many elements, of all variables, are worth a compiler."""
    return elements >= _COMPILE


# Loops over blocks. They run compiled and in Python, so they do only what is the same in both.


def _gather(
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


_gradient = jit.driver(_gather)


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
        g = _gradient(rows, start, factors, numbers, pending, is_plain, low, high, scratch)
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
    slots: Any,
    s: Array,
    sums: Array,
    last: bool,
    guard: bool,
) -> int:
    scratch, lanes = np.empty((1, BLOCK), w.dtype), np.empty(LANES)
    out, nonfinite_blocks = np.empty(BLOCK, w.dtype), 0
    for low in range(0, w.size, BLOCK):
        high = min(low + BLOCK, w.size)
        g = _gradient(rows, start, factors, numbers, pending, is_plain, low, high, scratch)
        if last and pending.size:
            pending[low:high] = 0
        if guard and not finite(g):
            nonfinite_blocks += 1
            sums[:, low // BLOCK] = np.nan
            continue
        step(w, g, slots, s, low, high, out[: high - low])
        sums[0, low // BLOCK] = sum_squares(w[low:high], lanes)
        sums[1, low // BLOCK] = sum_squares(out[: high - low], lanes)
    return nonfinite_blocks


def _in_parts(w: Array, g: Array, slots: Any, s: Array, low: int, high: int, guard: bool) -> bool:
    if not guard or finite(g):  # nearly always
        step(w, g, slots, s, low, high)
        return False
    for first in range(low, high, PART):
        last = min(first + PART, high)
        x = g[first - low : last - low]
        if finite(x):
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
    slots: Any,
    s: Array,
    ema: Array,
    new: Any,
    reads: bool,
    guard: bool,
    span: int,
) -> int:
    scratch, skipped_blocks = np.empty((1, 0 if is_plain else min(span, w.size)), w.dtype), 0
    for low in range(0, w.size, span):
        high = min(low + span, w.size)
        g = scratch[0, : high - low]
        if reads:
            g = _gradient(rows, start, factors, numbers, pending, is_plain, low, high, scratch)
            if pending.size:
                pending[low:high] = 0
        skipped_blocks += step(w, g, slots, s, low, high, guard)
        if ema.size:
            average(w[low:high], ema[low:high], new)
    return skipped_blocks


@functools.cache
def _bound(blocks: Any, step: jit.Kernel[..., Any]) -> jit.Kernel[..., Any]:
    return jit.driver(blocks, step=step)


def _run(kernel: jit.Kernel[..., Any], compiled: bool, *arguments: Any) -> Any:
    return kernel(*arguments) if compiled else kernel.reference(*arguments)


def accumulate(gradient: Gradient, compiled: bool = True) -> None:
    """Add the rows of the ranks, times their factors, to ``gradient.pending``.

    Args:
      gradient: With `pending`; divisor, scale and limit wait for the update.
      compiled: Whether to use compiled loops, as `compiles` says; the bits are the same.

    Cost: One pass over rows and slot.
    """
    _run(_accumulate_blocks, compiled, *gradient._forms())


def measure_norm(
    gradient: Gradient, size: int, sums: Array, keep: bool = False, compiled: bool = True
) -> None:
    """Write the sums of squares of a gradient, block by block, for `clipping.norm_of`.

    A sum that is not finite shows a gradient that is not (or, in float64, one beyond 1e154).

    Args:
      gradient: What it is made of; its `limit` had better be infinite.
      size: Elements of the slice.
      sums: float64, flat, one for each block.
      keep: Whether to write the gradient to the first row, for `Gradient.kept`, and zeros to the
        slot `pending`. No one else may read these columns of the first row then.
      compiled: As in `accumulate`.

    Cost: One pass over the rows, and one row written with `keep`, which pays from 3 rows on.
    """
    _run(_norm_blocks, compiled, *gradient._forms(), size, sums, keep)


def measure(
    rule: Rule,
    gradient: Gradient,
    w: Array,
    slots: tuple[Array, ...],
    s: Sequence[float] | Array,
    sums: Array,
    guard: bool = True,
    compiled: bool = True,
) -> int:
    """Make the first pass of a rule that needs norms of weights and of its direction.

    Args:
      rule: One with a `measure`.
      gradient: As in `update`.
      w: As in `update`; not written.
      slots: As in `update`.
      s: As in `update`, made without norms.
      sums: float64, of two rows, weights and direction, and a column for each block.
      guard: Whether to leave out blocks whose gradient is not finite.
      compiled: As in `accumulate`.

    Returns:
      How many blocks were left out; with any, `update` must not follow.

    Cost: One pass over rows, weights and slots.
    """
    assert rule.measure is not None
    numbers = numbers_of(tuple(s), w.dtype)
    arguments = (*gradient._forms(), w, slots, numbers, sums, not rule.reads, guard)
    return int(_run(_bound(_measure_blocks, rule.measure), compiled, *arguments))


def update(
    rule: Rule,
    gradient: Gradient,
    w: Array,
    slots: tuple[Array, ...],
    s: Sequence[float] | Array,
    ema: Array | None = None,
    decay: float = 0.0,
    guard: bool = True,
    compiled: bool = True,
) -> int:
    """Update a slice of a variable and of its slots, in place.

    Args:
      rule: Of the optimizer of this variable.
      gradient: What the gradient of the slice is made of. Its slot `pending` is 0 afterwards.
      w: The slice of the weights.
      slots: The slices of its slots, in the order of ``rule.slots``.
      s: `Optimizer.scalars` of the step; with norms, if `measure` came before.
      ema: The slice of the moving average; None for none.
      decay: How much of the average stays.
      guard: Whether to leave out parts of `PART` elements whose gradient is not finite; or these
        elements alone, if the rule guards.
      compiled: As in `accumulate`.

    Returns:
      How many blocks have elements that were left out.

    Cost: One pass over all that is given. New dtypes compile for some seconds, once per cache on
      disk.
    """
    dtype, size = w.dtype, w.size
    numbers = numbers_of(tuple(s), dtype)
    rows, start, factors, divisor, scale, limit, pending, _ = gradient
    is_unscaled = pending is None and scale == 1.0 and limit == math.inf
    if is_unscaled and not compiled and size <= AT_ONCE and rule.reads:
        # What the twin of the loop comes to, for what is small without the price of that.
        needs_mean = len(rows) > 1 or divisor != 1.0 or factors is not None
        g = rows[:, start : start + size]
        g = mean_rows(g, divisor, factors) if needs_mean else g[0]
        if not (guard or needs_mean) or finite.reference(g):
            reference: Any = rule.update.reference
            reference = reference.unguarded if type(reference) is Guarded else reference
            reference(w, g, slots, numbers, 0, size)
            if ema is not None:
                average.reference(w, ema, dtype.type(1.0 - decay))
            return 0
    mean, new = _nothing(dtype) if ema is None else ema, dtype.type(1.0 - decay)
    step = rule.update if rule.guards else _bound(_in_parts, rule.update)
    span = BLOCK if compiled and jit.is_compiling() else AT_ONCE
    block_arguments = (w, slots, numbers, mean, new, rule.reads, guard and rule.reads, span)
    return int(_run(_bound(_update_blocks, step), compiled, *gradient._forms(), *block_arguments))
