"""LAMB: Adam with a learning rate for each variable, by the norm of its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.kernels import jit
from mpistrat.optim.base import NO_NORMS, Rule
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.schedules import power

__all__ = ["LAMB"]


def _update_moments_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, out: Any
) -> None:
    new_1, old_2, new_2, epsilon, raw, decay = s[:6]
    w, m, v = w[low:high], slots[0][low:high], slots[1][low:high]
    m += new_1 * (g - m)
    v[:] = old_2 * v + new_2 * (g * g)
    out[:] = raw * m / (np.sqrt(v) + epsilon) + decay * w


@jit.kernel(_update_moments_reference)
def _update_moments(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, out: Array
) -> None:
    new_1, old_2, new_2, epsilon, raw, decay = s[0], s[1], s[2], s[3], s[4], s[5]
    w, m, v = w[low:high], slots[0][low:high], slots[1][low:high]
    # Two loops: with five arrays in one the compiler would not make vector code.
    for i in range(w.size):
        m[i] = m[i] + new_1 * (g[i] - m[i])
        v[i] = old_2 * v[i] + new_2 * (g[i] * g[i])
    for i in range(w.size):
        out[i] = raw * m[i] / (math.sqrt(v[i]) + epsilon) + decay * w[i]


def _step_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    _new_1, _old_2, _new_2, epsilon, raw, decay, rate = s
    w, m, v = w[low:high], slots[0][low:high], slots[1][low:high]
    w -= rate * (raw * m / (np.sqrt(v) + epsilon) + decay * w)


@jit.kernel(_step_reference)
def _step(w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int) -> None:
    epsilon, raw, decay, rate = s[3], s[4], s[5], s[6]
    w, m, v = w[low:high], slots[0][low:high], slots[1][low:high]
    for i in range(w.size):
        w[i] = w[i] - rate * (raw * m[i] / (math.sqrt(v[i]) + epsilon) + decay * w[i])


@final
@dataclass(frozen=True)
class LAMB(Optimizer):
    """Adam whose step, for each variable, is as long as the learning rate times its weights.

    Formula: ``u`` is the direction of `Adam` plus ``weight_decay * w``; then
    ``w -= learning_rate * norm(w) / norm(u) * u``, with 1 for the ratio where a norm is 0. Equal to
    ``optax.lamb`` (You and others, "Large batch optimization for deep learning: Training BERT in 76
    minutes", 2020).

    Attributes:
      learning_rate: As in `Optimizer`.
      beta_1: As in `Adam`.
      beta_2: As in `Adam`.
      epsilon: As in `Adam`.
      weight_decay: The factor of the weights in the direction.
      adapt: Whether the ratio of norms counts; a group for biases may switch it off.
      groups: As in `Optimizer`; so are `clip`, `accumulate`, `ema`, `nonfinite`, `loss_scale`
        and `shard`.

    Raises:
      ValueError: A number is out of its range.

    Dtypes: float32 and float64. State: slots ``"m"`` and ``"v"``.

    Cost: Two passes, as norms come before the step: 6 times the bytes of the weights for the
      moments, then 4 times for the weights, which makes the direction again and keeps it nowhere.

    Example:
      >>> LAMB(1e-3).scalars(0, norms=(8.0, 2.0))[-1]
      0.004
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    adapt: bool = True

    @property
    def rule(self) -> Rule:
        """The state and the loops."""
        return Rule(("m", "v"), _step, _update_moments, needs_gradient=False)

    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a `step` with these `norms`, as `Optimizer.scalars`."""
        root = math.sqrt(1.0 - power(self.beta_2, step + 1))
        raw = root / (1.0 - power(self.beta_1, step + 1))
        betas = (1.0 - self.beta_1, self.beta_2, 1.0 - self.beta_2)
        ratio = norms[0] / norms[1] if self.adapt and norms[0] and norms[1] else 1.0
        return *betas, self.epsilon * root, raw, self.weight_decay, self.rate(step) * ratio
