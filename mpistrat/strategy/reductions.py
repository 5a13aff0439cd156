"""Reductions and gathers of cross-replica code.

Values per replica become one (`reduce_over_replicas`), also over axes of their own
(`reduce_over_axis`). `gather` concatenates the values of all replicas, `gather_objects` lists trees
of any structure, and `local_rows` takes a replica's rows of arrays that all hold alike.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import (
    Array,
    as_array,
    as_int,
    digest,
    dtype_name,
    find_array_kind,
    label,
    restore_kind,
)
from mpistrat.collectives.dtypes import choose_wire_type
from mpistrat.collectives.plan import Contribution
from mpistrat.comm.serialization import decode_tree, encode_tree
from mpistrat.data.pieces import find_row_bounds
from mpistrat.errors import AxisError, DataError, StructureError
from mpistrat.kernels.elementwise import as_real, multiply, recompute_nonfinite_means
from mpistrat.kernels.local_sums import local_sum
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.threads import Team
from mpistrat.strategy.context_stack import check_readable
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables.indexed_slices import IndexedSlices, list_arrays
from mpistrat.variables.kinds import DistributedVariable, PlainValueRule, name_leaves
from mpistrat.variables.regroup import select_local
from mpistrat.variables.sparse import all_reduce_leaves, make_contribution
from mpistrat.variables.values import DistributedValues, Mirrored, PerReplica, describe_provenances
from mpistrat.variables.writes import check_same_contents, digest_contents


def _must_move(
    name: str, op: ReduceOp, plain_rule: PlainValueRule, leaf: object, path: str
) -> bool:
    """Tell whether the replicas' values of this leaf must meet; raise if the question is wrong."""
    if leaf is None:
        raise StructureError(
            f"{name}({op.value}): {label(path)} is None. Where strategy.run gave it, its function "
            "returned None on every replica: look for a missing return."
        )
    if isinstance(leaf, PerReplica) or (isinstance(leaf, DistributedVariable) and leaf._is_on_read):
        return True
    is_mirrored = isinstance(leaf, Mirrored | DistributedVariable)
    if plain_rule is PlainValueRule.SAME or (is_mirrored and op._reduction.is_idempotent):
        return False
    if plain_rule is PlainValueRule.PER_REPLICA and not is_mirrored:
        return True
    if op._reduction.is_idempotent:
        return False
    description = "the same on all replicas" if is_mirrored else "not a value per replica"
    raise StructureError(
        f"{name}({op.value}): {label(path)} is {description}, so it is not known whether it counts "
        "once or once per replica. Multiply it by strategy.num_replicas_in_sync, or reduce what "
        "strategy.run returned."
    )


def reduce_over_replicas(
    group: ReplicaGroup,
    name: str,
    reduce_op: ReduceOp | str,
    value: object,
    *,
    should_mirror: bool = False,
    destination_text: str = "",
) -> Any:
    """Reduce each leaf over the replicas; shapes stay. Collective.

    The text `destination_text` says where the results go. With `should_mirror`, results and values
    that are mirrored already come back as `Mirrored`.
    """
    with group.lockstep.validating_collectively(name):
        op = ReduceOp.parse(reduce_op)
        leaves, structure = pytree.flatten(value)
        group.regrouper.check(name, leaves)
        paths = name_leaves(leaves, structure)
        must_move = functools.partial(_must_move, name, op, group.view.plain_rule)
        moving_flags = list(map(must_move, leaves, paths))
        local_values = [_read_component(leaf) for leaf in leaves]
        contributions, plain_text = [], ""
        entries = zip(leaves, local_values, paths, moving_flags, strict=True)
        for leaf, local_value, path, is_moving in entries:
            if is_moving:
                size = group.lockstep.comm.size
                contributions.append(make_contribution(op, local_value, path, rank_count=size))
            else:
                plain_text += _describe_plain(group, leaf, local_value, path)
    moving_text = "".join("*" if is_moving else "." for is_moving in moving_flags)
    call = f"{name}({op.value}, {pytree.describe(structure)} {moving_text}){destination_text}"
    origin = f"{describe_provenances(leaves)}{plain_text}"
    totals = iter(all_reduce_leaves(group, call, op, contributions, origin_text=origin))
    results = [
        restore_kind(next(totals), local_value) if is_moving else local_value
        for local_value, is_moving in zip(local_values, moving_flags, strict=True)
    ]
    if should_mirror:
        leaf_indices = range(len(leaves))
        mirror = functools.partial(_mirror_result, group)
        results = list(map(mirror, leaf_indices, leaves, results, moving_flags))
    return pytree.unflatten(structure, results)


