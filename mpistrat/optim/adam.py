"""Adam, and AdamW, whose weight decay does not pass through the moments."""

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
from mpistrat.optim.schedules import power

__all__ = ["Adam", "AdamW"]


def _adam_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    decay, keep, new_1, old_2, new_2, epsilon, rate = s
    w, m, v = w[low:high], slots[0][low:high], slots[1][low:high]
    x = g + decay * w
    m += new_1 * (x - m)
    v[:] = old_2 * v + new_2 * (x * x)
    w[:] = keep * w - rate * m / (np.sqrt(v) + epsilon)


@jit.kernel(Guarded(_adam_reference))
def _adam(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    decay, keep, new_1, old_2, new_2, epsilon, rate = s[0], s[1], s[2], s[3], s[4], s[5], s[6]
    w, m, v = w[low:high], slots[0][low:high], slots[1][low:high]
    has_skipped = False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        x = g[i] + decay * w[i]
        mean = m[i] + new_1 * (x - m[i])
        square = old_2 * v[i] + new_2 * (x * x)
        new = keep * w[i] - rate * mean / (math.sqrt(square) + epsilon)
        m[i] = m[i] if skip else mean
        v[i] = v[i] if skip else square
        w[i] = w[i] if skip else new
    return has_skipped


@dataclass(frozen=True)
class _Adam(Optimizer):
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    @property
    def rule(self) -> Rule:
        """The state and the loops."""
        return Rule(("m", "v"), _adam, can_guard=True)

    def _scalars(self, step: int, decay: float, kept_share: float) -> tuple[float, ...]:
        # Both corrections of the bias are moved into the step and epsilon: one division less.
        correction_root = math.sqrt(1.0 - power(self.beta_2, step + 1))
        rate = self.rate(step) * correction_root / (1.0 - power(self.beta_1, step + 1))
        betas = (1.0 - self.beta_1, self.beta_2, 1.0 - self.beta_2)
        return decay, kept_share, *betas, self.epsilon * correction_root, rate


@final
@dataclass(frozen=True)
class Adam(_Adam):
    """Steps by the mean of the gradients over the root of the mean of their squares.

    Formula, at step t from 1: ``x = g + weight_decay * w; m += (1 - beta_1) * (x - m);
    v = beta_2 * v + (1 - beta_2) * x * x; w -= learning_rate * (m / (1 - beta_1**t)) /
    (sqrt(v / (1 - beta_2**t)) + epsilon)``. Equal to ``torch.optim.Adam`` without amsgrad
    (Kingma and Ba, "Adam: A method for stochastic optimization", 2015).

    Attributes:
      learning_rate: As in `Optimizer`.
      beta_1: Decay rate of the mean of gradients, below 1.
      beta_2: Decay rate of the mean of squares, below 1.
      epsilon: Keeps the divisor above 0.
      weight_decay: The factor of the weights that is added to gradients (L2).
      groups: As in `Optimizer`; so are `clip`, `accumulate`, `ema`, `nonfinite`, `loss_scale`
        and `shard`.

    Raises:
      ValueError: A number is out of its range.

    Dtypes: float32 and float64. State: slots ``"m"`` and ``"v"``.

    Cost: One pass that reads gradient, weights and slots, and writes the last three: 7 times the
      bytes of the weights.

    Example:
      >>> Adam(1e-3).slots()
      ('m', 'v')
    """

    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a `step`, as `Optimizer.scalars`."""
        return self._scalars(step, self.weight_decay, 1.0)


@final
@dataclass(frozen=True)
class AdamW(_Adam):
    """`Adam` with decoupled weight decay.

    Formula: ``w *= 1 - learning_rate * weight_decay``, then `Adam` without its decay. Equal to
    ``torch.optim.AdamW`` (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).

    Attributes:
      learning_rate: As in `Optimizer`.
      beta_1: As in `Adam`.
      beta_2: As in `Adam`.
      epsilon: As in `Adam`.
      weight_decay: The decay of the weights per step, divided by the learning rate.
      groups: As in `Optimizer`; so are `clip`, `accumulate`, `ema`, `nonfinite`, `loss_scale`
        and `shard`.

    Raises:
      ValueError: A number is out of its range.

    Dtypes, state and cost: As in `Adam`.

    Example:
      >>> from mpistrat.optim import Group
      >>> adamw = AdamW(1e-3, groups=[Group("*bias*", weight_decay=0.0)])
      >>> adamw.of("dense/bias", (8,)).weight_decay
      0.0
    """

    weight_decay: float = 0.01

    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a `step`, as `Optimizer.scalars`."""
        return self._scalars(step, 0.0, 1.0 - self.rate(step) * self.weight_decay)
