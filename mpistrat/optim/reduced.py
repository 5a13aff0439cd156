"""Gradients of all replicas made readable: proved, moved, and reduced as far as they have to be.

One handshake; then one of these, alike on all ranks:

========  ==================================  ==================================================
way       when                                what moves
========  ==================================  ==================================================
alone     one rank, or cross-replica code     nothing: the gradient is there
reduced    small variables only, or memory     an all-reduce; then each rank updates what it holds
          is not shared, or values move by
          choice
in place  gradients are in the arena, or are  each rank reduces and updates its parts of all
          put there                           variables in one pass; one barrier of the node
========  ==================================  ==================================================

On several nodes with as many ranks each, this rank's part of a large variable goes the same way:
some at a time (`Reduced.fetch`), it is reduced here, then with the twins on the other nodes, and
updated while it is in cache; with ``shard="all"`` each twin reduces and updates its slice of the
part alone. Everything else that is in the arena, and all of it where nodes differ in size, is
reduced into the first row of each node before it is read.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.layout import Segment, placed
from mpistrat.collectives.node import NodeReducer
from mpistrat.collectives.plan import Contribution, ReductionInputs
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.elementwise import factors_of
from mpistrat.kernels.loops import reduce_blocks
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.ending import abort
from mpistrat.optim.blocks import finite, mean_rows
from mpistrat.optim.gradient_validation import GradientCall
from mpistrat.optim.state import State, Target
from mpistrat.optim.update_plan import Places, UpdatePlan
from mpistrat.optim.updating import Fetch
from mpistrat.shm.arena import BufferAddress
from mpistrat.variables import sparse, writes
from mpistrat.variables.indexed_slices import IndexedSlices

__all__ = ["Reduced", "nothing_to_add", "reduce"]

# Small variables are updated by every rank, which reduces the rows of all: up to so many bytes it
# is quicker than to reduce them in slices first, and to wait for that.
_REPEATED_NBYTES = 1 << 20
_MEAN = ReduceOp.MEAN


class Reduced(NamedTuple):
    """Gradients as this rank can read them.

    Attributes:
      means: Of each gradient the mean over all replicas; None where it is still to be made.
      weight: The sum of the weights of all replicas.
      sparse: The gradients of some rows, of all replicas.
      places: Where the gradients of all ranks of the node are, which this rank reads until the call
        ends; None if all means are made.
      matrices: These, as matrices with a row for each rank.
      factors: What each row of these matrices is multiplied by; None for ones.
      divisor: What sums of rows are divided by.
      fetch: Reduces parts of gradients with the twins on other nodes, if some are far.
    """

    means: Sequence[Any]
    weight: float
    sparse: Sequence[IndexedSlices] = ()
    places: Places | None = None
    matrices: Sequence[Array] = ()
    factors: Sequence[Array] | None = None
    divisor: float = 1.0
    fetch: Fetch | None = None

    def gradient_of(self, i: int) -> tuple[Array, int, Array | None, float]:
        """Return what a gradient is made of.

        Args:
          i: Its number.

        Returns:
          A matrix, and its column where the gradient begins; what each row is multiplied by, None
          for ones; and what the sum of the rows is divided by.
        """
        mean = self.means[i]
        if mean is not None:  # a matrix of one row that loops can take
            row = mean if mean.flags.carray else np.require(mean, requirements=("C", "A", "W"))
            return row.reshape(1, -1), 0, None, 1.0
        assert self.places is not None
        matrix, start, is_reduced = self.places.rows[i]
        rows, factors = self.matrices[matrix], self.factors
        if is_reduced:
            return rows[:1], start, None, 1.0
        return rows, start, None if factors is None else factors[matrix], self.divisor


def reduce(state: State, call: GradientCall) -> Reduced:
    """Prove the call, and return the gradients of all replicas as this rank can read them."""
    group, update_plan = state.strategy.replicas, call.update_plan
    weight = 1.0 if call.weight is None else call.weight
    if group.lockstep.comm.size == 1:
        group.lockstep.check()
        return Reduced(call.values, weight, call.rows)
    if not call.replica:
        advice = "Reduce gradients first: strategy.reduce, extended.reduce_to, ctx.all_reduce."
        writes.prove_same(group.lockstep, call.text, call.alike, advice)
        return Reduced(call.values, weight, call.rows)
    rows: list[IndexedSlices] = []
    if call.rows:
        ones = call.rows if weight else [_no_rows(slices) for slices in call.rows]
        row_contributions = [
            sparse.contribution(_MEAN, slices, target.variable.name, weight)
            for slices, target in zip(ones, update_plan.sparse, strict=True)
        ]
        weigh = call.weight is not None
        rows = sparse.all_reduce(group, f"{call.text}, rows", _MEAN, row_contributions, weigh=weigh)
    if not call.values:
        if call.weight is not None:
            weight_payloads = group.lockstep.gather_payloads(
                f"{call.text}, weights", struct.pack("<d", weight)
            )
            weight = math.fsum(np.frombuffer(b"".join(weight_payloads)).tolist())
        return Reduced([], weight, rows)
    places = _places(state, call, weight)
    if places is not None:
        return _in_place(state, call, places, weight, rows)
    alarm = ""
    if group.reducer.watches:
        names = [t.variable.spec() for t in update_plan.dense]
        gradient_fields = zip(call.values, update_plan.plan.dtypes, names, strict=True)
        contributions = [Contribution(v, d, weight, n) for v, d, n in gradient_fields]
        alarm = group.reducer.alarm(call.name, contributions)
    inputs = ReductionInputs(call.values, (weight,), None, call.rates, alarm)
    totals = update_plan.reduction(inputs)
    return Reduced(totals, math.fsum(group.reducer.weights[:, 0].tolist()), rows)


def _no_rows(slices: IndexedSlices) -> IndexedSlices:
    """Return none of the rows: those of a gradient of weight 0 are not updated for its sake."""
    return IndexedSlices(slices.values[:0], slices.indices[:0], slices.dense_shape)


def nothing_to_add(update_plan: UpdatePlan) -> Reduced:
    """Return zeros of weight 0, for an update by what has accumulated before."""
    return Reduced([np.zeros(t.variable.shape, t.variable.dtype) for t in update_plan.dense], 0.0)


def _places(state: State, call: GradientCall, weight: float) -> Places | None:
    """Return where the gradients are in the arena, if they are reduced there.

    Collective, the first time that memory for gradients is wanted.
    """
    group, update_plan, values = state.strategy.replicas, call.update_plan, call.values
    node, session = group.reducer.node, group.lockstep.session
    if group.delegate is not None or not node.possible or session.options.nan != "off":
        return None
    key = tuple(map(id, values))
    known_places = update_plan.places.get(key)
    if known_places is not None and known_places.generation == node.arena.generation:
        return known_places
    homes = node.homes(update_plan.plan, values) if update_plan.reads_rows else None
    if homes is None:
        buffers = update_plan.buffers
        if not buffers:
            if not update_plan.large or not state.has_buffers(call.text):
                return None
            buffers = update_plan.buffers = state.buffers_of(update_plan.dense)
        if weight:  # what is taken 0 times is not read
            for place, value in zip(buffers, values, strict=True):
                place[...] = value
        known_places, key = update_plan.places.get(()), ()
        if known_places is not None and known_places.generation == node.arena.generation:
            return known_places
        homes = node.homes(update_plan.plan, buffers)
        assert homes is not None
    if len(update_plan.places) > 16:
        update_plan.places.clear()
    new_places = update_plan.places[key] = _placed(state, update_plan, homes)
    return new_places


def _placed(state: State, update_plan: UpdatePlan, homes: list[BufferAddress]) -> Places:
    node = state.strategy.replicas.reducer.node
    nodes = node.arena.nodes()
    small = [t for t in update_plan.dense if not t.shared]
    # Every rank of the node would read the rows of all.
    is_costly = sum(t.w.nbytes for t in small) * nodes.node.size > _REPEATED_NBYTES
    # Parts that no other rank of the node reads.
    unshared_flags = [t.shared or nodes.node.size == 1 for t in update_plan.dense]
    remote_flags = [node.twins and is_unshared for is_unshared in unshared_flags]
    reduced_flags = [
        nodes.node_count > 1 or (is_costly and not t.shared) for t in update_plan.dense
    ]
    reduced = [
        h
        for h, is_reduced, is_remote in zip(homes, reduced_flags, remote_flags, strict=True)
        if is_reduced and not is_remote
    ]
    keys = [(id(h.block), h.position.matrix) for h in homes]
    matrices = {key: (weakref.ref(h.block), key[1]) for key, h in zip(keys, homes, strict=True)}
    matrix_indices = [list(matrices).index(key) for key in keys]
    starts = [home.position.start for home in homes]
    runs = _runs(update_plan, matrix_indices, starts, reduced_flags)
    return Places(
        node.arena.generation,
        placed(homes).suffix,
        list(matrices.values()),
        list(zip(matrix_indices, starts, reduced_flags, strict=True)),
        [i for i, is_remote in enumerate(remote_flags) if is_remote],
        placed(reduced) if reduced else None,
        runs,
        update_plan.divide({i for *_, members in runs for i, _, _ in members}),
    )


def _runs(
    update_plan: UpdatePlan, matrix_indices: list[int], starts: list[int], reduced_flags: list[bool]
) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """Return what every rank reduces as one; see `Places.runs`."""
    groups: dict[int, list[int]] = {}
    for i, target in enumerate(update_plan.dense):
        if not target.shared and not reduced_flags[i]:
            groups.setdefault(matrix_indices[i], []).append(i)
    runs = []
    for matrix, members in groups.items():
        ends = {i: starts[i] + update_plan.dense[i].w.size for i in members}
        low, high = min(starts[i] for i in members), max(ends.values())
        total_size = sum(update_plan.dense[i].w.size for i in members)
        if len(members) > 1 and high - low <= 2 * total_size:  # else they are far apart
            runs.append((matrix, low, high, [(i, starts[i] - low, ends[i] - low) for i in members]))
    return runs


def _in_place(
    state: State, call: GradientCall, places: Places, weight: float, sparse: Sequence[IndexedSlices]
) -> Reduced:
    """Prove the call, and reduce into the first row what every rank would have to reduce."""
    reducer, plan = state.strategy.replicas.reducer, call.update_plan.plan
    text = plan.text + places.suffix + reducer.said + call.rates
    scales, _ = reducer.handshake(plan, text, plan.pack_weights((weight,)))
    table = reducer.weights
    total_weight = math.fsum(table[:, 0].tolist())
    # In calls that accumulate, each is to count by its weight, and not by its part of the mean.
    if state.accumulates:
        scales = Scales(table, [1.0])
    column, divisor = scales.of(0)
    try:
        if places.placed is not None and total_weight:
            reducer.node.reduce_placed(_MEAN, places.placed, scales, into=1)
        # The caller holds the arrays of each block, so the block still exists.
        matrices = [block().matrices[i] for block, i in places.matrices]  # type: ignore[union-attr]
        factors, divisor = None, float(divisor)
        if column is not None:
            nodes = reducer.node.arena.nodes()
            local_column = column if nodes.node_count == 1 else column[nodes.ranks]
            factors = [factors_of(local_column, matrix.dtype) for matrix in matrices]
        means: list[Array | None] = [None] * len(places.rows)
        for i, low, high, members in places.runs:
            total = _mean(matrices[i][:, low:high], factors[i] if factors else None, divisor)
            for number, begin, end in members:
                means[number] = total[begin:end]
        fetch = None
        if places.far:
            gradient_columns = [(matrices[i], start) for i, start, _ in places.rows]
            fetch = _fetch_by(
                reducer.node, call.update_plan.dense, gradient_columns, column, divisor
            )
        return Reduced(means, total_weight, sparse, places, matrices, factors, divisor, fetch)
    except BaseException as error:
        abort(state.strategy.replicas.lockstep, plan.text, error)


def _mean(rows: Array, factors: Array | None, divisor: float) -> Array:
    mean: Array = quiet().run(mean_rows, rows, divisor, factors)
    if finite.reference(mean):
        return mean
    total = np.empty((1, rows.shape[1]), rows.dtype)
    reduce_blocks(np.add, rows, total, factors, divisor)
    rescued_mean: Array = total[0]
    return rescued_mean


def _fetch_by(
    node: NodeReducer,
    targets: Sequence[Target],
    gradient_columns: Sequence[tuple[Array, int]],
    column: Array | None,
    divisor: float,
) -> Fetch:
    """Return a function that reduces parts of gradients with the twins.

    Args:
      node: Reduces them.
      targets: The variables.
      gradient_columns: The matrix of each gradient, with all ranks of the node, and its first
        column.
      column: What ranks are scaled by.
      divisor: What sums are divided by.
    """

    def columns(part: tuple[int, int, int], twin: int) -> tuple[Array, Segment]:
        i, low, high = part
        (rows, start), slices = gradient_columns[i], targets[i].slices
        first, last = targets[i].low, targets[i].variable.size
        if slices is not None:  # the last piece of a twin that has less may be empty
            first, last = slices.cuts[twin : twin + 2]
        low, high = (start + min(first + at, last) for at in (low, high))
        return rows, Segment(low, high, column, divisor)

    def fetch(parts: Sequence[tuple[int, int, int]]) -> None:
        slices = targets[parts[0][0]].slices
        twins = 1 if slices is None else slices.peers.size
        node.reduce_parts([[columns(part, twin) for part in parts] for twin in range(twins)])

    return fetch
