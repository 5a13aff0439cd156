"""Reductions of trees with `IndexedSlices` in them: rows are gathered, not added.

`make_contribution` checks a leaf, and `all_reduce_leaves` reduces several, dense and sparse ones.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, dtype_name, label, spec_text
from mpistrat.collectives.dtypes import WireType, check_integer, choose_wire_type
from mpistrat.collectives.plan import Contribution
from mpistrat.collectives.weights import normalize_weights, sum_weights
from mpistrat.errors import StructureError
from mpistrat.kernels.elementwise import as_real, divide, factors_of, multiply
from mpistrat.kernels.ops import ReduceOp
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.values import DistributedValues


class SlicesContribution(NamedTuple):
    """One rank's part in the reduction of a leaf that is `IndexedSlices`.

    Attributes:
      slices: The rows.
      dtypes: The dtypes in which a mean is computed, and comes back.
      weight: How many examples they stand for; 0 means that the values are never read.
      path: The name of the leaf.
    """

    slices: IndexedSlices
    dtypes: WireType
    weight: float = 1
    path: str = ""


def make_contribution(
    op: ReduceOp, leaf: object, path: str = "", weight: float = 1, rank_count: int = 1
) -> Contribution | SlicesContribution:
    """Return what this rank, of so many `rank_count`, gives to the reduction of `leaf`.

    Raises:
      LeafTypeError: The leaf cannot be reduced with `op`.
      OverflowError: The leaf is a Python integer that is too large to be reduced.
      ValueError: The leaf is `IndexedSlices`, and the operation neither SUM nor MEAN.
    """
    if not isinstance(leaf, IndexedSlices):
        if isinstance(leaf, int):
            check_integer(op, leaf, path, rank_count)
        array = as_array(leaf, path)
        return Contribution(array, choose_wire_type(op, array.dtype, path), weight, path)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"{op.value}: {label(path)} is IndexedSlices, and {op.value} has no meaning for rows "
            "that are not there. Make it dense: np.asarray(slices)."
        )
    return SlicesContribution(leaf, choose_wire_type(op, leaf.dtype, path), weight, path)


def copy_slices(op: ReduceOp, contribution: SlicesContribution) -> IndexedSlices:
    """Return the result where there is one replica by construction: the rows, with their dtype."""
    values = np.array(contribution.slices.values)
    if op is ReduceOp.MEAN and contribution.weight == 0:
        values = np.full(values.shape, np.nan, contribution.dtypes.result)
    return IndexedSlices(
        values, contribution.slices.indices.copy(), contribution.slices.dense_shape
    )


def all_reduce_leaves(
    group: ReplicaGroup,
    call: str,
    op: ReduceOp,
    contributions: Sequence[Contribution | SlicesContribution],
    *,
    is_weighting: bool = False,
    origin_text: str = "",
) -> list[Any]:
    """Reduce every leaf by `ReplicaGroup.all_reduce_contributions`; concatenate rows.

    Collective. Cost: as that, and for all slices together one handshake and two MPI_Allgatherv per
    leaf. Rows come in rank order; the same row of several ranks appears several times.
    """
    dense_contributions = [part for part in contributions if isinstance(part, Contribution)]
    slices_parts = [part for part in contributions if isinstance(part, SlicesContribution)]
    if not slices_parts:
        return group.all_reduce_contributions(
            call, op, dense_contributions, is_weighting, origin_text
        )
    lockstep = group.lockstep
    with lockstep.validating_collectively(call):
        form_letters = ["s" if isinstance(x, SlicesContribution) else "d" for x in contributions]
        shapes = [part.slices.dense_shape for part in slices_parts]
        call = f"{call} with slices {''.join(form_letters)} of {shapes}"
        slices_parts = [
            _zero_unread_rows(x) if is_weighting and x.weight == 0 else x for x in slices_parts
        ]
        alarm = group.reducer.describe_alarm(
            call, [Contribution(x.slices.values, *x[1:]) for x in slices_parts]
        )
    if group.reducer.needs_finite_check:
        lockstep.handshake(f"{call}{origin_text}, their numbers", alarm=alarm)
    totals: list[Array] = []
    if dense_contributions:
        totals = group.all_reduce_contributions(
            call, op, dense_contributions, is_weighting, origin_text
        )
    gather_slices = _gather_slices if group.delegate is None else _reduce_slices_by_class
    gathered_slices = iter(gather_slices(group, call + origin_text, op, slices_parts, is_weighting))
    dense_totals = iter(totals)
    return [next(gathered_slices if form == "s" else dense_totals) for form in form_letters]


def _zero_unread_rows(contribution: SlicesContribution) -> SlicesContribution:
    """Return zeros in place of rows of weight 0, which are never read."""
    slices = contribution.slices
    zeros = IndexedSlices(np.zeros_like(slices.values), slices.indices, slices.dense_shape)
    return contribution._replace(slices=zeros)


def _gather_slices(
    group: ReplicaGroup,
    call: str,
    op: ReduceOp,
    contributions: Sequence[SlicesContribution],
    is_weighting: bool,
) -> list[IndexedSlices]:
    leaves: list[Array] = []
    paths: list[str] = []
    for part in contributions:
        leaves += [part.slices.values, part.slices.indices]
        paths += [f"{part.path} values".strip(), f"{part.path} indices".strip()]
        if is_weighting:  # with the number of rows, which other ranks do not know
            leaves.append(np.array([[part.weight, len(part.slices.values)]], np.float64))
            paths.append(f"{part.path} weight".strip())
    gathered_arrays = iter(group.reducer.all_gather(call, [0] * len(leaves), leaves, paths))
    results = []
    for part in contributions:
        values, indices = next(gathered_arrays), next(gathered_arrays)
        if op is ReduceOp.MEAN:
            row_shares = _find_row_shares(next(gathered_arrays)) if is_weighting else None
            values = _scale_to_mean(values, row_shares, group.lockstep.comm.size, part.dtypes)
        results.append(IndexedSlices(values, indices, part.slices.dense_shape))
    return results


def _reduce_slices_by_class(
    group: ReplicaGroup,
    call: str,
    op: ReduceOp,
    contributions: Sequence[SlicesContribution],
    is_weighting: bool,
) -> list[IndexedSlices]:
    """Return the results of a class of the program's own."""
    wires = [part.slices.values.astype(part.dtypes.wire, copy=False) for part in contributions]
    shapes = [f"{dtype_name(wire.dtype)} rows of {wire.shape[1:]}" for wire in wires]
    text = f"{call}, {', '.join(shapes)}"
    with np.errstate(all="ignore"):
        if is_weighting and op is ReduceOp.MEAN:
            # A weighted mean comes as a sum, as that of dense leaves does.
            own_shares = _gather_own_shares(group, text, contributions)
            wires = [np.array(wire, order="C") for wire in wires]
            for wire, share in zip(wires, own_shares, strict=True):
                multiply(wire, share)
            op = ReduceOp.SUM
        wire_slices = [
            IndexedSlices(wire, part.slices.indices, part.slices.dense_shape)
            for part, wire in zip(contributions, wires, strict=True)
        ]
        assert group.delegate is not None
        results = group.delegate.reduce_values(text, op, wire_slices, _check_returned_slices)
        return [
            IndexedSlices(
                result.values.astype(part.dtypes.result), result.indices, result.dense_shape
            )
            for part, result in zip(contributions, results, strict=True)
        ]


