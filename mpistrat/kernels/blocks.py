"""Folds of the rows of a matrix by NumPy, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpistrat.kernels.scaling import Overflow, divide, noting, rescue, scale_into

__all__ = ["BLOCK", "fold_blocks"]

Array: TypeAlias = NDArray[Any]

BLOCK = 65536  # elements folded at once: calls of NumPy cost more than its loops


def fold_blocks(
    fold: Callable[..., Any],
    rows: Array,
    out: Array,
    start: int,
    stop: int,
    scales: Array | None,
    divisor: float,
    inside: bool = False,
) -> None:
    """Fold columns of all rows by NumPy; see `mpistrat.kernels.fold.fold_rows`.

    Args:
      fold: As there.
      rows: As there.
      out: As there.
      start: As there.
      stop: As there.
      scales: As there.
      divisor: As there.
      inside: `out` is `rows`, or begins where it does.
    """
    mean = divisor != 0.0 and (scales is not None or divisor != 1.0)
    # A mean is made beside the values, which may be needed again; else in the first row that goes
    # out, which may be the first that comes in: that is read first.
    room = np.empty(min(BLOCK, stop - start) if inside and mean else 0, rows.dtype)
    spare = np.empty(min(BLOCK, stop - start) if scales is not None else 0, rows.dtype)
    overflow = Overflow()
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        given = rows[:, low:high]
        total = room[: high - low] if room.size else out[0, low:high]
        with noting(overflow if mean else None):
            _fold_block(fold, given, total, spare[: high - low], scales)
            if divisor != 1.0:
                divide(total, divisor)
        if overflow.seen:
            overflow.seen = False
            with np.errstate(all="ignore"):
                rescue(total, list(given), scales, divisor)
        for r in range(0 if room.size else 1, len(out)):
            out[r, low:high] = total


def _fold_block(
    fold: Callable[..., Any], rows: Array, total: Array, part: Array, scales: Array | None
) -> None:
    if scales is not None:
        scale_into(rows[0], scales[0], total)
        for row, factor in zip(rows[1:], scales[1:], strict=True):
            fold(total, scale_into(row, factor, part), out=total)
        return
    if len(rows) > 1:
        fold(rows[0], rows[1], out=total)
    else:
        total[:] = rows[0]
    for row in rows[2:]:
        fold(total, row, out=total)
