"""Reductions of trees with `IndexedSlices` in them: rows are gathered, not added."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, dtype_name, label, spec_text
from mpistrat.collectives.call import Contribution
from mpistrat.collectives.dtypes import WireType, check_integer, wire_type
from mpistrat.collectives.weights import scaled, total_of
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.values import DistributedValues
from mpistrat.errors import StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import divide, factors_of, multiply, real


class SlicesContribution(NamedTuple):
    """What one rank gives to the reduction of a leaf that is `IndexedSlices`.

    Attributes:
      slices: The rows.
      dtypes: As what dtype a mean is made, and comes back.
      weight: How many examples they stand for; 0 means that the values are never read.
      path: The name of the leaf.
    """

    slices: IndexedSlices
    dtypes: WireType
    weight: float = 1
    path: str = ""


def contribution(
    op: ReduceOp, leaf: Any, path: str = "", weight: float = 1, ranks: int = 1
) -> Contribution | SlicesContribution:
    """Return what this rank, of so many `ranks`, gives to the reduction of `leaf`.

    Raises:
      LeafTypeError: The leaf cannot be reduced with `op`.
      OverflowError: The leaf is a Python integer that is too large to be reduced.
      ValueError: The leaf is `IndexedSlices`, and the operation neither SUM nor MEAN.
    """
    if not isinstance(leaf, IndexedSlices):
        if isinstance(leaf, int):
            check_integer(op, leaf, path, ranks)
        array = as_array(leaf, path)
        return Contribution(array, wire_type(op, array.dtype, path), weight, path)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"{op.value}: {label(path)} is IndexedSlices, and {op.value} has no meaning for rows "
            "that are not there. Make it dense: np.asarray(slices)."
        )
    return SlicesContribution(leaf, wire_type(op, leaf.dtype, path), weight, path)


def alone(op: ReduceOp, part: SlicesContribution) -> IndexedSlices:
    """Return the result where there is one replica by construction: the rows, with their dtype."""
    values = np.array(part.slices.values)
    if op is ReduceOp.MEAN and part.weight == 0:
        values = np.full(values.shape, np.nan, part.dtypes.result)
    return IndexedSlices(values, part.slices.indices.copy(), part.slices.dense_shape)


def all_reduce(
    group: ReplicaGroup,
    call: str,
    op: ReduceOp,
    parts: Sequence[Contribution | SlicesContribution],
    weigh: bool = False,
    of: str = "",
) -> list[Any]:
    """Reduce every leaf over all ranks by `ReplicaGroup.all_reduce_given`; concatenate rows.

    Collective. Cost: as that, and for all slices together one handshake and two MPI_Allgatherv per
    leaf. Rows come in rank order; the same row of several ranks appears several times.
    """
    dense = [part for part in parts if isinstance(part, Contribution)]
    sparse = [part for part in parts if isinstance(part, SlicesContribution)]
    if not sparse:
        return group.all_reduce_given(call, op, dense, weigh, of)
    lockstep = group.lockstep
    with lockstep.preparing(call):
        where = ["s" if isinstance(part, SlicesContribution) else "d" for part in parts]
        shapes = [part.slices.dense_shape for part in sparse]
        call = f"{call} with slices {''.join(where)} of {shapes}"
        sparse = [_to_be_read(part) if weigh and part.weight == 0 else part for part in sparse]
        alarm = group.reducer.alarm(call, [Contribution(p.slices.values, *p[1:]) for p in sparse])
    if group.reducer.watches:
        lockstep.prove(f"{call}{of}, their numbers", alarm=alarm)
    totals = iter(group.all_reduce_given(call, op, dense, weigh, of) if dense else [])
    meet = _gathered if group.delegate is None else _by_class
    gathered = iter(meet(group, call + of, op, sparse, weigh))
    return [next(gathered if kind == "s" else totals) for kind in where]


def _to_be_read(part: SlicesContribution) -> SlicesContribution:
    """Return zeros in place of rows of weight 0, which are never read."""
    rows = part.slices
    zeros = IndexedSlices(np.zeros_like(rows.values), rows.indices, rows.dense_shape)
    return part._replace(slices=zeros)


def _gathered(
    group: ReplicaGroup, call: str, op: ReduceOp, sparse: Sequence[SlicesContribution], weigh: bool
) -> list[IndexedSlices]:
    leaves: list[Array] = []
    paths: list[str] = []
    for part in sparse:
        leaves += [part.slices.values, part.slices.indices]
        paths += [f"{part.path} values".strip(), f"{part.path} indices".strip()]
        if weigh:  # and how many rows it is for, because they are known only once all have met
            leaves.append(np.array([[part.weight, len(part.slices.values)]], np.float64))
            paths.append(f"{part.path} weight".strip())
    found = iter(group.reducer.all_gather(call, [0] * len(leaves), leaves, paths))
    results = []
    for part in sparse:
        values, indices = next(found), next(found)
        if op is ReduceOp.MEAN:
            shares = _shares(next(found)) if weigh else None
            values = _mean(values, shares, group.lockstep.comm.size, part.dtypes)
        results.append(IndexedSlices(values, indices, part.slices.dense_shape))
    return results


def _by_class(
    group: ReplicaGroup, call: str, op: ReduceOp, sparse: Sequence[SlicesContribution], weigh: bool
) -> list[IndexedSlices]:
    """Return what a class of the program's own makes of the rows."""
    wires = [part.slices.values.astype(part.dtypes.wire, copy=False) for part in sparse]
    shapes = [f"{dtype_name(wire.dtype)} rows of {wire.shape[1:]}" for wire in wires]
    text = f"{call}, {', '.join(shapes)}"
    with np.errstate(all="ignore"):
        if weigh and op is ReduceOp.MEAN:
            # A weighted mean comes as a sum, as that of dense leaves does.
            header = struct.pack(f"<{len(sparse)}d", *[part.weight for part in sparse])
            smalls = group.lockstep.share(f"{text}, weights", header)
            table = np.array([np.frombuffer(small, np.float64) for small in smalls])
            scales = scaled(table)
            whole = [np.longdouble(total_of(column)) for column in scales.T.tolist()]
            mine = scales[group.lockstep.comm.rank] / whole
            wires = [np.array(wire, order="C") for wire in wires]
            for wire, share in zip(wires, mine, strict=True):
                multiply(wire, share)
            op = ReduceOp.SUM
        rows = [
            IndexedSlices(wire, part.slices.indices, part.slices.dense_shape)
            for part, wire in zip(sparse, wires, strict=True)
        ]
        assert group.delegate is not None
        found = zip(sparse, group.delegate.by_class(text, op, rows, _checked), strict=True)
        return [
            IndexedSlices(one.values.astype(part.dtypes.result), one.indices, one.dense_shape)
            for part, one in found
        ]


