"""The shared memory of a session: rows through which reductions pass, and blocks of buffers.

Storage of variables that the ranks of a node have in common is in `mpistrat.shm.storage`.

Life of a `SharedMemory`: it is made empty; at the first call that needs it, the ranks find out who
shares a node; each block is made by a collective call, and lives as long as its arrays do;
communicators go with the session. Nothing has a name, so nothing can be left behind, whatever
becomes of ranks. There is one for each session, so equal calls on two strategies use the same rows.

No rank writes memory that another still reads. The rows of the small shared-memory algorithm have
two sides, chosen by the parity of the call's number: a rank that has reached call k + 1 has
finished call k, so side k is free in call k + 2. Result rows of the bucketed algorithm take turns
in the same way; the row of a rank is read between two barriers only.

A block of buffers has one matrix for each dtype, with one row for each rank of the node, so that a
slice of columns is the same elements of the same leaves on every rank::

    float32   | w of rank 0          | b of rank 0 |      <- row 0
              | w of rank 1          | b of rank 1 |      <- row 1
    int64     | n of rank 0 |
              | n of rank 1 |
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, spec_text
from mpistrat.comm.base import Comm
from mpistrat.errors import ContextError
from mpistrat.shm.nodes import Nodes, find_nodes
from mpistrat.shm.segments import populate
from mpistrat.shm.storage import MIN_SHARED_NBYTES, StorageFactory

LINE = 64  # bytes of a cache line, and the widest vector unit's alignment

Specs = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


class BufferPosition(NamedTuple):
    """The position of one leaf in the matrices of a block.

    Attributes:
      matrix: Which matrix.
      start: Its first column.
      stop: The column after its last.
      shape: Its shape.
    """

    matrix: int
    start: int
    stop: int
    shape: tuple[int, ...]


class Matrix(NamedTuple):
    """All leaves of one dtype.

    Attributes:
      dtype: The dtype.
      columns: How many elements a row has.
      offset: Where the matrix begins in the block, in bytes.
    """

    dtype: np.dtype[Any]
    columns: int
    offset: int


class Layout(NamedTuple):
    """The layout of a block.

    Attributes:
      matrices: One for each dtype, in the order in which they first come.
      positions: One for each leaf.
      nbytes: The size of the block.
    """

    matrices: tuple[Matrix, ...]
    positions: tuple[BufferPosition, ...]
    nbytes: int

    def step(self, matrix: int) -> int:
        """Return at multiples of how many columns leaves begin in that matrix."""
        return _elements_per_line(self.matrices[matrix].dtype)


def _elements_per_line(dtype: np.dtype[Any]) -> int:
    return max(1, LINE // dtype.itemsize)


@functools.lru_cache(maxsize=256)
def lay_out_buffers(specs: Specs, row_count: int) -> Layout:
    """Return the layout of leaves of these ``(dtype, shape)``, with so many rows.

    Each leaf begins on a cache line of its own. Small ones are side by side, behind the large ones,
    so that they can be read as one.

    Example:
      >>> f4 = np.dtype(np.float32)
      >>> layout = lay_out_buffers(((f4, (3,)), (f4, (2, 2)), (f4, (200, 100))), 2)
      >>> [position.start for position in layout.positions]
      [20000, 20016, 0]
    """
    columns = {dtype: 0 for dtype, _ in specs}
    sizes = [math.prod(shape) for _, shape in specs]
    positions: dict[int, BufferPosition] = {}
    for i in sorted(
        range(len(specs)), key=lambda i: sizes[i] * specs[i][0].itemsize < MIN_SHARED_NBYTES
    ):
        dtype, shape = specs[i]
        start, step = columns[dtype], _elements_per_line(dtype)
        positions[i] = BufferPosition(list(columns).index(dtype), start, start + sizes[i], shape)
        columns[dtype] = -(-(start + sizes[i]) // step) * step
    matrices, offset = [], 0
    for dtype, width in columns.items():
        matrices.append(Matrix(dtype, width, offset))
        offset += -(-width * dtype.itemsize * row_count // LINE) * LINE
    return Layout(
        tuple(matrices), tuple(positions[i] for i in range(len(specs))), max(offset, LINE)
    )


def column_slice(rank: int, size: int, columns: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return begin and end of the columns that one of `size` ranks reduces.

    They begin on cache lines, so that no two ranks write to one.

    Example:
      >>> [column_slice(rank, 3, 100, np.dtype("f4")) for rank in range(3)]
      [(0, 32), (32, 64), (64, 100)]
    """
    step = _elements_per_line(dtype)
    lines = -(-columns // step)
    low, high = lines * rank // size * step, lines * (rank + 1) // size * step
    return min(columns, low), min(columns, high)


def byte_slices(rank: int, size: int, layout: Layout) -> list[tuple[int, int]]:
    """Return the bytes of a block that are in the columns of one rank, of all rows.

    Example:
      >>> block = lay_out_buffers(((np.dtype("f4"), (100,)),), 2)
      >>> [byte_slices(rank, 2, block) for rank in range(2)]
      [[(0, 192), (448, 640)], [(192, 448), (640, 896)]]
    """
    byte_ranges = []
    for dtype, columns, offset in layout.matrices:
        low, high = column_slice(rank, size, columns, dtype)
        for row in range(size):
            start, stop = (
                offset + (row * columns + column) * dtype.itemsize for column in (low, high)
            )
            byte_ranges.append((start, stop))
    return byte_ranges


# Two result rows beside the ranks' own: a rank that is ahead writes the one, while others that are
# behind still read the other.
_RESULT_ROWS = 2
# If all rows together are no more bytes than this, every rank reduces everything.
_MAX_DIRECT_NBYTES = 256 * 1024


@final
class SharedBuffers:
    """Arrays of every rank of the node, where all of them can be read and reduced.

    Attributes:
      number: How many blocks had been made before; equal on all ranks.
      layout: The positions of the leaves.
      matrices: The matrices, with one row for each rank of the node.
    """

    def __init__(self, number: int, layout: Layout, memory: memoryview, row_count: int):
        """Create a block of `row_count` ranks in `memory`."""
        self.number, self.layout = number, layout
        self.matrices = tuple(
            np.frombuffer(memory, m.dtype, m.columns * row_count, m.offset).reshape(
                row_count, m.columns
            )
            for m in layout.matrices
        )

    def leaf(self, index: int, row_index: int) -> Array:
        """Return leaf `index` of the rank whose row this is; a new writable view."""
        position = self.layout.positions[index]
        return self.matrices[position.matrix][row_index, position.start : position.stop].reshape(
            position.shape
        )


class BufferAddress(NamedTuple):
    """The address of an array: its block, and its number there.

    Attributes:
      block: The block.
      leaf: The number of the leaf in the block.
    """

    block: SharedBuffers
    leaf: int

    @property
    def key(self) -> tuple[int, int]:
        """A key that no other array of this memory has."""
        return self.block.number, self.leaf

    @property
    def matrix(self) -> Matrix:
        """The matrix that holds the leaf."""
        return self.block.layout.matrices[self.position.matrix]

    @property
    def position(self) -> BufferPosition:
        """The columns of the leaf."""
        return self.block.layout.positions[self.leaf]


@final
class SharedMemory:
    """The shared memory of a session: blocks of buffers, and rows for reductions.

    Args:
      comm: Its ranks.
      per_node: Take so many consecutive ranks as one node; 0 to ask MPI.

    Attributes:
      max_direct_nbytes: How many bytes a row of `sides` has; 0 without `sides`. Equal on all ranks.
      generation: Changes whenever an array of a block comes or goes.
      is_refused: Some node has not got the memory; equal on all ranks.
      moving_keys: The keys (`BufferAddress.key`) of arrays that an ``all_reduce_start`` works on.
    """

    def __init__(self, comm: Comm, per_node: int = 0):
        """Create it without blocks. Not collective yet."""
        self._comm, self._per_node = comm, per_node
        self._nodes: Nodes | None = None
        self._count = 0
        self.generation = 0
        # By id, and checked to be the same object: an id is used again after its array is gone.
        self._addresses: dict[int, tuple[weakref.ref[Array], BufferAddress]] = {}
        self._scratch: memoryview | None = None
        self._sides_memory: memoryview | None = None
        self._has_sides = False  # or was refused the memory
        self.max_direct_nbytes = 0
        self._sides: dict[np.dtype[Any], Array] = {}
        self._scratch_by_dtype: dict[np.dtype[Any], Array] = {}
        # There was no memory for scratch, so nothing is shared any more.
        self.is_refused = False
        self.moving_keys: set[tuple[int, int]] = set()
        self._turn = 0
        self.copies = StorageFactory(comm, self.nodes, self._is_true_everywhere)

    def nodes(self) -> Nodes:
        """Return the ranks of this node and its peers. Collective the first time."""
        if self._nodes is None:
            self._nodes = find_nodes(self._comm, self._per_node)
        return self._nodes

    def free(self) -> None:
        """Free the communicators. Collective; memory goes with its last reference."""
        if self._nodes is not None:
            self._nodes.free()
        self._nodes = None

    def block(self, specs: Specs) -> list[Array] | None:
        """Make a block for leaves of these ``(dtype, shape)``.

        Collective. Cost: the memory is taken at once, about 0.25 s per GB, by each rank its part.

        Returns:
          This rank's arrays, zeroed and writable; None on every rank of the job if some node has
          not the memory.
        """
        node = self.nodes().node
        layout = lay_out_buffers(specs, node.size)
        memory = self._shared(layout.nbytes, byte_slices(node.rank, node.size, layout))
        if memory is None:
            return None
        self._count += 1
        block = SharedBuffers(self._count, layout, memory, node.size)
        arrays = [block.leaf(index, node.rank) for index in range(len(specs))]
        for index, array in enumerate(arrays):
            self._remember(array, BufferAddress(block, index))
        return arrays

    def _remember(self, array: Array, address: BufferAddress) -> None:
        array_id, addresses = id(array), self._addresses

        def forget(_: weakref.ref[Array]) -> None:
            addresses.pop(array_id, None)
            self.generation += 1

        # Only this keeps the block: it goes when the last of its arrays is gone.
        addresses[array_id] = (weakref.ref(array, forget), address)
        self.generation += 1

    def find_address(self, array: Array) -> BufferAddress | None:
        """Return the address of an array, or None if no block has it."""
        entry = self._addresses.get(id(array))
        if entry is None or entry[0]() is not array:
            return None
        # NumPy lets a program change the dtype or the shape of an array in place.
        position, matrix = entry[1].position, entry[1].matrix
        same = array.dtype == matrix.dtype and array.shape == position.shape
        return entry[1] if same and array.flags.c_contiguous else None

    def _is_true_everywhere(self, has_memory: bool) -> bool:
        return bool(self._comm.reduce_integer(int(has_memory), "MIN"))

    def _shared(self, nbytes: int, local_ranges: Iterable[tuple[int, int]]) -> memoryview | None:
        """Return memory of the node, or None on every rank of the job. Collective.

        Args:
          nbytes: How many bytes.
          local_ranges: The byte ranges that this rank reads and writes most.
        """
        memory = self.nodes().node.shared(nbytes)
        has_memory = memory is not None and populate(memory, local_ranges)
        return memory if self._is_true_everywhere(has_memory) else None

    def check_not_moving(self, call: str, arrays: Iterable[Array]) -> None:
        """Raise ContextError if an ``all_reduce_start`` is still at work on one of these arrays."""
        if not self.moving_keys:
            return
        for number, array in enumerate(arrays):
            address = self.find_address(array)
            if address is not None and address.key in self.moving_keys:
                raise ContextError(
                    f"{call}: array {number}, {spec_text(array)}, of Strategy.buffers is still in "
                    "use by all_reduce_start. Call wait() of its handle first."
                )

    def has_room(self, nbytes: int) -> bool:
        """Tell whether `scratch` for so many bytes per rank needs no communication."""
        return self._scratch is not None and self._row() >= nbytes

    def _row(self) -> int:
        assert self._scratch is not None
        return len(self._scratch) // (self.nodes().node.size + _RESULT_ROWS)

    def make_room(self, nbytes: int) -> bool:
        """Have `scratch` of at least so many bytes per rank from now on, or tell that nobody can.

        Collective.
        """
        if self.is_refused:
            return False
        node = self.nodes().node
        row = 1 << max(16, (nbytes - 1).bit_length())
        self._scratch_by_dtype.clear()
        self._scratch = None
        self._scratch = self._rows(row, node.size + _RESULT_ROWS)
        self.is_refused = self._scratch is None
        if self.is_refused:
            return False
        self.make_sides()
        return True

    def make_sides(self) -> None:
        """Make the double buffer, if there is one node with memory for it. Collective."""
        if not self._has_sides and self.nodes().node_count == 1:
            self._has_sides, size = True, self.nodes().node.size
            row = max(LINE, _MAX_DIRECT_NBYTES // size // LINE * LINE)
            self._sides_memory = self._rows(row, 2 * size)
            self.max_direct_nbytes = 0 if self._sides_memory is None else row

    def _rows(self, nbytes: int, count: int) -> memoryview | None:
        # Each rank packs values into its own row; the rows of results take turns.
        node = self.nodes().node
        local_rows = range(node.rank, count, node.size)
        return self._shared(
            nbytes * count, [(row * nbytes, (row + 1) * nbytes) for row in local_rows]
        )

    def rows(self, specs: Sequence[tuple[np.dtype[Any], int]]) -> list[Array] | None:
        """Return a matrix for each ``(dtype, columns)``, with a row for each rank of the node.

        Nobody else has them. Collective.

        Returns:
          None on every rank of the job if some node has not the memory.
        """
        node = self.nodes().node
        starts, local_ranges, end = [], [], 0
        for dtype, columns in specs:
            row = dtype.itemsize * columns
            starts.append(end)
            local_ranges.append((end + node.rank * row, end + (node.rank + 1) * row))
            end += -(-row * node.size // LINE) * LINE
        memory = self._shared(max(LINE, end), local_ranges)
        if memory is None:
            return None
        return [
            np.frombuffer(memory, dtype, columns * node.size, at).reshape(node.size, columns)
            for (dtype, columns), at in zip(specs, starts, strict=True)
        ]

    def turn(self) -> int:
        """Return the number of the next of the two result rows; all ranks call it alike."""
        self._turn ^= 1
        return self._turn

    def sides(self, dtype: np.dtype[Any]) -> Array:
        """Return two matrices of `dtype` that take turns; one row of `direct` bytes per rank."""
        side_matrices = self._sides.get(dtype)
        if side_matrices is None:
            assert self._sides_memory is not None
            size, width = self.nodes().node.size, self.max_direct_nbytes // dtype.itemsize
            flat = np.frombuffer(self._sides_memory, dtype, 2 * size * width)
            side_matrices = self._sides[dtype] = flat.reshape(2, size, width)
        return side_matrices

    def scratch(self, dtype: np.dtype[Any]) -> Array:
        """Return the scratch memory as rows of `dtype`: one per rank of the node, two of results.

        Its contents have a meaning within one reduction only.
        """
        scratch_rows = self._scratch_by_dtype.get(dtype)
        if scratch_rows is None:
            assert self._scratch is not None
            row_count = self.nodes().node.size + _RESULT_ROWS
            scratch_rows = np.frombuffer(
                self._scratch, dtype, self._row() // dtype.itemsize * row_count
            )
            scratch_rows = self._scratch_by_dtype[dtype] = scratch_rows.reshape(row_count, -1)
        return scratch_rows
