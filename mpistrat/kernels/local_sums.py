"""Sums of one rank over some axes of an array, with the number of elements in each.

`local_sum` sorts the axes by stride and merges neighbours where it can, so that every memory layout
becomes a short list of loops over one flat view, read in the order of memory and never copied. One
kernel runs any such list: a block of totals that fits the fastest cache takes in whole rows of the
input. The totals are independent, so the processor adds several at once without reordering a sum.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpistrat.arrays import Array
from mpistrat.kernels import jit
from mpistrat.kernels.threads import Team

_TILE = 1024  # totals per block; with their carries 16 KiB, about half of a first-level cache
_LANES = 512  # partial totals side by side, where one output has a long run of its own
_PANEL = 64  # elements that an inner loop should have to be worth its start
_THREAD_NBYTES = 1 << 20  # bytes that are worth a thread: to hand them over takes 0.02 to 0.04 ms
_WIDE_OUTPUTS = 1 << 16  # outputs that NumPy's sum holds in the wide dtype at once


def local_sum(
    x: Array, axes: tuple[int, ...], dtype: np.dtype[Any], team: Team | None = None
) -> tuple[Array, int]:
    """Return the sums of an array over some of its axes, and the number of elements in each.

    Replaces ``x.sum(axes, dtype=wide).astype(dtype)`` and a product of sizes. Measured on 4 million
    elements (``benchmarks/local_sum.py``, times NumPy's speed): contiguous float32 1 to 9.5 and
    int32 0.9 to 16, most on few columns; float64, which pays for its accuracy, 0.4 to 3.5; strided
    columns 0.4 to 1.5. A tiny array takes 4 microseconds instead of 2. Two threads on 2 cores take
    0.53 to 0.57 of the time of one, for 4 and 16 million float32.

    Floating-point input is added in float64 (complex by component) with a compensation of rounding
    errors, so a result is about as exact as the sum rounded once, over any axis; NumPy's is
    pairwise along one axis only. Integers are added in int64 or uint64 and wrap into `dtype` as in
    NumPy; with a floating `dtype` they are added as float64 and nothing wraps. NaN and infinities
    come out as from NumPy, without its warnings. An empty sum is 0.

    NumPy's own sum, which converts in small blocks, is used for longdouble, for float16, bfloat16
    and their kin (added in float64), for foreign byte order, for memory not aligned to its type,
    and for everything where `mpistrat.kernels.jit` does not compile: last bits may differ.

    Args:
      x: Array of any shape and memory layout, never written; no bool, object or text.
      axes: Axes to sum over: distinct, none negative; may be empty, which converts only.
      dtype: Of the result. Complex input needs a complex one.
      team: The threads that take part if `x` is large; None for this one alone. Each sum is made
        by one thread, in the same order with any number of them.

    Returns:
      The sums, a new C-ordered array of `dtype` over the axes that are left (0-d if none is); and
      how many elements are in each, the product of the sizes of `axes`.

    Cost: One pass over `x`, no copy of it, 20 KiB beside the result (1 MiB through NumPy's own
      sum). New dtypes compile for a second or two, once per cache on disk.

    Example:
      >>> total, count = local_sum(np.ones((5, 3), np.float32), (0,), np.dtype(np.float32))
      >>> total, count
      (array([5., 5., 5.], dtype=float32), 5)
    """
    x = np.asarray(x)
    count = math.prod([x.shape[axis] for axis in axes])
    if not axes:
        with np.errstate(all="ignore"):
            return np.array(x, dtype=dtype, order="C"), count
    out = np.zeros([size for axis, size in enumerate(x.shape) if axis not in axes], dtype)
    if x.size == 0:
        return out, count
    sum_dtype, component_count = _choose_sum_type(x.dtype, out.dtype)
    whole_steps = x.flags.forc or not any([step % x.itemsize for step in x.strides])
    if component_count and x.flags.aligned and whole_steps:
        steps = tuple([step // x.itemsize for step in x.strides])
        _flat_sum(x, _make_plan(x.shape, steps, axes, component_count), sum_dtype, out, team)
    else:
        _numpy_sum(x, axes, sum_dtype, out)
    return out, count


@functools.cache
def _choose_sum_type(
    input_dtype: np.dtype[Any], output_dtype: np.dtype[Any]
) -> tuple[np.dtype[Any], int]:
    """Return the dtype to add in, and the numbers per element, or 0 if the kernel cannot do it."""
    kinds, chars = input_dtype.kind + output_dtype.kind, input_dtype.char + output_dtype.char
    native = input_dtype.isnative and output_dtype.isnative
    if "g" in chars.lower():  # longdouble or clongdouble
        return np.dtype(np.clongdouble if "c" in kinds else np.longdouble), 0
    if input_dtype.kind == "c":
        return np.dtype(np.complex128), 2 if native and output_dtype.kind == "c" else 0
    if input_dtype.kind in "iu" and output_dtype.kind in "iu":
        return np.dtype(np.int64 if input_dtype.kind == "i" else np.uint64), int(native)
    is_real = (input_dtype.char in "fd" or input_dtype.kind in "iu") and output_dtype.char in "fd"
    return np.dtype(np.float64), int(native and is_real)


def _numpy_sum(x: Array, axes: tuple[int, ...], sum_dtype: np.dtype[Any], out: Array) -> None:
    """Write the sums of `x` into `out`, added in `sum_dtype`, with bounded memory beside `out`."""
    with np.errstate(all="ignore"):
        if out.size <= _WIDE_OUTPUTS:
            # Not sum(out=out): a narrow `out` would round each partial sum that NumPy parks in it.
            # As an array, also of one number: a number that `out` does not hold would be an error.
            out[...] = np.asarray(x.sum(axis=axes, dtype=sum_dtype))
            return
    longest = int(np.argmax(out.shape))
    longest_axis = [axis for axis in range(x.ndim) if axis not in axes][longest]
    for half in (slice(out.shape[longest] // 2), slice(out.shape[longest] // 2, None)):
        source, target = (
            x[(slice(None),) * longest_axis + (half,)],
            out[(slice(None),) * longest + (half,)],
        )
        _numpy_sum(source, axes, sum_dtype, target)


def _flat_sum(
    x: Array, plan: _Plan, sum_dtype: np.dtype[Any], out: Array, team: Team | None
) -> None:
    """Describe `x` and `out` as flat memory and loops, and run the kernel on them."""
    if x.flags.forc:
        values = x.ravel(order="K")  # a view, made faster than the general one
        values.flags.writeable = False  # as below: the kernel is compiled for this kind of array
    else:
        values = as_strided(x[plan.forward], (plan.extent,), (x.itemsize,), writeable=False)
    target = out.reshape(-1)
    if plan.component_count == 2:
        values, target = values.view(values.real.dtype), target.view(target.real.dtype)
        sum_dtype = np.dtype(np.float64)
    elif sum_dtype.kind == "u" and target.itemsize <= values.itemsize:
        # Such sums wrap alike with a sign and without, so one loop does for both.
        values, target = (array.view(f"i{array.itemsize}") for array in (values, target))
        sum_dtype = np.dtype(np.int64)
    tiles = plan.tiles
    # NumPy's order within a sum may depend on what is beside it, so its work is not divided.
    if team is not None and tiles > 1 and x.nbytes >= 2 * _THREAD_NBYTES and jit.is_compiling():
        add_tiles = functools.partial(
            _add_tiles, elements=values, plan=plan, sum_dtype=sum_dtype, target=target
        )
        team.run(add_tiles, 0, tiles, x.nbytes // _THREAD_NBYTES)
        return
    scratch = np.empty((2, _TILE), sum_dtype)
    _add_loops(values, plan.loops, plan.sums_start, scratch, target, plan.start, 0, tiles)


def _add_tiles(
    low: int, high: int, *, elements: Array, plan: _Plan, sum_dtype: np.dtype[Any], target: Array
) -> None:
    """Do a part of the work in one thread, which needs totals of its own."""
    scratch = np.empty((2, _TILE), sum_dtype)
    _add_loops(elements, plan.loops, plan.sums_start, scratch, target, plan.start, low, high)


class _Loop(NamedTuple):
    """One loop: how often, and how far each turn moves in the input and in the output."""

    size: int
    step: int  # in the flat input, never negative
    output_step: int  # in the flat output; 0 for a loop that sums


_SINGLE_TURN = _Loop(1, 0, 0)


class _Plan(NamedTuple):
    """How to walk the memory of an array."""

    forward: tuple[slice, ...]  # the index that turns axes of negative stride round
    extent: int  # elements from the lowest to the highest address
    loops: Array  # a row per `_Loop`: inner kept one, inner sum, kept ones, sums
    sums_start: int  # the row where the outer sums begin
    start: int  # where in the output the first element of the flat input belongs
    tiles: int  # how many blocks of totals there are
    component_count: int  # numbers per element: 2 for complex ones


@functools.lru_cache(maxsize=512)
def _make_plan(
    shape: tuple[int, ...], steps: tuple[int, ...], axes: tuple[int, ...], component_count: int
) -> _Plan:
    """Turn shape and strides (in elements) into loops; `shape` has no 0."""
    forward = tuple([slice(None, None, -1 if step < 0 else 1) for step in steps])
    extent = 1 + sum((size - 1) * abs(step) for size, step in zip(shape, steps, strict=True))
    loops = [_Loop(component_count, 1, 1)] if component_count > 1 else []
    start, to = 0, component_count
    for axis in reversed(range(len(shape))):
        size, step = shape[axis], steps[axis] * component_count
        move, to = (0, to) if axis in axes else (to, to * size)
        if step < 0:
            start, step, move = start + (size - 1) * move, -step, -move
        if size > 1:
            loops.append(_Loop(size, step, move))
    merged = _merge_loops(sorted(loops, key=lambda loop: -loop.step))
    column, row = _choose_inner_loops(merged)
    for inner_loop in {column, row} - {_SINGLE_TURN}:
        merged.remove(inner_loop)  # one only: overlapping windows have equal loops
    keeps, sums = (
        [loop for loop in merged if loop.output_step],
        [loop for loop in merged if not loop.output_step],
    )
    table = np.array([column, row, *keeps, *sums], np.int64)
    table.flags.writeable = False  # it is shared by the calls to come
    tiles = math.prod([loop.size for loop in keeps]) * -(-column.size // _TILE)
    return _Plan(forward, extent, table, 2 + len(keeps), start, tiles, component_count)


def _merge_loops(loops: list[_Loop]) -> list[_Loop]:
    """Join each loop with the next one in where the two together move evenly."""
    merged: list[_Loop] = []
    for size, step, to in loops:
        if merged and merged[-1][1:] == (size * step, size * to):
            size *= merged.pop().size
        merged.append(_Loop(size, step, to))
    return merged


def _choose_inner_loops(loops: list[_Loop]) -> tuple[_Loop, _Loop]:
    """Choose the kept loop and the sum that run innermost; each may be a loop of one turn.

    The two are the longest of the innermost kept loops and of the innermost sums, so that memory is
    read in order; only where they are tiny (a sum over pairs) longer ones further out take over.
    """
    runs = itertools.groupby(reversed(loops), key=lambda loop: loop.output_step == 0)
    longest = [max(run, key=lambda loop: loop.size) for _, run in runs]
    keeps = [loop for loop in longest if loop.output_step] or [_SINGLE_TURN]
    sums = [loop for loop in longest if not loop.output_step] or [_SINGLE_TURN]
    column, row = keeps[0], sums[0]
    if row in longest[:1] and row.size >= _PANEL:
        return _SINGLE_TURN, row
    if column.size * row.size < _PANEL:
        column = max(keeps)
    return column, row if column.size * row.size >= _PANEL else max(sums)


def _add_loops_reference(
    elements: Array,
    loops: Array,
    sums_start: int,
    scratch: Array,
    out: Array,
    start: int,
    low: int,
    high: int,
) -> None:
    """Rebuild the strided arrays that the loops stand for, and let NumPy sum; always all tiles."""
    keeps = [0, *range(2, sums_start)]
    x = as_strided(elements, loops[:, 0], loops[:, 1] * elements.itemsize, writeable=False)
    target = as_strided(out[start:], loops[keeps, 0], loops[keeps, 2] * out.itemsize)
    _numpy_sum(x, (1, *range(sums_start, len(loops))), scratch.dtype, target)


@jit.helper
def _offsets_at(turn: int, loops: Array, first: int, last: int) -> tuple[int, int]:
    """Return the offsets in input and output at one turn of the loops `first` to `last`."""
    at, to = 0, 0
    for k in range(last - 1, first - 1, -1):
        i = turn % loops[k, 0]
        turn //= loops[k, 0]
        at += i * loops[k, 1]
        to += i * loops[k, 2]
    return at, to


@jit.helper
def _add_compensated(totals: Array, carries: Array, i: int, value: float) -> None:
    """Add a number to a total, and the rounding error to its carry (Knuth's two-sum)."""
    old_total = totals[i]
    addend = totals.dtype.type(value)
    new_total = old_total + addend
    rounded_addend = new_total - old_total
    carries[i] += (old_total - (new_total - rounded_addend)) + (addend - rounded_addend)
    totals[i] = new_total


@jit.helper
def _add_row(elements: Array, at: int, step: int, size: int, totals: Array, carries: Array) -> None:
    """Add elements `step` apart to the first totals, one each."""
    if step == 1:  # apart, as only this loop turns into vector instructions
        row = elements[at : at + size]
        for i in range(size):
            _add_compensated(totals, carries, i, row[i])
    else:
        for i in range(size):
            _add_compensated(totals, carries, i, elements[at + i * step])


@jit.helper
def _add_panel(
    elements: Array, at: int, loops: Array, lanes: int, width: int, totals: Array, carries: Array
) -> None:
    """Add all rows of the inner sum, `lanes` of them at a time side by side."""
    rows, row_step = loops[1, 0], loops[1, 1]
    step = row_step if width == 1 else loops[0, 1]
    even = width == 1 or row_step == width * step  # side by side is one long row
    for first in range(0, rows, lanes):
        lane_count = min(lanes, rows - first)
        position = at + first * row_step
        if even or lanes == 1:
            _add_row(elements, position, step, lane_count * width, totals, carries)
            continue
        for i in range(lane_count):
            for j in range(width):
                _add_compensated(
                    totals, carries, i * width + j, elements[position + i * row_step + j * step]
                )


@jit.helper
def _add_lanes(lanes: int, width: int, totals: Array, carries: Array) -> None:
    """Add the lanes up into the first one, half of them at a time."""
    while lanes > 1:
        remaining_lanes = (lanes + 1) // 2
        size = (lanes - remaining_lanes) * width
        _add_row(totals, remaining_lanes * width, 1, size, totals, carries)
        for i in range(size):
            carries[i] += carries[remaining_lanes * width + i]
        lanes = remaining_lanes


@jit.kernel(_add_loops_reference)
def _add_loops(
    elements: Array,
    loops: Array,
    sums_start: int,
    scratch: Array,
    out: Array,
    start: int,
    low: int,
    high: int,
) -> None:
    """Sum flat memory along the loops of a `_Plan`, tiles `low` to `high` of its outputs.

    It adds in the dtype of `scratch`. Tiles are the same whoever makes them, and so are the sums.
    """
    columns, column_step, column_to = loops[0, 0], loops[0, 1], loops[0, 2]
    totals, carries = scratch[0], scratch[1]
    blocks = (columns + _TILE - 1) // _TILE
    for tile in range(low, high):
        at, to = _offsets_at(tile // blocks, loops, 2, sums_start)
        first = tile % blocks * _TILE
        width = min(_TILE, columns - first)
        # A narrow block takes several rows side by side, if there are enough to pay for that.
        lanes = max(1, min(_LANES // width, loops[1, 0] // 8))
        totals[: lanes * width] = 0
        carries[: lanes * width] = 0
        for outer in range(loops[sums_start:, 0].prod()):
            position = (
                at + first * column_step + _offsets_at(outer, loops, sums_start, len(loops))[0]
            )
            _add_panel(elements, position, loops, lanes, width, totals, carries)
        _add_lanes(lanes, width, totals, carries)
        for i in range(width):
            # The carry of an infinite total is NaN, from inf - inf, and means nothing.
            total = totals[i] + carries[i] if np.isfinite(carries[i]) else totals[i]
            out[start + to + (first + i) * column_to] = total