def _checked(made: Any, given: IndexedSlices) -> IndexedSlices:
    """Return what a class made of rows, if it is rows of the same kind."""
    made = made.local if isinstance(made, DistributedValues) else made
    if not isinstance(made, IndexedSlices):
        raise StructureError(
            f"the CrossDeviceOps returned {type(made).__name__} for IndexedSlices; expected "
            "IndexedSlices of all replicas' rows. Where it has no way to reduce them, give the "
            "call options=CommunicationOptions(implementation='NCCL'), or dense values."
        )
    if made.values.shape[1:] != given.values.shape[1:] or not np.can_cast(
        made.values.dtype, given.values.dtype, "same_kind"
    ):
        raise StructureError(
            f"the CrossDeviceOps returned {spec_text(made.values)} for rows "
            f"{spec_text(given.values)}; expected rows of the same shape and kind."
        )
    return IndexedSlices(made.values, made.indices, given.dense_shape)


def _shares(weights: Array) -> Array:
    """Return for every row of all ranks its part of the mean, given weights and numbers of rows."""
    scales = scaled(weights[:, :1])[:, 0]
    with np.errstate(all="ignore"):  # all weights 0 give NaN
        share = scales / np.longdouble(total_of(scales.tolist()))
    rows: Array = np.repeat(share, weights[:, 1].astype(np.int64))
    return rows


def _mean(values: Array, shares: Array | None, size: int, how: WireType) -> Array:
    wide = np.array(values, how.wire, order="C")
    with np.errstate(all="ignore"):
        if shares is None:
            divide(wide, size)
        elif wide.size:
            rows = real(wide).reshape(len(wide), -1)
            rows *= factors_of(shares, wide.dtype)[:, None]
        result: Array = wide.astype(how.result, copy=False)
    return result


def reduced(group: ReplicaGroup, call: str, op: ReduceOp, value: Array) -> Array:
    """Return one array reduced over all replicas, in its own dtype. Collective."""
    given = [Contribution(value, wire_type(op, value.dtype))]
    total: Array = group.all_reduce_given(call, op, given)[0]
    return total
