"""Stochastic gradient descent, with momentum if wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from mpistrat.arrays import Array
from mpistrat.kernels import jit
from mpistrat.optim.base import NO_NORMS, Rule
from mpistrat.optim.blocks import Guarded, is_not_finite
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.schedules import Schedule

__all__ = ["SGD"]


def _descend_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    rate, decay = s
    w = w[low:high]
    w -= rate * (g + decay * w)


@jit.kernel(Guarded(_descend_reference))
def _descend(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    rate, decay = s[0], s[1]
    w, has_skipped = w[low:high], False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        new = w[i] - rate * (g[i] + decay * w[i])
        w[i] = w[i] if skip else new
    return has_skipped


def _move_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    rate, momentum = s[0], s[2]
    w, m = w[low:high], slots[0][low:high]
    m *= momentum
    m += g
    w -= rate * m


@jit.kernel(Guarded(_move_reference))
def _move(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    rate, momentum = s[0], s[2]
    w, m, has_skipped = w[low:high], slots[0][low:high], False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        mean = momentum * m[i] + g[i]
        new = w[i] - rate * mean
        m[i] = m[i] if skip else mean
        w[i] = w[i] if skip else new
    return has_skipped


def _move_with_options_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    rate, decay, momentum, direct_weight, mean_weight = s
    w, m = w[low:high], slots[0][low:high]
    x = g + decay * w
    m[:] = momentum * m + x
    w -= rate * (direct_weight * x + mean_weight * m)


@jit.kernel(Guarded(_move_with_options_reference))
def _move_with_options(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    rate, decay, momentum, direct_weight, mean_weight = s[0], s[1], s[2], s[3], s[4]
    w, m, has_skipped = w[low:high], slots[0][low:high], False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        x = g[i] + decay * w[i]
        mean = momentum * m[i] + x
        new = w[i] - rate * (direct_weight * x + mean_weight * mean)
        m[i] = m[i] if skip else mean
        w[i] = w[i] if skip else new
    return has_skipped


@final
@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum, Nesterov's or none.

    Formula: ``x = g + weight_decay * w; m = momentum * m + x``; then ``w -= learning_rate * m``, or
    ``learning_rate * (x + momentum * m)`` with `nesterov`. Equal to ``torch.optim.SGD`` without
    dampening (Sutskever and others, "On the importance of initialization and momentum in deep
    learning", 2013).

    Attributes:
      learning_rate: As in `Optimizer`.
      momentum: Decay rate of the momentum, below 1.
      nesterov: Whether to use Nesterov momentum.
      weight_decay: The factor of the weights that is added to gradients (L2).
      groups: As in `Optimizer`; so are `clip`, `accumulate`, `ema`, `nonfinite`, `loss_scale`
        and `shard`.

    Raises:
      ValueError: A number is out of its range, or `nesterov` has no momentum.

    Dtypes: float32 and float64. State: slot ``"momentum"``, none without momentum.

    Cost: One pass that reads gradient, weights and slot, and writes the last two: 5 times the bytes
      of the weights, 3 times without momentum.

    Example:
      >>> SGD(0.1, momentum=0.9).slots()
      ('momentum',)
    """

    learning_rate: float | Schedule = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers, and that there is a momentum to look ahead by."""
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("SGD(nesterov=True) needs a momentum above 0.")

    @property
    def rule(self) -> Rule:
        """The state and the loops."""
        if not self.momentum:
            return Rule((), _descend, can_guard=True)
        # Without decay and looking ahead, as most use it, it is half of the work.
        simple = not (self.weight_decay or self.nesterov)
        return Rule(("momentum",), _move if simple else _move_with_options, can_guard=True)

    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a `step`, as `Optimizer.scalars`."""
        rate = self.rate(step)
        if not self.momentum:
            return rate, self.weight_decay
        nesterov_weights = (1.0, self.momentum) if self.nesterov else (0.0, 1.0)
        return rate, self.weight_decay, self.momentum, *nesterov_weights
