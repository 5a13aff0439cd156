"""Some rows of a variable updated, and no others: what `IndexedSlices` come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.optim import passes
from mpistrat.optim.fused import Take
from mpistrat.optim.passes import Gradient
from mpistrat.optim.state import Target
from mpistrat.shm.storage import Slices
from mpistrat.variables.indexed_slices import IndexedSlices

__all__ = ["Rows", "unique", "update_rows"]


class Rows(NamedTuple):
    """A variable of which some rows are updated.

    Attributes:
      target: The variable.
      rows: Which rows; each once.
      values: Their gradients; of the dtype of the variable, the same on all ranks.
    """

    target: Target
    rows: Array
    values: Array


def unique(target: Target, slices: IndexedSlices, take: Take) -> Rows:
    """Return rows of a variable once each, with the sum of their gradients.

    Args:
      target: The variable.
      slices: The rows.
      take: What is done to gradients.
    """
    row_indices, place = np.unique(slices.indices, return_inverse=True)
    values = np.zeros((len(row_indices), *slices.values.shape[1:]), target.variable.dtype)
    np.add.at(values, place.reshape(-1), slices.values)
    values *= values.dtype.type(take.factor)
    moved = take.ignore or np.isfinite(values)
    np.clip(values, -take.limit, take.limit, out=values, where=moved)
    return Rows(target, row_indices, values)


def update_rows(row_update: Rows, step: int, compiled: bool) -> None:
    """Update this rank's part of some rows of a variable; no others change.

    Collective over the twins if each has a slice of its own; they get what has changed.

    Args:
      row_update: Which rows, and their gradients; the same on all ranks.
      step: How many updates were made before.
      compiled: Whether to use compiled loops.
    """
    target = row_update.target
    if target.slices is not None and target.twins is not None:
        _update_spread_rows(row_update, target.slices, target.twins, step, compiled)
        return
    width = math.prod(target.variable.shape[1:])
    if not width:
        return
    low, w = target.variable.storage.part(width)
    slots = [target.slots[name].storage.part(width)[1] for name in target.rule.slots]
    first, count = low // width, w.size // width
    is_local = (row_update.rows >= first) & (row_update.rows < first + count)
    places = [part.reshape(-1, *target.variable.shape[1:]) for part in (w, *slots)]
    _update_some(
        target,
        places,
        row_update.rows[is_local] - first,
        row_update.values[is_local],
        step,
        compiled,
    )


def _update_spread_rows(
    row_update: Rows, slices: Slices, twins: Array, step: int, compiled: bool
) -> None:
    """Update what of these rows is in this rank's slice, and tell the twins."""
    target, cuts = row_update.target, slices.cuts
    width = math.prod(target.variable.shape[1:])
    # Rows of which some elements are the twins'; an element becomes what it does on its own.
    is_affected = (row_update.rows + 1) * width > cuts[0]
    is_affected &= row_update.rows * width < cuts[-1]
    values = row_update.values[is_affected].reshape(-1)
    places = (row_update.rows[is_affected, None] * width + np.arange(width)).reshape(-1)
    bounds = np.searchsorted(places, cuts).tolist()
    low, high = bounds[slices.peers.rank :][:2]
    local_places, slots = places[low:high] - slices.low, list(target.mine)
    _update_some(target, [target.w, *slots], local_places, values[low:high], step, compiled)
    changed_weights = np.empty(bounds[-1] - bounds[0], target.w.dtype)
    slices._replace(cuts=[bound - bounds[0] for bound in bounds]).fill_part(
        target.w[local_places], changed_weights
    )
    twins[places[bounds[0] : bounds[-1]] - cuts[0]] = changed_weights


def _update_some(
    target: Target,
    parts: Sequence[Array],
    where: Array,
    gradients: Array,
    step: int,
    compiled: bool,
) -> None:
    """Update some places of the weights and the slots of the rule."""
    if not where.size:
        return
    copies = [part[where].reshape(-1) for part in parts]
    gradient = Gradient(np.ascontiguousarray(gradients).reshape(1, -1))
    s, slots = target.optimizer.scalars(step), tuple(copies[1:])
    passes.update(target.rule, gradient, copies[0], slots, s, guard=False, compiled=compiled)
    for part, copy in zip(parts, copies, strict=True):
        part[where] = copy.reshape(gradients.shape)
