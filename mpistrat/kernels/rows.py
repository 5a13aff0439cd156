"""Reductions of the rows of a matrix into each other: an all-reduce in shared memory.

Row r holds the values of rank r; each rank reduces its own slice of columns, in rank order, so the
result has the same bits whichever rank computed it and however the columns are cut.

float16 and bfloat16 are read narrow, added in float32 in rank order, and rounded once. Numbers are
widened in registers, tile by tile, so half as many bytes as with float32 pass through memory.
bfloat16 is the upper half of a float32: shifts of integers, and an addition that rounds to the
nearest, ties to even; a NaN becomes that of ``ml_dtypes``. float16 is converted by the processor's
own instruction (F16C on x86, every 64-bit Arm). Without it, or without Numba, NumPy converts, which
takes some ten times as long; the bits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.kernels import jit
from mpistrat.kernels.elementwise import factors_of
from mpistrat.kernels.loops import (
    BLOCK,
    TILE,
    add_tile,
    are_all_ones,
    average_tile,
    copy_row,
    divide_tile,
    recompute_nonfinite,
    reduce_blocks,
    sum_partly,
    sum_rows,
)
from mpistrat.kernels.threads import Team

if TYPE_CHECKING:
    widen: Any = None  # which of the two it is, put in by `jit.driver`
    narrow: Any = None
    sum_scaled_into_both: Any = None
    widen_row: Any = None
    narrow_row: Any = None

_WIDE_DTYPE = np.dtype(np.float32)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Tell whether numbers of that dtype are added in float32: float16 and bfloat16."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")


@jit.cast
def float_of_bits(bits: np.uint32) -> Any:
    """Return the float32 of these 32 bits."""
    return bits.view(np.float32)


@jit.cast
def bits_of_float(value: np.float32) -> Any:
    """Return the 32 bits of a float32."""
    return value.view(np.uint32)


@jit.cast
def float_of_half(bits: np.uint16) -> Any:
    """Return the float32 of the 16 bits of a half."""
    return np.float32(bits.view(np.float16))


@jit.cast
def half_of_float(value: np.float32) -> Any:
    """Return the 16 bits of the half that is nearest."""
    return np.float16(value).view(np.uint16)


@jit.helper
def _widen_bfloat16(bits: np.uint16) -> Any:
    return float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@jit.helper
def _narrow_bfloat16(value: np.float32) -> Any:
    bits = bits_of_float(value)
    high = np.uint32(bits >> np.uint32(16))
    even = np.uint32(high & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + even) >> np.uint32(16)
    missing = np.uint32(np.uint32(high & np.uint32(0x8000)) | np.uint32(0x7FC0))
    return np.uint16(missing if value != value else rounded)


def _to_bfloat16_reference(floats: Array, factor: np.float32, bits: Array) -> None:
    for low in range(0, floats.size, BLOCK):
        products = floats[low : low + BLOCK] * factor
        wide_bits = products.view(np.uint32)
        high = wide_bits >> 16
        rounded = (wide_bits + (high & 1) + 0x7FFF) >> 16
        np.copyto(rounded, high & 0x8000 | 0x7FC0, where=np.isnan(products))
        bits[low : low + BLOCK] = rounded


@jit.kernel(_to_bfloat16_reference)
def to_bfloat16(floats: Array, factor: np.float32, bits: Array) -> None:
    """Round float32 times a float32 to bfloat16, to nearest, ties to even: 16 bits in uint16."""
    for i in range(floats.size):
        bits[i] = _narrow_bfloat16(floats[i] * factor)


def _from_bfloat16_reference(bits: Array, floats: Array) -> None:
    np.left_shift(bits, 16, out=floats.view(np.uint32), dtype=np.uint32)


@jit.kernel(_from_bfloat16_reference)
def from_bfloat16(bits: Array, floats: Array) -> None:
    """Put the float32 that bfloat16 are, given as 16 bits in uint16, into `floats`."""
    for i in range(bits.size):
        floats[i] = _widen_bfloat16(bits[i])


def _sum_scaled_into_both(row_0: Array, row_1: Array, factor: float) -> None:
    """Put the sum of two rows, or half of it, into both."""
    # Halves of narrow numbers are exact in float32, and their sum does not overflow.
    for i in range(row_0.size):
        value = narrow(widen(row_0[i]) * factor + widen(row_1[i]) * factor)
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
    ones = are_all_ones(factors)
    is_mean = denominator != 0 and denominator != 1
    wide_rows, total = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32)
    is_pair = count == 2 and ones and (denominator == 1 or denominator == 2)
    part = np.float32(1) / denominator
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        size = high - low
        if is_pair:
            sum_scaled_into_both(rows[0, low:high], rows[1, low:high], part)
            continue
        for r in range(count):
            if factors[r] != 0:
                widen_row(rows[r, low:high], wide_rows[r, :size])
        if is_mean:
            if average_tile(wide_rows, 0, size, factors, denominator, total[:size]):
                recompute_nonfinite(wide_rows, 0, factors, denominator, total[:size])
        else:
            add_tile(wide_rows, 0, size, factors, False, total[:size])
            if denominator != 1:
                divide_tile(total[:size], denominator)
        narrow_row(total[:size], rows[0, low:high])
        for r in range(1, count):
            copy_row(rows[0, low:high], rows[r, low:high])


def _make_narrow_loop(
    widen: jit.Kernel[..., Any], narrow: jit.Kernel[..., Any]
) -> jit.Kernel[..., None]:
    return jit.driver(
        _sum_tiles,
        sum_scaled_into_both=jit.driver(_sum_scaled_into_both, widen=widen, narrow=narrow),
        widen_row=jit.driver(_widen_row, widen=widen),
        narrow_row=jit.driver(_narrow_row, narrow=narrow),
    )


_sum_halves = _make_narrow_loop(float_of_half, half_of_float)
_sum_bfloat16 = _make_narrow_loop(_widen_bfloat16, _narrow_bfloat16)


def reduce_narrow(
    ufunc: Callable[..., Any],
    rows: Array,
    start: int,
    stop: int,
    *,
    scales: Array | None,
    divisor: float,
    uses_loop: bool,
) -> None:
    """Reduce columns of all rows into all rows; see `mpistrat.kernels.rows.reduce_rows`.

    Args:
      ufunc: As there.
      rows: As there, of float16 or bfloat16.
      start: As there.
      stop: As there.
      scales: The factor of each row, in float32; None for all ones.
      divisor: As there.
      uses_loop: Use the loop, if there is one for this dtype on this processor.
    """
    half = rows.dtype.kind == "f"
    if uses_loop and jit.is_compiling() and (not half or jit.converts_halves()):
        factors = np.ones(len(rows), _WIDE_DTYPE) if scales is None else scales
        bits = rows.view(np.uint16)
        loop = _sum_halves if half else _sum_bfloat16
        loop(bits, start, stop, factors, np.array([divisor], _WIDE_DTYPE))
        return
    total = np.empty((1, min(BLOCK, stop - start)), _WIDE_DTYPE)
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        with np.errstate(all="ignore"):
            wide_rows = rows[:, low:high].astype(_WIDE_DTYPE)
            reduce_blocks(ufunc, wide_rows, total[:, : high - low], scales, divisor)
            rows[:, low:high] = total[:, : high - low].astype(rows.dtype)


# From here on a slice is worth a compiler, if none has run yet.
_MIN_COMPILED_COLUMNS = 1 << 18
# A part of this many is worth a thread: it takes 0.1 ms, and to hand it over 0.02 to 0.04.
_MIN_PART_COLUMNS = 1 << 19
_COMPILED_DTYPES = frozenset(map(np.dtype, ("f4", "f8", "i4", "i8", "u4", "u8")))
# Sums of integers wrap alike with a sign and without, so one loop does for both.
_SIGNED_DTYPES: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype("u4"): np.dtype("i4"),
    np.dtype("u8"): np.dtype("i8"),
}


def reduce_rows(
    ufunc: Callable[..., Any],
    rows: Array,
    out: Array,
    start: int,
    stop: int,
    *,
    scales: Array | None = None,
    divisor: float = 1.0,
    total_columns: int | None = None,
    team: Team | None = None,
    is_compiled: bool = False,
    shift: int = 0,
) -> None:
    """Reduce columns `start` to `stop` of all rows, and write the result to the rows of `out`.

    Replaces k - 1 calls of ``np.add`` and k of ``np.copyto`` by one pass that reads and writes each
    element once. Measured on 25.6 million float32 in two rows, each of two processes one half:
    6.9 ms, which is what their memory allows; 10.7 ms a copy of one row, 36 ms by ``MPI_Allreduce``
    in place. Two threads of one process instead of one, on 2 cores: 7.4 and 11.0 ms.

    Args:
      ufunc: ``np.add``, ``np.multiply``, ``np.minimum`` or ``np.maximum``.
      rows: C-ordered matrix, one row for each rank.
      out: C-ordered matrix of the same dtype and number of columns, which may be `rows` itself, or
        its first rows; of float16 and bfloat16, which are reduced in float32, it is `rows`.
      start: The first column.
      stop: The column after the last.
      scales: A factor of each row; a row of 0 is never read. None for all ones.
      divisor: The divisor of the result. With another than 1 it is a mean, and where its sum
        overflows, it is made from values that are scaled down before.
      total_columns: How many columns all ranks together reduce in this call; these alone if None.
        Equal on all ranks, which may cut differently: of two NaNs a loop may keep another payload
        than NumPy.
      team: The threads that take part if the slice is large; None for this one alone.
      is_compiled: The loop for this dtype is compiled, so smaller slices take it too. Equal on all
        ranks.
      shift: The column of `rows` that is the first of `out`.

    Cost: One pass over the slice of all rows. New dtypes compile for a second or two, once per
      cache on disk; reductions of less than 256 Ki columns in all do not wait for it, and go by
      NumPy in several passes: with scales in 16, 32, 63 microseconds for two rows of 32, 64, 128 Ki
      float32, and in 8, 13, 25 by the loop if `is_compiled`.
    """
    count = stop - start if total_columns is None else total_columns
    if team is not None and stop - start >= 2 * _MIN_PART_COLUMNS:
        reduce_slice = functools.partial(reduce_rows, ufunc, rows, out, scales=scales, shift=shift)
        shared = functools.partial(reduce_slice, divisor=divisor, total_columns=count)
        _run_divided(team, functools.partial(shared, is_compiled=is_compiled), start, stop)
        return
    if stop <= start:
        return
    if scales is not None and set(scales.tolist()) == {1.0}:
        scales = None
    dtype = rows.dtype
    uses_loop = ufunc is np.add and (is_compiled or is_worth_compiling(ufunc, dtype, count))
    if is_narrow(dtype):
        table = None if scales is None else factors_of(scales, np.dtype(np.float32))
        reduce_narrow(ufunc, rows, start, stop, scales=table, divisor=divisor, uses_loop=uses_loop)
        return
    is_in_place = out is rows or np.may_share_memory(out, rows)
    if uses_loop and (dtype.kind == "f" or (scales is None and divisor == 1.0)):
        if (like := _SIGNED_DTYPES.get(dtype)) is not None:
            rows, out, dtype = rows.view(like), out.view(like), like
        # To multiply by 1 changes no number, and takes no time beside that of memory.
        factors = np.ones(len(rows), dtype) if scales is None else factors_of(scales, dtype)
        sum_rows(rows, out, start, stop, factors, np.array([divisor], dtype), shift, is_in_place)
    else:
        columns, target = rows[:, start:stop], out[:, start - shift : stop - shift]
        reduce_blocks(ufunc, columns, target, scales, divisor, is_in_place=is_in_place)


def sum_between(
    rows: Array, out: Array, start: int, stop: int, power: float, *, team: Team | None = None
) -> None:
    """Add columns of all rows for a mean of several nodes, as `sum_partly` does.

    With a `team`, its threads take part if the slice is large.

    Cost: As that of `sum_partly`.
    """
    if team is not None and stop - start >= 2 * _MIN_PART_COLUMNS:
        _run_divided(team, lambda low, high: sum_partly(rows, out, low, high, power), start, stop)
    else:
        sum_partly(rows, out, start, stop, power)


def _run_divided(team: Team, run_part: Callable[[int, int], None], start: int, stop: int) -> None:
    """Let the team do slices of these columns; elements are reduced alike in any of them.

    They meet at whole tiles from the start on. A loop may treat its last few elements differently,
    which NaNs of two numbers and products of complex numbers can show; so these are the same
    elements whatever the number of threads.
    """
    columns = stop - start
    team.run(
        lambda a, b: run_part(start + a, start + b), 0, columns, columns // _MIN_PART_COLUMNS, TILE
    )


def is_worth_compiling(ufunc: Callable[..., Any], dtype: np.dtype[Any], columns: int) -> bool:
    """Tell whether reducing so many columns of this dtype is worth a compiler."""
    has_loop = dtype in _COMPILED_DTYPES or is_narrow(dtype)
    return ufunc is np.add and columns >= _MIN_COMPILED_COLUMNS and has_loop


@functools.cache
def _compile_loop(dtype: np.dtype[Any]) -> None:
    dtype = _SIGNED_DTYPES.get(dtype, dtype)
    rows = np.zeros((2, 1), dtype)
    if is_narrow(dtype):
        reduce_narrow(np.add, rows, 0, 1, scales=None, divisor=1.0, uses_loop=True)
    else:
        sum_rows(rows, rows, 0, 1, np.ones(2, dtype), np.ones(1, dtype), 0, True)


def compile_for(dtype: np.dtype[Any], columns: int) -> None:
    """Compile what reducing so many columns by addition needs, if it is not there yet.

    Cost: A second or two per dtype, once per cache on disk; nothing for small slices.
    """
    if is_worth_compiling(np.add, dtype, columns):
        _compile_loop(dtype)


def spread_rows(
    rows: Array, source_row: int, start: int, stop: int, team: Team | None = None
) -> None:
    """Copy columns `start` to `stop` of row `source_row` to all rows.

    With a `team`, its threads take part if the slice is large.

    Cost: One pass over the slice.
    """
    if team is not None and stop - start >= 2 * _MIN_PART_COLUMNS:
        _run_divided(team, functools.partial(spread_rows, rows, source_row), start, stop)
        return
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        for r in range(len(rows)):
            if r != source_row:
                rows[r, low:high] = rows[source_row, low:high]
