"""Values per replica made one, in cross-replica code."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array, as_array, digest, dtype_name, finish, kind_of, label
from mpistrat.collectives.dtypes import wire_type
from mpistrat.collectives.plan import Contribution
from mpistrat.distribute.kinds import DistributedVariable, named
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.slices import IndexedSlices, arrays_of
from mpistrat.distribute.sparse import all_reduce, contribution
from mpistrat.distribute.values import Mirrored, PerReplica, born
from mpistrat.distribute.views import Plain
from mpistrat.errors import AxisError, StructureError
from mpistrat.kernels.local import local_sum
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import multiply, real, rescue
from mpistrat.kernels.threads import Team


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
    if plain_rule is Plain.SAME or (mirrored and op.how.repeats):
        return False
    if plain_rule is Plain.PER_REPLICA and not mirrored:
        return True
    if op.how.repeats:
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
        leaves, structure = nest.flatten(value)
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
    call = f"{name}({op.value}, {nest.describe(structure)} {moving_text}){to}"
    origin = f"{born(leaves)}{plain_values}"
    totals = iter(all_reduce(group, call, op, contributions, of=origin))
    results = [
        finish(next(totals), source) if moves else source
        for source, moves in zip(sources, moving, strict=True)
    ]
    if mirrors:
        entries = zip(leaves, results, moving, strict=True)
        results = [_mirror(group, i, *entry) for i, entry in enumerate(entries)]
    return nest.unflatten(structure, results)


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
        leaves, structure = nest.flatten(value)
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
    call = f"reduce({op.value}, axis={axis_numbers}, {nest.describe(structure)})"
    origin = born(leaves)
    if op.how.repeats and op is not ReduceOp.MEAN:
        _refuse_nothing(group, call + origin, contributions, paths)
    totals = group.all_reduce_contributions(call, op, contributions, origin=origin)
    if op is ReduceOp.MEAN:
        _rescue(group, call, origin, sources, axis_numbers, contributions, totals)
    pairs = zip(totals, sources, strict=True)
    results = [t[()] if kind_of(x) is None else finish(t, x) for t, x in pairs]
    return nest.unflatten(structure, results)


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
            rescue(totals[i], real(mean).reshape(-1).__getitem__, 1.0, _SCALE)


def _over_axis(op: ReduceOp, array: Array, axis: Any, path: str, team: Team | None) -> Contribution:
    dtypes = wire_type(op, array.dtype, path)
    # The local total travels, perhaps in a wider dtype; the text has the dtype of the leaf.
    spec = f"{path} of {dtype_name(array.dtype)}"
    axes = _axes(axis, array, path)
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        total, count = local_sum(array, axes, dtypes.wire, team)
        return Contribution(total, dtypes, count, spec)
    count = int(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    start = op.how.start(dtypes.wire)
    with np.errstate(all="ignore"):
        total = op.how.ufunc.reduce(array, axis=axes, dtype=dtypes.wire, initial=start)
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
