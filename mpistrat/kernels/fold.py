"""Folds of the rows of a matrix into each other: what an all-reduce is, in shared memory.

Row r holds the values of rank r; each rank folds its own slice of columns, in rank order, so the
result has the same bits whoever computed it and however the columns are cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpistrat.kernels import jit
from mpistrat.kernels.blocks import BLOCK, fold_blocks
from mpistrat.kernels.scaling import factors_of
from mpistrat.kernels.threads import Team

__all__ = ["compile_for", "compiles", "fold_pair", "fold_rows", "spread_rows", "sum_rows"]

Array: TypeAlias = NDArray[Any]

_TILE = 2048  # elements folded at once; of float64 16 KiB, half of a first-level cache
# From here on a slice is worth a compiler, if none has run yet.
_COMPILE = 1 << 18
# A part of this many is worth a thread: it takes 0.1 ms, and to hand it over 0.02 to 0.04.
_PART = 1 << 19
_COMPILED = frozenset(map(np.dtype, ("f4", "f8", "i4", "i8", "u4", "u8")))


def fold_rows(
    fold: Callable[..., Any],
    rows: Array,
    out: Array,
    start: int,
    stop: int,
    scales: Array | None = None,
    divisor: float = 1.0,
    whole: int | None = None,
    team: Team | None = None,
    ready: bool = False,
) -> None:
    """Fold columns `start` to `stop` of all rows, and write the result to the rows of `out`.

    Replaces k - 1 calls of ``np.add`` and k of ``np.copyto`` by one pass that reads and writes each
    element once. Measured on 25.6 million float32 in two rows, each of two processes one half:
    6.9 ms, which is what their memory allows; 10.7 ms a copy of one row, 36 ms by ``MPI_Allreduce``
    in place. Two threads of one process instead of one, on 2 cores: 7.4 and 11.0 ms.

    Args:
      fold: ``np.add``, ``np.multiply``, ``np.minimum`` or ``np.maximum``.
      rows: C-ordered matrix, one row for each rank.
      out: C-ordered matrix of the same dtype and number of columns, which may be `rows` itself.
      start: The first column.
      stop: The column after the last.
      scales: What to multiply each row by; a row of 0 is never read. None for all ones.
      divisor: What to divide the result by. With one, or with scales, it is a mean, and where its
        sum overflows, it is made from values that are scaled down before.
      whole: How many columns all ranks together fold in this call; these alone if None.
      team: The threads that take part if the slice is large; None for this one alone.
      ready: The loop for this dtype is compiled, so what is less takes it too. Equal on all ranks.

    Cost: One pass over the slice of all rows. New dtypes compile for a second or two, once per
      cache on disk; what is less than 256 Ki columns as a whole does not wait for it, and goes
      by NumPy in several passes: with scales in 16, 32, 63 microseconds for two rows of 32, 64, 128
      Ki float32, and in 8, 13, 25 by the loop if it is `ready`.
    """
    count = stop - start if whole is None else whole
    if team is not None and stop - start >= 2 * _PART:

        def part(low: int, high: int) -> None:
            fold_rows(fold, rows, out, low, high, scales, divisor, count, ready=ready)

        _divided(team, part, start, stop)
        return
    if stop <= start:
        return
    if _ones(scales):
        scales = None
    dtype = rows.dtype
    plain = scales is None and divisor == 1.0
    compiled = (plain or dtype.kind == "f") and (ready or compiles(fold, dtype, count))
    if fold is np.add and compiled:
        inside = out.ctypes.data == rows.ctypes.data
        # To multiply by 1 changes no number, and takes no time beside that of memory.
        factors = np.ones(len(rows), dtype) if scales is None else factors_of(scales, dtype)
        sum_rows(rows, out, start, stop, factors, np.array([divisor], dtype), 0, inside)
    else:
        fold_blocks(fold, rows, out, start, stop, scales, divisor, out is rows)


def _divided(team: Team, work: Callable[[int, int], None], start: int, stop: int) -> None:
    """Let the team do slices of these columns; elements are folded alike in any of them.

    They meet at whole tiles from the start on. So what a loop does with its last few elements, of
    which a NaN of two or a product of complex numbers may show something, it does to the same ones
    whatever the number of threads.
    """
    columns = stop - start
    team.run(lambda a, b: work(start + a, start + b), 0, columns, columns // _PART, _TILE)


def fold_pair(
    fold: Callable[..., Any],
    rows: Array,
    start: int,
    stop: int,
    out: Array,
    scales: Array | None = None,
    divisor: float = 1.0,
    whole: int | None = None,
    team: Team | None = None,
    ready: bool = False,
) -> None:
    """Fold columns `start` to `stop` of two rows into a flat array.

    Replaces, for two ranks, a fold of one half of the columns and a copy of all: instead of 3.5
    times the bytes of a row, 3 times pass through memory.

    Args:
      fold: As in `fold_rows`.
      rows: C-ordered matrix of two rows.
      start: The first column.
      stop: The column after the last.
      out: Where the result goes; of ``stop - start`` elements and the same dtype, contiguous.
      scales: As in `fold_rows`.
      divisor: As in `fold_rows`.
      whole: As in `fold_rows`. Equal on all ranks, which may cut differently: loops give a NaN
        that comes of two another payload than NumPy.
      team: As in `fold_rows`.
      ready: As in `fold_rows`.

    Cost: One pass over the columns.
    """
    count = stop - start if whole is None else whole
    if team is not None and stop - start >= 2 * _PART:

        def part(low: int, high: int) -> None:
            into = out[low - start : high - start]
            fold_pair(fold, rows, low, high, into, scales, divisor, count, ready=ready)

        _divided(team, part, start, stop)
        return
    one, two = rows[0, start:stop], rows[1, start:stop]
    plain = _ones(scales)
    compiled = ready or compiles(fold, rows.dtype, count)
    if plain and divisor == 1.0:
        with np.errstate(all="ignore"):
            fold(one, two, out=out)
    elif rows.dtype.kind == "f" and fold is np.add and compiled:
        factors = np.ones(2, rows.dtype) if scales is None else factors_of(scales, rows.dtype)
        by = np.array([divisor], rows.dtype)
        sum_rows(rows, out[None], start, stop, factors, by, start, False)
    else:
        table = None if plain else scales
        fold_blocks(fold, rows[:, start:stop], out[None], 0, stop - start, table, divisor)


def _ones(scales: Array | None) -> bool:
    return scales is None or set(scales.tolist()) == {1.0}


def compiles(fold: Callable[..., Any], dtype: np.dtype[Any], columns: int) -> bool:
    """Tell whether folding so many columns of this dtype is worth a compiler."""
    return fold is np.add and columns >= _COMPILE and dtype in _COMPILED


@functools.cache
def _compiled_for(dtype: np.dtype[Any]) -> None:
    rows = np.zeros((2, 1), dtype)
    sum_rows(rows, rows, 0, 1, np.ones(2, dtype), np.ones(1, dtype), 0, True)


def compile_for(dtype: np.dtype[Any], columns: int) -> None:
    """Compile what folding so many columns by addition needs, if it is not there yet.

    Cost: A second or two per dtype, once per cache on disk; nothing for small slices.
    """
    if compiles(np.add, dtype, columns):
        _compiled_for(dtype)


def _sum_rows_twin(
    rows: Array,
    out: Array,
    start: int,
    stop: int,
    factors: Array,
    divisor: Array,
    shift: int,
    inside: bool,
) -> None:
    given, into = rows[:, start:stop], out[:, start - shift : stop - shift]
    scales = None if _ones(factors) else factors
    fold_blocks(np.add, given, into, 0, stop - start, scales, float(divisor[0]), inside)


@jit.helper
def _scale(total: Array, factor: Any) -> None:
    if factor == 0:
        for i in range(total.size):
            total[i] = 0
    elif factor != 1:
        for i in range(total.size):
            total[i] *= factor


@jit.helper
def _add(row: Array, factor: Any, total: Array) -> None:
    if factor == 0:
        for i in range(row.size):
            total[i] += 0
    else:
        for i in range(row.size):
            total[i] += row[i] * factor


@jit.helper
def _sum_two(one: Array, two: Array, factors: Array, total: Array) -> None:
    first, second = factors[0], factors[1]
    for i in range(total.size):
        total[i] = one[i] * first + two[i] * second


# Means also tell whether any number is not finite. Within the loop that makes them this takes no
# time; it is a branch that would.


@jit.helper
def _divide(total: Array, by: Any) -> bool:
    bad = False
    if by == 1:
        for i in range(total.size):
            bad |= total[i] - total[i] != 0
    else:
        for i in range(total.size):
            value = total[i] / by
            total[i] = value
            bad |= value - value != 0
    return bad


@jit.helper
def _mean_two(one: Array, two: Array, factors: Array, by: Any, total: Array) -> bool:
    first, second = factors[0], factors[1]
    bad = False
    if by == 1:
        for i in range(total.size):
            value = one[i] * first + two[i] * second
            total[i] = value
            bad |= value - value != 0
    else:
        for i in range(total.size):
            value = (one[i] * first + two[i] * second) / by
            total[i] = value
            bad |= value - value != 0
    return bad


@jit.helper
def _add_last(row: Array, factor: Any, by: Any, total: Array) -> bool:
    bad = False
    if factor == 0:
        _add(row, factor, total)
        bad = _divide(total, by)
    elif by == 1:
        for i in range(total.size):
            value = total[i] + row[i] * factor
            total[i] = value
            bad |= value - value != 0
    else:
        for i in range(total.size):
            value = (total[i] + row[i] * factor) / by
            total[i] = value
            bad |= value - value != 0
    return bad


# Both sums are written while both rows pass: in turns it takes twice as long (3.4, 8.4 ms).


@jit.helper
def _add_both(one: Array, two: Array, factors: Array) -> None:
    first, second = factors[0], factors[1]
    for i in range(one.size):
        total = one[i] * first + two[i] * second
        one[i] = total
        two[i] = total


@jit.helper
def _halve_both(one: Array, two: Array, half: Any) -> None:
    # What overflows is the sum of the halves: what `_rescue` makes, and no branch.
    for i in range(one.size):
        total, low = (one[i] + two[i]) * half, one[i] * half + two[i] * half
        mean = low if total - total != 0 else total
        one[i] = mean
        two[i] = mean


@jit.helper
def _put_both(total: Array, one: Array, two: Array) -> None:
    for i in range(total.size):
        one[i] = total[i]
        two[i] = total[i]


@jit.helper
def _rescue(rows: Array, low: int, factors: Array, by: Any, total: Array) -> None:
    """Do as `mpistrat.kernels.scaling.rescue`; each element is made alike."""
    size, power = 1, factors.dtype.type(1)
    while size <= rows.shape[0] and (factors == 1).all():  # others are no more than 1 together
        size, power = size * 2, power * factors.dtype.type(0.5)
    for i in range(total.size):
        if total[i] - total[i] == 0:
            continue
        found, most = power * 0, power * 0
        for r in range(rows.shape[0]):
            if factors[r] != 0:
                value = rows[r, low + i]
                found += value * (factors[r] * power)
                most = max(most, abs(value))
        found /= by * power
        if np.isinf(found) and most - most == 0:
            found = most if found > 0 else -most
        total[i] = found


@jit.helper
def _mean(rows: Array, low: int, high: int, factors: Array, by: Any, total: Array) -> bool:
    """Make a tile of the mean, which is none of the rows; tell whether any is not finite."""
    count = rows.shape[0]
    if count > 1 and factors[0] != 0 and factors[1] != 0:
        if count == 2:
            return _mean_two(rows[0, low:high], rows[1, low:high], factors, by, total)
        _sum_two(rows[0, low:high], rows[1, low:high], factors, total)
        done = 2
    else:
        total[:] = rows[0, low:high]
        _scale(total, factors[0])
        done = 1
    for r in range(done, count - 1):
        _add(rows[r, low:high], factors[r], total)
    if done == count:
        return _divide(total, by)
    return _add_last(rows[count - 1, low:high], factors[count - 1], by, total)


@jit.helper
def _sum(rows: Array, low: int, high: int, factors: Array, inside: bool, total: Array) -> None:
    """Make a tile of the sum; `inside`, it is the first row."""
    done = 1
    if not inside and rows.shape[0] > 1 and factors[0] != 0 and factors[1] != 0:
        _sum_two(rows[0, low:high], rows[1, low:high], factors, total)
        done = 2
    else:
        if not inside:
            total[:] = rows[0, low:high]
        _scale(total, factors[0])
    for r in range(done, rows.shape[0]):
        _add(rows[r, low:high], factors[r], total)


@jit.kernel(_sum_rows_twin)
def sum_rows(
    rows: Array,
    out: Array,
    start: int,
    stop: int,
    factors: Array,
    divisor: Array,
    shift: int,
    inside: bool,
) -> None:
    """Add columns `start` to `stop` of all rows, for loops that go on with the sums.

    Args:
      rows: C-ordered matrix of floats or integers, one row for each rank.
      out: C-ordered matrix of the same dtype; column `c` of a sum goes to column ``c - shift``.
      start: The first column.
      stop: The column after the last.
      factors: What to multiply each row by, in its dtype; a row of 0 is never read.
      divisor: One number of the same dtype, by which sums are divided.
      shift: The column of `rows` that is the first of `out`.
      inside: Whether `out` is `rows`.
    """
    by, count = divisor[0], rows.shape[0]
    ones = (factors == 1).all()
    mean = by != 0 and (by != 1 or not ones)
    read = count > 1 and factors[0] != 0 and factors[1] != 0
    both = read and inside and count == out.shape[0] == 2
    # Weights are no more than 1 together.
    plain, half = both and by == 1, factors.dtype.type(0.5)
    halves = both and ones and by == 2
    # The values of a mean may be needed again, so it is made beside them, in the fastest cache.
    beside = mean and inside and not plain and not halves
    tile = _TILE // 2 if beside else _TILE
    room = np.empty(tile if beside else 0, rows.dtype)
    for low in range(start, stop, tile):
        high = min(low + tile, stop)
        # Slices, not indices into the matrix, and no slice twice: only so are loops vector code.
        if plain:
            _add_both(rows[0, low:high], rows[1, low:high], factors)
            continue
        if halves:
            _halve_both(rows[0, low:high], rows[1, low:high], half)
            continue
        total = room[: high - low] if beside else out[0, low - shift : high - shift]
        if mean:
            bad = _mean(rows, low, high, factors, by, total)
            if bad:
                _rescue(rows, low, factors, by, total)
        else:
            _sum(rows, low, high, factors, inside, total)
            if by != 1:
                _divide(total, by)
        first = 0 if beside else 1
        for r in range(first, out.shape[0] - 1, 2):
            _put_both(
                total, out[r, low - shift : high - shift], out[r + 1, low - shift : high - shift]
            )
        if (out.shape[0] - first) % 2:
            place = out[out.shape[0] - 1, low - shift : high - shift]
            for i in range(high - low):
                place[i] = total[i]


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
