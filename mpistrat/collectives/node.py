"""All-reduces in memory that the ranks of a node share.

Each rank's values are a row of a matrix; rank r of a node reduces slice r of the columns of all
rows, in rank order, so every element is read once and every result has the same bits on all ranks.
Between nodes each slice is reduced by one rank of each node; see `mpistrat.shm.nodes` and
`mpistrat.collectives.inter_node`. Where all ranks of a node have peers, each exchanges the slice
that it has reduced itself, without a barrier before.

Arrays of the arena are in a matrix already, and are reduced in place. Other arrays are copied into
scratch memory, and the results are copied out.
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
    InterNodeGroup,
    compile_wire_casts,
    reduce_columns_between_nodes,
    reduce_means_between_nodes,
)
from mpistrat.collectives.layout import InPlaceColumns, Segment
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
from mpistrat.lockstep.ranks import FaultHooks
from mpistrat.shm.arena import BufferAddress, SharedMemory, Specs, column_slice
from mpistrat.shm.nodes import Nodes
from mpistrat.shm.storage import Storage


class _Compiled(set[np.dtype[Any]]):
    """The dtypes whose loops were compiled for a call of the session; equal on all ranks."""


def reduce_between_nodes(
    nodes: Nodes,
    peers: InterNodeGroup | None,
    op: ReduceOp,
    matrices: Sequence[tuple[Array, Array, int, Sequence[Segment]]],
    team: Team | None = None,
) -> None:
    """Reduce the nodes' sums between nodes, each rank its slice, in the first row.

    Collective over all ranks. Other ranks may read the result after a barrier of the node.

    Args:
      nodes: The ranks of each node.
      peers: This rank and its peers, if it has any.
      op: The operation.
      matrices: The rows, the rows of results, the number of columns, and the segments, as
        `NodeReducer.reduce` takes them.
      team: The threads that take part in copying to other rows.
    """
    node = nodes.node
    # If all ranks of the node have peers, a rank exchanges and spreads the slice that it has
    # reduced itself, so it does not wait for the others.
    needs_barrier = nodes.peer_group_count < node.size
    if needs_barrier:
        node.barrier()
    if peers is not None:
        for rows, out, columns, segments in matrices:
            own_columns = column_slice(node.rank, nodes.peer_group_count, columns, rows.dtype)
            reduce_columns_between_nodes(
                peers, op, rows, out[0], own_columns=own_columns, segments=segments
            )
    if needs_barrier:
        node.barrier()
    for rows, out, columns, segments in matrices:
        low, high = column_slice(node.rank, node.size, columns, rows.dtype)
        for start, stop, *_ in segments:
            spread_rows(out, 0, max(low, start), min(high, stop), team)


@final
class NodeReducer:
    """Reduction in the shared memory of a node.

    Args:
      lockstep: The ranks, and their handshake.
      wire: The dtype in which float32 is sent between nodes; see `CommunicationOptions`.

    Attributes:
      arena: The shared memory.
    """

    def __init__(self, lockstep: Lockstep, wire: str = WIRES[0]):
        """Create it; no memory is shared yet."""
        self._lockstep, self.wire = lockstep, wire
        self._size = lockstep.comm.size
        # One arena for all strategies of the session: a call that is equal on all ranks uses the
        # same memory, even if a rank makes it on another strategy than the others.
        ranks_per_node = lockstep.options.ranks_per_node
        self.arena = lockstep.get_shared(
            "arena", lambda: SharedMemory(lockstep.comm, ranks_per_node)
        )

    @property
    def can_share_memory(self) -> bool:
        """Whether memory can be shared, unless it was refused already; equal on all ranks."""
        return self._size > 1 and not self.arena.is_refused

    def create_buffers(self, specs: Specs) -> list[Array] | None:
        """Return zeroed arrays of these ``(dtype, shape)`` in the arena, or None on every rank.

        Collective.
        """
        if not self.can_share_memory:
            return None
        with self._lockstep.hooks, aborting(self._lockstep, "memory that ranks share"):
            return self.arena.block(specs)

    def create_storage(self, call: str, value: Array, is_shared: bool) -> Storage:
        """Return the storage of a variable, with the contents of the first rank's value.

        Collective.

        Args:
          call: The text of the call, for errors.
          value: An array of this rank alone, C-ordered, of one dtype and shape on all ranks.
          is_shared: Whether the variable is always equal on all ranks, so that the ranks of a node
            may share one copy.
        """
        copies = self.arena.copies
        was_refused = copies.is_refused
        with self._lockstep.hooks, aborting(self._lockstep, call):
            storage = copies.make(value, is_shared)
        if copies.is_refused and not was_refused:
            self.warn_of_private_memory(call, "each rank has its own copy of variables")
        return storage

    def lookup_addresses(
        self, plan: ReductionPlan, arrays: Sequence[Array]
    ) -> list[BufferAddress] | None:
        """Return the addresses of arrays, or None if one cannot be reduced in place."""
        addresses = []
        for array in arrays:
            address = self.arena.find_address(array)
            if address is None:
                return None
            addresses.append(address)
        if len(set(map(id, arrays))) < len(arrays):
            return None  # an array that occurs twice must not be reduced twice
        # Between nodes, values that are added in float32 travel in float32.
        return None if plan.narrow_dtypes and self.arena.nodes().node_count > 1 else addresses

    def compile_loops(self, plan: ReductionPlan, is_in_place: bool = False) -> None:
        """Compile the loops that this plan needs, before its handshake.

        Args:
          plan: The plan.
          is_in_place: Whether its arrays are reduced in place.
        """
        if plan.op in (ReduceOp.SUM, ReduceOp.MEAN):
            narrow_dtypes = plan.narrow_dtypes if is_in_place else ()
            columns = sum(math.prod(shape) for shape in plan.shapes) if narrow_dtypes else 0
            for dtype in narrow_dtypes:
                compile_for(dtype, columns)
            for bucket in plan.buckets:
                if not narrow_dtypes or any(d.result == bucket.dtype for d in plan.dtypes):
                    compile_for(bucket.dtype, bucket.columns)
                    if self.wire != WIRES[0]:
                        compile_wire_casts(bucket.dtype, bucket.columns)

    def is_compiled(self, op: ReduceOp, dtype: np.dtype[Any], columns: int) -> bool:
        """Return whether the compiled loop is used; equal on all ranks.

        It follows from the calls of this session that were checked so far. Loops that this process
        has compiled for another group of ranks do not count: the NaN that results from two NaNs has
        another payload in a compiled loop than in NumPy.
        """
        compiled_dtypes = self._lockstep.session.get_instance(_Compiled)
        if is_worth_compiling(UFUNCS[op], dtype, columns):
            compiled_dtypes.add(dtype)
        return UFUNCS[op] is np.add and dtype in compiled_dtypes

    @property
    def rank(self) -> int:
        """The rank in the node."""
        return self.arena.nodes().node.rank

    def warn_of_private_memory(
        self, call: str, fallback_text: str = "arrays are sent by MPI"
    ) -> None:
        """Warn on rank 0 that memory is not shared; if that warning is an error, all ranks raise.

        Collective.

        Args:
          call: The text of the call.
          fallback_text: The text of the fallback.
        """
        warn(
            self._lockstep,
            call,
            f"{call}: the ranks of a node cannot share memory (too little of it, or not allowed), "
            f"so {fallback_text}. The results are the same, and take more of the machine.",
            RuntimeWarning,
        )

    def reduce_in_place(
        self,
        op: ReduceOp,
        columns: InPlaceColumns,
        scales: Scales,
        result_row_count: int | None = None,
    ) -> None:
        """Reduce arrays in place. Collective; the handshake was the barrier before it.

        When it returns, all ranks of the node may read the results.

        Args:
          op: The operation.
          columns: The arrays.
          scales: The factors and divisors of their values.
          result_row_count: The number of ranks of the node, from the first, whose arrays receive
            the result; None for all.
        """
        with self.begin_data_movement():
            for rows, segments in columns.list_matrices(scales):
                self.reduce(op, rows, rows[:result_row_count], rows.shape[1], segments)
            self.arena.nodes().node.barrier()

    def reduce_within_node(
        self, op: ReduceOp, rows: Array, out: Array, columns: int, segments: Sequence[Segment]
    ) -> None:
        """Reduce this rank's slice of its node's rows into `out`.

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
            self._reduce_columns(
                op, rows, out, own_segment, column_count=column_count, is_compiled=is_compiled
            )

    def begin_data_movement(self) -> FaultHooks:
        """Return a context for moving data in shared memory, after the handshake of a call."""
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
          out: The rows that the result is written to; perhaps the same.
          columns: The number of columns.
          segments: The columns that are reduced, and their scales.
        """
        nodes = self.arena.nodes()
        has_several_nodes = nodes.node_count > 1
        self.reduce_within_node(op, rows, out[:1] if has_several_nodes else out, columns, segments)
        if has_several_nodes:
            peers = None if nodes.peers is None else self.create_inter_node_group(nodes.peers)
            team = self._lockstep.session.team
            reduce_between_nodes(nodes, peers, op, [(rows, out, columns, segments)], team)

    def _reduce_columns(
        self,
        op: ReduceOp,
        rows: Array,
        out: Array,
        segment: Segment,
        *,
        column_count: int,
        is_compiled: bool,
    ) -> None:
        """Reduce columns of this node's rows; with several nodes the sum is not divided yet."""
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

    def create_inter_node_group(self, comm: Comm) -> InterNodeGroup:
        """Return the group that reduces between nodes over `comm`, the peers of this rank."""
        return InterNodeGroup(comm, safe_power(self._size), self.wire)

    @property
    def has_peers_for_all_ranks(self) -> bool:
        """Whether each rank has a peer on every other node: with equal numbers of ranks."""
        nodes = self.arena.nodes()
        return nodes.node_count > 1 and nodes.peer_group_count * nodes.node_count == self._size

    def reduce_peer_columns(self, peer_columns: Sequence[Sequence[tuple[Array, Segment]]]) -> None:
        """Write means of columns that only this rank and its peers read, in the first rows.

        Collective over the peers, without a barrier: no other rank of the node reads them.

        Args:
          peer_columns: Matrices of one dtype with a row for each rank of the node, and their
            columns; the same on all nodes, with equal scales, and at most `MAX_EXCHANGE_ELEMENTS`
            elements. One list, whose means all peers receive; or one list for each peer, in the
            peers' order, whose means that peer alone receives; the contents of the other columns
            are undefined then.
        """
        peers = self.arena.nodes().peers
        assert peers is not None
        op = ReduceOp.MEAN
        column_count = sum(s.stop - s.start for columns in peer_columns for _, s in columns)
        with self.begin_data_movement():
            # This rank's own columns: their number does not show what other ranks have compiled.
            dtype = peer_columns[0][0][0].dtype
            is_compiled = is_worth_compiling(UFUNCS[op], dtype, column_count) or self.is_compiled(
                op, dtype, 0
            )
            for rows, segment in itertools.chain.from_iterable(peer_columns):
                if len(rows) > 1 or segment.scales is not None:
                    self._reduce_columns(
                        op,
                        rows,
                        rows[:1],
                        segment,
                        column_count=column_count,
                        is_compiled=is_compiled,
                    )
            reduce_means_between_nodes(self.create_inter_node_group(peers), op, peer_columns)
