"""A large checkpoint, read by all ranks: those of a node read all of it, each its share.

Each byte comes from the disk once for a node, and nothing is given to a variable before all of it
has been checked, on all nodes. What the node has in common each rank reads into memory of its own,
of large pages, and writes to the variable from there; of what each rank has to itself all need all
bytes, so that is read into memory that they have in common.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arena.storage import NodeStorage
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
    lockstep: Lockstep, call: str, path: Path, manifest: Manifest, wanted: Mapping[str, Any]
) -> dict[str, Array]:
    """Read a directory, each node all of it once, and check it. Collective.

    Args:
      lockstep: Proves it.
      call: What reads it.
      path: The directory.
      manifest: What is in it.
      wanted: The variables that want an array, by name. Those of which the node has one copy get it
        here; what nobody wants is read for its checksums only.

    Returns:
      The other arrays, in memory that the ranks of a node have in common. The call does not return
      before all ranks have read and checked their share.

    Raises:
      OSError: Some rank cannot read its share, or does not see the directory; on every rank.
      CheckpointError: It is damaged.
      MemoryError: Some rank has no memory for it.
    """
    node = nodes_of(lockstep).node
    placed, starts, total = {}, {}, 0
    for region in manifest.regions:
        storage = wanted[region.name].storage if region.name in wanted else None
        if isinstance(storage, NodeStorage) and storage.node.size == node.size:
            placed[region.name] = storage
        elif storage is not None:
            starts[region.name], total = total, total + region.room
    owned = _shares(manifest, node.size, placed)
    kept = [sum(p.stop - p.start for p in each if p.region.name in starts) for each in owned]
    image, common = _image(node, total, kept)
    mine = owned[node.rank]
    own: dict[str, dict[int, Array]] = {}

    def room(piece: Stretch) -> Array | None:
        name, at = piece.region.name, starts.get(piece.region.name)
        if at is None:
            return own[name][piece.start] if name in own else None
        return image[at + piece.start : at + piece.stop]

    def read() -> None:
        own.update(_rooms([piece for piece in mine if piece.region.name in placed]))
        with patient(lockstep, f"read {path}", sum(manifest.sizes)):
            sharded.fetch(path, mine, room)

    failure = _failing(read, lockstep.comm.rank)
    lockstep.prove(f"{call}, shares", failure=failure)
    for name, storage in placed.items():
        storage.put(own.get(name, {}))
    if not common:
        low = sum(kept[: node.rank])
        node.allgatherv(image[low : low + kept[node.rank]].copy(), image, kept)
    node.barrier()
    regions = (region for region in manifest.regions if region.name in starts)
    return {r.name: formed(r.entry, image[starts[r.name] :]) for r in regions}


def _failing(read: Callable[[], None], rank: int) -> BaseException | None:
    """Return what `read` fails with, as users are to see it; None if it does not."""
    try:
        read()
    except FileNotFoundError as error:
        text = f"Node {platform.node()} (rank {rank}) does not see this file"
        return FileNotFoundError(errno.ENOENT, text, error.filename)
    except BaseException as error:
        return error
    return None


def _shares(manifest: Manifest, ranks: int, placed: Container[str]) -> list[list[Stretch]]:
    """Return the pieces that each rank of a node reads: some that follow each other of all.

    Of a large one that is `placed` it reads what is about its slice, whose pages it has already.
    """
    owned: list[list[Stretch]] = [[] for _ in range(ranks)]
    at, total = 0, sum(manifest.sizes)
    for piece in manifest.pieces():
        region = piece.region
        sliced = region.name in placed and region.room >= ranks * manifest.chunk
        owner = piece.start * ranks // region.room if sliced else at * ranks // total
        owned[owner].append(piece)
        at += piece.stop - piece.start
    return owned


def _rooms(pieces: Sequence[Stretch]) -> dict[str, dict[int, Array]]:
    """Return memory for pieces, of one block, by the name of the array and the first byte."""
    block, at = np.empty(sum(each.stop - each.start for each in pieces), np.uint8), 0
    found: dict[str, dict[int, Array]] = {}
    for region, start, stop, _ in pieces:
        found.setdefault(region.name, {})[start] = block[at : at + stop - start]
        at += stop - start
    return found


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
