"""Gradients of all replicas made readable by this rank, and reduced as far as they have to be.

One handshake; then one of these ways, the same on all ranks:

========  ==================================  ==================================================
way       when                                what moves
========  ==================================  ==================================================
local     one rank, or cross-replica code     nothing: the gradient is there
reduced   small variables only, or memory is  an all-reduce; then each rank updates its variables
          not shared, or the program chose
          how to reduce
in place  gradients are in shared memory, or  each rank reduces and updates its parts of all
          are copied there                    variables in one pass; one barrier of the node
========  ==================================  ==================================================

In place, each rank processes its part of every large variable in blocks of 4096: it reduces the
rows of the ranks into scratch memory that stays in the cache, and updates weights and slots, which
exist once per node. Small variables are updated by each rank in full, from the rows of all; where
these are more than 1 MiB together, they are reduced in slices first. The contents of the shared
buffers are undefined afterwards.

On several nodes with as many ranks each, this rank's part of a large variable is processed in
pieces (`ReducedGradients.fetch`): the rows of the node are reduced into the first row, the sums of
the peers on the other nodes are added to it, and the piece is updated while it is in cache. With
``shard="all"`` each peer gets the sums of its slice of the part alone, in one message from each
other node, added in the order of the nodes. All other gradients in shared memory, and all of them
where nodes differ in size, are reduced into the first row of each node before they are read.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.layout import Segment, find_in_place_columns
from mpistrat.collectives.node import NodeReducer
from mpistrat.collectives.plan import Contribution, ReductionInputs
from mpistrat.collectives.weights import Scales, sum_equal
from mpistrat.kernels.elementwise import factors_of
from mpistrat.kernels.loops import reduce_blocks
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.ending import abort
from mpistrat.optim.blocks import is_all_finite, mean_rows
from mpistrat.optim.gradient_validation import GradientCall
from mpistrat.optim.state import State, Target
from mpistrat.optim.update_plan import (
    GradientColumn,
    GradientRun,
    InPlaceGradients,
    RunMember,
    UpdatePlan,
)
from mpistrat.optim.updating import Fetch
from mpistrat.shm.arena import BufferAddress
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables import sparse, writes
from mpistrat.variables.indexed_slices import IndexedSlices

__all__ = ["ReducedGradients", "make_zero_gradients", "reduce_gradients"]

# Every rank updates all small variables and reduces the rows of all ranks for it. Up to so many
# bytes that is quicker than a reduction in slices with a barrier.
_REPEATED_NBYTES = 1 << 20
_MEAN = ReduceOp.MEAN
_MAX_LOCATIONS = 16  # sets of arrays whose addresses a plan remembers


class ReducedGradients(NamedTuple):
    """Gradients as this rank can read them.

    Attributes:
      means: The mean of each gradient over all replicas; None where it is not computed yet.
      weight: The sum of the weights of all replicas.
      sparse: The gradients of some rows, of all replicas.
      in_place: Where the gradients of all ranks of the node are, which this rank reads until the
        call ends; None if all means are made.
      matrices: Matrices of these gradients, with a row for each rank.
      factors: The factors of the rows of each matrix; None for ones.
      divisor: The divisor of sums of rows.
      fetch: Reduces pieces of gradients with the peers on other nodes; None if no gradient is
        remote.
    """

    means: Sequence[Any]
    weight: float
    sparse: Sequence[IndexedSlices] = ()
    in_place: InPlaceGradients | None = None
    matrices: Sequence[Array] = ()
    factors: Sequence[Array] | None = None
    divisor: float = 1.0
    fetch: Fetch | None = None

    def get_gradient_rows(self, i: int) -> tuple[Array, int, Array | None, float]:
        """Return the terms of a gradient.

        Args:
          i: The index of the gradient.

        Returns:
          A matrix, and its column where the gradient begins; the factor of each row, None for ones;
          and the divisor of the sum of the rows.
        """
        mean = self.means[i]
        if mean is not None:  # a matrix of one row that loops can take
            row = mean if mean.flags.carray else np.require(mean, requirements=("C", "A", "W"))
            return row.reshape(1, -1), 0, None, 1.0
        assert self.in_place is not None
        matrix_index, start, is_reduced = self.in_place.columns[i]
        rows, factors = self.matrices[matrix_index], self.factors
        if is_reduced:
            return rows[:1], start, None, 1.0
        return rows, start, None if factors is None else factors[matrix_index], self.divisor


_RUN_ADVICE = (
    "Call the step by strategy.run(step, args=batch): there apply_gradients reduces the gradients. "
    "Else reduce them first: strategy.reduce, extended.reduce_to."
)


def reduce_gradients(state: State, gradient_call: GradientCall) -> ReducedGradients:
    """Make the handshake of the call, and return the gradients of all replicas.

    Args:
      state: The state of the optimizer.
      gradient_call: The call.

    Returns:
      The gradients as this rank can read them.
    """
    group, update_plan = state.strategy._replicas, gradient_call.update_plan
    dense = gradient_call.dense_gradients
    weight = 1.0 if gradient_call.weight is None else gradient_call.weight
    if group.lockstep.comm.size == 1:
        group.lockstep.check()
        return ReducedGradients(dense, weight, gradient_call.sparse_gradients)
    if not gradient_call.is_replica_code:
        writes.check_same_contents(
            group.lockstep, gradient_call.text, gradient_call.compared_values, _RUN_ADVICE
        )
        return ReducedGradients(dense, weight, gradient_call.sparse_gradients)
    sparse_gradients: list[IndexedSlices] = []
    if gradient_call.sparse_gradients:
        sparse_gradients = _reduce_sparse(group, gradient_call, weight)
    if not dense:
        if gradient_call.weight is not None:
            weight_payloads = group.lockstep.gather_payloads(
                f"{gradient_call.text}, weights", struct.pack("<d", weight)
            )
            weight = math.fsum(np.frombuffer(b"".join(weight_payloads)).tolist())
        return ReducedGradients([], weight, sparse_gradients)
    in_place = _locate_gradients(state, gradient_call, weight)
    if in_place is not None:
        return _reduce_in_place(state, gradient_call, in_place, weight, sparse_gradients)
    alarm = ""
    if group.reducer.needs_finite_check:
        names = [t.variable._spec() for t in update_plan.dense]
        gradient_fields = zip(dense, update_plan.plan.dtypes, names, strict=True)
        contributions = [Contribution(v, d, weight, n) for v, d, n in gradient_fields]
        alarm = group.reducer.describe_alarm(gradient_call.name, contributions)
    inputs = ReductionInputs(dense, (weight,), None, gradient_call.rates, alarm)
    totals = update_plan.reduction(inputs)
    weights = group.reducer.weights[:, 0]
    # Equal weights of many ranks are one number, broadcast.
    total_weight = math.fsum(weights.tolist()) if weights.strides[0] else sum_equal(weights)
    return ReducedGradients(totals, total_weight, sparse_gradients)


def _reduce_sparse(
    group: ReplicaGroup, gradient_call: GradientCall, weight: float
) -> list[IndexedSlices]:
    """Return the gradients of some rows, of all replicas. Collective."""
    gradients = gradient_call.sparse_gradients
    if not weight:
        gradients = [_drop_rows(slices) for slices in gradients]
    contributions = [
        sparse.make_contribution(_MEAN, slices, target.variable.name, weight)
        for slices, target in zip(gradients, gradient_call.update_plan.sparse, strict=True)
    ]
    weigh = gradient_call.weight is not None
    return sparse.all_reduce_leaves(
        group, f"{gradient_call.text}, rows", _MEAN, contributions, is_weighting=weigh
    )


def _drop_rows(slices: IndexedSlices) -> IndexedSlices:
    """Return slices without rows: a gradient of weight 0 causes no update of its rows."""
    return IndexedSlices(slices.values[:0], slices.indices[:0], slices.dense_shape)


def make_zero_gradients(update_plan: UpdatePlan) -> ReducedGradients:
    """Return zeros of weight 0, for an update by accumulated gradients."""
    variables = [target.variable for target in update_plan.dense]
    return ReducedGradients([np.zeros(v.shape, v.dtype) for v in variables], 0.0)


def _locate_gradients(
    state: State, gradient_call: GradientCall, weight: float
) -> InPlaceGradients | None:
    """Return where the gradients are in shared memory, if they are reduced there, or None.

    Collective, the first time that memory for gradients is needed.
    """
    group, update_plan = state.strategy._replicas, gradient_call.update_plan
    values = gradient_call.dense_gradients
    node, session = group.reducer.node, group.lockstep.session
    if group.delegate is not None or not node.can_share_memory or session.options.nan != "off":
        return None
    key = tuple(map(id, values))
    in_place = update_plan.in_place_gradients.get(key)
    if in_place is not None and in_place.generation == node.arena.generation:
        return in_place
    homes = node.lookup_addresses(update_plan.plan, values) if update_plan.reads_rows else None
    if homes is None:
        buffers = update_plan.buffers
        if not buffers:
            if not update_plan.has_large or not state.has_buffers(gradient_call.text):
                return None
            buffers = update_plan.buffers = state.buffers_of(update_plan.dense)
        if weight:  # gradients of weight 0 are not read
            for buffer, value in zip(buffers, values, strict=True):
                buffer[...] = value
        in_place, key = update_plan.in_place_gradients.get(()), ()
        if in_place is not None and in_place.generation == node.arena.generation:
            return in_place
        homes = node.lookup_addresses(update_plan.plan, buffers)
        assert homes is not None
    if len(update_plan.in_place_gradients) > _MAX_LOCATIONS:
        update_plan.in_place_gradients.clear()
    in_place = update_plan.in_place_gradients[key] = _plan_in_place(state, update_plan, homes)
    return in_place


def _plan_in_place(
    state: State, update_plan: UpdatePlan, homes: list[BufferAddress]
) -> InPlaceGradients:
    node = state.strategy._replicas.reducer.node
    nodes = node.arena.nodes()
    small = [t for t in update_plan.dense if not t.is_shared]
    # Every rank of the node would read the rows of all.
    is_costly = sum(t.w.nbytes for t in small) * nodes.node.size > _REPEATED_NBYTES
    # Parts that no other rank of the node reads.
    unshared_flags = [t.is_shared or nodes.node.size == 1 for t in update_plan.dense]
    remote_flags = [node.has_peers_for_all_ranks and is_unshared for is_unshared in unshared_flags]
    needs_reduction_flags = [
        nodes.node_count > 1 or (is_costly and not t.is_shared) for t in update_plan.dense
    ]
    reduced = [
        h
        for h, needs_reduction, is_remote in zip(
            homes, needs_reduction_flags, remote_flags, strict=True
        )
        if needs_reduction and not is_remote
    ]
    keys = [(id(h.block), h.position.matrix) for h in homes]
    matrices = {key: (weakref.ref(h.block), key[1]) for key, h in zip(keys, homes, strict=True)}
    matrix_indices = [list(matrices).index(key) for key in keys]
    starts = [home.position.start for home in homes]
    runs = _group_runs(update_plan, matrix_indices, starts, needs_reduction_flags)
    return InPlaceGradients(
        node.arena.generation,
        find_in_place_columns(homes).suffix,
        list(matrices.values()),
        [*map(GradientColumn, matrix_indices, starts, needs_reduction_flags)],
        [i for i, is_remote in enumerate(remote_flags) if is_remote],
        find_in_place_columns(reduced) if reduced else None,
        runs,
        update_plan.divide({member.gradient_index for run in runs for member in run.members}),
    )


def _group_runs(
    update_plan: UpdatePlan, matrix_indices: list[int], starts: list[int], reduced_flags: list[bool]
) -> list[GradientRun]:
    """Return the runs that every rank reduces as one; see `InPlaceGradients.runs`."""
    groups: dict[int, list[int]] = {}
    for i, target in enumerate(update_plan.dense):
        if not target.is_shared and not reduced_flags[i]:
            groups.setdefault(matrix_indices[i], []).append(i)
    runs = []
    for matrix_index, indices in groups.items():
        ends = {i: starts[i] + update_plan.dense[i].w.size for i in indices}
        low, high = min(starts[i] for i in indices), max(ends.values())
        total_size = sum(update_plan.dense[i].w.size for i in indices)
        if len(indices) > 1 and high - low <= 2 * total_size:  # else they are far apart
            members = [RunMember(i, starts[i] - low, ends[i] - low) for i in indices]
            runs.append(GradientRun(matrix_index, low, high, members))
    return runs


def _reduce_in_place(
    state: State,
    gradient_call: GradientCall,
    in_place: InPlaceGradients,
    weight: float,
    sparse_gradients: Sequence[IndexedSlices],
) -> ReducedGradients:
    """Make the handshake, and reduce into the first row what every rank would have to reduce."""
    reducer, plan = state.strategy._replicas.reducer, gradient_call.update_plan.plan
    text = plan.text + in_place.suffix + reducer.options_text + gradient_call.rates
    scales, _ = reducer.handshake(plan, text, plan.pack_weights((weight,)))
    weights = reducer.weights[:, 0]
    total_weight = math.fsum(weights.tolist()) if weights.strides[0] else sum_equal(weights)
    # Each accumulated call counts by its weight, and not by its share of the mean.
    scales = Scales(reducer.weights, [1.0]) if state.accumulates else scales
    column, divisor = scales.select_leaf(0)
    try:
        if in_place.placed is not None and total_weight:
            reducer.node.reduce_in_place(_MEAN, in_place.placed, scales, result_row_count=1)
        # The caller holds the arrays of each block, so the block still exists.
        matrices = [block().matrices[i] for block, i in in_place.matrices]  # type: ignore[union-attr]
        factors, divisor = None, float(divisor)
        if column is not None:
            nodes = reducer.node.arena.nodes()
            local_column = column if nodes.node_count == 1 else column[nodes.ranks]
            factors = [factors_of(local_column, matrix.dtype) for matrix in matrices]
        means: list[Array | None] = [None] * len(in_place.columns)
        for i, low, high, members in in_place.runs:
            total = _average(matrices[i][:, low:high], factors[i] if factors else None, divisor)
            for gradient_index, begin, end in members:
                means[gradient_index] = total[begin:end]
        fetch = None
        if in_place.remote_indices:
            gradient_columns = [(matrices[i], start) for i, start, _ in in_place.columns]
            targets = gradient_call.update_plan.dense
            fetch = _make_fetch(reducer.node, targets, gradient_columns, column, divisor)
        return ReducedGradients(
            means, total_weight, sparse_gradients, in_place, matrices, factors, divisor, fetch
        )
    except BaseException as error:
        abort(state.strategy._replicas.lockstep, plan.text, error)


def _average(rows: Array, factors: Array | None, divisor: float) -> Array:
    mean: Array = quiet().run(mean_rows, rows, divisor, factors)
    if is_all_finite.reference(mean):
        return mean
    total = np.empty((1, rows.shape[1]), rows.dtype)
    reduce_blocks(np.add, rows, total, factors, divisor)
    rescued_mean: Array = total[0]
    return rescued_mean


def _make_fetch(
    node: NodeReducer,
    targets: Sequence[Target],
    gradient_columns: Sequence[tuple[Array, int]],
    column: Array | None,
    divisor: float,
) -> Fetch:
    """Return a function that reduces pieces of gradients with the peers on other nodes.

    Args:
      node: The reducer of the node.
      targets: The variables.
      gradient_columns: The matrix of each gradient, with all ranks of the node, and its first
        column.
      column: The factors of the ranks.
      divisor: The divisor of the sums.
    """

    def find_segment(piece: tuple[int, int, int], peer: int) -> tuple[Array, Segment]:
        i, low, high = piece
        (rows, start), slices = gradient_columns[i], targets[i].slices
        first, last = targets[i].low, targets[i].variable.size
        if slices is not None:  # the last piece of a peer with a smaller slice may be empty
            first, last = slices.cuts[peer : peer + 2]
        low, high = (start + min(first + at, last) for at in (low, high))
        return rows, Segment(low, high, column, divisor)

    def fetch(pieces: Sequence[tuple[int, int, int]]) -> None:
        slices = targets[pieces[0][0]].slices
        peers = range(1 if slices is None else slices.peers.size)
        node.reduce_peer_columns(
            [[find_segment(piece, peer) for piece in pieces] for peer in peers]
        )

    return fetch