def _describe_plain(group: ReplicaGroup, leaf: object, local_value: object, path: str) -> str:
    """Return what the handshake says of a leaf that is returned unchanged; raise if it cannot be.

    It has to be the same on all ranks, unless there is one replica by construction.
    """
    array = local_value if isinstance(local_value, IndexedSlices) else as_array(local_value, path)
    if group.view.plain_rule is PlainValueRule.SAME:
        return ""
    if isinstance(leaf, DistributedVariable):
        return f" {path} "
    name = leaf._find_handshake(group.lockstep.session) if isinstance(leaf, Mirrored) else ""
    return f" {path} {name}" if name else f" {digest(list_arrays(array)).hex()[:16]}"


def _mirror_result(
    group: ReplicaGroup, leaf_index: int, leaf: object, reduced_leaf: object, is_moving: bool
) -> Any:
    """Return the result of a leaf as `Mirrored` if it is the same everywhere."""
    if is_moving:
        # The arrays of slices can be written to, so a handshake would say nothing of them later.
        is_sealable = not isinstance(reduced_leaf, IndexedSlices)
        handshake_name = f"{group.lockstep.session.calls}/{leaf_index}" if is_sealable else ""
        return Mirrored(
            reduced_leaf, group.lockstep.comm.size, handshake_name, group.regrouper.origin
        )
    if isinstance(leaf, DistributedVariable):
        return Mirrored(reduced_leaf, group.lockstep.comm.size)
    return leaf if isinstance(leaf, Mirrored) else reduced_leaf


def _read_component(leaf: object) -> Any:
    if isinstance(leaf, DistributedVariable):
        return leaf._component() if leaf._is_on_read else leaf.read_value()
    return select_local(leaf)


def _normalize_axes(axis: object, array: Array, path: str) -> tuple[int, ...]:
    if type(axis) is int and 0 <= axis < array.ndim:
        return (axis,)
    try:
        if isinstance(axis, bool | str):
            raise TypeError
        axis_numbers = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
        axis_numbers = tuple(operator.index(a) for a in axis_numbers)
    except TypeError:
        raise TypeError(
            f"reduce: axis must be None, an integer or a tuple of integers, not {axis!r}."
        ) from None
    if any(not -array.ndim <= a < array.ndim for a in axis_numbers):
        raise AxisError(
            f"reduce: {label(path)} of shape {array.shape} has no axis {axis!r}; it has "
            f"{array.ndim} dimensions. With axis=None values are reduced over the replicas only; "
            "with an axis, over its elements too, such as one value per example."
        )
    axes = tuple(a % array.ndim for a in axis_numbers)
    if len(set(axes)) != len(axes):
        raise AxisError(f"reduce: axis {axis!r} names an axis of {label(path)} twice.")
    return axes


def reduce_over_axis(
    group: ReplicaGroup, reduce_op: ReduceOp | str, value: object, axis: object
) -> Any:
    """Reduce each leaf over `axis` of every replica's value, and over the replicas. Collective."""
    with group.lockstep.validating_collectively("reduce"):
        op = ReduceOp.parse(reduce_op)
        leaves, structure = pytree.flatten(value)
        group.regrouper.check("reduce", leaves)
        paths = name_leaves(leaves, structure)
        team = group.lockstep.session.team
        local_values = [_read_component(leaf) for leaf in leaves]
        contributions = [
            _reduce_locally(op, as_array(local_value, path), axis, path, team)
            for local_value, path in zip(local_values, paths, strict=True)
        ]
        axis_numbers = tuple(
            map(operator.index, axis if isinstance(axis, tuple | list) else (axis,))
        )
    call = f"reduce({op.value}, axis={axis_numbers}, {pytree.describe(structure)})"
    origin = describe_provenances(leaves)
    if op._reduction.is_idempotent and op is not ReduceOp.MEAN:
        _refuse_empty(group, call + origin, contributions, paths)
    totals = group.all_reduce_contributions(call, op, contributions, origin=origin)
    if op is ReduceOp.MEAN:
        _recompute_overflowed_means(
            group,
            f"{call}, scaled",
            totals,
            contributions,
            leaves=local_values,
            axes=axis_numbers,
            origin=origin,
        )
    pairs = zip(totals, local_values, strict=True)
    results = [t[()] if find_array_kind(x) is None else restore_kind(t, x) for t, x in pairs]
    return pytree.unflatten(structure, results)


# A power of two that no sum of floating-point numbers overflows with, however many there are.
_OVERFLOW_SCALE = 2.0**-60


