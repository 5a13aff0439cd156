"""Storage of arrays that are the same on all ranks: one for each rank, each node, or for all.

The ranks of a node write to shared storage in slices, all at once, after they have agreed on the
values. Each reads it through a mapping of its own that cannot be written to. Storage that all nodes
have once (`SpreadStorage`) gives each rank a slice of its own; reading it is collective.

`StorageFactory.make` chooses: arrays of 64 KiB and more exist once per node. After the handshake
that shows all writes to be the same, each rank writes its slice through the writable mapping, and a
barrier of the node follows. So nothing has to be undone. Views that programs hold stay valid and
show later writes, and NumPy refuses to make them writable (the object of a sealed view's memoryview
still gives access to the memory). Where memory cannot be shared, each rank has its own copy.
"""

from __future__ import annotations

import abc
import itertools
import math
import mmap
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast, final

import numpy as np

from mpistrat.arrays import Array, seal
from mpistrat.comm.base import Comm
from mpistrat.kernels.elementwise import normalize_nans
from mpistrat.shm.nodes import Nodes
from mpistrat.shm.segments import Pages, populate

# A copy of a smaller array on every rank is cheaper than a barrier at every write.
MIN_SHARED_NBYTES = 64 * 1024
# Mappings and descriptors are limited by the system; small arrays share one.
_CHUNK_NBYTES = 8 * 1024 * 1024

# Writes values to an array, or to the rows of it that are given.
Write = Callable[[Array, Array, "Array | None"], None]


class Storage(abc.ABC):
    """The view of this rank of an array that all ranks hold.

    Attributes:
      array: The contents. Only `write` writes to it.
      view: The same memory, for programs: a view that cannot be made writable.
      base: The array whose views all views of `view` are; one for each storage.
      is_complete: This rank sees all of the contents.
    """

    array: Array
    view: Array
    base: Array
    is_complete = True

    @abc.abstractmethod
    def write(self, write_values: Write, array: Array, rows: Array | None = None) -> None:
        """Write `array`, or rows; all ranks of the node the same.

        Args:
          write_values: Writes values to an array, or to rows of it.
          array: The values; of the shape of the contents, or of the rows.
          rows: The numbers of the rows; None for all.
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
        """Return a function that puts back the present contents, once; all that wrote call it."""


def _make_restorer(array: Array) -> Callable[[], None]:
    """Return a function that puts back the present contents of an array, once."""
    saved_contents = [array.copy()]

    def restore() -> None:
        if saved_contents:
            array[...] = saved_contents.pop()

    return restore


@final
class PrivateStorage(Storage):
    """Memory of this rank alone.

    Args:
      array: The contents, which belong to this storage from now on.
    """

    def __init__(self, array: Array):
        """Create storage of the array."""
        self.array, self.view = array, seal(array)
        self.base = cast(Array, self.view.view().base)

    def write(self, write_values: Write, array: Array, rows: Array | None = None) -> None:
        """Write all of it. Never communicates."""
        write_values(self.array, array, rows)

    def part(self, step: int) -> tuple[int, Array]:
        """Return all elements."""
        return 0, self.array.reshape(-1)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts back the present contents, once. Cost: a copy."""
        return _make_restorer(self.array)


