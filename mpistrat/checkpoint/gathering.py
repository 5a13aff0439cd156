"""A large checkpoint, read by all ranks: those of a node read all of it, each its share.

Each byte comes from the disk once for a node, and nothing is given to a variable before all of it
has been checked, on all nodes. What the node has in common each rank reads into memory of its own,
of large pages, and writes to the variable from there; of what each rank has to itself all need all
bytes, so that is read into memory that they share. Where they cannot share any, each rank reads it.
"""

from __future__ import annotations

import errno
import itertools
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
from mpistrat.checkpoint.sharded import ChecksumRange, Manifest
from mpistrat.comm.base import Comm
from mpistrat.distribute.once import nodes_of
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import Caught
from mpistrat.sharedmem.shared import touch


def gather(
    lockstep: Lockstep, call: str, path: Path, manifest: Manifest, variables: Mapping[str, Any]
) -> tuple[dict[str, Array], Callable[[], None]]:
    """Read a directory, each node all of it once, and check it. Collective.

    Args:
      lockstep: Proves it.
      call: The call that reads it.
      path: The directory.
      manifest: The manifest of the directory.
      variables: The variables that take an array, by name. Other arrays are read only to check
        them.

    Returns:
      The arrays of the variables that each rank has for itself, by name, in memory that the ranks
      of a node have in common; and a function, collective over the node, that writes the other
      arrays to the variables of which the node has one copy. The call does not return before all
      ranks have read and checked their share.

    Raises:
      OSError: Some rank cannot read its share, or does not see the directory; on every rank.
      CheckpointError: It is damaged.
      MemoryError: Some rank has no memory for it.
    """
    node = nodes_of(lockstep).node
    regions = [region for region in manifest.regions if region.name in variables]
    storages = {region.name: variables[region.name].storage for region in regions}
    node_storages = {name: storage for name, storage in storages.items() if _of_node(storage, node)}
    other_regions = [region for region in regions if region.name not in node_storages]
    ends = list(itertools.accumulate((region.room for region in other_regions), initial=0))
    starts = {region.name: at for region, at in zip(other_regions, ends, strict=False)}
    pieces_by_rank = _shares(manifest, node.size, node_storages)
    shared_pieces = [[p for p in pieces if p.region.name in starts] for pieces in pieces_by_rank]
    kept_nbytes = [sum(p.stop - p.start for p in pieces) for pieces in shared_pieces]
    common = _common(node, ends[-1], kept_nbytes)
    own_pieces = pieces_by_rank[node.rank]
    if common is None:  # each rank reads all that it needs
        own_pieces += [
            p for r, pieces in enumerate(shared_pieces) if r != node.rank for p in pieces
        ]
    buffers: dict[str, dict[int, Array]] = {}

    def room(piece: ChecksumRange) -> Array | None:
        name = piece.region.name
        if name in starts:
            return image[starts[name] + piece.start : starts[name] + piece.stop]
        return buffers.get(name, {}).get(piece.start)

    def place() -> None:
        for name, storage in node_storages.items():
            storage.put(buffers.get(name, {}))

    with Caught() as caught:
        image = np.empty(ends[-1], np.uint8) if common is None else np.frombuffer(common, np.uint8)
        buffers.update(_rooms([p for p in own_pieces if p.region.name in node_storages]))
        with patient(lockstep, f"read {path}", sum(manifest.sizes)):
            _fetch(path, own_pieces, room, lockstep.comm.rank)
    lockstep.handshake(f"{call}, shares", failure=caught.failure)
    node.barrier()
    return {r.name: formed(r.entry, image[starts[r.name] :]) for r in other_regions}, place


def _of_node(storage: Any, node: Comm) -> bool:
    return isinstance(storage, NodeStorage) and storage.node.size == node.size


def _fetch(path: Path, pieces: Sequence[ChecksumRange], room: Any, rank: int) -> None:
    """Read pieces as `sharded.fetch` does; of a file that is not there say who does not see it."""
    try:
        sharded.fetch(path, pieces, room)
    except FileNotFoundError as error:
        text = f"Rank {rank} on {platform.node()} does not see this file, or it has been removed"
        raise FileNotFoundError(errno.ENOENT, text, error.filename) from None


def _shares(
    manifest: Manifest, ranks: int, node_names: Container[str]
) -> list[list[ChecksumRange]]:
    """Return the pieces that each rank of a node reads: for each rank a run of consecutive pieces.

    Of a large array in `node_names` a rank reads the pieces near its slice, whose pages it has.
    """
    pieces_by_rank: list[list[ChecksumRange]] = [[] for _ in range(ranks)]
    at, total = 0, sum(manifest.sizes)
    for piece in manifest.pieces():
        region = piece.region
        is_sliced = region.name in node_names and region.room >= ranks * manifest.chunk
        owner = piece.start * ranks // region.room if is_sliced else at * ranks // total
        pieces_by_rank[owner].append(piece)
        at += piece.stop - piece.start
    return pieces_by_rank


def _rooms(pieces: Sequence[ChecksumRange]) -> dict[str, dict[int, Array]]:
    """Return memory for pieces, of one block, by the name of the array and the first byte."""
    block, at = np.empty(sum(piece.stop - piece.start for piece in pieces), np.uint8), 0
    rooms: dict[str, dict[int, Array]] = {}
    for region, start, stop, _ in pieces:
        rooms.setdefault(region.name, {})[start] = block[at : at + stop - start]
        at += stop - start
    return rooms


def _common(node: Comm, nbytes: int, kept_nbytes: Sequence[int]) -> memoryview | None:
    """Return memory that the ranks of a node share; None on all of them without it. Collective."""
    memory = node.shared(nbytes) if node.size > 1 and nbytes else None
    low = sum(kept_nbytes[: node.rank])
    is_usable = memory is not None and touch(memory, [(low, low + kept_nbytes[node.rank])])
    return memory if node.reduced(int(is_usable), "MIN") else None