def _recompute_overflowed_means(
    group: ReplicaGroup,
    call: str,
    totals: list[Array],
    contributions: Sequence[Contribution],
    *,
    leaves: Sequence[Any],
    axes: tuple[int, ...],
    origin: str,
) -> None:
    """Compute infinite means again from values scaled down, as a sum may have overflowed.

    A NaN is no reason: it is often in the values. Sums that overflow with opposite signs give a NaN
    too, but only a look at all values could tell the two apart.
    """
    # float16 is added in a dtype that no sum of it leaves, and so are integers, which stay finite.
    infinite_indices = [
        i
        for i, (contribution, total) in enumerate(zip(contributions, totals, strict=True))
        if contribution.dtypes.result != np.float16 and np.isinf(total).any()
    ]
    if not infinite_indices:
        return
    with group.lockstep.validating_collectively(call):
        scaled_contributions = []
        for i in infinite_indices:
            array, contribution = as_array(leaves[i], contributions[i].path), contributions[i]
            scaled_values = np.array(array, contribution.dtypes.wire, order="C")
            with np.errstate(all="ignore"):
                multiply(scaled_values, _OVERFLOW_SCALE)
            positive_axes = tuple(axis % array.ndim for axis in axes)
            total, count = local_sum(
                scaled_values, positive_axes, contribution.dtypes.wire, group.lockstep.session.team
            )
            scaled_contributions.append(contribution._replace(value=total, weight=count))
    means = group.all_reduce_contributions(call, ReduceOp.MEAN, scaled_contributions, origin=origin)
    for i, mean in zip(infinite_indices, means, strict=True):
        with np.errstate(all="ignore"):
            recompute_nonfinite_means(
                totals[i], as_real(mean).reshape(-1).__getitem__, 1.0, _OVERFLOW_SCALE
            )


