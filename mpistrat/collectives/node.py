"""All-reduces in memory that the ranks of a node share.

Each rank's values stand in a row of a matrix; rank r of a node reduces slice r of the columns of
all rows, in rank order, so every element is read once and every result has the same bits on all
ranks. Between nodes the slices continue in lanes; see `mpistrat.shm.nodes` and
`mpistrat.collectives.inter_node`.

Two ways to the matrix: arrays of the arena are in it, and are reduced where they are; others are
packed into scratch memory, and the results copied out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.communication import WIRES
from mpistrat.collectives.inter_node import (
    Lane,
    compile_wire,
    reduce_between,
    reduce_far,
)
from mpistrat.collectives.layout import Placed, Segment
from mpistrat.collectives.plan import ReductionPlan
from mpistrat.collectives.weights import Scales
from mpistrat.comm.base import Comm
from mpistrat.kernels.elementwise import safe_power
from mpistrat.kernels.ops import UFUNCS, ReduceOp
from mpistrat.kernels.rows import (
    compile_for,
    is_worth_compiling,
    reduce_rows,
    spread_rows,
    sum_between,
)
from mpistrat.kernels.threads import Team
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import Hooks
from mpistrat.shm.arena import BufferAddress, SharedMemory, Specs, column_slice
from mpistrat.shm.nodes import Nodes
from mpistrat.shm.storage import Storage


class _Compiled(set[np.dtype[Any]]):
    """The dtypes whose loops some call of the session has had compiled; equal on all ranks."""


def reduce_outside(
    nodes: Nodes,
    lane: Lane | None,
    op: ReduceOp,
    parts: Sequence[tuple[Array, Array, int, Sequence[Segment]]],
    team: Team | None = None,
) -> None:
    """Reduce between nodes what their ranks have reduced, each its slice, in the first row.

    Collective over all ranks. Others may read it after a barrier of the node.

    Args:
      nodes: The ranks of each node.
      lane: This rank and its twins, if it has any.
      op: The operation.
      parts: As `NodeReducer.reduce` takes them: rows, where results go, columns, segments.
      team: The threads that take part in copying to other rows.
    """
    node = nodes.node
    # A rank exchanges and spreads what it has reduced itself, and waits for nobody.
    needs_barrier = nodes.peer_group_count < node.size
    if needs_barrier:
        node.barrier()
    if lane is not None:
        for rows, out, columns, segments in parts:
            own_columns = column_slice(node.rank, nodes.peer_group_count, columns, rows.dtype)
            reduce_between(lane, op, rows, out[0], own_columns, segments)
    if needs_barrier:
        node.barrier()
    for rows, out, columns, segments in parts:
        low, high = column_slice(node.rank, node.size, columns, rows.dtype)
        for start, stop, *_ in segments:
            spread_rows(out, 0, max(low, start), min(high, stop), team)


@final
class NodeReducer:
    """The shared-memory path of a reducer.

    Args:
      lockstep: Tells who the ranks are.
      wire: What float32 travels as between nodes; see `CommunicationOptions`.

    Attributes:
      arena: The shared memory.
    """

    def __init__(self, lockstep: Lockstep, wire: str = WIRES[0]):
        """Make nothing yet."""
        self._lockstep, self.wire = lockstep, wire
        self._size = lockstep.comm.size
        # One for all strategies of the session: a call that is equal on all ranks meets in the same
        # memory, even if a program makes it on another strategy on another rank.
        ranks_per_node = lockstep.options.ranks_per_node
        self.arena = lockstep.shared("arena", lambda: SharedMemory(lockstep.comm, ranks_per_node))

    @property
    def possible(self) -> bool:
        """Whether memory can be shared, as far as is known; equal on all ranks."""
        return self._size > 1 and not self.arena.is_refused

    def buffers(self, specs: Specs) -> list[Array] | None:
        """Return zeroed arrays of these ``(dtype, shape)`` in the arena, or None on every rank.

        Collective.
        """
        if not self.possible:
            return None
        with self._lockstep.hooks, aborting(self._lockstep, "memory that ranks share"):
            return self.arena.block(specs)

    def storage(self, call: str, value: Array, shared: bool) -> Storage:
        """Return the storage of a variable, with the contents that the first rank gives.

        Collective.

        Args:
          call: What it is for.
          value: An array of this rank alone, C-ordered, of one dtype and shape on all ranks.
          shared: It is always the same on all ranks, so those of a node may have it in common.
        """
        copies = self.arena.copies
        refused = copies.is_refused
        with self._lockstep.hooks, aborting(self._lockstep, call):
            storage = copies.make(value, shared)
        if copies.is_refused and not refused:
            self.warn(call, "each rank has its own copy of variables")
        return storage

    def homes(self, plan: ReductionPlan, arrays: Sequence[Array]) -> list[BufferAddress] | None:
        """Return the addresses of arrays, or None if one cannot be reduced in place."""
        addresses = []
        for array in arrays:
            home = self.arena.find_address(array)
            if home is None:
                return None
            addresses.append(home)
        if len(set(map(id, arrays))) < len(arrays):
            return None  # an array that is given twice must not be reduced twice
        # Between nodes, values that are added in float32 travel in float32.
        return None if plan.narrow_dtypes and self.arena.nodes().node_count > 1 else addresses

    def compile(self, plan: ReductionPlan, inside: bool = False) -> None:
        """Compile the loops that this plan needs, before its handshake; `inside` for in place."""
        if plan.op in (ReduceOp.SUM, ReduceOp.MEAN):
            narrow = plan.narrow_dtypes if inside else ()
            columns = sum(math.prod(shape) for shape in plan.shapes) if narrow else 0
            for dtype in narrow:
                compile_for(dtype, columns)
            for bucket in plan.buckets:
                if not narrow or any(d.result == bucket.dtype for d in plan.dtypes):
                    compile_for(bucket.dtype, bucket.columns)
                    if self.wire != WIRES[0]:
                        compile_wire(bucket.dtype, bucket.columns)

    def is_compiled(self, op: ReduceOp, dtype: np.dtype[Any], columns: int) -> bool:
        """Tell whether the loop is compiled, alike on all ranks: from the calls checked so far.

        Loops that this process has compiled for another group of ranks do not count: a NaN that
        comes of two has another payload in loops than in NumPy.
        """
        compiled_dtypes = self._lockstep.session.get_instance(_Compiled)
        if is_worth_compiling(UFUNCS[op], dtype, columns):
            compiled_dtypes.add(dtype)
        return UFUNCS[op] is np.add and dtype in compiled_dtypes

    @property
    def rank(self) -> int:
        """The rank in the node."""
        return self.arena.nodes().node.rank

    def warn(self, name: str, fallback_text: str = "arrays are sent by MPI") -> None:
        """Say that memory is not shared, on rank 0; an error of it is one on every rank.

        Collective.
        """
        warn(
            self._lockstep,
            name,
            f"{name}: the ranks of a node cannot share memory (too little of it, or not allowed), "
            f"so {fallback_text}. The results are the same, and take more of the machine.",
            RuntimeWarning,
            stacklevel=3,
        )

    def reduce_placed(
        self, op: ReduceOp, placed: Placed, scales: Scales, into: int | None = None
    ) -> None:
        """Reduce arrays where they lie. Collective; the handshake was the barrier before it.

        When it returns, all ranks of the node may read what has been written.

        Args:
          op: The operation.
          placed: The arrays.
          scales: What their values are multiplied and divided by.
          into: Of how many ranks of the node the arrays take the result; None for all, 1 for those
            of the first alone.
        """
        with self.moving():
            for rows, segments in placed.parts(scales):
                self.reduce(op, rows, rows[:into], rows.shape[1], segments)
            self.arena.nodes().node.barrier()

    def reduce_inside(
        self, op: ReduceOp, rows: Array, out: Array, columns: int, segments: Sequence[Segment]
    ) -> None:
        """Reduce this rank's slice of what its node gave into `out`.

        Not collective. Other ranks may read `out` after a barrier of the node.
        """
        node = self.arena.nodes().node
        low, high = column_slice(node.rank, node.size, columns, rows.dtype)
        column_count = sum(segment.stop - segment.start for segment in segments)
        is_compiled = self.is_compiled(op, rows.dtype, column_count)
        for segment in segments:
            own_segment = segment._replace(
                start=max(low, segment.start), stop=min(high, segment.stop)
            )
            self._reduce_here(op, rows, out, own_segment, column_count, is_compiled)

    def moving(self) -> Hooks:
        """Return a context for what moves data in shared memory; the handshake was the barrier."""
        hooks = self._lockstep.hooks
        if hooks.on_moving is not None:
            hooks.on_moving()
        return hooks

    def reduce(
        self, op: ReduceOp, rows: Array, out: Array, columns: int, segments: Sequence[Segment]
    ) -> None:
        """Reduce this rank's slice of `rows` into the rows of `out`, between nodes too. Collective.

        Args:
          op: The operation.
          rows: A matrix with a row for each rank of the node.
          out: Rows that take the result; perhaps the same.
          columns: How many columns there are.
          segments: Which of them, and how they are scaled.
        """
        nodes = self.arena.nodes()
        has_several_nodes = nodes.node_count > 1
        self.reduce_inside(op, rows, out[:1] if has_several_nodes else out, columns, segments)
        if has_several_nodes:
            lane = None if nodes.peers is None else self.create_lane(nodes.peers)
            team = self._lockstep.session.team
            reduce_outside(nodes, lane, op, [(rows, out, columns, segments)], team)

    def _reduce_here(
        self,
        op: ReduceOp,
        rows: Array,
        out: Array,
        segment: Segment,
        column_count: int,
        is_compiled: bool,
    ) -> None:
        """Reduce columns of this node's rows; of several, none divides before all have met."""
        nodes, team = self.arena.nodes(), self._lockstep.session.team
        start, stop, table, divisor = segment
        if nodes.node_count > 1:
            if op is ReduceOp.MEAN and table is None:
                sum_between(rows, out, start, stop, safe_power(self._size), team=team)
                return
            table, divisor = None if table is None else table[nodes.ranks], 1.0
        reduce_rows(
            UFUNCS[op],
            rows,
            out,
            start,
            stop,
            scales=table,
            divisor=divisor,
            total_columns=column_count,
            team=team,
            is_compiled=is_compiled,
        )

    def create_lane(self, comm: Comm) -> Lane:
        """Return the lane of these reductions over ranks of several nodes."""
        return Lane(comm, safe_power(self._size), self.wire)

    @property
    def twins(self) -> bool:
        """Whether each rank has a twin on every other node, which has the same part of a node."""
        nodes = self.arena.nodes()
        return nodes.node_count > 1 and nodes.peer_group_count * nodes.node_count == self._size

    def reduce_parts(self, parts: Sequence[Sequence[tuple[Array, Segment]]]) -> None:
        """Make means of columns that are this rank's and its twins' alone, in the first rows.

        Collective over the lane, without a barrier: no other rank of the node reads them.

        Args:
          parts: One list of what all twins want to have; or one for each of them, in their order,
            of what it alone wants, and what becomes of the others' columns is undefined. They have
            matrices of one dtype with a row for each rank of the node, and which columns; the same
            on all nodes, all scaled alike, and at most `mpistrat.collectives.inter_node.MOST`.
        """
        lane = self.arena.nodes().peers
        assert lane is not None
        op = ReduceOp.MEAN
        column_count = sum(s.stop - s.start for twin_parts in parts for _, s in twin_parts)
        with self.moving():
            # How much is this rank's own: it says nothing of what others have compiled.
            dtype = parts[0][0][0].dtype
            is_compiled = is_worth_compiling(UFUNCS[op], dtype, column_count) or self.is_compiled(
                op, dtype, 0
            )
            for rows, segment in itertools.chain.from_iterable(parts):
                if len(rows) > 1 or segment.scales is not None:
                    self._reduce_here(op, rows, rows[:1], segment, column_count, is_compiled)
            reduce_far(self.create_lane(lane), op, parts)
