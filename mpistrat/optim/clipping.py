"""Gradient clipping: by value, and by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

from mpistrat.arrays import is_real
from mpistrat.optim.words import NamedArguments

__all__ = ["ClipByGlobalNorm", "ClipByValue", "limit_of", "norm_of"]


def norm_of(sums: Iterable[float]) -> float:
    """Return the square root of the sum of sums of squares, rounded once.

    So it has the same bits in whatever order they come; infinite if a sum is or becomes so, NaN if
    one is.

    Args:
      sums: Of squares, as loops over blocks return them.

    Example:
      >>> norm_of([9.0, 16.0])
      5.0
    """
    try:
        return math.sqrt(math.fsum(sums))
    except OverflowError:
        return math.inf


def _limited(clip: object, limit: Any) -> None:
    if not is_real(limit):
        raise TypeError(f"{clip}: the limit must be a number, got {type(limit).__name__}.")
    if not 0.0 < limit < math.inf:
        raise ValueError(f"{clip}: the limit must be a finite number above 0.")


@final
@dataclass(frozen=True)
class ClipByGlobalNorm(NamedArguments):
    """Gradients of all variables times ``limit / max(norm, limit)``.

    The norm is that of all gradients together (Pascanu and others, "On the difficulty of training
    recurrent neural networks", 2013), after the mean over replicas, as
    ``tf.clip_by_global_norm``.

    Attributes:
      limit: The largest norm that stays.

    Raises:
      TypeError: `limit` is not a number.
      ValueError: It is not finite, or not above 0.

    Cost: One more pass over the gradients of all ranks, before that of the update.
    """

    limit: float

    def __post_init__(self) -> None:
        """Check the limit."""
        _limited(self, self.limit)

    def factor(self, norm: float) -> float:
        """Return what to multiply gradients of this norm by; NaN if it is not finite.

        Args:
          norm: Of all gradients together.

        Example:
          >>> ClipByGlobalNorm(1.0).factor(4.0), ClipByGlobalNorm(1.0).factor(0.5)
          (0.25, 1.0)
        """
        return self.limit / max(norm, self.limit) if math.isfinite(norm) else math.nan


@final
@dataclass(frozen=True)
class ClipByValue(NamedArguments):
    """Each element of a gradient moved into the range from ``-limit`` to `limit`.

    After the mean over replicas, as ``tf.clip_by_value``. NaN stays NaN; infinities count as not
    finite (`Optimizer.nonfinite`), and are moved only where nobody looks for them (``"ignore"``).

    Attributes:
      limit: The largest absolute value that stays.

    Raises:
      TypeError: `limit` is not a number.
      ValueError: It is not finite, or not above 0.

    Cost: Nothing beside the pass of the update.
    """

    limit: float

    def __post_init__(self) -> None:
        """Check the limit."""
        _limited(self, self.limit)


def limit_of(clip: object) -> float:
    """Return the largest absolute value that stays of an element.

    Example:
      >>> limit_of(ClipByValue(0.5)), limit_of(None)
      (0.5, inf)
    """
    return clip.limit if isinstance(clip, ClipByValue) else math.inf
