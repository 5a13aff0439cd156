"""Where a run of an optimizer is: counters of a few numbers, and what a call does to them.

Pure functions of values that are equal on all ranks, so all ranks decide alike. A call of
``apply_gradients`` asks, in this order::

    if not progress.due(optimizer):             # accumulate=4: three calls of four
        ...add the gradients to the slot "pending"...
        progress = progress.added(weight)
    elif finite or optimizer.nonfinite != "skip":
        ...update with optimizer.scalars(progress.step), gradients over progress.weight + weight...
        progress = progress.updated(optimizer)
    else:
        ...put zeros into the slot "pending"...
        progress = progress.left_out(optimizer)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from mpistrat.arrays import is_real, whole
from mpistrat.optim.words import NamedArguments

__all__ = ["LossScale", "Progress"]


@final
@dataclass(frozen=True)
class LossScale(NamedArguments):
    """A factor of the loss that keeps small gradients in float16 from becoming 0.

    The program multiplies its loss by the scale, the update divides the gradients by it. Where one
    is not finite the update is left out and the scale made smaller; after many good ones in a row
    it grows again (Micikevicius and others, "Mixed precision training", 2018).

    Attributes:
      start: The scale at first.
      growth: What it is multiplied by after `every` updates without a failure.
      backoff: What it is multiplied by after a failure.
      every: How many good updates let it grow.
      least: It never becomes less.

    Raises:
      TypeError: Something is not a number, or `every` is not an integer.
      ValueError: A factor does not do what its name says. Powers of two alone change no bits.

    Example:
      >>> LossScale(start=1024.0).start
      1024.0
    """

    start: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    every: int = 2000
    least: float = 1.0

    def __post_init__(self) -> None:
        """Check the factors."""
        reals = all(map(is_real, (self.start, self.growth, self.backoff, self.least)))
        if not reals or whole(self.every) is None:
            raise TypeError(f"{self}: expected numbers, and an integer for `every`.")
        factors = self.growth >= 1.0 >= self.backoff > 0.0
        if not (factors and self.every >= 1 and 0.0 < self.least <= self.start < math.inf):
            raise ValueError(
                f"{self}: expected growth >= 1 >= backoff > 0, every >= 1, 0 < least <= start."
            )


class Counted(Protocol):
    """What progress depends on of an `Optimizer`."""

    @property
    def accumulate(self) -> int:
        """How many calls make an update."""

    @property
    def loss_scale(self) -> LossScale | None:
        """The factor of the loss, if there is one."""


@final
class Progress(NamedTuple):
    """Counters of an optimizer, equal on all ranks; `Checkpoint` saves them as numbers.

    Attributes:
      step: How many updates were made: what schedules and bias corrections count.
      calls: How many calls have accumulated since the last update.
      weight: The sum of their weights.
      skipped: How many updates were left out because a gradient was not finite.
      scale: What the program is to multiply its loss by.
      good: How many updates were made since the scale has changed.
    """

    step: int = 0
    calls: int = 0
    weight: float = 0.0
    skipped: int = 0
    scale: float = 1.0
    good: int = 0

    @classmethod
    def start(cls, optimizer: Counted) -> Progress:
        """Return the counters before the first call.

        Args:
          optimizer: Whose counters they are.
        """
        return cls(scale=optimizer.loss_scale.start if optimizer.loss_scale else 1.0)

    def due(self, optimizer: Counted) -> bool:
        """Return whether the next call updates the weights; else it accumulates.

        Args:
          optimizer: Whose counters they are.
        """
        return self.calls + 1 >= optimizer.accumulate

    def added(self, weight: float) -> Progress:
        """Return the counters after a call that has accumulated gradients.

        Args:
          weight: The sum of the weights of all replicas in this call.
        """
        return self._replace(calls=self.calls + 1, weight=self.weight + weight)

    def dropped(self) -> Progress:
        """Return the counters after what was accumulated is dropped, by an error or the program."""
        return self._replace(calls=0, weight=0.0)

    def updated(self, optimizer: Counted) -> Progress:
        """Return the counters after an update.

        Args:
          optimizer: Whose counters they are.
        """
        rule, finite_steps, scale = optimizer.loss_scale, self.good + 1, self.scale
        if rule and finite_steps >= rule.every:
            # A scale that would become infinite does not change.
            grown_scale = scale * rule.growth
            finite_steps, scale = 0, grown_scale if math.isfinite(grown_scale) else scale
        return Progress(self.step + 1, 0, 0.0, self.skipped, scale, finite_steps)

    def left_out(self, optimizer: Counted) -> Progress:
        """Return the counters after an update that was left out; it does not count as a step.

        Args:
          optimizer: Whose counters they are.
        """
        rule, scale = optimizer.loss_scale, self.scale
        if rule:
            scale = max(scale * rule.backoff, rule.least)
        skipped = self.skipped + 1
        return Progress(self.step, 0, 0.0, skipped, scale, 0)
