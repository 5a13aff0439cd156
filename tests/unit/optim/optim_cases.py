"""What is compared with torch and optax: cases, first weights and gradients, by formulas."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpistrat import optim
from mpistrat.optim import passes

STEPS = 100
SHOWN = (1, 2, 10, 100)
SHAPES = ((7,), (3, 4))


# The passes around the loop of a rule compile for a second or three: by default those of one that
# is plain, of Adam, and of one that goes both passes, in float64 another. What else a rule has is
# its own loop, and that of each is compared with its twin.
PASSES = {
    "f4": {optim.SGD(0.1).rule.update, optim.Adam().rule.update, optim.LAMB().rule.update},
    "f8": {optim.SGD(0.1).rule.update, optim.Adam().rule.update, optim.LARS().rule.update},
}


class Case(NamedTuple):
    """An optimizer by its name in the table, and its hyper-parameters."""

    name: str
    given: dict[str, Any]


CASES = {
    "sgd": Case("sgd", {"learning_rate": 0.01}),
    "sgd decay": Case("sgd", {"learning_rate": 0.01, "weight_decay": 0.1}),
    "sgd momentum": Case("sgd", {"learning_rate": 0.01, "momentum": 0.9}),
    "sgd nesterov": Case(
        "sgd", {"learning_rate": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    ),
    "adam": Case("adam", {"learning_rate": 1e-3}),
    "adam decay": Case(
        "adam",
        {
            **{"learning_rate": 0.01, "beta_1": 0.8, "beta_2": 0.99},
            **{"epsilon": 1e-5, "weight_decay": 0.1},
        },
    ),
    "adamw": Case("adamw", {"learning_rate": 0.01, "weight_decay": 0.1}),
    "lamb": Case("lamb", {"learning_rate": 0.01}),
    "lamb decay": Case("lamb", {"learning_rate": 0.01, "weight_decay": 0.1, "beta_1": 0.8}),
    "lars": Case("lars", {"learning_rate": 1.0}),
    "lars nesterov": Case(
        "lars",
        {
            **{"learning_rate": 0.1, "momentum": 0.8, "nesterov": True},
            **{"weight_decay": 0.1, "trust": 0.02},
        },
    ),
    "lion": Case("lion", {"learning_rate": 1e-3}),
    "rmsprop": Case("rmsprop", {"learning_rate": 0.01}),
    "rmsprop momentum": Case(
        "rmsprop",
        {
            **{"learning_rate": 0.01, "beta_2": 0.9, "epsilon": 1e-6},
            **{"momentum": 0.8, "weight_decay": 0.1},
        },
    ),
    "rmsprop centered": Case(
        "rmsprop", {"learning_rate": 0.01, "centered": True, "momentum": 0.5, "epsilon": 1e-3}
    ),
    "adagrad": Case("adagrad", {"learning_rate": 0.1}),
    "adagrad decay": Case(
        "adagrad",
        {
            **{"learning_rate": 0.1, "epsilon": 1e-5, "weight_decay": 0.1},
            "initial_accumulator_value": 0.1,
        },
    ),
    "lion decay": Case("lion", {"learning_rate": 0.01, "weight_decay": 0.1, "beta_1": 0.8}),
}

SCHEDULE_STEPS = (0, 1, 2, 5, 9, 10, 11, 29, 30, 50, 99, 100, 101, 200)
# Ours, and the name and arguments of optax's.
SCHEDULES = {
    "constant": (optim.Constant(0.3), "constant_schedule", (0.3,)),
    "linear": (optim.Linear(0.3, 0.1, 50), "linear_schedule", (0.3, 0.1, 50)),
    "cosine": (optim.Cosine(0.3, 100), "cosine_decay_schedule", (0.3, 100)),
    "every": (optim.Steps(0.3, 0.5, every=10), "exponential_decay", (0.3, 10, 0.5, 0, True)),
    "at": (
        optim.Steps(0.3, 0.5, at=(10, 50)),
        *("piecewise_constant_schedule", (0.3, {10: 0.5, 50: 0.5})),
    ),
    "warm-up": (
        optim.WarmUp(optim.Cosine(0.3, 90, 0.01), 10),
        *("warmup_cosine_decay_schedule", (0.0, 0.3, 10, 100, 0.01)),
    ),
}


def weights(dtype):
    """Return the first weights, none near 0."""
    return [(np.arange(np.prod(shape)).reshape(shape) % 5 - 2.3).astype(dtype) for shape in SHAPES]


def gradient(step, k, w):
    """Return a gradient of a variable at a step: part of it follows the weights."""
    i = np.arange(w.size).reshape(w.shape)
    wave = ((7 * i + 3 * step + k) % 11 - 5.0) / 4
    return (0.5 * w + wave.astype(w.dtype)).astype(w.dtype)


def late(optimizer, dtype):
    """Return the marks of a test that compiles the passes of an optimizer."""
    known = optimizer.rule.update in PASSES[np.dtype(dtype).str[1:]]
    return () if known else (pytest.mark.nightly,)


class Trained:
    """A variable, its slots and its optimizer, updated from rows of gradients as ranks would."""

    def __init__(self, optimizer, w, compiled=True, cuts=()):
        self.optimizer, self.w, self.compiled = optimizer, np.array(w).reshape(-1), compiled
        edges = [0, *cuts, self.w.size]
        self.slices = list(itertools.pairwise(edges))
        self.slots = {name: np.zeros_like(self.w) for name in optimizer.slots()}
        self.bad = 0
        if "ema" in self.slots:
            self.slots["ema"][:] = self.w

    def part(self, low, high):
        """Return the slices of the weights, of the slots of the rule, and of the other slots."""
        slots = {name: slot[low:high] for name, slot in self.slots.items()}
        mine = tuple(slots[name] for name in self.optimizer.rule.slots)
        return self.w[low:high], mine, slots.get("pending"), slots.get("ema")

    @np.errstate(all="ignore")
    def step(self, step, rows, **of_gradient):
        """Update all slices with the fold of these rows."""
        rule, norms = self.optimizer.rule, (1.0, 1.0)
        guard = self.optimizer.nonfinite != "ignore"
        sums = np.zeros((2, sum(passes.count_blocks(high - low) for low, high in self.slices)))
        if rule.measure is not None:
            s, done = self.optimizer.scalars(step), 0
            for low, high in self.slices:
                w, mine, pending, _ = self.part(low, high)
                gradient = passes.Gradient(rows, low, pending=pending, **of_gradient)
                # An array of its own, as where the library asks: others compile once more.
                into = np.zeros((2, passes.count_blocks(high - low)))
                self.bad += passes.measure(
                    rule,
                    gradient,
                    w,
                    mine,
                    s,
                    sums=into,
                    is_guarded=guard,
                    is_compiled=self.compiled,
                )
                sums[:, done : done + into.shape[1]] = into
                done += into.shape[1]
            norms = optim.base.norm_of(sums[0]), optim.base.norm_of(sums[1])
        s = self.optimizer.scalars(step, norms)
        for low, high in self.slices:
            w, mine, pending, ema = self.part(low, high)
            gradient = passes.Gradient(rows, low, pending=pending, **of_gradient)
            decay = self.optimizer.ema or 0.0
            self.bad += passes.update(
                *(rule, gradient, w, mine, s),
                ema=ema,
                decay=decay,
                is_guarded=guard,
                is_compiled=self.compiled,
            )