def _reduce_locally(
    op: ReduceOp, array: Array, axis: object, path: str, team: Team | None
) -> Contribution:
    dtypes = choose_wire_type(op, array.dtype, path)
    # The local total travels, perhaps in a wider dtype; the text has the dtype of the leaf.
    spec = f"{path} of {dtype_name(array.dtype)}"
    axes = _normalize_axes(axis, array, path)
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        total, count = local_sum(array, axes, dtypes.wire, team)
        return Contribution(total, dtypes, count, spec)
    count = int(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    start = op._reduction.identity(dtypes.wire)
    with np.errstate(all="ignore"):
        total = op._reduction.ufunc.reduce(array, axis=axes, dtype=dtypes.wire, initial=start)
    return Contribution(np.asarray(total), dtypes, count, spec)


def _refuse_empty(
    group: ReplicaGroup, call: str, contributions: Sequence[Contribution], paths: Sequence[str]
) -> None:
    counts = np.array([contribution.weight for contribution in contributions], np.int64)
    messages = group.lockstep.gather_payloads(f"{call} counts", counts.tobytes())
    totals = np.frombuffer(b"".join(messages), np.int64).reshape(len(messages), -1).sum(axis=0)
    empty = [path for path, total in zip(paths, totals, strict=True) if total == 0]
    if empty:
        group.lockstep.raise_on_all_ranks(
            StructureError(f"{call}: {label(empty[0])} is empty on every replica.")
        )


_PLAIN_VALUES = "what is not a value per replica"
_GATHER_ADVICE = (
    "Gather what strategy.run returned, or call all_gather in replica code. A plain value "
    "counts as the same on all replicas, and is returned unchanged."
)


def gather_leaves(group: ReplicaGroup, value: object, axis: int) -> Any:
    """Concatenate the leaves that each replica has its own of; see `Strategy.gather`."""
    with group.lockstep.validating_collectively("gather"):
        leaves, structure = pytree.flatten(value)
        group.regrouper.check("gather", leaves)
        local_leaves = [select_local(leaf) for leaf in leaves]
        _refuse_slices("gather", local_leaves)
        kinds = DistributedValues | DistributedVariable
        should_move_plain = group.view.plain_rule is PlainValueRule.PER_REPLICA
        moving_flags = [should_move_plain or isinstance(leaf, kinds) for leaf in leaves]
        plain_leaves = [
            leaf for leaf, is_moving in zip(leaves, moving_flags, strict=True) if not is_moving
        ]
        plain_contents = digest_contents(plain_leaves, group.lockstep.session)
        structure_text = pytree.describe(structure)
    if all(moving_flags):
        return gather(
            group,
            "gather",
            pytree.unflatten(structure, local_leaves),
            axis,
            describe_provenances(leaves),
        )
    if (
        group.view.plain_rule is PlainValueRule.REFUSED
    ):  # it stays where it is: one value, and no rank's own
        check_same_contents(
            group.lockstep, "gather", {_PLAIN_VALUES: plain_contents}, _GATHER_ADVICE
        )
    moved_indices = [i for i, is_moving in enumerate(moving_flags) if is_moving]
    origin = f" of {structure_text} {moved_indices}{describe_provenances(leaves)}"
    for i, result in zip(
        moved_indices,
        gather(group, "gather", [local_leaves[i] for i in moved_indices], axis, origin),
        strict=True,
    ):
        local_leaves[i] = result
    return pytree.unflatten(structure, local_leaves)


def gather(group: ReplicaGroup, name: str, value: object, axis: int, origin: str = "") -> Any:
    """Concatenate this rank's `value` with the others'; see `ReplicaContext.all_gather`.

    The text `origin` is added to the text of the call.
    """
    with group.lockstep.validating_collectively(name):
        axis_index = as_int(axis)
        if axis_index is None:
            raise TypeError(f"{name}: axis must be an integer, not {axis!r:.60}.")
        axis = axis_index
        leaves, structure = pytree.flatten(value)
        _refuse_slices(name, leaves)
        paths = name_leaves(leaves, structure)
        # Each replica's copy of a variable: to read it here might reduce the copies to one value.
        copies = [
            _read_copy(leaf) if isinstance(leaf, DistributedVariable) else leaf for leaf in leaves
        ]
        arrays = [as_array(leaf, path) for leaf, path in zip(copies, paths, strict=True)]
        axes = [_normalize_axis(name, a, axis, path) for a, path in zip(arrays, paths, strict=True)]
    call = f"{name}(axis={axis}, {pytree.describe(structure)}){origin}"
    results = group.reducer.all_gather(call, axes, arrays, paths)
    return pytree.unflatten(structure, list(map(restore_kind, results, copies)))


def _refuse_slices(name: str, leaves: Sequence[Any]) -> None:
    if IndexedSlices in map(type, leaves):
        raise NotImplementedError(
            f"{name} does not support IndexedSlices. Gather their values and indices, or "
            "np.asarray(slices)."
        )


def _read_copy(variable: DistributedVariable) -> Array:
    check_readable(variable)
    return variable._component()


def _normalize_axis(name: str, array: Any, axis: int, path: str) -> int:
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


def gather_objects(group: ReplicaGroup, value: object) -> list[Any]:
    """Return every replica's tree; see `Strategy.gather_objects`. Collective."""
    lockstep = group.lockstep
    with lockstep.validating_collectively("gather_objects"):
        leaves, structure = pytree.flatten(value)
        group.regrouper.check("gather_objects", leaves)
        local_tree = pytree.unflatten(structure, [_extract_array(leaf) for leaf in leaves])
        tag, content = encode_tree(local_tree)
    messages = lockstep.gather_payloads("gather_objects", tag + content)
    with lockstep.validating_collectively("gather_objects"):
        return [decode_tree(message[:1], message[1:]) for message in messages]


def _extract_array(leaf: object) -> Any:
    """Return the array of a variable or of another library; anything else unchanged."""
    value = leaf._component() if isinstance(leaf, DistributedVariable) else select_local(leaf)
    return (
        value
        if isinstance(value, np.ndarray) or find_array_kind(value) is None
        else as_array(value)
    )


def local_rows(group: ReplicaGroup, tree: object) -> Any:
    """Return a replica's rows of arrays that all hold alike; see `Strategy.local_rows`."""
    leaves, structure = pytree.flatten(tree)
    leaves = [
        np.asarray(x) if isinstance(x, DistributedVariable) else select_local(x) for x in leaves
    ]
    names = list(map(label, name_leaves(leaves, structure)))
    counts = [_count_rows(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    if len(set(counts)) > 1:
        sizes = ", ".join(f"{name} has {n}" for name, n in zip(names, counts, strict=True))
        raise DataError(f"local_rows: the leaves must have the same number of rows, but {sizes}.")
    lo, hi = find_row_bounds(counts[0] if counts else 0, group.regrouper.rank, group.regrouper.size)
    return pytree.unflatten(structure, [getattr(leaf, "iloc", leaf)[lo:hi] for leaf in leaves])


def _count_rows(leaf: object, name: str) -> int:
    shape = getattr(leaf, "shape", None)
    if not shape or not hasattr(leaf, "__getitem__"):
        raise DataError(
            f"local_rows: {name} is {leaf!r:.60} ({type(leaf).__name__}), which has no rows. Give "
            "an array, or a tree of arrays; of a list np.asarray(list)."
        )
    return int(shape[0])
