"""The part of an all-reduce that is the same on all ranks and in every call, and its inputs."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, label, spec_text
from mpistrat.collectives.buckets import LIMIT, Bucket, buckets
from mpistrat.collectives.dtypes import WireType
from mpistrat.comm.callsite import where
from mpistrat.kernels.narrow import is_narrow
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import divide
from mpistrat.lockstep.lockstep import digest_of

# Up to so many bytes of a rank are copied into shared memory, wherever they lie: a copy is less
# than the barrier that ends a reduction in place.
SMALL = 16 * 1024
# But to copy so many leaves takes longer than the barrier.
_MANY = 32
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


def described(call: str, given: Sequence[Contribution]) -> str:
    """Return the text of a call with the names, dtypes and shapes of its leaves."""
    return f"{call} {', '.join(spec_of(one.path, spec_text(one.value)) for one in given)}"


def spec_of(path: str, spec: str) -> str:
    """Return how a text shows a leaf: its name, if it has one, and its dtype and shape."""
    return f"{path}: {spec}" if path else spec


def first_nonfinite(call: str, step: int, given: Sequence[Contribution]) -> str:
    """Return where the first NaN or infinity of this rank is, or an empty string.

    A value of weight 0 is never read.

    Cost: one pass over the values, about that of a sum; only with ``MPISTRAT_NAN``.
    """
    for one in given:
        if one.weight == 0 or one.value.dtype.kind not in "fcV":
            continue
        good = np.isfinite(one.value)
        if not good.all():
            index = tuple(int(i) for i in np.unravel_index(int(np.argmin(good)), good.shape))
            return (
                f"{label(one.path)}, {spec_text(one.value)}, is {one.value[index]} at index "
                f"{index} (the first of {good.size - int(good.sum())}), in step {step}, "
                f"{where()} {call}"
            )
    return ""


def specs_of(leaves: Sequence[Array]) -> tuple[Any, Any]:
    """Return dtypes and shapes, without a loop of Python's: there may be hundreds of leaves."""
    return tuple(map(_dtype, leaves)), tuple(map(_shape, leaves))


def worth_a_place(nbytes: int, leaves: int) -> bool:
    """Tell whether so many leaves, of so many bytes together, are reduced in place."""
    return nbytes > (SMALL if leaves < _MANY else 0)


