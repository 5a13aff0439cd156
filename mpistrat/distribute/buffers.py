"""Arrays that all ranks of a node can reduce in place."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arena.layout import LINE
from mpistrat.arrays import Array, check_travels, dtype_name, kind_of, label
from mpistrat.distribute.kinds import named
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.errors import LeafTypeError

Spec = tuple[np.dtype[Any], tuple[int, ...]]


def make_buffers(group: ReplicaGroup, name: str, specs: Any) -> Any:
    """Return a tree of zeroed arrays; see `Strategy.buffers`. Collective."""
    with group.lockstep.preparing(name):
        leaves, structure = nest.flatten(specs)
        paths = named(leaves, structure)
        array_specs = tuple(_spec(leaf, path) for leaf, path in zip(leaves, paths, strict=True))
        shapes = ", ".join(f"{dtype_name(dtype)}{list(shape)}" for dtype, shape in array_specs)
    group.lockstep.handshake(f"{name}({nest.describe(structure)} of {shapes})")
    arrays = group.reducer.node.buffers(array_specs)
    if arrays is None:
        if group.lockstep.comm.size > 1:
            group.reducer.node.warn(name)
        arrays = [_aligned(dtype, shape) for dtype, shape in array_specs]
    kinds = map(kind_of, leaves)
    buffers = [
        array if kind is None else kind.as_buffer(array)
        for kind, array in zip(kinds, arrays, strict=True)
    ]
    return nest.unflatten(structure, buffers)


def _spec(leaf: Any, path: str) -> Spec:
    kind = kind_of(leaf)
    try:
        if kind is not None:
            return kind.spec(leaf, path)
        dtype, shape = np.dtype(leaf.dtype), tuple(int(size) for size in leaf.shape)
    except (AttributeError, TypeError, ValueError):
        raise LeafTypeError(
            f"{label(path)} is {leaf!r:.60}; expected something with a dtype and a shape, such as "
            "an array or a variable."
        ) from None
    check_travels(dtype, path)
    if min(shape, default=0) < 0:
        raise LeafTypeError(f"{label(path)} has shape {shape}, which no array has.")
    if math.prod(shape) * dtype.itemsize * 1024 > sys.maxsize:
        raise LeafTypeError(f"{label(path)} of shape {shape} is larger than any memory.")
    return dtype.newbyteorder("="), shape


def _aligned(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return a zeroed array of this rank that begins on a cache line, as shared ones do."""
    buffer = np.zeros(math.prod(shape) * dtype.itemsize + LINE, np.uint8)
    start = -buffer.ctypes.data % LINE
    return buffer[start : start + buffer.size - LINE].view(dtype).reshape(shape)
