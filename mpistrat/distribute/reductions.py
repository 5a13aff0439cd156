"""Values per replica made one, in cross-replica code."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array, as_array, digest, dtype_name, finish, kind_of, label
from mpistrat.collectives.call import Contribution
from mpistrat.collectives.dtypes import wire_type
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


def _moves(name: str, op: ReduceOp, leaf: Any, plain: Plain, path: str) -> bool:
    """Tell whether the replicas' values of this leaf must meet; raise if the question is wrong."""
    if leaf is None:
        raise StructureError(
            f"{name}({op.value}): {label(path)} is None. Where strategy.run gave it, its function "
            "returned None on every replica: look for a missing return."
        )
    if isinstance(leaf, PerReplica) or (isinstance(leaf, DistributedVariable) and leaf.on_read):
        return True
    mirrored = isinstance(leaf, Mirrored | DistributedVariable)
    if plain is Plain.SAME or (mirrored and op.how.repeats):
        return False
    if plain is Plain.EACH and not mirrored:
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
        plain = group.view.plain
        moving = [_moves(name, op, leaf, plain, p) for leaf, p in zip(leaves, paths, strict=True)]
        sources = [_component(leaf) for leaf in leaves]
        contributions, plain_values = [], ""
        for leaf, source, path, moves in zip(leaves, sources, paths, moving, strict=True):
            if moves:
                contributions.append(contribution(op, source, path, ranks=ranks))
                continue
            checked = source if isinstance(source, IndexedSlices) else as_array(source, path)
            if plain is not Plain.SAME:
                # It is returned as it is, so it has to be the same on all ranks.
                proof = leaf.proved_by(session) if isinstance(leaf, Mirrored) else ""
                known = isinstance(leaf, DistributedVariable) or bool(proof)
                plain_values += (
                    f" {path} {proof}" if known else f" {digest(arrays_of(checked)).hex()[:16]}"
                )
    which = "".join("*" if moves else "." for moves in moving)
    call = f"{name}({op.value}, {nest.describe(structure)} {which}){to}"
    of = f"{born(leaves)}{plain_values}"
    totals = iter(all_reduce(group, call, op, contributions, of=of))
    found = [
        finish(next(totals), source) if moves else source
        for source, moves in zip(sources, moving, strict=True)
    ]
    if mirrors:
        given = zip(leaves, found, moving, strict=True)
        found = [_mirror(group, i, *one) for i, one in enumerate(given)]
    return nest.unflatten(structure, found)


def _mirror(group: ReplicaGroup, place: int, leaf: Any, result: Any, moved: bool) -> Any:
    """Return `result`, of the leaf in that place, as `Mirrored` if it is the same everywhere."""
    if moved:
        # What is in slices can be written to, so a handshake would say nothing of it later.
        known = not isinstance(result, IndexedSlices)
        proof = f"{group.lockstep.session.calls}/{place}" if known else ""
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
        given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
        given = tuple(operator.index(a) for a in given)
    except TypeError:
        raise TypeError(
            f"reduce: axis must be None, an integer or a tuple of integers, not {axis!r}."
        ) from None
    if any(not -array.ndim <= a < array.ndim for a in given):
        raise AxisError(
            f"reduce: {label(path)} of shape {array.shape} has no axis {axis!r}; it has "
            f"{array.ndim} dimensions. With axis=None values are reduced over the replicas only; "
            "with an axis, over its elements too, such as one value per example."
        )
    found = tuple(a % array.ndim for a in given)
    if len(set(found)) != len(found):
        raise AxisError(f"reduce: axis {axis!r} names an axis of {label(path)} twice.")
    return found


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
        over = tuple(map(operator.index, axis if isinstance(axis, tuple | list) else (axis,)))
    call, of = f"reduce({op.value}, axis={over}, {nest.describe(structure)})", born(leaves)
    if op.how.repeats and op is not ReduceOp.MEAN:
        _refuse_nothing(group, call + of, contributions, paths)
    totals = group.all_reduce_given(call, op, contributions, of=of)
    if op is ReduceOp.MEAN:
        _rescue(group, call, of, sources, over, contributions, totals)
    pairs = zip(totals, sources, strict=True)
    found = [t[()] if kind_of(x) is None else finish(t, x) for t, x in pairs]
    return nest.unflatten(structure, found)


# A power of two that no sum of floating-point numbers overflows with, however many there are.
_LITTLE = 2.0**-60


def _rescue(
    group: ReplicaGroup,
    call: str,
    of: str,
    leaves: Sequence[Any],
    axes: tuple[int, ...],
    given: Sequence[Contribution],
    totals: list[Array],
) -> None:
    """Make means again that are infinite, from values scaled down: a sum may have overflowed.

    A NaN is no reason: data have it often, and where sums that overflow with opposite signs meet,
    which leave it too, nobody could tell without a look at all values.
    """
    # float16 is added in a dtype that no sum of it leaves, and so are integers, which stay finite.
    which = [
        i
        for i, (part, total) in enumerate(zip(given, totals, strict=True))
        if part.dtypes.result != np.float16 and np.isinf(total).any()
    ]
    if not which:
        return
    with group.lockstep.preparing(call):
        again = []
        for i in which:
            array, part = as_array(leaves[i], given[i].path), given[i]
            little = np.array(array, part.dtypes.wire, order="C")
            with np.errstate(all="ignore"):
                multiply(little, _LITTLE)
            over = tuple(axis % array.ndim for axis in axes)
            total, count = local_sum(little, over, part.dtypes.wire, group.lockstep.session.team)
            again.append(part._replace(value=total, weight=count))
    means = group.all_reduce_given(f"{call}, scaled", ReduceOp.MEAN, again, of=of)
    for i, mean in zip(which, means, strict=True):
        with np.errstate(all="ignore"):
            rescue(totals[i], real(mean).reshape(-1).__getitem__, 1.0, _LITTLE)


def _over_axis(op: ReduceOp, array: Array, axis: Any, path: str, team: Team | None) -> Contribution:
    how = wire_type(op, array.dtype, path)
    # What travels is the local total, perhaps in a wider dtype: the leaf's own goes into the text.
    spec = f"{path} of {dtype_name(array.dtype)}"
    axes = _axes(axis, array, path)
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        total, count = local_sum(array, axes, how.wire, team)
        return Contribution(total, how, count, spec)
    count = int(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    start = op.how.start(how.wire)
    with np.errstate(all="ignore"):
        total = op.how.ufunc.reduce(array, axis=axes, dtype=how.wire, initial=start)
    return Contribution(np.asarray(total), how, count, spec)


def _refuse_nothing(
    group: ReplicaGroup, call: str, all_: Sequence[Contribution], paths: Sequence[str]
) -> None:
    counts = np.array([part.weight for part in all_], np.int64)
    rows = group.lockstep.share(f"{call} counts", counts.tobytes())
    totals = sum(np.frombuffer(row, np.int64) for row in rows)
    empty = [path for path, total in zip(paths, np.atleast_1d(totals), strict=True) if total == 0]
    if empty:
        group.lockstep.fail(StructureError(f"{call}: {label(empty[0])} is empty on every replica."))