def _gather_own_shares(
    group: ReplicaGroup, text: str, contributions: Sequence[SlicesContribution]
) -> Array:
    """Return the part of each mean that this rank's rows count for. Collective."""
    weight_bytes = struct.pack(f"<{len(contributions)}d", *[part.weight for part in contributions])
    messages = group.lockstep.gather_payloads(f"{text}, weights", weight_bytes)
    scales = normalize_weights(
        np.array([np.frombuffer(message, np.float64) for message in messages])
    )
    scale_totals = [np.longdouble(sum_weights(column)) for column in scales.T.tolist()]
    own_shares: Array = scales[group.lockstep.comm.rank] / scale_totals
    return own_shares


def _check_returned_slices(returned_value: object, slices: IndexedSlices) -> IndexedSlices:
    """Return the result of a class, if it is rows of the same kind."""
    returned_value = (
        returned_value.local if isinstance(returned_value, DistributedValues) else returned_value
    )
    if not isinstance(returned_value, IndexedSlices):
        raise StructureError(
            f"the CrossDeviceOps returned {type(returned_value).__name__} for IndexedSlices; "
            "expected IndexedSlices of all replicas' rows. Where it has no way to reduce them, "
            "give the call options=CommunicationOptions(implementation='NCCL'), or dense values."
        )
    if returned_value.values.shape[1:] != slices.values.shape[1:] or not np.can_cast(
        returned_value.values.dtype, slices.values.dtype, "same_kind"
    ):
        raise StructureError(
            f"the CrossDeviceOps returned {spec_text(returned_value.values)} for rows "
            f"{spec_text(slices.values)}; expected rows of the same shape and kind."
        )
    return IndexedSlices(returned_value.values, returned_value.indices, slices.dense_shape)


def _find_row_shares(weights: Array) -> Array:
    """Return for every row of all ranks its part of the mean, given weights and numbers of rows."""
    scales = normalize_weights(weights[:, :1])[:, 0]
    with np.errstate(all="ignore"):  # all weights 0 give NaN
        rank_shares = scales / np.longdouble(sum_weights(scales.tolist()))
    row_shares: Array = np.repeat(rank_shares, weights[:, 1].astype(np.int64))
    return row_shares


def _scale_to_mean(
    array: Array, row_shares: Array | None, rank_count: int, dtypes: WireType
) -> Array:
    means = np.array(array, dtypes.wire, order="C")
    with np.errstate(all="ignore"):
        if row_shares is None:
            divide(means, rank_count)
        elif means.size:
            rows = as_real(means).reshape(len(means), -1)
            rows *= factors_of(row_shares, means.dtype)[:, None]
        mean_array: Array = means.astype(dtypes.result, copy=False)
    return mean_array


def reduce_array(group: ReplicaGroup, call: str, op: ReduceOp, value: Array) -> Array:
    """Return one array reduced over all replicas, in its own dtype. Collective."""
    contributions = [Contribution(value, choose_wire_type(op, value.dtype))]
    total: Array = group.all_reduce_contributions(call, op, contributions)[0]
    return total