@final
class Call:
    """What an all-reduce is: compiled once, and remembered with the structure of its tree.

    Args:
      text: The text of the call, with names, dtypes and shapes.
      op: The operation.
      dtypes: How each leaf travels.
      shapes: Of the leaves.
      weights: How many weights ride with a MEAN: one for all leaves, or one for each.
      weigh: Values are multiplied by their weights; else they are sums over their examples already,
        and weights only divide.
      same: Every rank has the weight 1.
      numbers: For each leaf, whether it comes back as a number; none of them if empty.
      raw: Leaves are given as they travel and come back: arrays of that dtype, or numbers.

    Attributes:
      nbytes: What travels of one rank.
      as_it_is: Every leaf is reduced in the dtype that comes back.
      narrow: The dtypes that are reduced in float32, and come back as they came.
      specs: dtype on the wire and number of elements of each leaf.
      buckets: What passes through shared memory at once.
      most: The size of the largest bucket, in bytes.
      path: How it goes, whatever arrays are given; see `mpistrat.collectives.allreduce.path_of`.
      went: How it went the last time.
      places: How it went with arrays of `Strategy.buffers`, by their identities.
      of: What the text says of the values that are reduced this time, such as where they are from.
      alarm: What is wrong with them, if anything is looked for.
    """

    def __init__(
        self,
        text: str,
        op: ReduceOp,
        dtypes: Sequence[WireType],
        shapes: Sequence[tuple[int, ...]],
        weights: int = 1,
        weigh: bool = False,
        same: bool = False,
        numbers: Sequence[bool] = (),
        raw: bool = False,
    ):
        """Find out what follows from dtypes and shapes."""
        self.text, self.op, self.dtypes, self.shapes = text, op, tuple(dtypes), tuple(shapes)
        self.mean = op is ReduceOp.MEAN
        self.weights, self.weigh = weights if self.mean else 0, weigh and self.mean
        self.same = same
        self.numbers = tuple(numbers) if any(numbers) else ()
        self.raw = raw
        self.specs = tuple((d.wire, math.prod(s)) for d, s in zip(dtypes, shapes, strict=True))
        self.nbytes = sum(size * dtype.itemsize for dtype, size in self.specs)
        self.as_it_is = all(d.wire == d.result for d in self.dtypes)
        # In place, float16 and bfloat16 are widened within the loop.
        narrow = [d.wire == np.float32 and is_narrow(d.result) for d in self.dtypes]
        self.narrow = {d.result for d, is_so in zip(self.dtypes, narrow, strict=True) if is_so}
        fit = all(n or d.wire == d.result for d, n in zip(self.dtypes, narrow, strict=True))
        self.worth_a_place = fit and worth_a_place(self.nbytes, len(self.dtypes))
        self.buckets: tuple[Bucket, ...] = buckets(self.specs)
        self.most = max((bucket.nbytes for bucket in self.buckets), default=0)
        self.path: Any = None
        self.went: Any = None
        self.places: dict[tuple[int, ...], Any] = {}
        self.of = self.alarm = ""
        self._said: dict[str, tuple[str, bytes]] = {}
        self._header = struct.Struct(f"<{self.weights}d")

    def but(self, more: str) -> Call:
        """Return the same call, whose text says more."""
        made = object.__new__(Call)
        made.__dict__.update(self.__dict__, text=self.text + more, path=None, went=None, places={})
        made._said = {}
        return made

    def said(self, suffix: str) -> tuple[str, bytes]:
        """Return the text with what a path adds to it, and its digest; the same each time."""
        found = self._said.get(suffix)
        if found is None:
            text = self.text + suffix
            found = self._said[suffix] = text, digest_of(text)
            if len(self._said) > 16:  # buffers come and go, and have their numbers in the suffix
                self._said = {suffix: found}
        return found

    def said_now(self, suffix: str) -> tuple[str, bytes]:
        """Return the same with what is said of the values that are reduced this time."""
        if not self.of:
            return self.said(suffix)
        text = self.text + suffix + self.of
        return text, digest_of(text)

    def header(self, weights: Sequence[float]) -> bytes:
        """Return what rides of the weights."""
        return self._header.pack(*weights) if self.weights else b""

    def wires(self, values: Sequence[Any], weights: Sequence[float], fresh: bool) -> list[Array]:
        """Return the leaves as they travel, C-ordered and aligned; those never read as zeros.

        Args:
          values: The leaves.
          weights: One per leaf, or one for all; a value of weight 0 is never read by MEAN.
          fresh: Return copies, which may be multiplied.
        """
        each = list(weights) * (1 if len(weights) == len(values) else len(values))
        return [
            np.zeros(np.shape(value), dtypes.wire)
            if self.mean and weight == 0
            else np.array(
                value,
                dtypes.wire,
                order="C",
                copy=fresh or (type(value) is np.ndarray and not value.flags.aligned) or None,
            )
            for value, dtypes, weight in zip(values, self.dtypes, each, strict=True)
        ]

    def to_copy(
        self, values: Sequence[Array], weights: Sequence[float], flat: bool = False
    ) -> Sequence[Array]:
        """Return the leaves as buckets take them; those never read as zeros.

        Args:
          values: The leaves.
          weights: As `wires` takes them.
          flat: All of them C-ordered; else if a bucket may have a part of one.
        """
        if self.mean and 0 in weights:
            values = self.wires(values, weights, fresh=False)
        if flat or self.most > LIMIT // 2:
            values = [v if v.flags.c_contiguous else v.copy() for v in values]
        return values

    def results(self, totals: Sequence[Any], divisors: Sequence[float] | None = None) -> list[Any]:
        """Return the totals divided, in place, and in the dtypes that come back.

        Args:
          totals: The reduced leaves.
          divisors: One per leaf, or one for all; None if nothing is divided.
        """
        if divisors is not None:
            each = list(divisors) * (1 if len(divisors) == len(totals) else len(totals))
            with np.errstate(all="ignore"):  # all weights 0 give NaN
                for total, divisor in zip(totals, each, strict=True):
                    divide(total, divisor)
        if self.as_it_is:
            return list(totals)
        return [t.astype(d.result, copy=False) for t, d in zip(totals, self.dtypes, strict=True)]

    def as_given(self, results: list[Any]) -> list[Any]:
        """Return the results, with numbers where numbers were given."""
        if not self.numbers:
            return results
        pairs = zip(results, self.numbers, strict=True)
        return [total[()] if number else total for total, number in pairs]
