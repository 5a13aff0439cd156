"""Which leaves of a tree travel together.

A plan is made from dtypes and sizes alone, so it is equal on all ranks once the proof has passed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

__all__ = ["ALONE", "LIMIT", "Bucket", "plan"]

# A large leaf travels alone, straight from where it lies: packing it would only add two copies.
ALONE = 64 * 1024
# Packs are bounded, so scratch memory is, whatever the tree.
LIMIT = 4 * 1024 * 1024


class Bucket(NamedTuple):
    """Leaves of one dtype that travel as one message.

    Attributes:
      dtype: The dtype of all of them.
      leaves: Their positions in the tree, ascending.
      size: The number of elements of all together.
    """

    dtype: np.dtype[Any]
    leaves: tuple[int, ...]
    size: int


@functools.lru_cache(maxsize=256)
def plan(specs: tuple[tuple[np.dtype[Any], int], ...]) -> tuple[Bucket, ...]:
    """Return the messages for leaves with these ``(dtype, number of elements)``.

    Leaves of `ALONE` bytes or more travel alone; smaller ones of one dtype together, up to `LIMIT`
    bytes; empty ones not at all.

    Example:
      >>> f4 = np.dtype(np.float32)
      >>> [bucket.leaves for bucket in plan(((f4, 3), (f4, 10**6), (f4, 0), (f4, 5)))]
      [(1,), (0, 3)]
    """
    done: list[Bucket] = []
    open_: dict[np.dtype[Any], list[int]] = {}
    sizes: dict[np.dtype[Any], int] = {}

    def close(dtype: np.dtype[Any]) -> None:
        done.append(Bucket(dtype, tuple(open_.pop(dtype)), sizes.pop(dtype)))

    for index, (dtype, size) in enumerate(specs):
        nbytes = size * dtype.itemsize
        if nbytes >= ALONE:
            done.append(Bucket(dtype, (index,), size))
        elif size:
            if dtype in open_ and (sizes[dtype] + size) * dtype.itemsize > LIMIT:
                close(dtype)
            open_.setdefault(dtype, []).append(index)
            sizes[dtype] = sizes.get(dtype, 0) + size
    for dtype in list(open_):
        close(dtype)
    return tuple(done)
