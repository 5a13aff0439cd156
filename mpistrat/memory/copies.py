"""The copies of an array that is the same on all ranks: one for each rank, or one for each node.

A copy that a node has in common is written to in slices, by all of its ranks at once, when they
have agreed on what. Until then a rank writes for itself alone, in its overlay of the memory
(`mpistrat.memory.overlay`); `settle` makes that the copy of all, or it is undone.
"""

from __future__ import annotations

import abc
import mmap
from collections.abc import Callable, Iterable
from typing import Any, cast, final

import numpy as np

from mpistrat.arrays import Array, sealed
from mpistrat.comm.base import Comm
from mpistrat.memory.nodes import Nodes
from mpistrat.memory.shared import Pages
from mpistrat.memory.touched import NOTHING, joined, pages_of, part_of, whole

__all__ = ["LEAST", "Common", "Copies", "Copy", "Own", "settle"]

# Arrays of fewer bytes are cheaper to have on every rank than to meet for at every write.
LEAST = 64 * 1024
# Mappings and descriptors are limited by the system; what is not large shares one.
_CHUNK = 8 * 1024 * 1024

# Writes values to an array, or to the rows of it that are given.
Write = Callable[[Array, Array, "Array | None"], None]


class Copy(abc.ABC):
    """What this rank sees of an array that all ranks hold.

    Attributes:
      array: The contents. Only `write` writes to it.
      seen: The same memory, for programs: a view that cannot be made writable.
    """

    array: Array
    seen: Array
    # While it is more than 0 all writes are this rank's alone, and none of them is settled.
    holds = 0

    @property
    @abc.abstractmethod
    def base(self) -> Array:
        """The array whose views all views of `seen` are."""

    @abc.abstractmethod
    def undo(self, rows: Array | None = None) -> Callable[[], None]:
        """Return a function that takes back what this rank is about to write alone; once.

        Args:
          rows: The rows that are about to be written; None for all.
        """

    @abc.abstractmethod
    def write(self, write: Write, values: Array, rows: Array | None, alone: bool) -> None:
        """Write `values`, or rows.

        Args:
          write: How.
          values: What; of the shape of the array, or of its rows.
          rows: To which rows; None for all.
          alone: The other ranks have not agreed yet. Otherwise all ranks of the node write the
            same now, and each returns when all of it is written.
        """


@final
class Own(Copy):
    """A copy of this rank alone.

    Args:
      array: The contents, which are this copy's from now on.
    """

    def __init__(self, array: Array):
        """Take the array."""
        self.array, self.seen = array, sealed(array)
        self._base = cast(Array, self.seen.view().base)

    @property
    def base(self) -> Array:
        """The sealed array; one for each copy."""
        return self._base

    def undo(self, rows: Array | None = None) -> Callable[[], None]:
        """Return a function that puts back what is there now; once."""
        place: Any = ... if rows is None else rows.copy()
        before = [np.array(self.array[place])]

        def restore() -> None:
            if before:
                self.array[place] = before.pop()

        return restore

    def write(self, write: Write, values: Array, rows: Array | None, alone: bool) -> None:
        """Write all of it. Never communicates."""
        write(self.array, values, rows)


