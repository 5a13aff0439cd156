"""What one rank gives to a reduction."""

from __future__ import annotations

from typing import NamedTuple

from mpistrat.arrays import Array
from mpistrat.collectives.forms import Form

__all__ = ["Part"]


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
