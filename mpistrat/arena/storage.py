"""The memory of an array that is the same on all ranks: one copy for each rank, or for each node.

What a node has in common is written to in slices, by all of its ranks at once, after they have
agreed on what. Everybody reads it through a mapping of its own that cannot be written to.
"""

from __future__ import annotations

import abc
import mmap
from collections.abc import Callable
from typing import cast, final

import numpy as np

from mpistrat.arena.nodes import Nodes
from mpistrat.arrays import Array, sealed
from mpistrat.comm.base import Comm
from mpistrat.sharedmem.shared import Pages, touch

__all__ = ["LEAST", "NodeStorage", "PrivateStorage", "Storage", "Storages"]

# Arrays of fewer bytes are cheaper to have on every rank than to meet for at every write.
LEAST = 64 * 1024
# Mappings and descriptors are limited by the system; what is not large shares one.
_CHUNK = 8 * 1024 * 1024

# Writes values to an array, or to the rows of it that are given.
Write = Callable[[Array, Array, "Array | None"], None]


class Storage(abc.ABC):
    """What this rank sees of an array that all ranks hold.

    Attributes:
      array: The contents. Only `write` writes to it.
      seen: The same memory, for programs: a view that cannot be made writable.
    """

    array: Array
    seen: Array

    @property
    @abc.abstractmethod
    def base(self) -> Array:
        """The array whose views all views of `seen` are."""

    @abc.abstractmethod
    def write(self, write: Write, values: Array, rows: Array | None = None) -> None:
        """Write `values`, or rows; all ranks of the node the same.

        Args:
          write: How.
          values: What; of the shape of the array, or of its rows.
          rows: To which rows; None for all.
        """

    @abc.abstractmethod
    def part(self, step: int) -> tuple[int, Array]:
        """Return the elements that this rank updates: the first one, and memory to write to.

        Flat. All of it, if the memory is this rank's alone; else this rank's part, and a barrier of
        the node has to come before any rank reads what others have written.

        Args:
          step: Parts of ranks meet at multiples of so many elements.
        """

    @abc.abstractmethod
    def snapshot(self) -> Callable[[], None]:
        """Return what puts back the contents of now, once; all ranks that wrote call it."""


@final
class PrivateStorage(Storage):
    """Memory of this rank alone.

    Args:
      array: The contents, which belong to this storage from now on.
    """

    def __init__(self, array: Array):
        """Take the array."""
        self.array, self.seen = array, sealed(array)
        self._base = cast(Array, self.seen.view().base)

    @property
    def base(self) -> Array:
        """The sealed array; one for each storage."""
        return self._base

    def write(self, write: Write, values: Array, rows: Array | None = None) -> None:
        """Write all of it. Never communicates."""
        write(self.array, values, rows)

    def part(self, step: int) -> tuple[int, Array]:
        """Return all elements."""
        return 0, self.array.reshape(-1)

    def snapshot(self) -> Callable[[], None]:
        """Return what puts back the contents of now, once. Cost: a copy."""
        before = [self.array.copy()]

        def restore() -> None:
            if before:
                self.array[...] = before.pop()

        return restore


