"""LARS: momentum with a learning rate for each variable, by the norm of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from mpistrat.arrays import Array
from mpistrat.kernels import jit
from mpistrat.optim.base import NO_NORMS, Rule
from mpistrat.optim.blocks import Guarded, is_not_finite
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.schedules import Schedule

__all__ = ["LARS"]


def _add_decay_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, out: Array
) -> None:
    out[:] = g + s[0] * w[low:high]


@jit.kernel(_add_decay_reference)
def _add_decay(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, out: Array
) -> None:
    decay, w = s[0], w[low:high]
    for i in range(w.size):
        out[i] = g[i] + decay * w[i]


def _step_reference(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int
) -> None:
    decay, rate, momentum, direct_weight, mean_weight = s
    w, m = w[low:high], slots[0][low:high]
    x = rate * (g + decay * w)
    m[:] = momentum * m + x
    w -= direct_weight * x + mean_weight * m


@jit.kernel(Guarded(_step_reference))
def _step(
    w: Array, g: Array, slots: tuple[Array, ...], s: Array, low: int, high: int, guard: bool = False
) -> bool:
    decay, rate, momentum, direct_weight, mean_weight = s[0], s[1], s[2], s[3], s[4]
    w, m, has_skipped = w[low:high], slots[0][low:high], False
    for i in range(w.size):
        skip = guard and is_not_finite(g[i])
        has_skipped |= skip
        x = rate * (g[i] + decay * w[i])
        mean = momentum * m[i] + x
        new = w[i] - (direct_weight * x + mean_weight * mean)
        m[i] = m[i] if skip else mean
        w[i] = w[i] if skip else new
    return has_skipped


@final
@dataclass(frozen=True)
class LARS(Optimizer):
    """Momentum whose steps are, for each variable, in proportion to the norm of its weights.

    Formula: ``u = g + weight_decay * w; x = learning_rate * trust * norm(w) / (norm(u) + epsilon)
    * u; m = momentum * m + x``; then ``w -= m``, or ``x + momentum * m`` with `nesterov`. The
    ratio, `trust` included, is 1 where a norm is 0. Equal to ``optax.lars`` (You, Gitman and
    Ginsburg, "Large batch training of convolutional networks", 2017).

    Attributes:
      learning_rate: As in `Optimizer`.
      momentum: Decay rate of the momentum, below 1.
      nesterov: Whether to use Nesterov momentum.
      weight_decay: The factor of the weights in the direction.
      trust: The factor of the ratio of norms.
      epsilon: Added to the norm of the direction.
      adapt: Whether the ratio counts; a group for biases may switch it off.
      groups: As in `Optimizer`; so are `clip`, `accumulate`, `ema`, `nonfinite`, `loss_scale`
        and `shard`.

    Raises:
      ValueError: A number is out of its range.

    Dtypes: float32 and float64. State: slot ``"velocity"``, which has the learning rate in it; the
    momentum of `SGD` has not.

    Cost: Two passes, as norms come before the step: twice the bytes of the weights, then 5 times.

    Example:
      >>> LARS(1.0).scalars(0, norms=(8.0, 2.0))[1]
      0.004
    """

    learning_rate: float | Schedule = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    trust: float = 0.001
    epsilon: float = 0.0
    adapt: bool = True

    @property
    def rule(self) -> Rule:
        """The state and the loops."""
        return Rule(("velocity",), _step, _add_decay, can_guard=True)

    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a `step` with these `norms`, as `Optimizer.scalars`."""
        ratio = 1.0
        if self.adapt and norms[0] and norms[1]:
            ratio = self.trust * norms[0] / (norms[1] + self.epsilon)
        nesterov_weights = (1.0, self.momentum) if self.nesterov else (0.0, 1.0)
        return self.weight_decay, self.rate(step) * ratio, self.momentum, *nesterov_weights
