"""Arrays times a number, and through one: as a weighted mean has it."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["divide", "factors_of", "multiply", "real", "scale_into"]

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
    return math.frexp(divisor)[0] == 0.5 and 2**-14 <= divisor <= 2**14
