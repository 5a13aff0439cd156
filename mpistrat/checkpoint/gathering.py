"""A large checkpoint, read by all ranks: those of a node read all of it, each its share.

They read into memory that they have in common, so each byte comes from the disk once for a node,
and nothing is given to a variable before all of it has been checked, on all nodes.
"""

from __future__ import annotations

import errno
import itertools
import platform
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import sharded
from mpistrat.checkpoint.entries import formed
from mpistrat.checkpoint.first import patient
from mpistrat.checkpoint.sharded import Manifest, Stretch
from mpistrat.comm.base import Comm
from mpistrat.distribute.once import nodes_of
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.sharedmem.shared import touch

__all__ = ["gather"]


def gather(
    lockstep: Lockstep, call: str, path: Path, manifest: Manifest, names: Container[str]
) -> dict[str, Array]:
    """Read arrays of a directory, each node all of them once, and check them. Collective.

    Args:
      lockstep: Proves it.
      call: What reads it.
      path: The directory.
      manifest: What is in it.
      names: Those that are wanted; the others are read for their checksums only.

    Returns:
      The arrays, in memory that the ranks of a node have in common. The call does not return before
      all ranks have read and checked their share.

    Raises:
      OSError: Some rank cannot read its share, or does not see the directory; on every rank.
      CheckpointError: It is damaged.
      MemoryError: Some rank has no memory for it.
    """
    node = nodes_of(lockstep).node
    starts, total = {}, 0
    for region in manifest.regions:
        if region.name in names:
            starts[region.name], total = total, total + region.room
    every = manifest.pieces()
    lengths = [piece.stop - piece.start for piece in every]
    ends = list(itertools.accumulate(lengths, initial=0))
    owners = [at * node.size // ends[-1] for at in ends[:-1]]
    kept = [0] * node.size  # bytes of the image that each rank reads, one rank after the other
    for piece, length, owner in zip(every, lengths, owners, strict=True):
        kept[owner] += length if piece.region.name in starts else 0
    image, common = _image(node, total, kept)

    def room(piece: Stretch) -> Array | None:
        at = starts.get(piece.region.name)
        return None if at is None else image[at + piece.start : at + piece.stop]

    failure: BaseException | None = None
    try:
        with patient(lockstep, f"read {path}", ends[-1]):
            mine = [one for one, owner in zip(every, owners, strict=True) if owner == node.rank]
            sharded.fetch(path, mine, room)
    except FileNotFoundError as error:
        text = f"Node {platform.node()} (rank {lockstep.comm.rank}) does not see this file"
        failure = FileNotFoundError(errno.ENOENT, text, error.filename)
    except BaseException as error:
        failure = error
    lockstep.prove(f"{call}, shares", failure=failure)
    if not common:
        low = sum(kept[: node.rank])
        node.allgatherv(image[low : low + kept[node.rank]].copy(), image, kept)
    node.barrier()
    regions = (region for region in manifest.regions if region.name in names)
    return {r.name: formed(r.entry, image[starts[r.name] :]) for r in regions}


def _image(node: Comm, nbytes: int, kept: Sequence[int]) -> tuple[Array, bool]:
    """Return memory for what a node reads, and whether its ranks have it in common. Collective."""
    memory = node.shared(nbytes) if node.size > 1 and nbytes else None
    low = sum(kept[: node.rank])
    found = memory is not None and touch(memory, [(low, low + kept[node.rank])])
    agreed = np.empty(1, np.int64)
    node.allreduce(np.array([int(found)]), agreed, "MIN")
    if memory is not None and agreed[0]:
        return np.frombuffer(memory, np.uint8), True
    return np.empty(nbytes, np.uint8), node.size == 1
