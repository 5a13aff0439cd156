"""RMSprop: steps by the gradient over the root of the mean of its squares."""

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

__all__ = ["RMSprop"]


def _divide_by_root_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    rate, decay, old_share, new_share, epsilon, _momentum = s
    w, v = w[low:high], slots[0][low:high]
    x = g + decay * w
    v[:] = old_share * v + new_share * (x * x)
    w -= rate * x / (np.sqrt(v) + epsilon)


@jit.kernel(Guarded(_divide_by_root_reference))
def _divide_by_root(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    rate, decay, old_share, new_share, epsilon = s[0], s[1], s[2], s[3], s[4]
    w, v, has_skipped = w[low:high], slots[0][low:high], False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        x = g[i] + decay * w[i]
        square = old_share * v[i] + new_share * (x * x)
        updated = w[i] - rate * x / (math.sqrt(square) + epsilon)
        v[i] = v[i] if skip else square
        w[i] = w[i] if skip else updated
    return has_skipped


def _move_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    rate, decay, old, new, epsilon, momentum = s
    w, v, m = w[low:high], slots[0][low:high], slots[1][low:high]
    x = g + decay * w
    v[:] = old * v + new * (x * x)
    m[:] = momentum * m + x / (np.sqrt(v) + epsilon)
    w -= rate * m


@jit.kernel(Guarded(_move_reference))
def _move(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    rate, decay, old, new, epsilon, momentum = s[0], s[1], s[2], s[3], s[4], s[5]
    w, v, m = w[low:high], slots[0][low:high], slots[1][low:high]
    has_skipped = False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        x = g[i] + decay * w[i]
        square = old * v[i] + new * (x * x)
        direction = momentum * m[i] + x / (math.sqrt(square) + epsilon)
        updated = w[i] - rate * direction
        v[i] = v[i] if skip else square
        m[i] = m[i] if skip else direction
        w[i] = w[i] if skip else updated
    return has_skipped


def _move_centered_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    rate, decay, old, new, epsilon, momentum = s
    w, v, m, c = (array[low:high] for array in (w, *slots))
    x = g + decay * w
    v[:] = old * v + new * (x * x)
    c += new * (x - c)
    variance = v - c * c
    variance[variance < 0] = 0
    m[:] = momentum * m + x / (np.sqrt(variance) + epsilon)
    w -= rate * m


@jit.kernel(Guarded(_move_centered_reference))
def _move_centered(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    rate, decay, old, new, epsilon, momentum = s[0], s[1], s[2], s[3], s[4], s[5]
    w, v, m, c = w[low:high], slots[0][low:high], slots[1][low:high], slots[2][low:high]
    zero, has_skipped = rate - rate, False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        x = g[i] + decay * w[i]
        square = old * v[i] + new * (x * x)
        mean = c[i] + new * (x - c[i])
        variance = square - mean * mean
        variance = zero if variance < zero else variance  # By rounding it may be below 0.
        direction = momentum * m[i] + x / (math.sqrt(variance) + epsilon)
        updated = w[i] - rate * direction
        v[i] = v[i] if skip else square
        c[i] = c[i] if skip else mean
        m[i] = m[i] if skip else direction
        w[i] = w[i] if skip else updated
    return has_skipped


@final
@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Steps by the gradient over the root of the mean of its squares.

    Formula: ``x = g + weight_decay * w; v = beta_2 * v + (1 - beta_2) * x * x;
    m = momentum * m + x / (sqrt(v) + epsilon); w -= learning_rate * m``. With `centered` also
    ``c += (1 - beta_2) * (x - c)``, and the root is that of ``v - c * c``, an estimate of the
    variance. Equal to ``torch.optim.RMSprop``, whose `beta_2` is ``alpha`` (Tieleman and Hinton,
    "Lecture 6.5: RMSProp", 2012; centered: Graves, "Generating sequences with recurrent neural
    networks", 2013). Where rounding makes that difference less than 0 it counts as 0.

    Attributes:
      learning_rate: As in `Optimizer`.
      beta_2: Decay rate of the mean of squares, below 1; ``rho`` in Keras.
      epsilon: Keeps the divisor above 0.
      momentum: Decay rate of the momentum of the steps, below 1.
      centered: Whether to divide by the root of the variance instead of that of the mean square.
      weight_decay: The factor of the weights that is added to gradients (L2).
      groups: As in `Optimizer`; so are `clip`, `accumulate`, `ema`, `nonfinite`, `loss_scale`
        and `shard`.

    Raises:
      ValueError: A number is out of its range.
      TypeError: `centered` is neither True nor False.

    Dtypes: float32 and float64. State: slot ``"mean_square"``, the formula's v; with a momentum
    also ``"momentum"``, m; with `centered` these two and ``"mean"``, c.

    Cost: One pass that reads gradient, weights and slots, and writes all but the first: 5 times the
      bytes of the weights with one slot, and 2 times more for each other slot.

    Example:
      >>> RMSprop(0.01).slots(), RMSprop(0.01, momentum=0.9).slots()
      (('mean_square',), ('mean_square', 'momentum'))
    """

    learning_rate: float | Schedule = 0.01
    beta_2: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0

    @property
    def rule(self) -> Rule:
        """The state and the loops."""
        if self.centered:
            return Rule(("mean_square", "momentum", "mean"), _move_centered, can_guard=True)
        if self.momentum:
            return Rule(("mean_square", "momentum"), _move, can_guard=True)
        return Rule(("mean_square",), _divide_by_root, can_guard=True)

    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a `step`, as `Optimizer.scalars`."""
        squares = (self.beta_2, 1.0 - self.beta_2, self.epsilon)
        return self.rate(step), self.weight_decay, *squares, self.momentum
