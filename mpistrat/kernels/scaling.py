"""Arrays times a number, and through one: as a weighted mean has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Overflow",
    "divide",
    "factors_of",
    "multiply",
    "noting",
    "power_for",
    "real",
    "rescue",
    "scale_into",
]

Array: TypeAlias = NDArray[Any]


def real(array: Array) -> Array:
    """Return a view of a contiguous complex array as real numbers; of others itself.

    To scale a complex number is to scale its parts: inf + 1j times 2 + 0j would be NaN.
    """
    if array.dtype.kind != "c":
        return array
    return array.reshape(-1).view(np.dtype(f"f{array.dtype.itemsize // 2}"))


def factors_of(scales: Array, dtype: np.dtype[Any]) -> Array:
    """Return scales in the dtype of what they scale.

    One that is not 0 does not become 0, or a NaN that it belongs to would not be read: it counts as
    the smallest number of that dtype, 1e-45 in float32.

    Args:
      scales: float64, not below 0; of any shape.
      dtype: Of real or complex numbers; scales are of its real kind.
    """
    kind = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    factors: Array = scales.astype(kind)
    if kind.kind == "f":
        factors[(factors == 0) & (scales != 0)] = np.finfo(kind).smallest_subnormal
    return factors


def _factor(factor: float, array: Array) -> Any:
    found = array.dtype.type(factor)
    return np.finfo(array.dtype).smallest_subnormal if factor and not found else found


def scale_into(row: Array, factor: float, out: Array) -> Array:
    """Put `row` times a real number into `out`, and return it; what is taken 0 times is not read.

    Args:
      row: Contiguous.
      factor: The number; not below 0.
      out: Of the same shape and dtype.
    """
    if factor == 0:
        out[:] = 0
    else:
        parts = real(row)
        np.multiply(parts, _factor(factor, parts), out=real(out))
    return out


def multiply(array: Array, factor: float) -> None:
    """Multiply a contiguous array by a real number, in place."""
    parts = real(array)
    np.multiply(parts, _factor(factor, parts), out=parts)


def divide(array: Array, divisor: float) -> None:
    """Divide a contiguous array by a real number, in place.

    Cost: One pass, which for a power of two multiplies: 16 microseconds for 256 Ki float32 in
      cache instead of 25, 24 for float64 instead of 73. The results have the same bits.
    """
    parts = real(array)
    kind = parts.dtype.type
    by = kind(divisor)
    if _halves(divisor):
        np.multiply(parts, 1 / by, out=parts)
    else:
        np.divide(parts, by, out=parts)


def _halves(divisor: float) -> bool:
    # The inverse of such a number is exact, in float16 too: both ways round the same number.
    whole = float(divisor)
    return math.frexp(whole)[0] == 0.5 and 2**-14 <= whole <= 2**14 and whole == divisor


@final
class Overflow:
    """Notes whether finite numbers have become infinite, at no cost: the processor says so.

    Infinite numbers that were given are none.

    Attributes:
      seen: Whether any have.

    Example:
      >>> overflow = Overflow()
      >>> with np.errstate(over="call", call=overflow):
      ...     total = np.full(2, 1e308) + np.array([1e308, np.inf])
      >>> overflow.seen, total
      (True, array([inf, inf]))
    """

    __slots__ = ("seen",)

    def __init__(self) -> None:
        """Note nothing yet."""
        self.seen = False

    def __call__(self, kind: str, flag: int) -> None:
        """Note it; NumPy calls this."""
        self.seen = True


def noting(overflow: Overflow | None) -> np.errstate:
    """Return a context in which NumPy is silent, and tells `overflow` if there is one."""
    if overflow is None:
        return np.errstate(all="ignore")
    return np.errstate(all="ignore", over="call", call=overflow)


def power_for(count: int) -> float:
    """Return a power of two that `count` numbers are multiplied by so that no sum overflows."""
    return 2.0 ** -math.frexp(count)[1]


def rescue(total: Array, values: Sequence[Array], factors: Array | None, divisor: float) -> None:
    """Make those of the means anew whose sum has overflowed, from values scaled down before.

    Args:
      total: The means; contiguous. Those that are finite stay.
      values: Of each rank, contiguous; not `total`.
      factors: What each was multiplied by; of 0, it is not read. None for all ones.
      divisor: What the sum was divided by.

    Cost: one pass over `total`, and some over what is not finite in it.
    """
    flat = real(total).reshape(-1)
    where = np.flatnonzero(~np.isfinite(flat))
    kind = flat.dtype.type
    # Weights are no more than 1 together, and the least of them would become 0.
    power, scales = kind(1), np.ones(len(values), flat.dtype)
    if factors is None:
        power = kind(power_for(len(values)))
    else:
        scales = factors_of(factors, flat.dtype)
    parts = [(real(v).reshape(-1)[where], s) for v, s in zip(values, scales, strict=True) if s]
    found = np.zeros(where.size, flat.dtype)
    for part, scale in parts:
        found += part * (scale * power)
    found /= kind(divisor) * power
    # Rounding alone may lead beyond the largest number, where all values are close to it.
    most = np.max([np.abs(part) for part, _ in parts], axis=0, initial=0)
    flat[where] = np.where(np.isinf(found) & np.isfinite(most), np.copysign(most, found), found)
