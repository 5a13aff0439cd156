"""One all-reduce, as far as it is the same on all ranks and every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from mpistrat.collectives.forms import Form
from mpistrat.collectives.lockstep import digest_of
from mpistrat.collectives.packs import Pack, packs
from mpistrat.kernels.ops import ReduceOp

__all__ = ["Folding"]


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
        self.packs: tuple[Pack, ...] = packs(tuple(specs))
        self.most = max((pack.nbytes for pack in self.packs), default=0)
        self._said: dict[str, tuple[str, bytes]] = {}

    def said(self, suffix: str) -> tuple[str, bytes]:
        """Return the text with what a path adds to it, and its digest."""
        found = self._said.get(suffix)
        if found is None:
            text = self.text + suffix
            found = self._said[suffix] = text, digest_of(text)
            if len(self._said) > 16:  # buffers come and go, and have their numbers in the suffix
                self._said = {suffix: found}
        return found
