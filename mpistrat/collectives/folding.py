"""One all-reduce, as far as it is the same on all ranks and every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.forms import Form
from mpistrat.collectives.packs import Pack, packs
from mpistrat.kernels.narrow import is_narrow
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import divide
from mpistrat.lockstep.lockstep import digest_of

__all__ = ["SMALL", "Folding", "put", "worth_a_place"]

# Up to so many bytes of a rank are copied into shared memory, wherever they lie: a copy is less
# than the barrier that ends a fold in place.
SMALL = 16 * 1024
# But to copy so many leaves takes longer than the barrier.
_MANY = 32


@final
class Folding:
    """What an all-reduce is: found out once, and remembered with the structure of its tree.

    Args:
      text: The text of the call, with names, dtypes and shapes.
      op: The fold.
      forms: How each leaf travels.
      shapes: Of the leaves.

    Attributes:
      nbytes: What travels of one rank.
      as_it_is: Every leaf is folded in the dtype that comes back.
      narrow: The dtypes that are folded in float32, and come back as they came.
      packs: What passes through shared memory at once.
      most: The size of the largest pack, in bytes.
    """

    def __init__(
        self,
        text: str,
        op: ReduceOp,
        forms: Sequence[Form],
        shapes: Sequence[tuple[int, ...]],
    ):
        """Find out what follows from dtypes and shapes."""
        self.text, self.op, self.forms, self.shapes = text, op, tuple(forms), tuple(shapes)
        specs = [(f.wire, math.prod(s)) for f, s in zip(self.forms, self.shapes, strict=True)]
        self.nbytes = sum(size * dtype.itemsize for dtype, size in specs)
        self.as_it_is = all(form.wire == form.result for form in self.forms)
        # In place, float16 and bfloat16 are widened within the loop.
        narrow = [form.wire == np.float32 and is_narrow(form.result) for form in self.forms]
        self.narrow = {f.result for f, is_so in zip(self.forms, narrow, strict=True) if is_so}
        self._placeable = all(
            is_so or form.wire == form.result
            for form, is_so in zip(self.forms, narrow, strict=True)
        )
        self.packs: tuple[Pack, ...] = packs(tuple(specs))
        self.most = max((pack.nbytes for pack in self.packs), default=0)
        self._said: dict[str, tuple[str, bytes]] = {}

    @property
    def worth_a_place(self) -> bool:
        """Whether arrays of the arena are folded where they lie."""
        return self._placeable and worth_a_place(self.nbytes, len(self.forms))

    def but(self, more: str) -> Folding:
        """Return the same call, whose text says more."""
        made = object.__new__(Folding)
        made.__dict__.update(self.__dict__, text=self.text + more, _said={})
        return made

    def said(self, suffix: str) -> tuple[str, bytes]:
        """Return the text with what a path adds to it, and its digest."""
        found = self._said.get(suffix)
        if found is None:
            text = self.text + suffix
            found = self._said[suffix] = text, digest_of(text)
            if len(self._said) > 16:  # buffers come and go, and have their numbers in the suffix
                self._said = {suffix: found}
        return found

    def wires(self, values: Sequence[Array], weights: Sequence[float], fresh: bool) -> list[Array]:
        """Return the leaves as they travel, C-ordered and aligned; those never read as zeros.

        Args:
          values: The leaves.
          weights: One per leaf, or one for all; a value of weight 0 is never read by MEAN.
          fresh: Return copies, which may be multiplied.
        """
        each = list(weights) * (1 if len(weights) == len(values) else len(values))
        mean = self.op is ReduceOp.MEAN
        return [
            np.zeros(value.shape, form.wire)
            if mean and weight == 0
            else np.array(
                value, form.wire, order="C", copy=fresh or not value.flags.aligned or None
            )
            for value, form, weight in zip(values, self.forms, each, strict=True)
        ]

    def results(self, totals: Sequence[Array], divisors: Sequence[float] | None) -> list[Array]:
        """Return the totals divided, in place, and in the dtypes that come back.

        Args:
          totals: The folded leaves.
          divisors: One per leaf, or one for all; None if nothing is divided.
        """
        if divisors is not None:
            each = list(divisors) * (1 if len(divisors) == len(totals) else len(totals))
            with np.errstate(all="ignore"):  # all weights 0 give NaN
                for total, divisor in zip(totals, each, strict=True):
                    divide(total, divisor)
        return [t.astype(f.result, copy=False) for t, f in zip(totals, self.forms, strict=True)]


def worth_a_place(nbytes: int, leaves: int) -> bool:
    """Tell whether so many leaves, of so many bytes together, are folded where they lie."""
    return nbytes > (SMALL if leaves < _MANY else 0)


def put(results: list[Array], outs: Sequence[Array] | None) -> list[Array]:
    """Return the results, in `outs` if they are given."""
    if outs is None or outs is results:
        return results
    for out, result in zip(outs, results, strict=True):
        if out is not result:
            out[...] = result
    return list(outs)
