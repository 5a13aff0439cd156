"""A plan of an all-reduce: what is the same on all ranks and in every call; and its inputs."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, label, spec_text
from mpistrat.collectives.dtypes import WireType
from mpistrat.collectives.layout import LIMIT, Bucket, buckets
from mpistrat.comm.callsite import find_call_site
from mpistrat.kernels.elementwise import divide
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.rows import is_narrow

# Up to so many bytes of a rank are copied into shared memory, wherever they lie: a copy is less
# than the barrier that ends a reduction in place.
SMALL = 16 * 1024
# But to copy so many leaves takes longer than the barrier.
_MANY_LEAVES = 32
# The weight of a value that stands for itself.
ONES = (1.0,)
_dtype = operator.attrgetter("dtype")
_shape = operator.attrgetter("shape")


class Contribution(NamedTuple):
    """What one rank gives to the reduction of one leaf.

    Attributes:
      value: Any layout; the dtype that travels, or one that converts to it.
      dtypes: How it travels and comes back.
      weight: How many examples it stands for; 0 means that `value` is never read.
      path: The name of the leaf.
    """

    value: Array
    dtypes: WireType
    weight: float = 1
    path: str = ""


def described(call: str, contributions: Sequence[Contribution]) -> str:
    """Return the text of a call with the names, dtypes and shapes of its leaves."""
    specs = (
        spec_of(contribution.path, spec_text(contribution.value)) for contribution in contributions
    )
    return f"{call} {', '.join(specs)}"


def spec_of(path: str, spec: str) -> str:
    """Return how a text shows a leaf: its name, if it has one, and its dtype and shape."""
    return f"{path}: {spec}" if path else spec


def first_nonfinite(call: str, step: int, contributions: Sequence[Contribution]) -> str:
    """Return where the first NaN or infinity of this rank is, or an empty string.

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


def specs_of(leaves: Sequence[Array]) -> tuple[Any, Any]:
    """Return dtypes and shapes, without a loop of Python's: there may be hundreds of leaves."""
    return tuple(map(_dtype, leaves)), tuple(map(_shape, leaves))


def worth_a_place(nbytes: int, leaves: int) -> bool:
    """Tell whether so many leaves, of so many bytes together, are reduced in place."""
    return nbytes > (SMALL if leaves < _MANY_LEAVES else 0)


class ReductionInputs(NamedTuple):
    """What one rank gives to one call of a plan.

    Attributes:
      values: The leaves, in native byte order; numbers only of a plan that is `is_native`.
      weights: How many examples each stands for, or one number for all.
      outs: Where the results go: arrays of the dtypes that come back; None for new arrays.
      origin: More of the text that all ranks agree on, such as which call made the values.
      alarm: The description of values that are not finite, if the options ask for it.
    """

    values: Sequence[Any]
    weights: Sequence[float] = ONES
    outs: Sequence[Array] | None = None
    origin: str = ""
    alarm: str = ""


