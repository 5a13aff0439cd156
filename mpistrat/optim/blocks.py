"""Loops over a block of a gradient, each beside its NumPy reference, which gives the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from mpistrat.kernels import jit
from mpistrat.kernels.elementwise import divide

__all__ = [
    *("LANES", "Guarded", "add", "average", "clip", "is_all_finite", "is_not_finite"),
    *("mean_rows", "scale", "sum_squares"),
]

Array: TypeAlias = NDArray[Any]

LANES = 512  # sums side by side
_PRODUCT_LIMIT = 1 << 13  # elements whose product no library gives to threads


def _add_reference(total: Array, addend: Array, divisor: float) -> None:
    total += addend
    total /= divisor


@jit.kernel(_add_reference)
def add(total: Array, addend: Array, divisor: float) -> None:
    """Add `addend` to `total`, and divide by `divisor`, in place."""
    for i in range(total.size):
        total[i] = (total[i] + addend[i]) / divisor


def _scale_reference(g: Array, scale: float) -> None:
    g *= scale


@jit.kernel(_scale_reference)
def scale(g: Array, scale: float) -> None:
    """Multiply by a number of the same dtype, in place."""
    for i in range(g.size):
        g[i] = g[i] * scale


def _clip_reference(g: Array, limit: float, largest: float) -> None:
    np.clip(g, -limit, limit, out=g, where=np.abs(g) <= largest)


@jit.kernel(_clip_reference)
def clip(g: Array, limit: float, largest: float) -> None:
    """Clip to `limit` in place; NaN, and numbers beyond `largest`, stay."""
    for i in range(g.size):
        x = g[i]
        g[i] = limit if limit < x <= largest else (-limit if -largest <= x < -limit else x)


def _finite_reference(g: Array) -> bool:
    if g.size <= _PRODUCT_LIMIT and math.isfinite(g.dot(g)):
        return True  # nearly always; large numbers overflow there, and take the check below
    return bool(np.isfinite(g).all())


@jit.kernel(_finite_reference)
def is_all_finite(g: Array) -> bool:
    """Return whether there is neither NaN nor infinity."""
    has_nonfinite = False
    for i in range(g.size):
        rest = g[i] - g[i]  # NaN for NaN and for infinities
        has_nonfinite |= rest != rest  # counting them takes 6 times as long
    return not has_nonfinite


@jit.helper
def is_not_finite(x: float) -> bool:
    """Return whether a number is NaN or infinite."""
    rest = x - x  # NaN for both
    return rest != rest


@final
class Guarded:
    """The NumPy version of an update that guards (`Rule.guards`), made of one that does not.

    Args:
      unguarded: As `Rule.update`.

    Attributes:
      unguarded: The same, for gradients that are known to be finite.
    """

    def __init__(self, unguarded: Callable[..., None]):
        """Store the update."""
        self.unguarded = unguarded

    def __call__(
        self,
        w: Array,
        g: Array,
        slots: tuple[Array, ...],
        s: Array,
        low: int,
        high: int,
        guard: bool = False,
    ) -> bool:
        """Update, and return whether elements were left out, as their gradient is not finite."""
        if not guard or _finite_reference(g):
            self.unguarded(w, g, slots, s, low, high)
            return False
        is_finite, arrays = np.isfinite(g), [x[low:high] for x in (w, *slots)]
        weights, *slot_parts = parts = [x[is_finite] for x in arrays]
        self.unguarded(weights, g[is_finite], tuple(slot_parts), s, 0, weights.size)
        for array, part in zip(arrays, parts, strict=True):
            array[is_finite] = part
        return True


def mean_rows(rows: Array, divisor: float, factors: Array | None = None) -> Array:
    """Return the sum of rows, each times its factor, over a divisor.

    If it is finite it has the bits of `mpistrat.kernels.rows.reduce_rows`, which also computes
    means of numbers whose sum overflows.

    Args:
      rows: A matrix, one row for each rank.
      divisor: The divisor of the sum.
      factors: The factor of each row, in the dtype of the rows; a row with factor 0 is not read.
        None for ones.
    """
    if factors is None:
        total: Array = rows[0] + rows[1] if len(rows) > 1 else rows[0].copy()
        for row in rows[2:]:
            total += row
    else:
        pairs = zip(rows, factors, strict=True)
        total, *other_rows = [x * factor if factor else np.zeros_like(x) for x, factor in pairs]
        for row in other_rows:
            total += row
    if divisor != 1.0:
        divide(total, divisor)
    return total


def _sum_squares_reference(x: Array, lanes: Array) -> float:
    lanes[:] = 0
    for low in range(0, x.size, LANES):
        part = x[low : low + LANES].astype(np.float64)
        lanes[: part.size] += part * part
    half = LANES // 2
    while half:
        lanes[:half] += lanes[half : 2 * half]
        half //= 2
    return float(lanes[0])


@jit.kernel(_sum_squares_reference)
def sum_squares(x: Array, lanes: Array) -> float:
    """Return the sum of squares in float64, made in `lanes`, `LANES` of float64, in pairs."""
    for i in range(LANES):
        lanes[i] = 0.0
    for low in range(0, x.size, LANES):
        part = x[low : low + LANES]
        for i in range(part.size):
            value = np.float64(part[i])
            lanes[i] += value * value
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    return lanes[0]  # type: ignore[no-any-return]  # an array of any dtype


def _average_reference(w: Array, ema: Array, new: float) -> None:
    ema += new * (w - ema)


@jit.kernel(_average_reference)
def average(w: Array, ema: Array, new: float) -> None:
    """Move the average `ema` towards `w`, by `new` of the difference, in place."""
    for i in range(w.size):
        ema[i] = ema[i] + new * (w[i] - ema[i])