@final
class Common(Copy):
    """A copy that the ranks of a node have in common.

    Args:
      node: The ranks of the node.
      pages: Memory of theirs.
      start: Its first byte there; begins a page.
      like: An array of this dtype and shape, not empty.
    """

    def __init__(self, node: Comm, pages: Pages, start: int, like: Array):
        """Look at the memory; write nothing."""
        self.node, self._pages = node, pages
        self._start, self._stop = start, start + -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.shape, self._row = like.shape, like.nbytes // max((1, *like.shape[:1]))
        here = slice(start, start + like.nbytes)
        self._flat = np.frombuffer(pages.overlay.seen(here.start, here.stop), like.dtype)
        self._shared = np.frombuffer(pages.memory[here], like.dtype)
        # Of a read-only mapping, so that it is sealed already.
        self.array = self.seen = self._flat.reshape(self.shape)
        # The pages that this rank has opened, or is about to write to.
        self._touched = NOTHING

    @property
    def base(self) -> Array:
        """The flat array; one for each copy."""
        return self._flat

    @property
    def open(self) -> bool:
        """Whether this rank writes alone."""
        return len(self._touched) > 0

    def fill(self, values: Array) -> None:
        """Write all of it; for one rank of the node, before the others look."""
        self._shared[:] = values.reshape(-1)

    def undo(self, rows: Array | None = None) -> Callable[[], None]:
        """Return what forgets all that is written alone; or, after the first, what is put back."""
        if not self.open:
            self._opened(rows)
            return self.forget
        self._opened(rows)
        place: Any = ... if rows is None else rows.copy()
        before = [np.array(self.array[place])]

        def restore() -> None:
            if before:
                self._opened(rows)[place] = before.pop()

        return restore

    def _opened(self, rows: Array | None) -> Array:
        """Return the array with these rows, or all, open; to write to others ends the process."""
        runs = whole(self._flat.nbytes) if rows is None else pages_of(rows, self._row)
        touched, overlay = joined(self._touched, runs), self._pages.overlay
        if not np.array_equal(touched, self._touched):
            try:
                overlay.open(self._start, self._stop, runs)
            except OSError:
                if not self.open:
                    overlay.close(self._start, self._stop, NOTHING)
                raise
            self._touched = touched
        mine = overlay.writable(self._start, self._start + self._flat.nbytes)
        return mine.view(self._flat.dtype).reshape(self.shape)

    def forget(self) -> None:
        """Drop what this rank has written alone."""
        if self.open:
            self._pages.overlay.close(self._start, self._stop, self._touched)
            self._touched = NOTHING

    def give(self) -> None:
        """Make this rank's part of the pages that it has written to alone those of all."""
        place = slice(self._start, self._stop)
        ours = np.frombuffer(self._pages.memory[place], np.uint8)
        mine = np.frombuffer(self._pages.overlay.seen(place.start, place.stop), np.uint8)
        runs = part_of(self._touched, self.node.rank, self.node.size)
        for low, high in (mmap.PAGESIZE * runs).tolist():
            ours[low:high] = mine[low:high]

    def _slice(self, count: int) -> tuple[int, int]:
        rank, size = self.node.rank, self.node.size
        return count * rank // size, count * (rank + 1) // size

    def write(self, write: Write, values: Array, rows: Array | None, alone: bool) -> None:
        """Write all of it to the overlay, or this rank's slice of it to what all see.

        Collective over the node unless `alone`.
        """
        if alone or self.holds:
            write(self._opened(rows), values, rows)
            return
        if rows is None:
            low, high = self._slice(self._flat.size)
            write(self._shared[low:high], values.reshape(-1)[low:high], None)
        else:
            low, high = self._slice(self.shape[0])
            mine = (rows >= low) & (rows < high)
            write(self._shared.reshape(self.shape)[low:high], values[mine], rows[mine] - low)
        self.node.barrier()


def settle(copies: Iterable[Copy]) -> None:
    """Make what all ranks of the node have written alone, and alike, the copy of all of them.

    Collective over the node, if any of the copies is common, open and not held.
    """
    # Written to several times, it is there several times.
    common = [copy for copy in copies if isinstance(copy, Common)]
    held = {id(copy): copy for copy in common if copy.open and not copy.holds}
    for copy in held.values():
        copy.give()
    if held:
        next(iter(held.values())).node.barrier()
    for copy in held.values():
        copy.forget()


@final
class Copies:
    """Where the common copies of a session are.

    Args:
      comm: The ranks of the session.
      nodes: Tells who shares a node. Collective the first time.
      everywhere: Tells whether something holds on all ranks of the session. Collective.

    Attributes:
      refused: There was no memory to share for some array, so each rank has its own copy of it.
    """

    def __init__(
        self, comm: Comm, nodes: Callable[[], Nodes], everywhere: Callable[[bool], bool]
    ) -> None:
        """Have no memory yet."""
        self._comm, self._nodes, self._everywhere = comm, nodes, everywhere
        self._chunk: Pages | None = None
        self._used = _CHUNK
        self.refused = False

    def make(self, value: Array, shared: bool) -> Copy:
        """Return a copy with the contents that the first rank gives.

        Collective. Cost: a broadcast between nodes and a copy on each of them; of what is not
        shared, a broadcast.

        Args:
          value: An array of this rank alone, C-ordered, of one dtype and shape on all ranks. It is
            written to, and may become the copy.
          shared: The copy may be common.
        """
        if shared and self._comm.size > 1 and value.nbytes >= LEAST:
            nodes = self._nodes()
            room = self._room(value.nbytes) if nodes.nodes < self._comm.size else None
            if room is not None:
                return _filled(Common(nodes.node, *room, value), nodes, value)
        self._comm.bcast(value, 0)
        return Own(value)

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
        found = self._everywhere(pages is not None)
        self.refused = self.refused or not found
        return pages if found else None


def _filled(copy: Common, nodes: Nodes, value: Array) -> Common:
    # The first rank of the session is the first of its node, and of the first lane.
    if nodes.node.rank == 0:
        if nodes.lane is not None:
            nodes.lane.bcast(value, 0)
        copy.fill(value)
    nodes.node.barrier()
    return copy
