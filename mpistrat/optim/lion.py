"""Lion: steps of one size, by the sign of a momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.kernels import jit
from mpistrat.optim.base import NO_NORMS, Rule
from mpistrat.optim.blocks import Guarded, is_not_finite
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.schedules import Schedule

__all__ = ["Lion"]


def _lion_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    old_1, new_1, old_2, new_2, rate, decay, _unit = s
    w, m = w[low:high], slots[0][low:high]
    x = old_1 * m + new_1 * g
    m[:] = old_2 * m + new_2 * g
    w -= rate * (np.sign(x) + decay * w)


@jit.kernel(Guarded(_lion_reference))
def _lion(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    old_1, new_1, old_2, new_2, rate, decay, unit = s[0], s[1], s[2], s[3], s[4], s[5], s[6]
    zero, has_skipped = unit - unit, False
    w, m = w[low:high], slots[0][low:high]
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        x = old_1 * m[i] + new_1 * g[i]
        mean = old_2 * m[i] + new_2 * g[i]
        # A NaN has no sign, and stays.
        sign = unit if x > zero else (-unit if x < zero else x - x)
        new = w[i] - rate * (sign + decay * w[i])
        m[i] = m[i] if skip else mean
        w[i] = w[i] if skip else new
    return has_skipped


@final
@dataclass(frozen=True)
class Lion(Optimizer):
    """Steps by the sign of a momentum, so all elements move by the same amount.

    Formula: ``x = beta_1 * m + (1 - beta_1) * g; m = beta_2 * m + (1 - beta_2) * g;
    w -= learning_rate * (sign(x) + weight_decay * w)``. Equal to ``optax.lion`` (Chen and others,
    "Symbolic discovery of optimization algorithms", 2023). Use a learning rate 3 to 10 times
    smaller than for `AdamW`, and a weight decay as many times larger.

    Attributes:
      learning_rate: As in `Optimizer`.
      beta_1: How much of the momentum is in the direction, below 1.
      beta_2: Decay rate of the momentum, below 1.
      weight_decay: The decay of the weights per step, divided by the learning rate.
      groups: As in `Optimizer`; so are `clip`, `accumulate`, `ema`, `nonfinite`, `loss_scale`
        and `shard`.

    Raises:
      ValueError: A number is out of its range.

    Dtypes: float32 and float64. State: slot ``"m"``.

    Cost: One pass that reads gradient, weights and slot, and writes the last two: 5 times the bytes
      of the weights.

    Example:
      >>> Lion(1e-4).slots()
      ('m',)
    """

    learning_rate: float | Schedule = 1e-4
    beta_1: float = 0.9
    beta_2: float = 0.99
    weight_decay: float = 1e-3

    @property
    def rule(self) -> Rule:
        """The state and the loops."""
        return Rule(("m",), _lion, can_guard=True)

    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a `step`, as `Optimizer.scalars`."""
        betas = (self.beta_1, 1.0 - self.beta_1, self.beta_2, 1.0 - self.beta_2)
        return *betas, self.rate(step), self.weight_decay, 1.0
