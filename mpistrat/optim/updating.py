"""One update of all variables of a call: norms first, if they are needed, then weights and state.

Each rank updates its parts (`mpistrat.optim.state.Target`). Norms (for clipping, LAMB, LARS and
``"skip"``) need a pass before the update: each rank computes the sums of squares of its own blocks;
they are added within the node and then exactly, so their bits do not depend on the number of ranks.
One barrier of the ranks that divide the update ends it, or an all-reduce that finds the first
gradient that is not finite.

With ``shard="all"`` one ``MPI_Allgatherv`` per variable between peers puts the updated weights into
the memory of each node, a barrier of all ranks ends the call, and sums of squares and the first bad
gradient are reduced over all ranks, as each block is on one. Rows of `IndexedSlices` are updated by
element, as a row may be in two slices, and only changed elements are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives import inter_node
from mpistrat.comm.base import Comm
from mpistrat.kernels.threads import Team
from mpistrat.optim import passes
from mpistrat.optim.base import ClipByGlobalNorm, norm_of
from mpistrat.optim.passes import BLOCK, Gradient, count_blocks
from mpistrat.optim.state import Target
from mpistrat.shm.storage import Slices
from mpistrat.variables.indexed_slices import IndexedSlices

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings
    from mpistrat.optim.fused import FusedSmallVariables, GradientTransform

__all__ = [
    *("NO_INDEX", "THREADS", "Fetch", "FusedUpdate", "RowUpdate", "Update", "VariableUpdate"),
    *("merge_duplicate_rows", "synchronize_ranks", "update_rows"),
]

_PART = 1 << 19  # elements that are worth a thread
THREADS = 2 * _PART  # elements that are worth more than one
# From so many rows on, a reduced gradient that is needed twice is written down.
_KEPT_ROW_COUNT = 3
NO_INDEX = np.iinfo(np.int64).max

# A function that fetches pieces: index of the gradient, first element and element after the last,
# counted from the first that the rank updates. All are of one dtype, and together at most
# `inter_node.MAX_EXCHANGE_ELEMENTS` elements, for all peers if each has a slice of its own.
# Collective over the peers on all nodes.
Fetch: TypeAlias = Callable[[Sequence[tuple[int, int, int]]], None]


class VariableUpdate(NamedTuple):
    """A variable, and the gradient of this rank's part of it.

    Attributes:
      target: The variable.
      gradient: Its `start` is the first element of the part.
    """

    target: Target
    gradient: Gradient


class FusedUpdate(NamedTuple):
    """Small variables that are updated as one, and their gradients.

    Attributes:
      fused: The variables.
      indices: The index of each gradient in the call.
      gradients: The gradients.
    """

    fused: FusedSmallVariables
    indices: Sequence[int]
    gradients: Sequence[Array]


class RowUpdate(NamedTuple):
    """A variable of which some rows are updated.

    Attributes:
      target: The variable.
      row_indices: The rows, each once.
      values: Their gradients in the dtype of the variable, the same on all ranks.
    """

    target: Target
    row_indices: Array
    values: Array


def synchronize_ranks(comm: Comm | None, bad_index: int, is_guarded: bool) -> int | None:
    """Wait for the ranks that divide an update, and return the first gradient that is not finite.

    Args:
      comm: The ranks; None if no rank reads what another one writes.
      bad_index: The index of the first bad gradient of this rank; `NO_INDEX` if all are finite.
      is_guarded: Whether ranks have checked.

    Returns:
      The index of the first bad gradient of all ranks; None if all are finite.
    """
    if comm is not None and is_guarded:
        lowest_index = np.empty(1, np.int64)
        comm.allreduce(np.array([bad_index]), lowest_index, "MIN")  # a barrier as well
        bad_index = int(lowest_index[0])
    elif comm is not None:
        comm.barrier()
    return None if bad_index == NO_INDEX else bad_index


@final
class Update:
    """One call that changes variables or accumulates, once its gradients can be read.

    Args:
      optimizer: The optimizer.
      step: How many updates were made before.
      scalars: The numbers of this step, without norms, by the identity of optimizers.
      is_compiled: Whether there are so many elements that compiled loops pay.
      variable_updates: The variables that are updated one by one, by the index of the gradient.
      fused_updates: The small variables that are updated as one.
      transform: What is done to the gradients of these.
      row_updates: Variables of which some rows are updated; their indices follow those of the
        dense gradients.
      dense_count: How many gradients of all elements there are.
      comm: The ranks that divide the update: of the node, or all if each has a slice of its own.
        None if no rank reads what another one writes.
      team: The threads of this rank; None for this one alone.
      remote_indices: The indices of gradients that are fetched, part by part, before they are read.
      fetch: Fetches them.
    """

    def __init__(
        self,
        optimizer: OptimizerSettings,
        *,
        step: int,
        scalars: dict[int, tuple[float, ...]],
        is_compiled: bool,
        variable_updates: dict[int, VariableUpdate],
        fused_updates: Sequence[FusedUpdate],
        transform: GradientTransform,
        row_updates: Sequence[RowUpdate],
        dense_count: int,
        comm: Comm | None,
        team: Team | None,
        remote_indices: Sequence[int] = (),
        fetch: Fetch | None = None,
    ):
        """Store the arguments, and change no variable yet."""
        self._optimizer, self._step = optimizer, step
        self._scalars, self._is_compiled = scalars, is_compiled
        self._updates, self._fused_updates = variable_updates, fused_updates
        self._row_updates, self._dense_count = list(row_updates), dense_count
        self._transform, self._comm, self._team = transform, comm, team
        self._remote_indices, self._fetch = set(remote_indices), fetch
        self._is_guarded = optimizer.nonfinite == "raise"
        # Where the sums of each variable begin, and how many of them the ranks add up.
        self._sum_starts, self._shared_width = dict.fromkeys(variable_updates, 0), 0

    def _allocate_sums(self, row_count: int) -> Array:
        """Return zeros for sums of squares of each block, and set the start of each variable."""
        width = self._shared_width = 0
        # Shared variables come first, so that the sums that ranks add up are one run.
        for i in sorted(self._updates, key=lambda i: not self._updates[i].target.is_shared):
            target = self._updates[i].target
            self._sum_starts[i] = width
            width += count_blocks(target.variable.size)
            self._shared_width += count_blocks(target.variable.size) * target.is_shared
        return np.zeros((row_count, width))

    def accumulate(self) -> None:
        """Add the gradients to the slots that wait for the update, and end the call."""
        self._run_pass(self._updates, lambda i, g, *_: passes.accumulate(g, self._is_compiled))
        for fused_update in self._fused_updates:
            fused_update.fused.accumulate(fused_update.gradients, self._transform)
        self.wait_for_ranks()

    def clear_pending(self) -> None:
        """Put zeros into the slots that wait for an update that is left out, and end the call."""
        slots = [target.pending for target, _ in self._updates.values()]
        for pending in [*slots, *[update.fused.pending for update in self._fused_updates]]:
            if pending is not None:
                pending[:] = 0
        self.wait_for_ranks()

    def wait_for_ranks(self) -> None:
        """Wait for the ranks that divide the update."""
        if self._comm is not None:
            self._comm.barrier()

    def norm(self) -> float:
        """Return the norm of all gradients; it is finite exactly if all of them are.

        Collective over the ranks that divide the update.
        """
        sums = self._allocate_sums(1)
        self._measure_norms(sums[0])
        block_sums = self._add_shared_sums(sums)[0].tolist()
        for fused_update in self._fused_updates:
            fused, gradients = fused_update.fused, fused_update.gradients
            block_sums += fused.compute_square_sums(gradients, self._transform)
        for row_update in self._row_updates:
            flat = row_update.values.reshape(1, -1)
            row_sums = np.zeros(count_blocks(flat.size))
            passes.measure_norm(Gradient(flat), flat.size, row_sums, False, self._is_compiled)
            block_sums += row_sums.tolist()
        norm = norm_of(block_sums)
        if isinstance(self._optimizer.clip, ClipByGlobalNorm):
            self._scale_gradients(self._optimizer.clip.factor(norm))
        if math.isfinite(norm):
            self._is_guarded = False  # a finite norm shows that all gradients are finite
        return norm

    def _measure_norms(self, sums: Array) -> None:
        # No other rank reads this rank's columns of shared memory.
        is_kept = {
            i: t.is_shared and len(g.rows) >= _KEPT_ROW_COUNT for i, (t, g) in self._updates.items()
        }

        def measure(i: int, g: Gradient, low: int, high: int) -> None:
            block_sums = self._get_local_sums(sums, i)[
                low // BLOCK : low // BLOCK + count_blocks(high - low)
            ]
            passes.measure_norm(g, high - low, block_sums, is_kept[i], self._is_compiled)

        self._run_pass(self._updates, measure)
        for i, (target, gradient) in self._updates.items():
            if is_kept[i]:
                self._updates[i] = VariableUpdate(target, gradient.kept_gradient())

    def _scale_gradients(self, factor: float) -> None:
        self._transform = self._transform._replace(factor=self._transform.factor * factor)
        for i, (target, gradient) in self._updates.items():
            self._updates[i] = VariableUpdate(
                target, gradient._replace(scale=gradient.scale * factor)
            )
        self._row_updates = [
            row_update._replace(values=row_update.values * row_update.values.dtype.type(factor))
            for row_update in self._row_updates
        ]

    def apply(self) -> int | None:
        """Update weights and slots, and end the call.

        Collective over the ranks that divide the update.

        Returns:
          None; or the index of the first gradient that is not finite, alike on all ranks.
        """
        bad_index = self._find_bad_rows() if self._is_guarded and self._row_updates else NO_INDEX
        norms = self._measure_step_norms()
        if self._is_guarded and norms:
            not_finite = [i for i, pair in norms.items() if not math.isfinite(sum(pair))]
            bad_index = min([bad_index, *not_finite])
        if bad_index != NO_INDEX:  # all ranks see it before a weight has changed
            self.wait_for_ranks()
            return bad_index
        for i in self._update_variables({i: self._get_scalars(i, norms) for i in self._updates}):
            bad_index = min(bad_index, i)
        for fused, indices, gradients in self._fused_updates:
            update_arguments = (
                self._scalars[id(fused.optimizer)],
                self._is_guarded,
                self._is_compiled,
            )
            bad_member = fused.update(gradients, self._transform, *update_arguments)
            bad_index = bad_index if bad_member is None else min(bad_index, indices[bad_member])
        for target, _ in self._updates.values():
            if target.slices is not None and target.peer_weights is not None:
                target.slices.fill_part(target.w.copy(), target.peer_weights)
        for row_update in self._row_updates:
            update_rows(row_update, self._step, self._is_compiled)
        return synchronize_ranks(self._comm, bad_index, self._is_guarded)

    def _find_bad_rows(self) -> int:
        bad_indices = (
            i
            for i, row_update in enumerate(self._row_updates)
            if not np.isfinite(row_update.values).all()
        )
        bad_index = next(bad_indices, None)
        return NO_INDEX if bad_index is None else self._dense_count + bad_index

    def _measure_step_norms(self) -> dict[int, tuple[float, float]]:
        """Return the norms of weights and directions, for rules that need them."""
        norms: dict[int, tuple[float, float]] = {}
        measured = [i for i, update in self._updates.items() if update.target.rule.measure]
        if not measured:
            return norms
        sums = self._allocate_sums(2)
        self._measure(measured, sums)
        sums = self._add_shared_sums(sums)
        for i in measured:
            weight_norm, direction_norm = (norm_of(row.tolist()) for row in self._get_sums(sums, i))
            norms[i] = weight_norm, direction_norm
        return norms

    def _measure(self, indices: Sequence[int], sums: Array) -> None:
        numbers = {i: self._updates[i].target.optimizer.scalars(self._step) for i in indices}

        def measure(i: int, g: Gradient, low: int, high: int) -> None:
            target = self._updates[i].target
            block_sums = np.zeros((2, count_blocks(high - low)))
            slots = tuple(slot[low:high] for slot in target.slot_parts)
            passes.measure(
                target.rule,
                g,
                target.w[low:high],
                slots,
                numbers[i],
                sums=block_sums,
                is_guarded=self._is_guarded,
                is_compiled=self._is_compiled,
            )
            self._get_local_sums(sums, i)[:, low // BLOCK : low // BLOCK + block_sums.shape[1]] = (
                block_sums
            )

        self._run_pass(indices, measure)

    def _get_scalars(self, i: int, norms: dict[int, tuple[float, float]]) -> tuple[float, ...]:
        optimizer = self._updates[i].target.optimizer
        if i in norms:
            return optimizer.scalars(self._step, norms[i])
        return self._scalars[id(optimizer)]

    def _update_variables(self, scalars: dict[int, tuple[float, ...]]) -> list[int]:
        """Update this rank's parts, and return the indices with blocks that were left out."""
        skipped_indices = []

        def update(i: int, g: Gradient, low: int, high: int) -> None:
            target = self._updates[i].target
            w, slots, ema = target.w, target.slot_parts, target.ema
            if high - low < w.size:
                w, slots = w[low:high], tuple(slot[low:high] for slot in slots)
                ema = None if ema is None else ema[low:high]
            skipped_count = passes.update(
                target.rule,
                g,
                w,
                slots,
                scalars[i],
                ema=ema,
                decay=target.optimizer.ema or 0.0,
                is_guarded=self._is_guarded,
                is_compiled=self._is_compiled,
            )
            if skipped_count:
                skipped_indices.append(i)

        self._run_pass(list(scalars), update)
        return skipped_indices

    def _run_pass(
        self, indices: Iterable[int], action: Callable[[int, Gradient, int, int], None]
    ) -> None:
        """Call `action` with each part of the gradients, its begin and its end in the slots.

        Remote arrays are fetched the first time, in pieces, so that `action` finds them in cache.
        """
        remote_arrays: dict[int, list[tuple[int, Array]]] = {}
        for i in indices:
            target = self._updates[i].target
            if i not in self._remote_indices:
                self._run_threads(i, 0, target.w.size, action)
            elif target.slices is None or target.peer_weights is None:
                remote_arrays.setdefault(1, []).append((i, target.w))
            else:  # as many pieces as the peer with the largest slice has
                widest_part = target.peer_weights[: target.slices.widest]
                remote_arrays.setdefault(target.slices.peers.size, []).append((i, widest_part))
        for peer_count, arrays in remote_arrays.items():
            for pieces in inter_node.cut_into_exchanges(arrays, BLOCK, peer_count):
                assert self._fetch is not None
                self._fetch(pieces)
                for i, low, high in pieces:
                    high = min(high, self._updates[i].target.w.size)
                    if low < high:
                        self._run_threads(i, low, high, action)
            self._remote_indices.difference_update(i for i, _ in arrays)

    def _run_threads(
        self, i: int, begin: int, end: int, action: Callable[[int, Gradient, int, int], None]
    ) -> None:
        """Divide these elements between the threads."""
        g, size = self._updates[i].gradient, end - begin

        if (
            not begin
            and size == self._updates[i].target.w.size
            and (self._team is None or size < THREADS)
        ):
            action(i, g, 0, size)
            return

        def run_part(low: int, high: int) -> None:
            low, high = begin + low, begin + high
            pending = None if g.pending is None else g.pending[low:high]
            with np.errstate(all="ignore"):  # each thread has its own setting
                action(i, g._replace(start=g.start + low, pending=pending), low, high)

        if self._team is None or size < THREADS:
            run_part(0, size)
        else:
            self._team.run(run_part, 0, size, size // _PART, BLOCK)

    def _get_sums(self, sums: Array, i: int) -> Array:
        """Return the sums of a variable."""
        start = self._sum_starts[i]
        return sums[..., start : start + count_blocks(self._updates[i].target.variable.size)]

    def _get_local_sums(self, sums: Array, i: int) -> Array:
        """Return the sums of this rank's part of a variable and of what follows the part."""
        return self._get_sums(sums, i)[..., self._updates[i].target.low // BLOCK :]

    def _add_shared_sums(self, sums: Array) -> Array:
        """Return the sums of all ranks: one rank has the sum of each block, others have 0."""
        if self._comm is None or not self._shared_width:
            return sums
        local_sums = np.ascontiguousarray(sums[:, : self._shared_width])
        total_sums = np.empty_like(local_sums)
        self._comm.allreduce(local_sums, total_sums, "SUM")
        sums[:, : self._shared_width] = total_sums
        return sums


def merge_duplicate_rows(
    target: Target, slices: IndexedSlices, transform: GradientTransform
) -> RowUpdate:
    """Return rows of a variable once each, with the sum of their gradients.

    Args:
      target: The variable.
      slices: The rows and their gradients.
      transform: The transform of gradients.
    """
    row_indices, inverse_indices = np.unique(slices.indices, return_inverse=True)
    values = np.zeros((len(row_indices), *slices.values.shape[1:]), target.variable.dtype)
    np.add.at(values, inverse_indices.reshape(-1), slices.values)
    values *= values.dtype.type(transform.factor)
    is_clipped = transform.should_clip_infinities or np.isfinite(values)
    np.clip(values, -transform.limit, transform.limit, out=values, where=is_clipped)
    return RowUpdate(target, row_indices, values)


def update_rows(row_update: RowUpdate, step: int, is_compiled: bool) -> None:
    """Update this rank's part of some rows of a variable; no others change.

    Collective over the peers if each has a slice of its own; they get the changed elements.

    Args:
      row_update: The rows and their gradients, the same on all ranks.
      step: How many updates were made before.
      is_compiled: Whether to use compiled loops.
    """
    target = row_update.target
    if target.slices is not None and target.peer_weights is not None:
        _update_spread_rows(row_update, target.slices, target.peer_weights, step, is_compiled)
        return
    width = math.prod(target.variable.shape[1:])
    if not width:
        return
    low, w = target.variable._storage.part(width)
    slots = [target.slots[name]._storage.part(width)[1] for name in target.rule.slots]
    first, count = low // width, w.size // width
    is_local = (row_update.row_indices >= first) & (row_update.row_indices < first + count)
    matrices = [part.reshape(-1, *target.variable.shape[1:]) for part in (w, *slots)]
    local_rows, gradients = row_update.row_indices[is_local] - first, row_update.values[is_local]
    _update_elements(target, matrices, local_rows, gradients, step=step, is_compiled=is_compiled)


def _update_spread_rows(
    row_update: RowUpdate, slices: Slices, peer_weights: Array, step: int, is_compiled: bool
) -> None:
    """Update the elements of these rows in this rank's slice, and send them to the peers."""
    target, cuts = row_update.target, slices.cuts
    width = math.prod(target.variable.shape[1:])
    # Rows with elements of this rank and its peers; the update of an element depends on no other.
    is_affected = (row_update.row_indices + 1) * width > cuts[0]
    is_affected &= row_update.row_indices * width < cuts[-1]
    values = row_update.values[is_affected].reshape(-1)
    positions = (row_update.row_indices[is_affected, None] * width + np.arange(width)).reshape(-1)
    bounds = np.searchsorted(positions, cuts).tolist()
    low, high = bounds[slices.peers.rank :][:2]
    local_positions, slots = positions[low:high] - slices.low, list(target.slot_parts)
    parts, gradients = [target.w, *slots], values[low:high]
    _update_elements(target, parts, local_positions, gradients, step=step, is_compiled=is_compiled)
    changed_weights = np.empty(bounds[-1] - bounds[0], target.w.dtype)
    slices._replace(cuts=[bound - bounds[0] for bound in bounds]).fill_part(
        target.w[local_positions], changed_weights
    )
    peer_weights[positions[bounds[0] : bounds[-1]] - cuts[0]] = changed_weights


def _update_elements(
    target: Target,
    parts: Sequence[Array],
    positions: Array,
    gradients: Array,
    *,
    step: int,
    is_compiled: bool,
) -> None:
    """Update the weights and the slots of the rule at some positions."""
    if not positions.size:
        return
    copies = [part[positions].reshape(-1) for part in parts]
    gradient = Gradient(np.ascontiguousarray(gradients).reshape(1, -1))
    s, slots = target.optimizer.scalars(step), tuple(copies[1:])
    passes.update(
        target.rule, gradient, copies[0], slots, s, is_guarded=False, is_compiled=is_compiled
    )
    for part, copy in zip(parts, copies, strict=True):
        part[positions] = copy.reshape(gradients.shape)
