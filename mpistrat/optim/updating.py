"""One update of all variables of a call: norms first, if they are wanted, then weights and state.

Each rank does its parts (`mpistrat.optim.state.Target`); where the ranks of a node share memory,
they tell each other sums of squares, and wait for one another at the end.
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
from mpistrat.optim.passes import BLOCK, Gradient, blocks
from mpistrat.optim.rows import Rows, update_rows
from mpistrat.optim.state import Target

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings
    from mpistrat.optim.fused import FusedSmallVariables, Take

__all__ = ["NOBODY", "THREADS", "Fetch", "Group", "Update", "Work", "meet"]

_PART = 1 << 19  # elements that are worth a thread
THREADS = 2 * _PART  # elements that are worth more than one
_KEEP = 3  # from so many rows on a reduced gradient that is needed twice is written down
NOBODY = np.iinfo(np.int64).max

# Takes which gradients, and which elements, counted from the first that the rank updates, up to
# after the last; of one dtype, and together at most `lanes.MOST`, for all twins if each has a slice
# of its own. Collective over the twins on all nodes.
Fetch: TypeAlias = Callable[[Sequence[tuple[int, int, int]]], None]


class Work(NamedTuple):
    """A variable, and the gradient of this rank's part of it.

    Attributes:
      target: The variable.
      gradient: Its `start` is the first element of the part.
    """

    target: Target
    gradient: Gradient


# Small variables that are updated as one, the number of each, and their gradients.
Group: TypeAlias = "tuple[FusedSmallVariables, Sequence[int], Sequence[Array]]"


def meet(node: Comm | None, first: int, guard: bool) -> int | None:
    """Wait for the ranks that divide an update; return which gradient is not finite, or None.

    Args:
      node: The ranks; None if nobody reads what another one writes.
      first: Which one is not, of those that this rank has seen; `NOBODY` if all are.
      guard: Whether anybody has looked.
    """
    if node is not None and guard:
        lowest_index = np.empty(1, np.int64)
        node.allreduce(np.array([first]), lowest_index, "MIN")  # a barrier as well
        first = int(lowest_index[0])
    elif node is not None:
        node.barrier()
    return None if first == NOBODY else first


@final
class Update:
    """One call that changes variables or accumulates, once its gradients can be read.

    Args:
      optimizer: The optimizer.
      step: How many updates were made before.
      scalars: The numbers of this step, without norms, by the identity of optimizers.
      compiled: Whether so many elements are worth a compiler.
      works: What is updated by itself, by the number of its gradient.
      groups: What is updated as one.
      take: What is done to the gradients of these.
      rows: Variables of which some rows are updated; their numbers follow.
      count: How many gradients of all elements there are.
      node: The ranks that divide the update: of the node, or all if each has a slice of its own.
        None if nobody reads what another one writes.
      team: The threads of this rank; None for this one alone.
      far: Which of the works have gradients that are fetched, part by part, before they are read.
      fetch: Fetches.
    """

    def __init__(
        self,
        optimizer: OptimizerSettings,
        step: int,
        scalars: dict[int, tuple[float, ...]],
        compiled: bool,
        works: dict[int, Work],
        groups: Sequence[Group],
        take: Take,
        rows: Sequence[Rows],
        count: int,
        node: Comm | None,
        team: Team | None,
        remote_indices: Sequence[int] = (),
        fetch: Fetch | None = None,
    ):
        """Change nothing yet."""
        self._optimizer, self._step = optimizer, step
        self._works, self._groups, self._take = works, groups, take
        self._rows, self._count = list(rows), count
        self._node, self._team = node, team
        self._far, self._fetch = set(remote_indices), fetch
        self._guard = optimizer.nonfinite == "raise"
        self._scalars, self._compiled = scalars, compiled
        self._at, self._width, self._common = dict.fromkeys(works, 0), 0, 0

    def _sums(self, rows: int) -> Array:
        """Return room for sums of squares of each block of all works, and note where each lies."""
        # Shared variables come first, so that what the node adds up is one run.
        self._width = self._common = 0
        for i in sorted(self._works, key=lambda i: not self._works[i].target.shared):
            target = self._works[i].target
            self._at[i] = self._width
            self._width += blocks(target.variable.size)
            self._common += blocks(target.variable.size) * target.shared
        return np.zeros((rows, self._width))

    def accumulate(self) -> None:
        """Add the gradients to the slots that wait for the update, and end the call."""
        self._pass(self._works, lambda i, g, *_: passes.accumulate(g, self._compiled))
        for group, _, gradients in self._groups:
            group.accumulate(gradients, self._take)
        self.close()

    def forget(self) -> None:
        """Put zeros into the slots that wait for an update that is left out, and end the call."""
        waiting = [target.pending for target, _ in self._works.values()]
        for pending in [*waiting, *[group.pending for group, *_ in self._groups]]:
            if pending is not None:
                pending[:] = 0
        self.close()

    def close(self) -> None:
        """Wait for the ranks that divide the update."""
        if self._node is not None:
            self._node.barrier()

    def norm(self) -> float:
        """Return the norm of all gradients; not finite exactly if one of them is not.

        Collective over the ranks that divide the update.
        """
        sums = self._sums(1)
        self._measure_norms(sums[0])
        block_sums = self._exchange(sums)[0].tolist()
        for group, _, gradients in self._groups:
            block_sums += group.squares(gradients, self._take)
        for row_update in self._rows:
            flat = row_update.values.reshape(1, -1)
            row_sums = np.zeros(blocks(flat.size))
            passes.measure_norm(Gradient(flat), flat.size, row_sums, False, self._compiled)
            block_sums += row_sums.tolist()
        norm = norm_of(block_sums)
        if isinstance(self._optimizer.clip, ClipByGlobalNorm):
            self._scale(self._optimizer.clip.factor(norm))
        if math.isfinite(norm):
            self._guard = False  # so are all that are in it
        return norm

    def _measure_norms(self, sums: Array) -> None:
        # No other rank reads this rank's columns of what is shared.
        keep = {i: t.shared and len(g.rows) >= _KEEP for i, (t, g) in self._works.items()}

        def measure(i: int, g: Gradient, low: int, high: int) -> None:
            block_sums = self._place(sums, i)[low // BLOCK : low // BLOCK + blocks(high - low)]
            passes.measure_norm(g, high - low, block_sums, keep[i], self._compiled)

        self._pass(self._works, measure)
        for i, (target, gradient) in self._works.items():
            if keep[i]:
                self._works[i] = Work(target, gradient.kept())

    def _scale(self, factor: float) -> None:
        self._take = self._take._replace(factor=self._take.factor * factor)
        for i, (target, gradient) in self._works.items():
            self._works[i] = Work(target, gradient._replace(scale=gradient.scale * factor))
        self._rows = [
            row_update._replace(values=row_update.values * row_update.values.dtype.type(factor))
            for row_update in self._rows
        ]

    def apply(self) -> int | None:
        """Update weights and slots, and end the call.

        Collective over the ranks that divide the update.

        Returns:
          None; or the number of the first gradient that is not finite, alike on all ranks.
        """
        first = self._first_bad_rows() if self._guard and self._rows else NOBODY
        norms = self._measured()
        if self._guard and norms:
            not_finite = [i for i, pair in norms.items() if not math.isfinite(sum(pair))]
            first = min([first, *not_finite])
        if first != NOBODY:  # known to all, before a weight has changed
            self.close()
            return first
        for i in self._updated({i: self._scalars_of(i, norms) for i in self._works}):
            first = min(first, i)
        for group, places, gradients in self._groups:
            update_arguments = (self._scalars[id(group.optimizer)], self._guard, self._compiled)
            bad_member = group.update(gradients, self._take, *update_arguments)
            first = first if bad_member is None else min(first, places[bad_member])
        for target, _ in self._works.values():
            if target.slices is not None and target.twins is not None:
                target.slices.fill_part(target.w.copy(), target.twins)
        for row_update in self._rows:
            update_rows(row_update, self._step, self._compiled)
        return meet(self._node, first, self._guard)

    def _first_bad_rows(self) -> int:
        bad_indices = (
            i for i, row_update in enumerate(self._rows) if not np.isfinite(row_update.values).all()
        )
        bad_index = next(bad_indices, None)
        return NOBODY if bad_index is None else self._count + bad_index

    def _measured(self) -> dict[int, tuple[float, float]]:
        """Return the norms of weights and directions, for rules that want them."""
        norms: dict[int, tuple[float, float]] = {}
        measured = [i for i, w in self._works.items() if w.target.rule.measure]
        if not measured:
            return norms
        sums = self._sums(2)
        self._measure(measured, sums)
        sums = self._exchange(sums)
        for i in measured:
            weight_norm, direction_norm = (norm_of(row.tolist()) for row in self._whole(sums, i))
            norms[i] = weight_norm, direction_norm
        return norms

    def _measure(self, indices: Sequence[int], sums: Array) -> None:
        numbers = {i: self._works[i].target.optimizer.scalars(self._step) for i in indices}

        def measure(i: int, g: Gradient, low: int, high: int) -> None:
            target = self._works[i].target
            block_sums = np.zeros((2, blocks(high - low)))
            slots = tuple(slot[low:high] for slot in target.mine)
            measure_arguments = (numbers[i], block_sums, self._guard, self._compiled)
            passes.measure(target.optimizer.rule, g, target.w[low:high], slots, *measure_arguments)
            self._place(sums, i)[:, low // BLOCK : low // BLOCK + block_sums.shape[1]] = block_sums

        self._pass(indices, measure)

    def _scalars_of(self, i: int, norms: dict[int, tuple[float, float]]) -> tuple[float, ...]:
        optimizer = self._works[i].target.optimizer
        if i in norms:
            return optimizer.scalars(self._step, norms[i])
        return self._scalars[id(optimizer)]

    def _updated(self, scalars: dict[int, tuple[float, ...]]) -> list[int]:
        """Update this rank's part of these; return those of which blocks were left out."""
        skipped_indices = []

        def update(i: int, g: Gradient, low: int, high: int) -> None:
            _, optimizer, _, _, _, w, slots, _, ema, rule, *_ = self._works[i].target
            if high - low < w.size:
                w, slots = w[low:high], tuple(slot[low:high] for slot in slots)
                ema = None if ema is None else ema[low:high]
            update_arguments = (scalars[i], ema, optimizer.ema or 0.0, self._guard, self._compiled)
            if passes.update(rule, g, w, slots, *update_arguments):
                skipped_indices.append(i)

        self._pass(list(scalars), update)
        return skipped_indices

    def _pass(
        self, indices: Iterable[int], action: Callable[[int, Gradient, int, int], None]
    ) -> None:
        """Call `action` with gradients part by part, and where these begin and end in the slots.

        Remote arrays are fetched the first time, in pieces, so that `action` finds them in cache.
        """
        remote_arrays: dict[int, list[tuple[int, Array]]] = {}
        for i in indices:
            target = self._works[i].target
            if i not in self._far:
                self._parts(i, 0, target.w.size, action)
            elif target.slices is None or target.twins is None:
                remote_arrays.setdefault(1, []).append((i, target.w))
            else:  # as many pieces as the twin has that has most
                widest = target.twins[: target.slices.widest]
                remote_arrays.setdefault(target.slices.peers.size, []).append((i, widest))
        for twins, arrays in remote_arrays.items():
            for pieces in inter_node.in_pieces(arrays, BLOCK, twins):
                assert self._fetch is not None
                self._fetch(pieces)
                for i, low, high in pieces:
                    high = min(high, self._works[i].target.w.size)
                    if low < high:
                        self._parts(i, low, high, action)
            self._far.difference_update(i for i, _ in arrays)

    def _parts(
        self, i: int, first: int, last: int, action: Callable[[int, Gradient, int, int], None]
    ) -> None:
        """Divide these elements between the threads."""
        g, size = self._works[i].gradient, last - first

        if (
            not first
            and size == self._works[i].target.w.size
            and (self._team is None or size < THREADS)
        ):
            action(i, g, 0, size)
            return

        def part(low: int, high: int) -> None:
            low, high = first + low, first + high
            pending = None if g.pending is None else g.pending[low:high]
            with np.errstate(all="ignore"):  # which is each thread's own
                action(i, g._replace(start=g.start + low, pending=pending), low, high)

        if self._team is None or size < THREADS:
            part(0, size)
        else:
            self._team.run(part, 0, size, size // _PART, BLOCK)

    def _whole(self, sums: Array, i: int) -> Array:
        at = self._at[i]
        return sums[:, at : at + blocks(self._works[i].target.variable.size)]

    def _place(self, sums: Array, i: int) -> Array:
        """Return where the sums of this rank's part of a variable go."""
        at = self._at[i]
        first = at + self._works[i].target.low // BLOCK
        return sums[..., first : at + blocks(self._works[i].target.variable.size)]

    def _exchange(self, sums: Array) -> Array:
        """Return the sums of all ranks: of each block one rank has it, others 0."""
        if self._node is None or not self._common:
            return sums
        local_sums = np.ascontiguousarray(sums[:, : self._common])
        total_sums = np.empty_like(local_sums)
        self._node.allreduce(local_sums, total_sums, "SUM")
        sums[:, : self._common] = total_sums
        return sums
