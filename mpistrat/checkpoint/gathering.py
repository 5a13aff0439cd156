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
from mpistrat.checkpoint.sharded import Manifest, Stretch
from mpistrat.comm.base import Comm
from mpistrat.distribute.once import nodes_of
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import Caught
from mpistrat.sharedmem.shared import touch


def gather(
    lockstep: Lockstep, call: str, path: Path, manifest: Manifest, wanted: Mapping[str, Any]
) -> tuple[dict[str, Array], Callable[[], None]]:
    """Read a directory, each node all of it once, and check it. Collective.

    Args:
      lockstep: Proves it.
      call: What reads it.
      path: The directory.
      manifest: What is in it.
      wanted: The variables that want an array, by name; what nobody wants is read for its checksums
        only.

    Returns:
      What gives their arrays to those variables of which the node has one copy, collective over the
      node; and the other arrays, in memory that the ranks of a node have in common. The call does
      not return before all ranks have read and checked their share.

    Raises:
      OSError: Some rank cannot read its share, or does not see the directory; on every rank.
      CheckpointError: It is damaged.
      MemoryError: Some rank has no memory for it.
    """
    node = nodes_of(lockstep).node
    regions = [region for region in manifest.regions if region.name in wanted]
    storages = {region.name: wanted[region.name].storage for region in regions}
    placed = {name: one for name, one in storages.items() if _of_node(one, node)}
    rest = [region for region in regions if region.name not in placed]
    ends = list(itertools.accumulate((region.room for region in rest), initial=0))
    starts = {region.name: at for region, at in zip(rest, ends, strict=False)}
    owned = _shares(manifest, node.size, placed)
    kept = [sum(p.stop - p.start for p in each if p.region.name in starts) for each in owned]
    common = _common(node, ends[-1], kept)
    mine = owned[node.rank]
    if common is None:  # each reads all that it needs
        mine += [p for each in owned if each is not mine for p in each if p.region.name in starts]
    own: dict[str, dict[int, Array]] = {}

    def room(piece: Stretch) -> Array | None:
        name = piece.region.name
        if name in starts:
            return image[starts[name] + piece.start : starts[name] + piece.stop]
        return own.get(name, {}).get(piece.start)

    def place() -> None:
        for name, storage in placed.items():
            storage.put(own.get(name, {}))

    with Caught() as caught:
        image = np.empty(ends[-1], np.uint8) if common is None else np.frombuffer(common, np.uint8)
        own.update(_rooms([piece for piece in mine if piece.region.name in placed]))
        with patient(lockstep, f"read {path}", sum(manifest.sizes)):
            _fetch(path, mine, room, lockstep.comm.rank)
    lockstep.handshake(f"{call}, shares", failure=caught.failure)
    node.barrier()
    return {one.name: formed(one.entry, image[starts[one.name] :]) for one in rest}, place


def _of_node(storage: Any, node: Comm) -> bool:
    return isinstance(storage, NodeStorage) and storage.node.size == node.size


def _fetch(path: Path, mine: Sequence[Stretch], room: Any, rank: int) -> None:
    """Read pieces as `sharded.fetch` does; of a file that is not there say who does not see it."""
    try:
        sharded.fetch(path, mine, room)
    except FileNotFoundError as error:
        text = f"Rank {rank} on {platform.node()} does not see this file, or it has been removed"
        raise FileNotFoundError(errno.ENOENT, text, error.filename) from None


def _shares(manifest: Manifest, ranks: int, placed: Container[str]) -> list[list[Stretch]]:
    """Return the pieces that each rank of a node reads: some that follow each other of all.

    For a large one that is `placed` it reads what is about its slice, whose pages it has already.
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


def _common(node: Comm, nbytes: int, kept: Sequence[int]) -> memoryview | None:
    """Return memory that the ranks of a node share; None on all of them without it. Collective."""
    memory = node.shared(nbytes) if node.size > 1 and nbytes else None
    low = sum(kept[: node.rank])
    found = memory is not None and touch(memory, [(low, low + kept[node.rank])])
    return memory if node.reduced(int(found), "MIN") else None
