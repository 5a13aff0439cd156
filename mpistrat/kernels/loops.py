"""Loops that reduce the rows of a matrix: by NumPy, block by block, and compiled, tile by tile.

`reduce_blocks` uses NumPy, for every ufunc. `sum_rows` is the compiled sum or mean: one pass over
memory. `mpistrat.kernels.rows` chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.kernels import jit
from mpistrat.kernels.elementwise import (
    Overflow,
    as_real,
    divide,
    recompute_means_of_rows,
    scale_into,
    sum_scaled_down,
)

BLOCK = 65536  # elements reduced at once: calls of NumPy cost more than its loops


def reduce_blocks(
    ufunc: Callable[..., Any],
    rows: Array,
    out: Array,
    scales: Array | None,
    divisor: float,
    *,
    is_in_place: bool = False,
) -> None:
    """Reduce all rows by NumPy; see `mpistrat.kernels.rows.reduce_rows`.

    Args:
      ufunc: As there.
      rows: A matrix whose rows are contiguous.
      out: Rows that take the result, of as many columns.
      scales: As there.
      divisor: As there.
      is_in_place: `out` is in the memory of `rows`.
    """
    size = rows.shape[1]
    mean = divisor not in (0.0, 1.0)
    # A mean is made beside the values, which may be needed again; else in the first row that goes
    # out, which may be the first that comes in: that is read first.
    mean_block = np.empty(min(BLOCK, size) if is_in_place and mean else 0, rows.dtype)
    scaled_block = np.empty(min(BLOCK, size) if scales is not None else 0, rows.dtype)
    overflow = Overflow()
    for low in range(0, size, BLOCK):
        high = min(low + BLOCK, size)
        block = rows[:, low:high]
        total = mean_block[: high - low] if mean_block.size else out[0, low:high]
        context = overflow.quiet() if mean else quiet()
        scaled_row = scaled_block[: high - low]
        context.run(_reduce_block, ufunc, block, total, scaled_row, scales=scales, divisor=divisor)
        if overflow.reports:
            overflow.reports.clear()
            with np.errstate(all="ignore"):
                recompute_means_of_rows(total, list(block), scales, divisor)
        for r in range(0 if mean_block.size else 1, len(out)):
            out[r, low:high] = total


def _reduce_block(
    ufunc: Callable[..., Any],
    rows: Array,
    total: Array,
    scaled_row: Array,
    *,
    scales: Array | None,
    divisor: float,
) -> None:
    if scales is not None:
        scale_into(rows[0], scales[0], total)
        for row, factor in zip(rows[1:], scales[1:], strict=True):
            ufunc(total, scale_into(row, factor, scaled_row), out=total)
    else:
        fold_rows(ufunc, rows, total)
    if divisor != 1.0:
        divide(total, divisor)


def fold_rows(ufunc: Callable[..., Any], rows: Sequence[Array] | Array, total: Array) -> None:
    """Reduce rows in their order into `total`, which may be the memory of the first."""
    if len(rows) > 1:
        ufunc(rows[0], rows[1], out=total)
    else:
        total[:] = rows[0]
    for row in rows[2:]:
        ufunc(total, row, out=total)


def sum_partly(rows: Array, out: Array, start: int, stop: int, power: float) -> None:
    """Add columns `start` to `stop` of all rows, for a sum that other nodes take part in.

    Values whose sum overflows are lost where the sum is written over them. So where a sum is not
    finite, the sum of the values times `power` goes to the second row, which is not needed any
    more.

    Args:
      rows: C-ordered matrix of floating or complex numbers, one row for each rank.
      out: C-ordered matrix, to whose first row the sums go; may be in the memory of `rows`.
      start: The first column.
      stop: The column after the last.
      power: A power of two, so that no such sum overflows.

    Cost: One pass over the slice of all rows; each block is looked at while it is in cache.
    """
    block_totals = np.empty(min(BLOCK, max(0, stop - start)), rows.dtype)
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        block, total = rows[:, low:high], block_totals[: high - low]
        with np.errstate(all="ignore"):
            fold_rows(np.add, block, total)
            if len(rows) > 1 and not np.isfinite(total).all():
                overflow_indices = np.flatnonzero(~np.isfinite(as_real(total)))
                as_real(block[1])[overflow_indices] = sum_scaled_down(
                    list(block), None, power, overflow_indices
                )
        out[0, low:high] = total


TILE = 2048  # elements reduced at once; of float64 16 KiB, half of a first-level cache


def _sum_rows_reference(
    rows: Array,
    out: Array,
    start: int,
    stop: int,
    factors: Array,
    divisor: Array,
    shift: int,
    is_in_place: bool,
) -> None:
    columns, target = rows[:, start:stop], out[:, start - shift : stop - shift]
    scales = None if (factors == 1).all() else factors
    reduce_blocks(np.add, columns, target, scales, float(divisor[0]), is_in_place=is_in_place)


# Numba compiles the texts of the errors of ``total[:] = row``, which take it 7 s; this loop is the
# same machine code without them. So is `are_all_ones` for ``(factors == 1).all()``, 1 s.


@jit.helper
def copy_row(row: Array, total: Array) -> None:
    """Copy a row to an array of the same size."""
    for i in range(row.size):
        total[i] = row[i]


@jit.helper
def are_all_ones(factors: Array) -> bool:
    """Tell whether all factors are 1."""
    ones = True
    for i in range(factors.size):
        ones &= factors[i] == 1
    return ones


@jit.helper
def _scale_row(total: Array, factor: float) -> None:
    if factor == 0:
        for i in range(total.size):
            total[i] = 0
    elif factor != 1:
        for i in range(total.size):
            total[i] *= factor


@jit.helper
def _add_row(row: Array, factor: float, total: Array) -> None:
    if factor == 0:
        for i in range(row.size):
            total[i] += 0
    else:
        for i in range(row.size):
            total[i] += row[i] * factor


@jit.helper
def _sum_pair(row_0: Array, row_1: Array, factors: Array, total: Array) -> None:
    first, second = factors[0], factors[1]
    for i in range(total.size):
        total[i] = row_0[i] * first + row_1[i] * second


# Means also return whether any number is not finite. Within the loop that makes them this takes no
# time; it is a branch that would.


@jit.helper
def divide_tile(total: Array, denominator: float) -> bool:
    """Divide in place; return whether any quotient is not finite."""
    has_nonfinite = False
    for i in range(total.size):
        value = total[i] / denominator
        total[i] = value
        has_nonfinite |= value - value != 0
    return has_nonfinite


@jit.helper
def _average_pair(
    row_0: Array, row_1: Array, factors: Array, denominator: float, total: Array
) -> bool:
    first, second = factors[0], factors[1]
    has_nonfinite = False
    for i in range(total.size):
        value = (row_0[i] * first + row_1[i] * second) / denominator
        total[i] = value
        has_nonfinite |= value - value != 0
    return has_nonfinite


@jit.helper
def _add_last_row(row: Array, factor: float, denominator: float, total: Array) -> bool:
    has_nonfinite = False
    if factor == 0:
        _add_row(row, factor, total)
        has_nonfinite = divide_tile(total, denominator)
    else:
        for i in range(total.size):
            value = (total[i] + row[i] * factor) / denominator
            total[i] = value
            has_nonfinite |= value - value != 0
    return has_nonfinite


# Both sums are written while both rows pass: in turns it takes twice as long (3.4, 8.4 ms).


@jit.helper
def _sum_into_both(row_0: Array, row_1: Array, factors: Array) -> None:
    first, second = factors[0], factors[1]
    for i in range(row_0.size):
        total = row_0[i] * first + row_1[i] * second
        row_0[i] = total
        row_1[i] = total


@jit.helper
def _average_into_both(row_0: Array, row_1: Array, half: float) -> None:
    # Where the sum overflows, the sum of the halves is taken: as `recompute_nonfinite` does,
    # without a branch.
    for i in range(row_0.size):
        total, low = (row_0[i] + row_1[i]) * half, row_0[i] * half + row_1[i] * half
        mean = low if total - total != 0 else total
        row_0[i] = mean
        row_1[i] = mean


@jit.helper
def _copy_to_both(total: Array, row_0: Array, row_1: Array) -> None:
    for i in range(total.size):
        row_0[i] = total[i]
        row_1[i] = total[i]


@jit.helper
def recompute_nonfinite(
    rows: Array, low: int, factors: Array, denominator: float, total: Array
) -> None:
    """Recompute a tile as `recompute_nonfinite_means` does; each element is made alike."""
    size, power = 1, factors.dtype.type(1)
    while size <= rows.shape[0] and are_all_ones(factors):  # others are less than 1 together
        size, power = size * 2, power * factors.dtype.type(0.5)
    for i in range(total.size):
        if total[i] - total[i] == 0:
            continue
        mean, largest = power * 0, power * 0
        for r in range(rows.shape[0]):
            if factors[r] != 0:
                value = rows[r, low + i]
                mean += value * (factors[r] * power)
                largest = max(largest, abs(value))
        mean /= denominator * power
        if np.isinf(mean) and largest - largest == 0:
            mean = largest if mean > 0 else -largest
        total[i] = mean


@jit.helper
def average_tile(
    rows: Array, low: int, high: int, factors: Array, denominator: float, total: Array
) -> bool:
    """Make a tile of the mean, which is not one of the rows; return whether any is not finite."""
    count = rows.shape[0]
    if count > 1 and factors[0] != 0 and factors[1] != 0:
        if count == 2:
            return _average_pair(rows[0, low:high], rows[1, low:high], factors, denominator, total)
        _sum_pair(rows[0, low:high], rows[1, low:high], factors, total)
        row_count = 2
    else:
        copy_row(rows[0, low:high], total)
        _scale_row(total, factors[0])
        row_count = 1
    for r in range(row_count, count - 1):
        _add_row(rows[r, low:high], factors[r], total)
    if row_count == count:
        return divide_tile(total, denominator)
    return _add_last_row(rows[count - 1, low:high], factors[count - 1], denominator, total)


@jit.helper
def add_tile(
    rows: Array, low: int, high: int, factors: Array, is_in_place: bool, total: Array
) -> None:
    """Make a tile of the sum, which is the first row if `is_in_place`."""
    row_count = 1
    if not is_in_place and rows.shape[0] > 1 and factors[0] != 0 and factors[1] != 0:
        _sum_pair(rows[0, low:high], rows[1, low:high], factors, total)
        row_count = 2
    else:
        if not is_in_place:
            copy_row(rows[0, low:high], total)
        _scale_row(total, factors[0])
    for r in range(row_count, rows.shape[0]):
        _add_row(rows[r, low:high], factors[r], total)


@jit.helper
def _copy_to_rows(total: Array, out: Array, first: int, at: int) -> None:
    """Copy a tile to the rows of `out` from `first` on, to columns from `at` on; two at once."""
    end = at + total.size
    for r in range(first, out.shape[0] - 1, 2):
        _copy_to_both(total, out[r, at:end], out[r + 1, at:end])
    if (out.shape[0] - first) % 2:
        copy_row(total, out[out.shape[0] - 1, at:end])


@jit.kernel(_sum_rows_reference)
def sum_rows(
    rows: Array,
    out: Array,
    start: int,
    stop: int,
    factors: Array,
    divisor: Array,
    shift: int,
    is_in_place: bool,
) -> None:
    """Add columns `start` to `stop` of all rows, for loops that continue with the sums.

    Args:
      rows: C-ordered matrix of floats or integers, one row for each rank.
      out: C-ordered matrix of the same dtype; column `c` of a sum goes to column ``c - shift``.
      start: The first column.
      stop: The column after the last.
      factors: The factor of each row, in its dtype; a row with factor 0 is never read.
      divisor: One number of the same dtype, by which sums are divided.
      shift: The column of `rows` that is the first of `out`.
      is_in_place: Whether `out` is `rows`.
    """
    denominator, count = divisor[0], rows.shape[0]
    ones = are_all_ones(factors)
    is_mean = denominator != 0 and denominator != 1
    are_both_read = count > 1 and factors[0] != 0 and factors[1] != 0
    is_pair = are_both_read and is_in_place and count == out.shape[0] == 2
    # A mean that is divided by 1 is a sum, also with weights: where it overflows it stays infinite.
    is_sum, half = is_pair and denominator == 1, factors.dtype.type(0.5)
    halves = is_pair and ones and denominator == 2
    # The values of a mean may be needed again, so it is made beside them, in the fastest cache.
    needs_room = is_mean and is_in_place and not is_sum and not halves
    tile = TILE // 2 if needs_room else TILE
    tile_totals = np.empty(tile if needs_room else 0, rows.dtype)
    for low in range(start, stop, tile):
        high = min(low + tile, stop)
        # Slices, not indices into the matrix, and no slice twice: only so are loops vector code.
        if is_sum:
            _sum_into_both(rows[0, low:high], rows[1, low:high], factors)
            continue
        if halves:
            _average_into_both(rows[0, low:high], rows[1, low:high], half)
            continue
        total = tile_totals[: high - low] if needs_room else out[0, low - shift : high - shift]
        if is_mean:
            if average_tile(rows, low, high, factors, denominator, total):
                recompute_nonfinite(rows, low, factors, denominator, total)
        else:
            add_tile(rows, low, high, factors, is_in_place, total)
            if denominator != 1:
                divide_tile(total, denominator)
        _copy_to_rows(total, out, 0 if needs_room else 1, low - shift)
