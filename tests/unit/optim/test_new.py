"""A new optimizer is thirty lines: its state, one loop, its reference, and its options."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optim_cases as cases

from mpistrat import optim
from mpistrat.kernels import jit
from mpistrat.optim.base import NO_NORMS, Rule
from mpistrat.optim.optimizer import Optimizer


def _reference(w, g, slots, s, low, high):
    rate, old, new, epsilon = s
    w, v = w[low:high], slots[0][low:high]
    v[:] = old * v + new * (g * g)
    w -= rate * g / (np.sqrt(v) + epsilon)


@jit.kernel(_reference)
def _loop(w, g, slots, s, low, high):
    rate, old, new, epsilon = s[0], s[1], s[2], s[3]
    w, v = w[low:high], slots[0][low:high]
    for i in range(w.size):
        v[i] = old * v[i] + new * (g[i] * g[i])
        w[i] = w[i] - rate * g[i] / (math.sqrt(v[i]) + epsilon)


@dataclass(frozen=True)
class Decayed(Optimizer):
    """Steps by the gradient over the root of the mean of its squares."""

    rho: float = 0.9
    epsilon: float = 1e-7

    @property
    def rule(self) -> Rule:
        """The state and the loops."""
        return Rule(("v",), _loop)

    def scalars(self, step, norms=NO_NORMS):
        """Return the numbers of a step."""
        return self.rate(step), self.rho, 1.0 - self.rho, self.epsilon


def test_it_works_with_all_that_there_is():
    groups = [optim.Group("*bias*", rho=0.5)]
    made = Decayed(optim.WarmUp(0.1, 3), groups=groups, ema=0.5, clip=optim.ClipByValue(1.0))
    assert made.of("a/bias", (3,)).rho == 0.5
    rng, found = np.random.default_rng(0), []
    w, g = rng.standard_normal(5000), rng.standard_normal((4, 2, 5000))
    for compiled in (True, False):
        one = cases.Trained(made, w, compiled)
        for step, rows in enumerate(g):
            one.step(step, rows, divisor=2.0, limit=made.clip.limit)
        found.append(one.w)
    v, x = 0.0, w.copy()
    for step, rows in enumerate(g):
        mean = np.clip(rows.mean(0), -1, 1)
        v = 0.9 * v + 0.1 * mean**2
        x -= min(step / 3, 1.0) * 0.1 * mean / (np.sqrt(v) + 1e-7)
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0], x, 1e-12)


def test_it_is_about_thirty_lines():
    nodes = ast.parse(Path(__file__).read_text()).body
    mine = [
        node for node in nodes if getattr(node, "name", "") in ("_reference", "_loop", "Decayed")
    ]
    assert len(mine) == 3
    assert sum(len(ast.unparse(node).splitlines()) for node in mine) <= 32
