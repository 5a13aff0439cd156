"""Values per replica made one, in cross-replica code.

The values of all replicas, one after the other along an axis.

Values that each rank has of its own: gathered as they are, and rows of arrays of all ranks.
"""

from __future__ import annotations

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
from mpistrat.collectives.dtypes import wire_type
from mpistrat.collectives.plan import Contribution
from mpistrat.comm.serialization import decode_tree, encode_tree
from mpistrat.data.pieces import row_bounds
from mpistrat.errors import AxisError, DataError, StructureError
from mpistrat.kernels.elementwise import as_real, multiply, recompute_nonfinite_means
from mpistrat.kernels.local_sums import local_sum
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.threads import Team
from mpistrat.strategy.context_stack import check_readable
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables.indexed_slices import IndexedSlices, arrays_of
from mpistrat.variables.kinds import DistributedVariable, Plain, named
from mpistrat.variables.regroup import select
from mpistrat.variables.sparse import all_reduce, contribution
from mpistrat.variables.values import DistributedValues, Mirrored, PerReplica, born
from mpistrat.variables.writes import contents, prove_same


def _moves(name: str, op: ReduceOp, leaf: Any, plain_rule: Plain, path: str) -> bool:
    """Tell whether the replicas' values of this leaf must meet; raise if the question is wrong."""
    if leaf is None:
        raise StructureError(
            f"{name}({op.value}): {label(path)} is None. Where strategy.run gave it, its function "
            "returned None on every replica: look for a missing return."
        )
    if isinstance(leaf, PerReplica) or (isinstance(leaf, DistributedVariable) and leaf.on_read):
        return True
    mirrored = isinstance(leaf, Mirrored | DistributedVariable)
    if plain_rule is Plain.SAME or (mirrored and op._reduction.is_idempotent):
        return False
    if plain_rule is Plain.PER_REPLICA and not mirrored:
        return True
    if op._reduction.is_idempotent:
        return False
    kind = "the same on all replicas" if mirrored else "not a value per replica"
    raise StructureError(
        f"{name}({op.value}): {label(path)} is {kind}, so it is not known whether it counts once "
        "or once per replica. Multiply it by strategy.num_replicas_in_sync, or reduce what "
        "strategy.run returned."
    )


def reduce_over_replicas(
    group: ReplicaGroup, name: str, reduce_op: Any, value: Any, mirrors: bool = False, to: str = ""
) -> Any:
    """Reduce each leaf over the replicas; shapes stay. Collective.

    The text `to` says where the results go. With `mirrors`, what was reduced or is mirrored already
    comes back as `Mirrored`.
    """
    session, ranks = group.lockstep.session, group.lockstep.comm.size
    with group.lockstep.preparing(name):
        op = ReduceOp.parse(reduce_op)
        leaves, structure = pytree.flatten(value)
        group.regroup.check(name, leaves)
        paths = named(leaves, structure)
        plain_rule = group.view.plain
        moving = [
            _moves(name, op, leaf, plain_rule, p) for leaf, p in zip(leaves, paths, strict=True)
        ]
        sources = [_component(leaf) for leaf in leaves]
        contributions, plain_values = [], ""
        for leaf, source, path, moves in zip(leaves, sources, paths, moving, strict=True):
            if moves:
                contributions.append(contribution(op, source, path, ranks=ranks))
                continue
            checked = source if isinstance(source, IndexedSlices) else as_array(source, path)
            if plain_rule is not Plain.SAME:
                # It is returned unchanged, so it has to be the same on all ranks.
                proof = leaf.proved_by(session) if isinstance(leaf, Mirrored) else ""
                is_proved = isinstance(leaf, DistributedVariable) or bool(proof)
                plain_values += (
                    f" {path} {proof}" if is_proved else f" {digest(arrays_of(checked)).hex()[:16]}"
                )
    moving_text = "".join("*" if moves else "." for moves in moving)
    call = f"{name}({op.value}, {pytree.describe(structure)} {moving_text}){to}"
    origin = f"{born(leaves)}{plain_values}"
    totals = iter(all_reduce(group, call, op, contributions, of=origin))
    results = [
        restore_kind(next(totals), source) if moves else source
        for source, moves in zip(sources, moving, strict=True)
    ]
    if mirrors:
        entries = zip(leaves, results, moving, strict=True)
        results = [_mirror(group, i, *entry) for i, entry in enumerate(entries)]
    return pytree.unflatten(structure, results)


def _mirror(group: ReplicaGroup, place: int, leaf: Any, result: Any, moved: bool) -> Any:
    """Return `result`, of the leaf in that place, as `Mirrored` if it is the same everywhere."""
    if moved:
        # The arrays of slices can be written to, so a handshake would say nothing of them later.
        is_sealable = not isinstance(result, IndexedSlices)
        proof = f"{group.lockstep.session.calls}/{place}" if is_sealable else ""
        return Mirrored(result, group.lockstep.comm.size, proof, group.regroup.home)
    if isinstance(leaf, DistributedVariable):
        return Mirrored(result, group.lockstep.comm.size)
    return leaf if isinstance(leaf, Mirrored) else result


