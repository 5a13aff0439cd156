"""Reductions of float16 and bfloat16: read narrow, added in float32 in rank order, rounded once.

Numbers are widened in registers, tile by tile, so what passes through memory is half of what
float32 takes. bfloat16 is the upper half of a float32: shifts of integers, and an addition that
rounds to the nearest, ties to even; a NaN becomes that of ``ml_dtypes``. float16 goes by the
processor's own instruction (F16C on x86, every 64-bit Arm). Where there is none, as where Numba is
not, it goes by NumPy, whose casts take some ten times as long; the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.kernels import jit
from mpistrat.kernels.blocks import BLOCK, reduce_blocks
from mpistrat.kernels.loops import TILE, add_up, average, copy, divide, make_anew, only_ones

if TYPE_CHECKING:
    widen: Any = None  # which of the two it is, put in by `jit.driver`
    narrow: Any = None
    both_rows: Any = None
    widen_row: Any = None
    narrow_row: Any = None


_WIDE_DTYPE = np.dtype(np.float32)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Tell whether numbers of that dtype are added in float32: float16 and bfloat16."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")


@jit.cast
def float_of_bits(bits: Any) -> Any:
    """Return the float32 of these 32 bits."""
    return bits.view(np.float32)


@jit.cast
def bits_of_float(value: Any) -> Any:
    """Return the 32 bits of a float32."""
    return value.view(np.uint32)


@jit.cast
def float_of_half(bits: Any) -> Any:
    """Return the float32 of the 16 bits of a half."""
    return np.float32(bits.view(np.float16))


@jit.cast
def half_of_float(value: Any) -> Any:
    """Return the 16 bits of the half that is nearest."""
    return np.float16(value).view(np.uint16)


@jit.helper
def _widen_bfloat16(bits: Any) -> Any:
    return float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@jit.helper
def _narrow_bfloat16(value: Any) -> Any:
    bits = bits_of_float(value)
    high = np.uint32(bits >> np.uint32(16))
    even = np.uint32(high & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + even) >> np.uint32(16)
    missing = np.uint32(np.uint32(high & np.uint32(0x8000)) | np.uint32(0x7FC0))
    return np.uint16(missing if value != value else rounded)


def _to_bfloat16_twin(values: Array, factor: Any, bits: Array) -> None:
    for low in range(0, values.size, BLOCK):
        products = values[low : low + BLOCK] * factor
        wide_bits = products.view(np.uint32)
        high = wide_bits >> 16
        rounded = (wide_bits + (high & 1) + 0x7FFF) >> 16
        np.copyto(rounded, high & 0x8000 | 0x7FC0, where=np.isnan(products))
        bits[low : low + BLOCK] = rounded


@jit.kernel(_to_bfloat16_twin)
def to_bfloat16(values: Array, factor: Any, bits: Array) -> None:
    """Round float32 times a float32 to bfloat16, to nearest, ties to even: 16 bits in uint16."""
    for i in range(values.size):
        bits[i] = _narrow_bfloat16(values[i] * factor)


def _from_bfloat16_twin(bits: Array, values: Array) -> None:
    np.left_shift(bits, 16, out=values.view(np.uint32), dtype=np.uint32)


@jit.kernel(_from_bfloat16_twin)
def from_bfloat16(bits: Array, values: Array) -> None:
    """Put the float32 that bfloat16 are, given as 16 bits in uint16, into `values`."""
    for i in range(bits.size):
        values[i] = _widen_bfloat16(bits[i])


def _both(row_0: Array, row_1: Array, part: Any) -> None:
    """Put the sum of two rows, or half of it, into both."""
    # Halves of narrow numbers are exact in float32, and their sum does not overflow.
    for i in range(row_0.size):
        value = narrow(widen(row_0[i]) * part + widen(row_1[i]) * part)
        row_0[i] = value
        row_1[i] = value


def _widen_row(row: Array, wide_row: Array) -> None:
    for i in range(row.size):
        wide_row[i] = widen(row[i])


def _narrow_row(wide_row: Array, row: Array) -> None:
    for i in range(row.size):
        row[i] = narrow(wide_row[i])


def _sum_tiles(rows: Array, start: int, stop: int, factors: Array, divisor: Array) -> None:
    """Do as `mpistrat.kernels.loops.sum_rows`, of the bits of narrow numbers, into all rows."""
    denominator, count = divisor[0], rows.shape[0]
    ones = only_ones(factors)
    is_mean = denominator != 0 and denominator != 1
    wide_rows, total = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32)
    is_pair = count == 2 and ones and (denominator == 1 or denominator == 2)
    part = np.float32(1) / denominator
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        size = high - low
        if is_pair:
            both_rows(rows[0, low:high], rows[1, low:high], part)
            continue
        for r in range(count):
            if factors[r] != 0:
                widen_row(rows[r, low:high], wide_rows[r, :size])
        if is_mean:
            if average(wide_rows, 0, size, factors, denominator, total[:size]):
                make_anew(wide_rows, 0, factors, denominator, total[:size])
        else:
            add_up(wide_rows, 0, size, factors, False, total[:size])
            if denominator != 1:
                divide(total[:size], denominator)
        narrow_row(total[:size], rows[0, low:high])
        for r in range(1, count):
            copy(rows[0, low:high], rows[r, low:high])


def _loop(widen: jit.Kernel[..., Any], narrow: jit.Kernel[..., Any]) -> jit.Kernel[..., None]:
    return jit.driver(
        _sum_tiles,
        both_rows=jit.driver(_both, widen=widen, narrow=narrow),
        widen_row=jit.driver(_widen_row, widen=widen),
        narrow_row=jit.driver(_narrow_row, narrow=narrow),
    )


_of_halves = _loop(float_of_half, half_of_float)
_of_bfloat16 = _loop(_widen_bfloat16, _narrow_bfloat16)


def reduce_narrow(
    ufunc: Callable[..., Any],
    rows: Array,
    start: int,
    stop: int,
    scales: Array | None,
    divisor: float,
    compiled: bool,
) -> None:
    """Reduce columns of all rows into all rows; see `mpistrat.kernels.rows.reduce_rows`.

    Args:
      ufunc: As there.
      rows: As there, of float16 or bfloat16.
      start: As there.
      stop: As there.
      scales: What to multiply each row by, in float32; None for all ones.
      divisor: As there.
      compiled: By the loop, if there is one for this dtype on this processor.
    """
    half = rows.dtype.kind == "f"
    if compiled and jit.compiling() and (not half or jit.converts_halves()):
        factors = np.ones(len(rows), _WIDE_DTYPE) if scales is None else scales
        bits = rows.view(np.uint16)
        loop = _of_halves if half else _of_bfloat16
        loop(bits, start, stop, factors, np.array([divisor], _WIDE_DTYPE))
        return
    total = np.empty((1, min(BLOCK, stop - start)), _WIDE_DTYPE)
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        with np.errstate(all="ignore"):
            wide_rows = rows[:, low:high].astype(_WIDE_DTYPE)
            reduce_blocks(ufunc, wide_rows, total[:, : high - low], scales, divisor)
            rows[:, low:high] = total[:, : high - low].astype(rows.dtype)