@final
class NodeStorage(Storage):
    """Memory that the ranks of a node have in common.

    Args:
      node: The ranks of the node.
      pages: Memory of theirs.
      start: Its first byte there; begins a page.
      like: An array of this dtype and shape, not empty.
    """

    def __init__(self, node: Comm, pages: Pages, start: int, like: Array):
        """Look at the memory; write nothing."""
        self.node, self._pages, self._start = node, pages, start
        self.shape = like.shape
        here = slice(start, start + like.nbytes)
        self._flat = np.frombuffer(pages.overlay.seen(here.start, here.stop), like.dtype)
        self._shared = np.frombuffer(pages.memory[here], like.dtype)
        # Of a read-only mapping, so that it is sealed already.
        self.array = self.seen = self._flat.reshape(self.shape)
        self._writes = 0

    @property
    def base(self) -> Array:
        """The flat array; one for each storage."""
        return self._flat

    def touch(self) -> bool:
        """Take the pages of this rank's slice, before anybody writes; tell whether there were any.

        Not collective.
        """
        low, high = (self._start + one * self._flat.itemsize for one in self.slice())
        return touch(self._pages.memory, [(low, high)])

    def fill(self, values: Array) -> None:
        """Write all of it; for one rank of the node, before the others look."""
        self._shared[:] = values.reshape(-1)

    def slice(self, count: int | None = None) -> tuple[int, int]:
        """Return which of `count` things are this rank's: first, and after the last."""
        count = self._flat.size if count is None else count
        rank, size = self.node.rank, self.node.size
        return count * rank // size, count * (rank + 1) // size

    def write(self, write: Write, values: Array, rows: Array | None = None) -> None:
        """Write this rank's slice.

        Collective over the node: each returns when all of it is written. Cost: one barrier.
        """
        self._writes += 1
        if rows is None:
            low, high = self.slice()
            write(self._shared[low:high], values.reshape(-1)[low:high], None)
        else:
            low, high = self.slice(self.shape[0])
            mine = (rows >= low) & (rows < high)
            write(self._shared.reshape(self.shape)[low:high], values[mine], rows[mine] - low)
        self.node.barrier()

    def part(self, step: int) -> tuple[int, Array]:
        """Return this rank's part."""
        low, high = (
            min(one * step, self._flat.size) for one in self.slice(-(-self._flat.size // step))
        )
        return low, self._shared[low:high]

    def snapshot(self) -> Callable[[], None]:
        """Return what puts back the contents of now, once.

        Collective over the node, but only if there was a write meanwhile, which all ranks have
        made. Cost: a copy of this rank's slice; to put back, the same and a barrier.
        """
        low, high = self.slice()
        before, writes = [self._shared[low:high].copy()], self._writes

        def restore() -> None:
            if before and self._writes > writes:
                self._shared[low:high] = before.pop()
                self.node.barrier()

        return restore


@final
class Storages:
    """Makes the storage of the variables of a session.

    Args:
      comm: The ranks of the session.
      nodes: Tells who shares a node. Collective the first time.
      everywhere: Tells whether something holds on all ranks of the session. Collective.

    Attributes:
      refused: There was no memory to share for some array, so each rank has its own.
    """

    def __init__(
        self, comm: Comm, nodes: Callable[[], Nodes], everywhere: Callable[[bool], bool]
    ) -> None:
        """Create one that has no memory yet."""
        self._comm, self._nodes, self._everywhere = comm, nodes, everywhere
        self._chunk: Pages | None = None
        self._used = _CHUNK
        self.refused = False

    def make(self, value: Array, shared: bool) -> Storage:
        """Return storage with the contents that the first rank gives.

        Collective. Cost: a broadcast between nodes and a copy on each of them; of what is not
        shared, a broadcast.

        Args:
          value: An array of this rank alone, C-ordered, of one dtype and shape on all ranks. It is
            written to, and may become the storage.
          shared: The ranks of a node may have it in common.
        """
        if shared and self._comm.size > 1 and value.nbytes >= LEAST:
            nodes = self._nodes()
            room = self._room(value.nbytes) if nodes.nodes < self._comm.size else None
            storage = None if room is None else NodeStorage(nodes.node, *room, value)
            if storage is not None and self._agreed(storage.touch()):
                return _filled(storage, nodes, value)
        self._comm.bcast(value, 0)
        return PrivateStorage(value)

    def _room(self, nbytes: int) -> tuple[Pages, int] | None:
        """Return where so many bytes are free, or None on all ranks. Collective."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if nbytes > _CHUNK // 2:
            pages = self._pages(nbytes)
            return None if pages is None else (pages, 0)
        if self._used + nbytes > _CHUNK:
            self._chunk, self._used = self._pages(_CHUNK), 0
        if self._chunk is None:
            self._used = _CHUNK
            return None
        self._used += nbytes
        return self._chunk, self._used - nbytes

    def _pages(self, nbytes: int) -> Pages | None:
        pages = self._nodes().node.pages(nbytes)
        return pages if self._agreed(pages is not None) else None

    def _agreed(self, found: bool) -> bool:
        found = self._everywhere(found)
        self.refused = self.refused or not found
        return found


def _filled(storage: NodeStorage, nodes: Nodes, value: Array) -> NodeStorage:
    # The first rank of the session is the first of its node, and of the first lane.
    if nodes.node.rank == 0:
        if nodes.lane is not None:
            nodes.lane.bcast(value, 0)
        storage.fill(value)
    nodes.node.barrier()
    return storage