def _component(leaf: Any) -> Any:
    if isinstance(leaf, DistributedVariable):
        return leaf.component() if leaf.on_read else leaf.read_value()
    return select(leaf)


def _axes(axis: Any, array: Array, path: str) -> tuple[int, ...]:
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


def reduce_over_axis(group: ReplicaGroup, reduce_op: Any, value: Any, axis: Any) -> Any:
    """Reduce each leaf over `axis` of every replica's value, and over the replicas. Collective."""
    with group.lockstep.preparing("reduce"):
        op = ReduceOp.parse(reduce_op)
        leaves, structure = pytree.flatten(value)
        group.regroup.check("reduce", leaves)
        paths = named(leaves, structure)
        team = group.lockstep.session.team
        sources = [_component(leaf) for leaf in leaves]
        contributions = [
            _over_axis(op, as_array(source, path), axis, path, team)
            for source, path in zip(sources, paths, strict=True)
        ]
        axis_numbers = tuple(
            map(operator.index, axis if isinstance(axis, tuple | list) else (axis,))
        )
    call = f"reduce({op.value}, axis={axis_numbers}, {pytree.describe(structure)})"
    origin = born(leaves)
    if op._reduction.is_idempotent and op is not ReduceOp.MEAN:
        _refuse_nothing(group, call + origin, contributions, paths)
    totals = group.all_reduce_contributions(call, op, contributions, origin=origin)
    if op is ReduceOp.MEAN:
        _rescue(group, call, origin, sources, axis_numbers, contributions, totals)
    pairs = zip(totals, sources, strict=True)
    results = [t[()] if find_array_kind(x) is None else restore_kind(t, x) for t, x in pairs]
    return pytree.unflatten(structure, results)


# A power of two that no sum of floating-point numbers overflows with, however many there are.
_SCALE = 2.0**-60


def _rescue(
    group: ReplicaGroup,
    call: str,
    origin: str,
    leaves: Sequence[Any],
    axes: tuple[int, ...],
    contributions: Sequence[Contribution],
    totals: list[Array],
) -> None:
    """Compute infinite means again from values scaled down, as a sum may have overflowed.

    A NaN is no reason: it is often in the values. Sums that overflow with opposite signs give a NaN
    too, but only a look at all values could tell the two apart.
    """
    # float16 is added in a dtype that no sum of it leaves, and so are integers, which stay finite.
    infinite_indices = [
        i
        for i, (part, total) in enumerate(zip(contributions, totals, strict=True))
        if part.dtypes.result != np.float16 and np.isinf(total).any()
    ]
    if not infinite_indices:
        return
    with group.lockstep.preparing(call):
        scaled_contributions = []
        for i in infinite_indices:
            array, part = as_array(leaves[i], contributions[i].path), contributions[i]
            scaled_values = np.array(array, part.dtypes.wire, order="C")
            with np.errstate(all="ignore"):
                multiply(scaled_values, _SCALE)
            positive_axes = tuple(axis % array.ndim for axis in axes)
            total, count = local_sum(
                scaled_values, positive_axes, part.dtypes.wire, group.lockstep.session.team
            )
            scaled_contributions.append(part._replace(value=total, weight=count))
    means = group.all_reduce_contributions(
        f"{call}, scaled", ReduceOp.MEAN, scaled_contributions, origin=origin
    )
    for i, mean in zip(infinite_indices, means, strict=True):
        with np.errstate(all="ignore"):
            recompute_nonfinite_means(totals[i], as_real(mean).reshape(-1).__getitem__, 1.0, _SCALE)


