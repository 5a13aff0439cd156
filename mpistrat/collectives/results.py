"""Where the results of an all-reduce go, made before the handshake."""

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

# Smaller leaves of a bucket come back in one piece of memory, since to allocate each costs as much
# as to copy it. A larger one has its own, so that keeping one keeps nothing else.
_OWN_MEMORY_NBYTES = 64 * 1024


_Copy: TypeAlias = tuple[int, int, Array]  # columns of a bucket, and where they go


@final
class Results:
    """The results of one all-reduce, leaf by leaf.

    Args:
      arrays: Where each leaf goes.
      copies: What is copied from each bucket.
    """

    def __init__(self, arrays: list[Array], copies: list[list[_Copy]]):
        """Wait for what is reduced."""
        self.arrays, self._copies = arrays, copies

    def take(self, number: int, row: Array) -> None:
        """Copy the results of that bucket out of `row`."""
        for start, stop, to in self._copies[number]:
            np.copyto(to, row[start:stop], casting="unsafe")


def _bounds(array: Array) -> tuple[int, int]:
    return array_utils.byte_bounds(array) if array.size else (0, 0)


def _tangled(values: Sequence[Array], outs: Sequence[Array]) -> bool:
    """Tell whether some `out` may share memory with a value that is not read before it is written.

    Each leaf may be in its own `out`; any other overlap counts, of outs among themselves too.
    """
    spans = []
    for value, out in zip(values, outs, strict=True):
        to = _bounds(out)
        spans.append(to)
        if value is not out:
            at = _bounds(value)
            if at != to or not value.flags.c_contiguous:
                spans.append(at)
    spans.sort()
    return any(low < end for (_, end), (low, _) in itertools.pairwise(spans) if end)


def _small(plan: ReductionPlan, bucket: Bucket) -> set[int]:
    """Return the leaves that come back in one piece of memory with others of their bucket."""
    return {
        piece.leaf
        for piece in bucket.pieces
        if piece.whole
        and piece.stop * bucket.dtype.itemsize < _OWN_MEMORY_NBYTES
        and plan.dtypes[piece.leaf].result == bucket.dtype
    }


def _place_small_leaves(
    plan: ReductionPlan, bucket: Bucket, arrays: list[Array | None]
) -> list[_Copy]:
    """Place small leaves in one array, and return how the bucket is copied there."""
    leaves = _small(plan, bucket)
    pieces = [piece for piece in bucket.pieces if piece.leaf in leaves]
    flat = np.empty(sum(piece.stop for piece in pieces), bucket.dtype)
    copies: list[_Copy] = []
    at = begin = 0
    for i, piece in enumerate(pieces):
        end = at + piece.stop
        arrays[piece.leaf] = flat[at:end].reshape(plan.shapes[piece.leaf])
        column = piece.column + piece.stop
        if i + 1 == len(pieces) or pieces[i + 1].column != column:  # neighbours are copied at once
            copies.append((column - (end - begin), column, flat[begin:end]))
            begin = end
        at = end
    return copies


def results_for(
    plan: ReductionPlan,
    values: Sequence[Array],
    outs: Sequence[Array] | None,
    pool: ResultPool,
    late: bool = False,
) -> Results:
    """Return where results go: to `outs` where they are, else to memory of the pool.

    Args:
      plan: The plan.
      values: The leaves.
      outs: Where the results go, if that is given.
      pool: Where memory for fresh ones comes from.
      late: Values are still read when the first results are written, however few there are.
    """
    if outs is not None and (late or len(plan.buckets) > 1) and _tangled(values, outs):
        outs = None  # the caller copies them, when all values have been read
    arrays: list[Array | None] = [None] * len(plan.dtypes)
    if outs is not None:
        # A matrix stays one, whatever it is reshaped to. Unaligned arrays are filled by a copy.
        arrays = [np.asarray(out) if out.flags.carray else None for out in outs]
        copies: list[list[_Copy]] = [[] for _ in plan.buckets]
    else:
        copies = [_place_small_leaves(plan, bucket, arrays) for bucket in plan.buckets]
    done = {leaf for leaf, array in enumerate(arrays) if array is not None and outs is None}
    result_arrays = [
        pool.empty(plan.shapes[leaf], dtypes.result) if array is None else array
        for leaf, (array, dtypes) in enumerate(zip(arrays, plan.dtypes, strict=True))
    ]
    for bucket, bucket_copies in zip(plan.buckets, copies, strict=True):
        for leaf, start, stop, column, _ in bucket.pieces:
            if leaf not in done:
                to = result_arrays[leaf].reshape(-1)[start:stop]
                bucket_copies.append((column, column + stop - start, to))
    return Results(result_arrays, copies)


def of_one(
    values: Sequence[Array],
    outs: Sequence[Array] | None,
    dtypes: Sequence[np.dtype[Any]],
    pool: ResultPool,
) -> list[Array]:
    """Return the results of a reduction over one rank: its values, in `outs` or as fresh arrays.

    Args:
      values: The leaves.
      outs: Where they go; each of its result's dtype. A leaf that is its own `out` stays as it is.
      dtypes: Of the results.
      pool: Where memory for fresh ones comes from.

    Cost: one copy; nothing in place.
    """
    if outs is None or _tangled(values, outs):
        copies = [pool.empty(v.shape, d) for v, d in zip(values, dtypes, strict=True)]
        for copy, value in zip(copies, values, strict=True):
            copy[...] = value
        values = copies
    return put(list(values), outs)


def put(results: list[Any], outs: Sequence[Array] | None) -> list[Any]:
    """Return the results, in `outs` if they are given."""
    if outs is None or outs is results:
        return results
    for out, result in zip(outs, results, strict=True):
        if out is not result:
            out[...] = result
    return list(outs)
