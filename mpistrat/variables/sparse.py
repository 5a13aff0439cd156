"""Reductions of trees with `IndexedSlices` in them: rows are gathered, not added."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, dtype_name, label, spec_text
from mpistrat.collectives.dtypes import WireType, check_integer, wire_type
from mpistrat.collectives.plan import Contribution
from mpistrat.collectives.weights import scaled, total_of
from mpistrat.errors import StructureError
from mpistrat.kernels.elementwise import as_real, divide, factors_of, multiply
from mpistrat.kernels.ops import ReduceOp
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.values import DistributedValues


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


def copy_slices(op: ReduceOp, part: SlicesContribution) -> IndexedSlices:
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
    """Reduce every leaf by `ReplicaGroup.all_reduce_contributions`; concatenate rows.

    Collective. Cost: as that, and for all slices together one handshake and two MPI_Allgatherv per
    leaf. Rows come in rank order; the same row of several ranks appears several times.
    """
    dense = [part for part in parts if isinstance(part, Contribution)]
    sparse = [part for part in parts if isinstance(part, SlicesContribution)]
    if not sparse:
        return group.all_reduce_contributions(call, op, dense, weigh, of)
    lockstep = group.lockstep
    with lockstep.preparing(call):
        part_kinds = ["s" if isinstance(part, SlicesContribution) else "d" for part in parts]
        shapes = [part.slices.dense_shape for part in sparse]
        call = f"{call} with slices {''.join(part_kinds)} of {shapes}"
        sparse = [_to_be_read(part) if weigh and part.weight == 0 else part for part in sparse]
        alarm = group.reducer.alarm(call, [Contribution(p.slices.values, *p[1:]) for p in sparse])
    if group.reducer.watches:
        lockstep.handshake(f"{call}{of}, their numbers", alarm=alarm)
    totals = iter(group.all_reduce_contributions(call, op, dense, weigh, of) if dense else [])
    gather_slices = _gathered if group.delegate is None else _by_class
    gathered = iter(gather_slices(group, call + of, op, sparse, weigh))
    return [next(gathered if kind == "s" else totals) for kind in part_kinds]


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
    gathered_arrays = iter(group.reducer.all_gather(call, [0] * len(leaves), leaves, paths))
    results = []
    for part in sparse:
        values, indices = next(gathered_arrays), next(gathered_arrays)
        if op is ReduceOp.MEAN:
            shares = _shares(next(gathered_arrays)) if weigh else None
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
            smalls = group.lockstep.gather_payloads(f"{text}, weights", header)
            table = np.array([np.frombuffer(small, np.float64) for small in smalls])
            scales = scaled(table)
            scale_totals = [np.longdouble(total_of(column)) for column in scales.T.tolist()]
            own_shares = scales[group.lockstep.comm.rank] / scale_totals
            wires = [np.array(wire, order="C") for wire in wires]
            for wire, share in zip(wires, own_shares, strict=True):
                multiply(wire, share)
            op = ReduceOp.SUM
        rows = [
            IndexedSlices(wire, part.slices.indices, part.slices.dense_shape)
            for part, wire in zip(sparse, wires, strict=True)
        ]
        assert group.delegate is not None
        pairs = zip(sparse, group.delegate.by_class(text, op, rows, _checked), strict=True)
        return [
            IndexedSlices(
                result.values.astype(part.dtypes.result), result.indices, result.dense_shape
            )
            for part, result in pairs
        ]


def _checked(result: Any, slices: IndexedSlices) -> IndexedSlices:
    """Return what a class made of rows, if it is rows of the same kind."""
    result = result.local if isinstance(result, DistributedValues) else result
    if not isinstance(result, IndexedSlices):
        raise StructureError(
            f"the CrossDeviceOps returned {type(result).__name__} for IndexedSlices; expected "
            "IndexedSlices of all replicas' rows. Where it has no way to reduce them, give the "
            "call options=CommunicationOptions(implementation='NCCL'), or dense values."
        )
    if result.values.shape[1:] != slices.values.shape[1:] or not np.can_cast(
        result.values.dtype, slices.values.dtype, "same_kind"
    ):
        raise StructureError(
            f"the CrossDeviceOps returned {spec_text(result.values)} for rows "
            f"{spec_text(slices.values)}; expected rows of the same shape and kind."
        )
    return IndexedSlices(result.values, result.indices, slices.dense_shape)


def _shares(weights: Array) -> Array:
    """Return for every row of all ranks its part of the mean, given weights and numbers of rows."""
    scales = scaled(weights[:, :1])[:, 0]
    with np.errstate(all="ignore"):  # all weights 0 give NaN
        share = scales / np.longdouble(total_of(scales.tolist()))
    rows: Array = np.repeat(share, weights[:, 1].astype(np.int64))
    return rows


def _mean(values: Array, shares: Array | None, size: int, dtypes: WireType) -> Array:
    means = np.array(values, dtypes.wire, order="C")
    with np.errstate(all="ignore"):
        if shares is None:
            divide(means, size)
        elif means.size:
            rows = as_real(means).reshape(len(means), -1)
            rows *= factors_of(shares, means.dtype)[:, None]
        result: Array = means.astype(dtypes.result, copy=False)
    return result


def reduced(group: ReplicaGroup, call: str, op: ReduceOp, value: Array) -> Array:
    """Return one array reduced over all replicas, in its own dtype. Collective."""
    contributions = [Contribution(value, wire_type(op, value.dtype))]
    total: Array = group.all_reduce_contributions(call, op, contributions)[0]
    return total
