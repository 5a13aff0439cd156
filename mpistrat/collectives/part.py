"""What one rank gives to a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.arrays import Array, label, spec_text
from mpistrat.collectives.forms import Form
from mpistrat.comm.callsite import where

__all__ = ["Part", "first_nonfinite"]


class Part(NamedTuple):
    """What one rank gives to the reduction of one leaf.

    Attributes:
      value: Any layout; the dtype of `form`'s wire, or one that converts to it.
      form: How it travels and comes back.
      weight: How many examples it stands for; 0 means that `value` is never read.
      path: The name of the leaf.
    """

    value: Array
    form: Form
    weight: float = 1
    path: str = ""


def first_nonfinite(call: str, step: int, parts: Sequence[Part]) -> str:
    """Return where the first NaN or infinity of this rank is, or an empty text.

    A value of weight 0 is never read.

    Cost: one pass over the values, about that of a sum; only with ``MPISTRAT_NAN``.
    """
    for part in parts:
        if part.weight == 0 or part.value.dtype.kind not in "fcV":
            continue
        good = np.isfinite(part.value)
        if not good.all():
            index = tuple(int(i) for i in np.unravel_index(int(np.argmin(good)), good.shape))
            return (
                f"{label(part.path)}, {spec_text(part.value)}, is {part.value[index]} at index "
                f"{index} (the first of {good.size - int(good.sum())}), in step {step}, "
                f"{where()} {call}"
            )
    return ""