class PlanOptions(NamedTuple):
    """How a plan treats weights, and what it returns.

    Attributes:
      weight_count: The weights of a MEAN that are sent: one for all leaves, or one for each.
      is_weighting: Values are multiplied by their weights; else they are sums over their examples
        already, and weights only divide.
      has_equal_weights: Every rank has the weight 1.
      number_flags: For each leaf, whether it comes back as a number; none of them if empty.
      is_native: Leaves are given as they travel and come back: arrays of that dtype, or numbers.
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
      dtypes: How each leaf travels.
      shapes: Of the leaves.
      options: How weights are treated, and what is returned; `PlanOptions` says what each is.

    Attributes:
      is_mean: The operation is MEAN.
      nbytes: The bytes of one rank that travel.
      keeps_dtypes: Every leaf is reduced in the dtype that comes back.
      narrow_dtypes: The dtypes that are reduced in float32, and come back as they came.
      specs: dtype on the wire and number of elements of each leaf.
      is_worth_a_place: Arrays of `Strategy.buffers` are reduced in place.
      buckets: The groups of leaves that pass through shared memory at once.
      largest_bucket_nbytes: The size of the largest bucket.
    """

    def __init__(
        self,
        text: str,
        op: ReduceOp,
        dtypes: Sequence[WireType],
        shapes: Sequence[tuple[int, ...]],
        options: PlanOptions = _DEFAULT_OPTIONS,
    ):
        """Work out what follows from dtypes and shapes."""
        self.text, self.op, self.dtypes, self.shapes = text, op, tuple(dtypes), tuple(shapes)
        self.is_mean = op is ReduceOp.MEAN
        self.weight_count = options.weight_count if self.is_mean else 0
        self.is_weighting = options.is_weighting and self.is_mean
        self.has_equal_weights = options.has_equal_weights or not self.is_mean
        self.number_flags = tuple(options.number_flags) if any(options.number_flags) else ()
        self.is_native = options.is_native
        self.specs = tuple((d.wire, math.prod(s)) for d, s in zip(dtypes, shapes, strict=True))
        self.nbytes = sum(size * dtype.itemsize for dtype, size in self.specs)
        self.keeps_dtypes = all(d.wire == d.result for d in self.dtypes)
        # In place, float16 and bfloat16 are widened within the loop.
        narrow = [d.wire == np.float32 and is_narrow(d.result) for d in self.dtypes]
        pairs = list(zip(self.dtypes, narrow, strict=True))
        self.narrow_dtypes = {dtype.result for dtype, is_so in pairs if is_so}
        can_stay = all(is_so or dtype.wire == dtype.result for dtype, is_so in pairs)
        self.is_worth_a_place = can_stay and worth_a_place(self.nbytes, len(self.dtypes))
        self.buckets: tuple[Bucket, ...] = buckets(self.specs)
        self.largest_bucket_nbytes = max((bucket.nbytes for bucket in self.buckets), default=0)
        self._weights_format = struct.Struct(f"<{self.weight_count}d")

    def pack_weights(self, weights: Sequence[float]) -> bytes:
        """Return the weights that are sent with the handshake; 8 bytes for each."""
        return self._weights_format.pack(*weights) if self.weight_count else b""

    def convert_to_wire(
        self, values: Sequence[Any], weights: Sequence[float], fresh: bool
    ) -> list[Array]:
        """Return the leaves as they travel, C-ordered and aligned; those never read as zeros.

        Args:
          values: The leaves.
          weights: One per leaf, or one for all; a value of weight 0 is never read by MEAN.
          fresh: Return copies, which may be multiplied.
        """
        leaf_weights = list(weights) * (1 if len(weights) == len(values) else len(values))
        return [
            np.zeros(np.shape(value), dtypes.wire)
            if self.is_mean and weight == 0
            else np.array(
                value,
                dtypes.wire,
                order="C",
                copy=fresh or (type(value) is np.ndarray and not value.flags.aligned) or None,
            )
            for value, dtypes, weight in zip(values, self.dtypes, leaf_weights, strict=True)
        ]

    def leaves_to_copy(
        self, values: Sequence[Array], weights: Sequence[float], flat: bool = False
    ) -> Sequence[Array]:
        """Return the leaves as buckets take them; those never read as zeros.

        Args:
          values: The leaves.
          weights: As `convert_to_wire` takes them.
          flat: All of them C-ordered; else if a bucket may have a part of one.
        """
        if self.is_mean and 0 in weights:
            values = self.convert_to_wire(values, weights, fresh=False)
        if flat or self.largest_bucket_nbytes > LIMIT // 2:
            values = [v if v.flags.c_contiguous else v.copy() for v in values]
        return values

    def finish_totals(
        self, totals: Sequence[Any], divisors: Sequence[float] | None = None
    ) -> list[Any]:
        """Return the totals divided, in place, and in the dtypes that come back.

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
        """Return the results, with numbers where numbers were given."""
        if not self.number_flags:
            return results
        pairs = zip(results, self.number_flags, strict=True)
        return [total[()] if number else total for total, number in pairs]