@final
class NodeStorage(Storage):
    """Memory that the ranks of a node have in common.

    Args:
      node: The ranks of the node.
      pages: Memory of theirs.
      start: Its first byte there; begins a page.
      like: An array of this dtype and shape, not empty.
      has_several_nodes: Other nodes have memory with the same contents.
    """

    def __init__(self, node: Comm, pages: Pages, start: int, like: Array, has_several_nodes: bool):
        """Create storage in this memory; nothing is written."""
        self.node, self._pages, self._start = node, pages, start
        self._has_several_nodes = has_several_nodes
        self.shape = like.shape
        storage_bytes = slice(start, start + like.nbytes)
        self.base = np.frombuffer(
            pages.private_mapping.view_bytes(storage_bytes.start, storage_bytes.stop), like.dtype
        )
        self._shared = np.frombuffer(pages.memory[storage_bytes], like.dtype)
        # The mapping is read-only, so the array is sealed already.
        self.array = self.view = self.base.reshape(self.shape)
        self._writes = 0

    def populate(self) -> bool:
        """Take the pages of this rank's slice, before anybody writes; return whether it worked.

        Not collective.
        """
        low, high = (self._start + index * self.base.itemsize for index in self.slice())
        return populate(self._pages.memory, [(low, high)])

    def fill(self, contents: Array) -> None:
        """Write all of it; for one rank of the node, before the others look."""
        self._shared[:] = contents.reshape(-1)

    def put(self, bytes_by_offset: Mapping[int, Array]) -> None:
        """Write bytes of it, each rank of the node others; bytes beyond the end are left out.

        Collective over the node: each returns when all are written. Cost: one barrier.

        Args:
          bytes_by_offset: The bytes of each part of this rank, flat, by the first of them.
        """
        self._writes += 1
        flat = self._shared.view(np.uint8)
        for offset, part_bytes in bytes_by_offset.items():
            flat[offset : offset + part_bytes.size] = part_bytes[: flat.size - offset]
        self.node.barrier()

    def slice(self, count: int | None = None) -> tuple[int, int]:
        """Return the first of `count` elements that is this rank's, and the one after its last."""
        count = self.base.size if count is None else count
        rank, size = self.node.rank, self.node.size
        return count * rank // size, count * (rank + 1) // size

    def write(self, write_values: Write, array: Array, rows: Array | None = None) -> None:
        """Write this rank's slice.

        Collective over the node: each returns when all of it is written. Cost: one barrier.
        """
        self._writes += 1
        if rows is None:
            low, high = self.slice()
            write_values(self._shared[low:high], array.reshape(-1)[low:high], None)
            if self._has_several_nodes:  # where nodes differ in size, they are cut elsewhere
                with np.errstate(all="ignore"):
                    normalize_nans(self._shared[low:high])
        else:
            low, high = self.slice(self.shape[0])
            local_row_mask = (rows >= low) & (rows < high)
            write_values(
                self._shared.reshape(self.shape)[low:high],
                array[local_row_mask],
                rows[local_row_mask] - low,
            )
        self.node.barrier()

    def map_private(self) -> Array:
        """Return the array, flat, as memory in which this rank can write for itself alone.

        Later writes to the storage show in all pages that this rank has not written to.

        Raises:
          OSError: The system refuses.
        """
        return self._pages.private_mapping.map_private(*self._bytes).view(self.base.dtype)

    def has_private_writes(self) -> bool:
        """Return whether this rank has written to the private mapping. Cost: 15 us per MB.

        Raises:
          OSError: The system does not allow to read that.
        """
        return bool(self._pages.private_mapping.find_written_pages(*self._bytes).any())

    def discard_private(self) -> None:
        """Discard the private writes of this rank."""
        self._pages.private_mapping.discard_private(*self._bytes)

    @property
    def _bytes(self) -> tuple[int, int]:
        return self._start, self._start + self.base.nbytes

    def part(self, step: int) -> tuple[int, Array]:
        """Return this rank's part."""
        low, high = _cut_points(self.base.size, step, self.node.size)[self.node.rank :][:2]
        return low, self._shared[low:high]

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts back the present contents, once.

        Collective over the node, but only if there was a write meanwhile, which all ranks have
        made. Cost: a copy of this rank's slice; to put back, the same and a barrier.
        """
        low, high = self.slice()
        saved_slices, writes = [self._shared[low:high].copy()], self._writes

        def restore() -> None:
            if saved_slices and self._writes > writes:
                self._shared[low:high] = saved_slices.pop()
                self.node.barrier()

        return restore


def _cut_points(size: int, step: int, count: int) -> list[int]:
    """Return where `count` parts of so many elements begin, at multiples of `step`; and the end."""
    steps = -(-size // step)
    return [min(steps * i // count * step, size) for i in range(count + 1)]


class Slices(NamedTuple):
    """The slices of an array: one for each rank of all nodes.

    The part of a rank of a node, as `Storage.part` cuts it, is cut again between this rank and its
    peers, the ranks of the other nodes that have the same part.

    Attributes:
      node: The ranks of this node.
      peers: This rank and its peers.
      parts: Where the parts of the ranks of a node begin, and the end.
      cuts: Where the slices of this part begin, and its end.
    """

    node: Comm
    peers: Comm
    parts: list[int]
    cuts: list[int]

    @property
    def low(self) -> int:
        """The first element of this rank."""
        return self.cuts[self.peers.rank]

    @property
    def high(self) -> int:
        """The one after its last."""
        return self.cuts[self.peers.rank + 1]

    @property
    def widest(self) -> int:
        """The number of elements of the largest slice among the peers."""
        return max(high - low for low, high in itertools.pairwise(self.cuts))

    def fill_part(self, local_slice: Array, part: Array) -> None:
        """Put the slices of all peers into their part.

        Collective over them; no handshake checks it.

        Args:
          local_slice: This rank's slice; flat, of other memory.
          part: All elements from ``cuts[0]`` to ``cuts[-1]``.
        """
        _gather_slices(self.peers, local_slice, part, self.cuts)

    def gather(self, local_slice: Array) -> Array:
        """Return the slices of all ranks as one flat array. Collective; no handshake checks it."""
        part = np.empty(self.cuts[-1] - self.cuts[0], local_slice.dtype)
        self.fill_part(local_slice, part)
        flat_array = np.empty(self.parts[-1], local_slice.dtype)
        _gather_slices(self.node, part, flat_array, self.parts)
        return flat_array


def _gather_slices(comm: Comm, local_slice: Array, out: Array, cuts: list[int]) -> None:
    counts = [(high - low) * out.itemsize for low, high in itertools.pairwise(cuts)]
    comm.allgatherv(local_slice.view(np.uint8), out.view(np.uint8), counts)


def slices_of_ranks(nodes: Nodes, size: int, step: int) -> Slices:
    """Cut so many elements between all ranks, of nodes with as many ranks each.

    Args:
      nodes: The nodes, of which there are several.
      size: How many elements.
      step: Slices meet at multiples of so many elements.
    """
    assert nodes.peers is not None
    parts = _cut_points(size, step, nodes.node.size)
    low, high = parts[nodes.node.rank :][:2]
    cuts = [low + cut for cut in _cut_points(high - low, step, nodes.peers.size)]
    return Slices(nodes.node, nodes.peers, parts, cuts)


@final
class SpreadStorage(Storage):
    """A slice of an array for each rank of all nodes, which nobody else has.

    `array` has the dtype and the shape of the whole, and no contents: it is all NaN, and has no
    memory. `read` has the contents.

    Args:
      slices: The slices of all ranks.
      like: An array of the dtype and the shape.
    """

    is_complete = False

    def __init__(self, slices: Slices, like: Array):
        """Create storage, which is zeroed."""
        self.slices = slices
        self.array = self.view = np.broadcast_to(np.array(np.nan, like.dtype), like.shape)
        self.base = np.zeros(slices.high - slices.low, like.dtype)

    def read(self) -> Array:
        """Return the contents: new memory. Collective; no handshake checks it."""
        return self.slices.gather(self.base).reshape(self.array.shape)

    def write(self, write_values: Write, array: Array, rows: Array | None = None) -> None:
        """Write this rank's slice. Never communicates: all ranks write alike."""
        low, high = self.slices.low, self.slices.high
        if rows is None:
            write_values(self.base, array.reshape(-1)[low:high], None)
            return
        width = math.prod(self.array.shape[1:])
        positions = (rows[:, None] * width + np.arange(width)).reshape(-1)
        local_mask = (positions >= low) & (positions < high)
        write_values(self.base, array.reshape(-1)[local_mask], positions[local_mask] - low)

    def part(self, step: int) -> tuple[int, Array]:
        """Return this rank's slice, which is cut as it was made, whatever `step` says."""
        return self.slices.low, self.base

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts back the present contents, once.

        Cost: a copy of the slice.
        """
        return _make_restorer(self.base)


@final
class StorageFactory:
    """A factory of the storage of all variables of a session.

    Args:
      comm: The ranks of the session.
      nodes: Returns the ranks of this node and its peers. Collective the first time.
      is_true_everywhere: Returns whether a condition holds on all ranks of the session.
        Collective.

    Attributes:
      is_refused: There was no memory to share for some array, so each rank has its own.
      is_sharing_allowed: Arrays that are made now may be shared; else each rank has its own.
    """

    def __init__(
        self, comm: Comm, nodes: Callable[[], Nodes], is_true_everywhere: Callable[[bool], bool]
    ) -> None:
        """Create one that has no memory yet."""
        self._comm, self._nodes, self._is_true_everywhere = comm, nodes, is_true_everywhere
        self._chunk: Pages | None = None
        self._used_nbytes = _CHUNK_NBYTES
        self.is_refused, self.is_sharing_allowed = False, True

    def make(self, value: Array, may_share: bool) -> Storage:
        """Return storage with the contents that the first rank gives.

        Collective. Cost: a broadcast between nodes and a copy on each of them; without shared
        memory, a broadcast.

        Args:
          value: An array of this rank alone, C-ordered, of one dtype and shape on all ranks. It is
            written to, and may become the storage.
          may_share: The ranks of a node may have it in common.
        """
        if (
            may_share
            and self.is_sharing_allowed
            and self._comm.size > 1
            and value.nbytes >= MIN_SHARED_NBYTES
        ):
            nodes = self._nodes()
            memory = (
                self._find_free_pages(value.nbytes) if nodes.node_count < self._comm.size else None
            )
            storage = (
                None
                if memory is None
                else NodeStorage(nodes.node, *memory, value, nodes.node_count > 1)
            )
            if storage is not None and self._agree_on_memory(storage.populate()):
                return _fill_storage(storage, nodes, value)
        self._comm.bcast(value, 0)
        return PrivateStorage(value)

    def _find_free_pages(self, nbytes: int) -> tuple[Pages, int] | None:
        """Return where so many bytes are free, or None on all ranks. Collective."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if nbytes > _CHUNK_NBYTES // 2:
            pages = self._pages(nbytes)
            return None if pages is None else (pages, 0)
        if self._used_nbytes + nbytes > _CHUNK_NBYTES:
            self._chunk, self._used_nbytes = self._pages(_CHUNK_NBYTES), 0
        if self._chunk is None:
            self._used_nbytes = _CHUNK_NBYTES
            return None
        self._used_nbytes += nbytes
        return self._chunk, self._used_nbytes - nbytes

    def _pages(self, nbytes: int) -> Pages | None:
        pages = self._nodes().node.pages(nbytes)
        return pages if self._agree_on_memory(pages is not None) else None

    def _agree_on_memory(self, has_memory: bool) -> bool:
        has_memory = self._is_true_everywhere(has_memory)
        self.is_refused = self.is_refused or not has_memory
        return has_memory


def _fill_storage(storage: NodeStorage, nodes: Nodes, value: Array) -> NodeStorage:
    # The first rank of the session is the first of its node and of its peers.
    if nodes.node.rank == 0:
        if nodes.peers is not None:
            nodes.peers.bcast(value, 0)
        storage.fill(value)
    nodes.node.barrier()
    return storage
