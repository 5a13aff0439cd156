"""The values of all replicas, one after the other along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat import nest
from mpistrat.arrays import Array, as_array, finish, label, whole
from mpistrat.distribute.kinds import DistributedVariable, named
from mpistrat.distribute.mode import check_readable
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.values import DistributedValues, born
from mpistrat.distribute.views import Plain
from mpistrat.distribute.writes import contents, prove_same
from mpistrat.errors import AxisError

_PLAIN_VALUES = "what is not a value per replica"
_ADVICE = (
    "Gather what strategy.run returned, or call all_gather in replica code. A plain value "
    "counts as the same on all replicas, and is returned unchanged."
)


def gather_leaves(group: ReplicaGroup, value: Any, axis: int) -> Any:
    """Concatenate the leaves that each replica has its own of; see `Strategy.gather`."""
    with group.lockstep.preparing("gather"):
        leaves, structure = nest.flatten(value)
        group.regroup.check("gather", leaves)
        local_leaves = [select(leaf) for leaf in leaves]
        _refuse_slices("gather", local_leaves)
        kinds = DistributedValues | DistributedVariable
        should_move_plain = group.view.plain is Plain.PER_REPLICA
        moves = [should_move_plain or isinstance(leaf, kinds) for leaf in leaves]
        plain_leaves = [leaf for leaf, moved in zip(leaves, moves, strict=True) if not moved]
        plain_contents = contents(plain_leaves, group.lockstep.session)
        structure_text = nest.describe(structure)
    if all(moves):
        return gather(group, "gather", nest.unflatten(structure, local_leaves), axis, born(leaves))
    if group.view.plain is Plain.REFUSED:  # it stays where it is: one value, and no rank's own
        prove_same(group.lockstep, "gather", {_PLAIN_VALUES: plain_contents}, _ADVICE)
    moved_indices = [i for i, moved in enumerate(moves) if moved]
    origin = f" of {structure_text} {moved_indices}{born(leaves)}"
    for i, result in zip(
        moved_indices,
        gather(group, "gather", [local_leaves[i] for i in moved_indices], axis, origin),
        strict=True,
    ):
        local_leaves[i] = result
    return nest.unflatten(structure, local_leaves)


def gather(group: ReplicaGroup, name: str, value: Any, axis: int, origin: str = "") -> Any:
    """Concatenate this rank's `value` with the others'; see `ReplicaContext.all_gather`.

    The text `origin` says more of what is gathered.
    """
    with group.lockstep.preparing(name):
        axis_index = whole(axis)
        if axis_index is None:
            raise TypeError(f"{name}: axis must be an integer, not {axis!r:.60}.")
        axis = axis_index
        leaves, structure = nest.flatten(value)
        _refuse_slices(name, leaves)
        paths = named(leaves, structure)
        # Each replica's copy of a variable: to read it here might reduce the copies to one value.
        copies = [_copy(leaf) if isinstance(leaf, DistributedVariable) else leaf for leaf in leaves]
        arrays = [as_array(leaf, path) for leaf, path in zip(copies, paths, strict=True)]
        axes = [_axis(name, a, axis, path) for a, path in zip(arrays, paths, strict=True)]
    call = f"{name}(axis={axis}, {nest.describe(structure)}){origin}"
    results = group.reducer.all_gather(call, axes, arrays, paths)
    return nest.unflatten(structure, list(map(finish, results, copies)))


def _refuse_slices(name: str, leaves: Sequence[Any]) -> None:
    if IndexedSlices in map(type, leaves):
        raise NotImplementedError(
            f"{name} does not support IndexedSlices. Gather their values and indices, or "
            "np.asarray(slices)."
        )


def _copy(variable: DistributedVariable) -> Array:
    check_readable(variable)
    return variable.component()


def _axis(name: str, array: Any, axis: int, path: str) -> int:
    if array.ndim == 0:
        raise AxisError(
            f"{name}: {label(path)} has no dimensions, so it cannot be concatenated. Give it one: "
            "value[np.newaxis]."
        )
    if not -array.ndim <= axis < array.ndim:
        raise AxisError(
            f"{name}: {label(path)} of shape {array.shape} has no axis {axis}; expected "
            f"{-array.ndim} to {array.ndim - 1}."
        )
    return axis % int(array.ndim)
