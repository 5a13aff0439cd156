"""Adagrad: steps by the gradient over the root of the sum of all its squares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.kernels import jit
from mpistrat.optim.base import NO_NORMS, Rule
from mpistrat.optim.blocks import Guarded, is_not_finite
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.schedules import Schedule

__all__ = ["Adagrad"]


def _update_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    rate, decay, start, epsilon = s
    w, v = w[low:high], slots[0][low:high]
    x = g + decay * w
    v += x * x
    w -= rate * x / (np.sqrt(start + v) + epsilon)


@jit.kernel(Guarded(_update_reference))
def _update(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    rate, decay, start, epsilon = s[0], s[1], s[2], s[3]
    w, v, has_skipped = w[low:high], slots[0][low:high], False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        x = g[i] + decay * w[i]
        total = v[i] + x * x
        updated = w[i] - rate * x / (math.sqrt(start + total) + epsilon)
        v[i] = v[i] if skip else total
        w[i] = w[i] if skip else updated
    return has_skipped


@final
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Steps by the gradient over the root of the sum of all its squares, so that they shrink.

    Formula: ``x = g + weight_decay * w; v += x * x;
    w -= learning_rate * x / (sqrt(initial_accumulator_value + v) + epsilon)``. Equal to
    ``torch.optim.Adagrad`` (Duchi, Hazan and Singer, "Adaptive subgradient methods for online
    learning and stochastic optimization", 2011). Instead of PyTorch's ``lr_decay`` give a schedule:
    ``lambda step: learning_rate / (1 + step * lr_decay)``.

    Attributes:
      learning_rate: As in `Optimizer`.
      epsilon: Keeps the divisor above 0.
      initial_accumulator_value: What the sum of squares begins with; the slot begins at 0, and this
        is added where it is read.
      weight_decay: The factor of the weights that is added to gradients (L2).
      groups: As in `Optimizer`; so are `clip`, `accumulate`, `ema`, `nonfinite`, `loss_scale`
        and `shard`.

    Raises:
      ValueError: A number is out of its range.

    Dtypes: float32 and float64. State: slot ``"sum_squares"``.

    Cost: One pass that reads gradient, weights and slot, and writes the last two: 5 times the bytes
      of the weights. With `IndexedSlices` only the rows that are there.

    Example:
      >>> Adagrad(0.1).slots()
      ('sum_squares',)
    """

    learning_rate: float | Schedule = 0.01
    epsilon: float = 1e-10
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0

    @property
    def rule(self) -> Rule:
        """The state and the loops."""
        return Rule(("sum_squares",), _update, can_guard=True)

    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a `step`, as `Optimizer.scalars`."""
        start = self.initial_accumulator_value
        return self.rate(step), self.weight_decay, start, self.epsilon
