"""Which pages some rows of an array lie on, as runs of neighbours.

A run is a row ``(first page, page after the last)`` of an int64 matrix; runs are sorted and do not
meet.
"""

from __future__ import annotations

import mmap

import numpy as np

from mpistrat.arrays import Array

__all__ = ["NOTHING", "few", "joined", "pages_of", "part_of", "whole"]

NOTHING: Array = np.empty((0, 2), np.int64)
NOTHING.flags.writeable = False


def whole(nbytes: int) -> Array:
    """Return the pages of an array of so many bytes, as one run.

    Example:
      >>> whole(mmap.PAGESIZE + 1).tolist()
      [[0, 2]]
    """
    return np.array([(0, -(-nbytes // mmap.PAGESIZE))], np.int64)


def pages_of(rows: Array, row_nbytes: int) -> Array:
    """Return the pages that these rows lie on.

    Args:
      rows: Numbers of rows, in any order, also several times.
      row_nbytes: How many bytes a row has, one after the other from the begin of a page.

    Example:
      >>> pages_of(np.array([9, 0, 9, 2]), mmap.PAGESIZE // 2).tolist()
      [[0, 2], [4, 5]]
    """
    begins = np.unique(rows).astype(np.int64) * row_nbytes
    first, last = begins // mmap.PAGESIZE, (begins + row_nbytes - 1) // mmap.PAGESIZE
    return _united(first, last + 1)


def joined(one: Array, two: Array) -> Array:
    """Return the pages of both.

    Example:
      >>> joined(np.array([[0, 2], [7, 9]]), np.array([[2, 3], [8, 12]])).tolist()
      [[0, 3], [7, 12]]
    """
    if not len(one) or not len(two):
        return one if len(one) else two
    both = np.concatenate([one, two])
    first, stop = both[np.argsort(both[:, 0], kind="stable")].T
    return _united(first, np.maximum.accumulate(stop))


def _united(first: Array, stop: Array) -> Array:
    """Make runs that meet one; both ascend."""
    if not len(first):
        return NOTHING
    apart = np.flatnonzero(first[1:] > stop[:-1])
    begins, ends = np.append(0, apart + 1), np.append(apart, len(first) - 1)
    return np.stack([first[begins], stop[ends]], axis=1)


def few(runs: Array, most: int) -> Array:
    """Return at most so many runs that hold these, with the narrowest gaps filled.

    Example:
      >>> few(np.array([[0, 1], [3, 4], [9, 10]]), 2).tolist()
      [[0, 4], [9, 10]]
    """
    if len(runs) <= most:
        return runs
    gaps = runs[1:, 0] - runs[:-1, 1]
    kept = np.sort(np.argsort(gaps, kind="stable")[len(runs) - most :])
    first, stop = runs[np.append(0, kept + 1), 0], runs[np.append(kept, len(runs) - 1), 1]
    return np.stack([first, stop], axis=1)


def part_of(runs: Array, rank: int, size: int) -> Array:
    """Return the part of the pages that one of `size` ranks takes; all parts are all pages.

    Example:
      >>> [part_of(np.array([[0, 3], [7, 8]]), rank, 2).tolist() for rank in range(2)]
      [[[0, 2]], [[2, 3], [7, 8]]]
    """
    counts = runs[:, 1] - runs[:, 0]
    ends = np.cumsum(counts)
    begins = ends - counts
    total = int(counts.sum())
    low, high = (total * r // size for r in (rank, rank + 1))
    first, stop = np.maximum(begins, low), np.minimum(ends, high)
    shift = runs[:, 0] - begins
    part: Array = np.stack([first + shift, stop + shift], axis=1)[first < stop]
    return part
