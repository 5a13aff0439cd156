"""Reductions of the rows of a matrix by NumPy, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.kernels.scaling import (
    Overflow,
    divide,
    low_sum,
    real,
    rescue_rows,
    scale_into,
)

BLOCK = 65536  # elements reduced at once: calls of NumPy cost more than its loops


def reduce_blocks(
    ufunc: Callable[..., Any],
    rows: Array,
    out: Array,
    scales: Array | None,
    divisor: float,
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
    room = np.empty(min(BLOCK, size) if is_in_place and mean else 0, rows.dtype)
    spare = np.empty(min(BLOCK, size) if scales is not None else 0, rows.dtype)
    overflow = Overflow()
    for low in range(0, size, BLOCK):
        high = min(low + BLOCK, size)
        block = rows[:, low:high]
        total = room[: high - low] if room.size else out[0, low:high]
        context = overflow.quiet() if mean else quiet()
        context.run(_reduce_block, ufunc, block, total, spare[: high - low], scales, divisor)
        if overflow.seen:
            overflow.seen.clear()
            with np.errstate(all="ignore"):
                rescue_rows(total, list(block), scales, divisor)
        for r in range(0 if room.size else 1, len(out)):
            out[r, low:high] = total


def _reduce_block(
    ufunc: Callable[..., Any],
    rows: Array,
    total: Array,
    part: Array,
    scales: Array | None,
    divisor: float,
) -> None:
    if scales is not None:
        scale_into(rows[0], scales[0], total)
        for row, factor in zip(rows[1:], scales[1:], strict=True):
            ufunc(total, scale_into(row, factor, part), out=total)
    else:
        fold(ufunc, rows, total)
    if divisor != 1.0:
        divide(total, divisor)


def fold(ufunc: Callable[..., Any], rows: Sequence[Array] | Array, total: Array) -> None:
    """Reduce rows in their order into `total`, which may be the memory of the first."""
    if len(rows) > 1:
        ufunc(rows[0], rows[1], out=total)
    else:
        total[:] = rows[0]
    for row in rows[2:]:
        ufunc(total, row, out=total)


def sum_partly(rows: Array, out: Array, start: int, stop: int, power: float) -> None:
    """Add columns `start` to `stop` of all rows, for a sum that other nodes take part in.

    Values whose sum overflows are lost where it is written over them. So where a sum is not finite,
    the sum of the values times `power` goes to the second row, which is not needed any more.

    Args:
      rows: C-ordered matrix of floating or complex numbers, one row for each rank.
      out: C-ordered matrix, to whose first row the sums go; may be in the memory of `rows`.
      start: The first column.
      stop: The column after the last.
      power: A power of two, so that no such sum overflows.

    Cost: One pass over the slice of all rows; each block is looked at while it is in cache.
    """
    room = np.empty(min(BLOCK, max(0, stop - start)), rows.dtype)
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        block, total = rows[:, low:high], room[: high - low]
        with np.errstate(all="ignore"):
            fold(np.add, block, total)
            if len(rows) > 1 and not np.isfinite(total).all():
                overflow_indices = np.flatnonzero(~np.isfinite(real(total)))
                real(block[1])[overflow_indices] = low_sum(
                    list(block), None, power, overflow_indices
                )
        out[0, low:high] = total
