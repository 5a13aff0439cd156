"""Reductions of the rows of a matrix into each other: what an all-reduce is, in shared memory.

Row r holds the values of rank r; each rank reduces its own slice of columns, in rank order, so the
result has the same bits whoever computed it and however the columns are cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.kernels.blocks import BLOCK, reduce_blocks, sum_partly
from mpistrat.kernels.loops import TILE, sum_rows
from mpistrat.kernels.narrow import is_narrow, reduce_narrow
from mpistrat.kernels.scaling import factors_of
from mpistrat.kernels.threads import Team

# From here on a slice is worth a compiler, if none has run yet.
_COMPILE = 1 << 18
# A part of this many is worth a thread: it takes 0.1 ms, and to hand it over 0.02 to 0.04.
_PART = 1 << 19
_COMPILED = frozenset(map(np.dtype, ("f4", "f8", "i4", "i8", "u4", "u8")))
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
    scales: Array | None = None,
    divisor: float = 1.0,
    whole: int | None = None,
    team: Team | None = None,
    ready: bool = False,
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
      scales: What to multiply each row by; a row of 0 is never read. None for all ones.
      divisor: What to divide the result by. By another than 1 it is a mean, and where its sum
        overflows, it is made from values that are scaled down before.
      whole: How many columns all ranks together reduce in this call; these alone if None. Equal on
        all ranks, which may cut differently: loops give a NaN that comes of two another payload
        than NumPy.
      team: The threads that take part if the slice is large; None for this one alone.
      ready: The loop for this dtype is compiled, so what is less takes it too. Equal on all ranks.
      shift: The column of `rows` that is the first of `out`.

    Cost: One pass over the slice of all rows. New dtypes compile for a second or two, once per
      cache on disk; what is less than 256 Ki columns as a whole does not wait for it, and goes
      by NumPy in several passes: with scales in 16, 32, 63 microseconds for two rows of 32, 64, 128
      Ki float32, and in 8, 13, 25 by the loop if it is `ready`.
    """
    count = stop - start if whole is None else whole
    if team is not None and stop - start >= 2 * _PART:
        arguments = (scales, divisor, count, None, ready, shift)
        _divided(team, lambda a, b: reduce_rows(ufunc, rows, out, a, b, *arguments), start, stop)
        return
    if stop <= start:
        return
    if scales is not None and set(scales.tolist()) == {1.0}:
        scales = None
    dtype = rows.dtype
    if is_narrow(dtype):
        table = None if scales is None else factors_of(scales, np.dtype(np.float32))
        compiled = ufunc is np.add and (ready or compiles(ufunc, dtype, count))
        reduce_narrow(ufunc, rows, start, stop, table, divisor, compiled)
        return
    is_sum = scales is None and divisor == 1.0
    compiled = (is_sum or dtype.kind == "f") and (ready or compiles(ufunc, dtype, count))
    is_in_place = out is rows or np.may_share_memory(out, rows)
    if ufunc is np.add and compiled:
        if (like := _SIGNED_DTYPES.get(dtype)) is not None:
            rows, out, dtype = rows.view(like), out.view(like), like
        # To multiply by 1 changes no number, and takes no time beside that of memory.
        factors = np.ones(len(rows), dtype) if scales is None else factors_of(scales, dtype)
        sum_rows(rows, out, start, stop, factors, np.array([divisor], dtype), shift, is_in_place)
    else:
        columns, target = rows[:, start:stop], out[:, start - shift : stop - shift]
        reduce_blocks(ufunc, columns, target, scales, divisor, is_in_place)


def sum_between(
    rows: Array, out: Array, start: int, stop: int, power: float, team: Team | None = None
) -> None:
    """Add columns of all rows for a mean of several nodes; see `sum_partly` for what is kept.

    With a `team`, its threads take part if the slice is large.

    Cost: As that of `sum_partly`.
    """
    if team is not None and stop - start >= 2 * _PART:
        _divided(team, lambda low, high: sum_partly(rows, out, low, high, power), start, stop)
    else:
        sum_partly(rows, out, start, stop, power)


def _divided(team: Team, work: Callable[[int, int], None], start: int, stop: int) -> None:
    """Let the team do slices of these columns; elements are reduced alike in any of them.

    They meet at whole tiles from the start on. So what a loop does with its last few elements, of
    which a NaN of two or a product of complex numbers may show something, it does to the same ones
    whatever the number of threads.
    """
    columns = stop - start
    team.run(lambda a, b: work(start + a, start + b), 0, columns, columns // _PART, TILE)


def compiles(ufunc: Callable[..., Any], dtype: np.dtype[Any], columns: int) -> bool:
    """Tell whether reducing so many columns of this dtype is worth a compiler."""
    has_loop = dtype in _COMPILED or is_narrow(dtype)
    return ufunc is np.add and columns >= _COMPILE and has_loop


@functools.cache
def _compiled_for(dtype: np.dtype[Any]) -> None:
    dtype = _SIGNED_DTYPES.get(dtype, dtype)
    rows = np.zeros((2, 1), dtype)
    if is_narrow(dtype):
        reduce_narrow(np.add, rows, 0, 1, None, 1.0, True)
    else:
        sum_rows(rows, rows, 0, 1, np.ones(2, dtype), np.ones(1, dtype), 0, True)


def compile_for(dtype: np.dtype[Any], columns: int) -> None:
    """Compile what reducing so many columns by addition needs, if it is not there yet.

    Cost: A second or two per dtype, once per cache on disk; nothing for small slices.
    """
    if compiles(np.add, dtype, columns):
        _compiled_for(dtype)


def spread_rows(rows: Array, source: int, start: int, stop: int, team: Team | None = None) -> None:
    """Copy columns `start` to `stop` of row `source` to all rows.

    With a `team`, its threads take part if the slice is large.

    Cost: One pass over the slice.
    """
    if team is not None and stop - start >= 2 * _PART:
        _divided(team, functools.partial(spread_rows, rows, source), start, stop)
        return
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        for r in range(len(rows)):
            if r != source:
                rows[r, low:high] = rows[source, low:high]
