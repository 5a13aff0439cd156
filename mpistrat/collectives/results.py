"""The memory that the results of an all-reduce are written to, allocated before the handshake."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.lib import array_utils

from mpistrat.arrays import Array
from mpistrat.collectives.layout import Bucket
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.shm.segments import ResultPool

# Smaller results of a bucket share one piece of memory, since allocating each costs as much as
# copying it. A larger one has its own, so that keeping it keeps nothing else.
_OWN_MEMORY_NBYTES = 64 * 1024


_Copy: TypeAlias = tuple[int, int, Array]  # columns of a bucket, and their destination


@final
class Results:
    """The results of one all-reduce, leaf by leaf.

    Args:
      arrays: The memory of each result.
      copies: The columns that are copied from each bucket, and their destinations.
    """

    def __init__(self, arrays: list[Array], copies: list[list[_Copy]]):
        """Create it; nothing is written yet."""
        self.arrays, self._copies = arrays, copies

    def copy_out(self, bucket_index: int, row: Array) -> None:
        """Copy the results of bucket `bucket_index` out of `row`."""
        for start, stop, destination in self._copies[bucket_index]:
            np.copyto(destination, row[start:stop], casting="unsafe")


def _find_byte_bounds(array: Array) -> tuple[int, int]:
    return array_utils.byte_bounds(array) if array.size else (0, 0)


def _has_harmful_overlap(values: Sequence[Array], outs: Sequence[Array]) -> bool:
    """Return whether writing an `out` may change a value that is read later, or another `out`.

    Each leaf may be its own `out`; any other overlap counts.
    """
    spans = []
    for value, out in zip(values, outs, strict=True):
        out_bounds = _find_byte_bounds(out)
        spans.append(out_bounds)
        if value is not out:
            value_bounds = _find_byte_bounds(value)
            if value_bounds != out_bounds or not value.flags.c_contiguous:
                spans.append(value_bounds)
    spans.sort()
    return any(low < end for (_, end), (low, _) in itertools.pairwise(spans) if end)


def _select_small_leaves(plan: ReductionPlan, bucket: Bucket) -> set[int]:
    """Return the leaves whose results share one piece of memory with others of their bucket."""
    return {
        piece.leaf_index
        for piece in bucket.pieces
        if piece.is_whole
        and piece.stop * bucket.dtype.itemsize < _OWN_MEMORY_NBYTES
        and plan.dtypes[piece.leaf_index].result == bucket.dtype
    }


def _place_small_leaves(
    plan: ReductionPlan, bucket: Bucket, arrays: list[Array | None]
) -> list[_Copy]:
    """Put small leaves in one array, and return the copies from the bucket to it."""
    leaves = _select_small_leaves(plan, bucket)
    pieces = [piece for piece in bucket.pieces if piece.leaf_index in leaves]
    flat = np.empty(sum(piece.stop for piece in pieces), bucket.dtype)
    copies: list[_Copy] = []
    at = begin = 0
    for i, piece in enumerate(pieces):
        end = at + piece.stop
        arrays[piece.leaf_index] = flat[at:end].reshape(plan.shapes[piece.leaf_index])
        column = piece.column + piece.stop
        is_last = i + 1 == len(pieces) or pieces[i + 1].column != column
        if is_last:  # neighbours are copied at once
            copies.append((column - (end - begin), column, flat[begin:end]))
            begin = end
        at = end
    return copies


def allocate_results(
    plan: ReductionPlan,
    values: Sequence[Array],
    outs: Sequence[Array] | None,
    pool: ResultPool,
    reads_values_late: bool = False,
) -> Results:
    """Return the memory of the results: `outs` if possible, else memory of the pool.

    Args:
      plan: The plan.
      values: The leaves.
      outs: The arrays that the caller wants to be written, or None.
      pool: The source of fresh memory.
      reads_values_late: Whether values are still read when the first results are written, even if
        there is one bucket only.
    """
    if (
        outs is not None
        and (reads_values_late or len(plan.buckets) > 1)
        and _has_harmful_overlap(values, outs)
    ):
        outs = None  # the caller copies them, when all values have been read
    arrays: list[Array | None] = [None] * len(plan.dtypes)
    if outs is not None:
        # A matrix stays one, whatever it is reshaped to. Unaligned arrays are filled by a copy.
        arrays = [np.asarray(out) if out.flags.carray else None for out in outs]
        copies: list[list[_Copy]] = [[] for _ in plan.buckets]
    else:
        copies = [_place_small_leaves(plan, bucket, arrays) for bucket in plan.buckets]
    finished_leaves = {
        leaf for leaf, array in enumerate(arrays) if array is not None and outs is None
    }
    result_arrays = [
        pool.empty(plan.shapes[leaf], dtypes.result) if array is None else array
        for leaf, (array, dtypes) in enumerate(zip(arrays, plan.dtypes, strict=True))
    ]
    for bucket, bucket_copies in zip(plan.buckets, copies, strict=True):
        for leaf, start, stop, column, _ in bucket.pieces:
            if leaf not in finished_leaves:
                destination = result_arrays[leaf].reshape(-1)[start:stop]
                bucket_copies.append((column, column + stop - start, destination))
    return Results(result_arrays, copies)


def copy_single_rank_values(
    values: Sequence[Array],
    outs: Sequence[Array] | None,
    dtypes: Sequence[np.dtype[Any]],
    pool: ResultPool,
) -> list[Array]:
    """Return the results of a reduction over one rank: its values, in `outs` or as fresh arrays.

    Args:
      values: The leaves.
      outs: The arrays to be written, of the results' dtypes; None for fresh ones. A leaf that is
        its own `out` does not change.
      dtypes: The dtypes of the results.
      pool: The source of fresh memory.

    Cost: one copy; nothing in place.
    """
    if outs is None or _has_harmful_overlap(values, outs):
        copies = [pool.empty(v.shape, d) for v, d in zip(values, dtypes, strict=True)]
        for copy, value in zip(copies, values, strict=True):
            copy[...] = value
        values = copies
    return write_outs(list(values), outs)


def write_outs(results: list[Any], outs: Sequence[Array] | None) -> list[Any]:
    """Return the results, in `outs` if they are given."""
    if outs is None or outs is results:
        return results
    for out, result in zip(outs, results, strict=True):
        if out is not result:
            out[...] = result
    return list(outs)