def _over_axis(op: ReduceOp, array: Array, axis: Any, path: str, team: Team | None) -> Contribution:
    dtypes = wire_type(op, array.dtype, path)
    # The local total travels, perhaps in a wider dtype; the text has the dtype of the leaf.
    spec = f"{path} of {dtype_name(array.dtype)}"
    axes = _axes(axis, array, path)
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        total, count = local_sum(array, axes, dtypes.wire, team)
        return Contribution(total, dtypes, count, spec)
    count = int(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    start = op._reduction.identity(dtypes.wire)
    with np.errstate(all="ignore"):
        total = op._reduction.ufunc.reduce(array, axis=axes, dtype=dtypes.wire, initial=start)
    return Contribution(np.asarray(total), dtypes, count, spec)


def _refuse_nothing(
    group: ReplicaGroup, call: str, all_: Sequence[Contribution], paths: Sequence[str]
) -> None:
    counts = np.array([part.weight for part in all_], np.int64)
    rows = group.lockstep.gather_payloads(f"{call} counts", counts.tobytes())
    totals = sum(np.frombuffer(row, np.int64) for row in rows)
    empty = [path for path, total in zip(paths, np.atleast_1d(totals), strict=True) if total == 0]
    if empty:
        group.lockstep.fail(StructureError(f"{call}: {label(empty[0])} is empty on every replica."))


_PLAIN_VALUES = "what is not a value per replica"
_ADVICE = (
    "Gather what strategy.run returned, or call all_gather in replica code. A plain value "
    "counts as the same on all replicas, and is returned unchanged."
)


def gather_leaves(group: ReplicaGroup, value: Any, axis: int) -> Any:
    """Concatenate the leaves that each replica has its own of; see `Strategy.gather`."""
    with group.lockstep.preparing("gather"):
        leaves, structure = pytree.flatten(value)
        group.regroup.check("gather", leaves)
        local_leaves = [select(leaf) for leaf in leaves]
        _refuse_slices("gather", local_leaves)
        kinds = DistributedValues | DistributedVariable
        should_move_plain = group.view.plain is Plain.PER_REPLICA
        moves = [should_move_plain or isinstance(leaf, kinds) for leaf in leaves]
        plain_leaves = [leaf for leaf, moved in zip(leaves, moves, strict=True) if not moved]
        plain_contents = contents(plain_leaves, group.lockstep.session)
        structure_text = pytree.describe(structure)
    if all(moves):
        return gather(
            group, "gather", pytree.unflatten(structure, local_leaves), axis, born(leaves)
        )
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
    return pytree.unflatten(structure, local_leaves)


def gather(group: ReplicaGroup, name: str, value: Any, axis: int, origin: str = "") -> Any:
    """Concatenate this rank's `value` with the others'; see `ReplicaContext.all_gather`.

    The text `origin` says more of what is gathered.
    """
    with group.lockstep.preparing(name):
        axis_index = as_int(axis)
        if axis_index is None:
            raise TypeError(f"{name}: axis must be an integer, not {axis!r:.60}.")
        axis = axis_index
        leaves, structure = pytree.flatten(value)
        _refuse_slices(name, leaves)
        paths = named(leaves, structure)
        # Each replica's copy of a variable: to read it here might reduce the copies to one value.
        copies = [_copy(leaf) if isinstance(leaf, DistributedVariable) else leaf for leaf in leaves]
        arrays = [as_array(leaf, path) for leaf, path in zip(copies, paths, strict=True)]
        axes = [_axis(name, a, axis, path) for a, path in zip(arrays, paths, strict=True)]
    call = f"{name}(axis={axis}, {pytree.describe(structure)}){origin}"
    results = group.reducer.all_gather(call, axes, arrays, paths)
    return pytree.unflatten(structure, list(map(restore_kind, results, copies)))


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


def gather_objects(group: ReplicaGroup, value: Any) -> list[Any]:
    """Return every replica's tree; see `Strategy.gather_objects`. Collective."""
    lockstep = group.lockstep
    with lockstep.preparing("gather_objects"):
        leaves, structure = pytree.flatten(value)
        group.regroup.check("gather_objects", leaves)
        local_tree = pytree.unflatten(structure, [_extract_array(leaf) for leaf in leaves])
        kind, content = encode_tree(local_tree)
    messages = lockstep.gather_payloads("gather_objects", kind + content)
    with lockstep.preparing("gather_objects"):
        return [decode_tree(message[:1], message[1:]) for message in messages]


def _extract_array(leaf: Any) -> Any:
    """Return the array of a variable or of another library; anything else unchanged."""
    value = leaf.component() if isinstance(leaf, DistributedVariable) else select(leaf)
    return (
        value
        if isinstance(value, np.ndarray) or find_array_kind(value) is None
        else as_array(value)
    )


def local_rows(group: ReplicaGroup, arrays: Any) -> Any:
    """Return a replica's rows of arrays that all hold alike; see `Strategy.local_rows`."""
    leaves, structure = pytree.flatten(arrays)
    leaves = [np.asarray(x) if isinstance(x, DistributedVariable) else select(x) for x in leaves]
    names = list(map(label, named(leaves, structure)))
    counts = [_row_count(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    if len(set(counts)) > 1:
        sizes = ", ".join(f"{name} has {n}" for name, n in zip(names, counts, strict=True))
        raise DataError(f"local_rows: the leaves must have the same number of rows, but {sizes}.")
    lo, hi = row_bounds(counts[0] if counts else 0, group.regroup.rank, group.regroup.size)
    return pytree.unflatten(structure, [getattr(leaf, "iloc", leaf)[lo:hi] for leaf in leaves])


def _row_count(leaf: Any, name: str) -> int:
    shape = getattr(leaf, "shape", None)
    if not shape or not hasattr(leaf, "__getitem__"):
        raise DataError(
            f"local_rows: {name} is {leaf!r:.60} ({type(leaf).__name__}), which has no rows. Give "
            "an array, or a tree of arrays; of a list np.asarray(list)."
        )
    return int(shape[0])
