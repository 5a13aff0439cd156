"""The plan of an all-reduce, equal on all ranks and in every call, and the inputs of a call."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, label, spec_text
from mpistrat.collectives.dtypes import WireType
from mpistrat.collectives.layout import BUCKET_NBYTES, Bucket, make_buckets
from mpistrat.comm.callsite import find_call_site
from mpistrat.kernels.elementwise import divide
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.rows import is_narrow

# Up to so many bytes of a rank are copied into shared memory even if they could be reduced in
# place: the copy takes less time than the barrier that ends a reduction in place.
MAX_COPIED_NBYTES = 16 * 1024
# But copying so many leaves takes longer than the barrier.
_MANY_LEAVES = 32
# The weight of a value that stands for itself.
UNIT_WEIGHTS = (1.0,)
_dtype = operator.attrgetter("dtype")
_shape = operator.attrgetter("shape")


class Contribution(NamedTuple):
    """One rank's contribution to the reduction of one leaf.

    Attributes:
      value: Any layout; the dtype that travels, or one that converts to it.
      dtypes: The dtypes in which it travels and in which the result is returned.
      weight: The number of examples it stands for; 0 means that `value` is never read.
      path: The name of the leaf.
    """

    value: Array
    dtypes: WireType
    weight: float = 1
    path: str = ""


def describe_call(call: str, contributions: Sequence[Contribution]) -> str:
    """Return the text of a call with the names, dtypes and shapes of its leaves."""
    specs = (
        format_leaf(contribution.path, spec_text(contribution.value))
        for contribution in contributions
    )
    return f"{call} {', '.join(specs)}"


def format_leaf(path: str, array_spec: str) -> str:
    """Return the text of a leaf: its name, if it has one, and its dtype and shape."""
    return f"{path}: {array_spec}" if path else array_spec


def describe_first_nonfinite(call: str, step: int, contributions: Sequence[Contribution]) -> str:
    """Return the description of this rank's first NaN or infinity, or an empty string.

    A value of weight 0 is never read.

    Cost: one pass over the values, about that of a sum; only with ``MPISTRAT_NAN``.
    """
    for contribution in contributions:
        if contribution.weight == 0 or contribution.value.dtype.kind not in "fcV":
            continue
        is_finite = np.isfinite(contribution.value)
        if not is_finite.all():
            index = tuple(
                int(i) for i in np.unravel_index(int(np.argmin(is_finite)), is_finite.shape)
            )
            return (
                f"{label(contribution.path)}, {spec_text(contribution.value)}, is "
                f"{contribution.value[index]} at index {index} (the first of "
                f"{is_finite.size - int(is_finite.sum())}), in step {step}, "
                f"{find_call_site()} {call}"
            )
    return ""


def list_specs(leaves: Sequence[Array]) -> tuple[Any, Any]:
    """Return the dtypes and the shapes of leaves.

    Cost: no loop in Python, since there may be hundreds of leaves.
    """
    return tuple(map(_dtype, leaves)), tuple(map(_shape, leaves))


def is_worth_reducing_in_place(nbytes: int, leaf_count: int) -> bool:
    """Return whether so many leaves, of so many bytes together, are better reduced in place."""
    return nbytes > (MAX_COPIED_NBYTES if leaf_count < _MANY_LEAVES else 0)


class ReductionInputs(NamedTuple):
    """One rank's inputs of one call of a plan.

    Attributes:
      values: The leaves, in native byte order; numbers only if the plan is `is_native`.
      weights: The number of examples that each leaf stands for, or one number for all.
      outs: The arrays that results are written to, of the results' dtypes; None for new arrays.
      origin: More of the text that all ranks agree on, such as the call that made the values.
      alarm: The description of values that are not finite, if the options ask for it.
    """

    values: Sequence[Any]
    weights: Sequence[float] = UNIT_WEIGHTS
    outs: Sequence[Array] | None = None
    origin: str = ""
    alarm: str = ""


class PlanOptions(NamedTuple):
    """How a plan treats weights, and the kinds of its leaves.

    Attributes:
      weight_count: The weights of a MEAN that are sent: one for all leaves, or one for each.
      is_weighting: Whether values are multiplied by their weights; else they are sums over their
        examples already, and weights only divide.
      has_equal_weights: Whether every rank has the weight 1.
      number_flags: For each leaf, whether its result is a number; empty if no result is.
      is_native: Whether each leaf has the dtype in which it travels and is returned: arrays of that
        dtype, or numbers.
    """

    weight_count: int = 1
    is_weighting: bool = False
    has_equal_weights: bool = False
    number_flags: Sequence[bool] = ()
    is_native: bool = False


_DEFAULT_OPTIONS = PlanOptions()


@final
class ReductionPlan:
    """The part of an all-reduce that follows from its structure, shapes and dtypes; immutable.

    Args:
      text: The text of the call, with names, dtypes and shapes.
      op: The operation.
      dtypes: The dtypes in which each leaf travels and is returned.
      shapes: The shapes of the leaves.
      plan_options: The treatment of weights, and the kinds of leaves.

    Attributes:
      is_mean: Whether the operation is MEAN.
      nbytes: The bytes of one rank that travel.
      keeps_dtypes: Whether every leaf is reduced in the dtype of its result.
      narrow_dtypes: The dtypes that are reduced in float32, and returned unchanged.
      specs: The dtype on the wire and the number of elements of each leaf.
      can_reduce_in_place: Whether arrays of `Strategy.buffers` are reduced in place.
      buckets: The groups of leaves that pass through shared memory at once.
      largest_bucket_nbytes: The size of the largest bucket.
      weights_nbytes: The size of the weights that are sent.
    """

    def __init__(
        self,
        text: str,
        op: ReduceOp,
        dtypes: Sequence[WireType],
        shapes: Sequence[tuple[int, ...]],
        plan_options: PlanOptions = _DEFAULT_OPTIONS,
    ):
        """Compute everything that follows from dtypes and shapes."""
        self.text, self.op, self.dtypes, self.shapes = text, op, tuple(dtypes), tuple(shapes)
        self.is_mean = op is ReduceOp.MEAN
        self.weight_count = plan_options.weight_count if self.is_mean else 0
        self.is_weighting = plan_options.is_weighting and self.is_mean
        self.has_equal_weights = plan_options.has_equal_weights or not self.is_mean
        self.number_flags = (
            tuple(plan_options.number_flags) if any(plan_options.number_flags) else ()
        )
        self.is_native = plan_options.is_native
        self.specs = tuple((d.wire, math.prod(s)) for d, s in zip(dtypes, shapes, strict=True))
        self.nbytes = sum(size * dtype.itemsize for dtype, size in self.specs)
        self.keeps_dtypes = all(d.wire == d.result for d in self.dtypes)
        # In place, the loop widens float16 and bfloat16.
        narrow_flags = [d.wire == np.float32 and is_narrow(d.result) for d in self.dtypes]
        flagged_dtypes = list(zip(self.dtypes, narrow_flags, strict=True))
        self.narrow_dtypes = {
            dtype.result for dtype, is_narrow_leaf in flagged_dtypes if is_narrow_leaf
        }
        has_in_place_dtypes = all(
            is_narrow_leaf or dtype.wire == dtype.result for dtype, is_narrow_leaf in flagged_dtypes
        )
        self.can_reduce_in_place = has_in_place_dtypes and is_worth_reducing_in_place(
            self.nbytes, len(self.dtypes)
        )
        self.buckets: tuple[Bucket, ...] = make_buckets(self.specs)
        self.largest_bucket_nbytes = max((bucket.nbytes for bucket in self.buckets), default=0)
        self._weights_format = struct.Struct(f"<{self.weight_count}d")
        self.weights_nbytes = self._weights_format.size

    def pack_weights(self, weights: Sequence[float]) -> bytes:
        """Return the weights that are sent with the handshake; 8 bytes for each."""
        return self._weights_format.pack(*weights) if self.weight_count else b""

    def convert_to_wire(
        self, values: Sequence[Any], weights: Sequence[float], needs_copies: bool
    ) -> list[Array]:
        """Return the leaves in the dtypes in which they travel, C-ordered and aligned.

        A leaf of weight 0 in a mean is never read; zeros take its place.

        Args:
          values: The leaves.
          weights: One per leaf, or one for all.
          needs_copies: Whether to return copies, which may be written to.
        """
        leaf_weights = list(weights) * (1 if len(weights) == len(values) else len(values))
        return [
            np.zeros(np.shape(value), dtypes.wire)
            if self.is_mean and weight == 0
            else np.array(
                value,
                dtypes.wire,
                order="C",
                copy=needs_copies
                or (type(value) is np.ndarray and not value.flags.aligned)
                or None,
            )
            for value, dtypes, weight in zip(values, self.dtypes, leaf_weights, strict=True)
        ]

    def prepare_leaves_to_copy(
        self, values: Sequence[Array], weights: Sequence[float], needs_contiguous: bool = False
    ) -> Sequence[Array]:
        """Return the leaves ready for being copied into buckets; zeros for those never read.

        Args:
          values: The leaves.
          weights: As in `convert_to_wire`.
          needs_contiguous: Whether all must be C-ordered; else they are only where a bucket may
            have a part of one.
        """
        if self.is_mean and 0 in weights:
            values = self.convert_to_wire(values, weights, needs_copies=False)
        if needs_contiguous or self.largest_bucket_nbytes > BUCKET_NBYTES // 2:
            values = [v if v.flags.c_contiguous else v.copy() for v in values]
        return values

    def finish_totals(
        self, totals: Sequence[Any], divisors: Sequence[float] | None = None
    ) -> list[Any]:
        """Return the totals, divided in place, in the dtypes of the results.

        Args:
          totals: The reduced leaves.
          divisors: One per leaf, or one for all; None if nothing is divided.
        """
        if divisors is not None:
            leaf_divisors = list(divisors) * (1 if len(divisors) == len(totals) else len(totals))
            with np.errstate(all="ignore"):  # all weights 0 give NaN
                for total, divisor in zip(totals, leaf_divisors, strict=True):
                    divide(total, divisor)
        if self.keeps_dtypes:
            return list(totals)
        return [t.astype(d.result, copy=False) for t, d in zip(totals, self.dtypes, strict=True)]

    def restore_numbers(self, results: list[Any]) -> list[Any]:
        """Return the results, with numbers where the leaves were numbers."""
        if not self.number_flags:
            return results
        flagged_totals = zip(results, self.number_flags, strict=True)
        return [total[()] if is_number else total for total, is_number in flagged_totals]
