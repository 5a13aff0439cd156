"""The text program's training in plain NumPy on whole batches; nothing of ranks or optimizers."""

from __future__ import annotations

import math

import numpy as np

from mpistrat.examples import text_model


def rate(settings, step):
    """A straight line up for a tenth of the steps, then half a cosine down to a hundredth."""
    warm = max(settings.steps // 10, 1)
    if step < warm:
        return settings.lr * step / warm
    turn = min((step - warm) / max(settings.steps - warm, 1), 1.0)
    low = settings.lr / 100
    return low + (settings.lr - low) * (1 + math.cos(math.pi * turn)) / 2


def adamw(weights, gradients, moments, step, rate, decay):
    for name, w in weights.items():
        m, v = moments[name]
        m += 0.1 * (gradients[name] - m)
        v += 0.001 * (gradients[name] ** 2 - v)
        w *= 1 - rate * (0.0 if "bias" in name else decay)
        unbiased = v / (1 - 0.999 ** (step + 1))
        w -= rate * m / (1 - 0.9 ** (step + 1)) / (np.sqrt(unbiased) + 1e-8)


def mean_loss(weights, pieces):
    return text_model.compute_losses(weights, pieces[:, :-1], pieces[:, 1:]).mean()


def simulate(settings, symbols, batches, held_out):
    """Return the averaged weights and a row per evaluation; `batches` are those of all updates."""
    chosen = (settings.channels, settings.layers, settings.seed, "float64")
    weights = text_model.make_parameters(symbols, *chosen)
    average = {name: w.copy() for name, w in weights.items()}
    moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in weights.items()}
    history, seen, batches = [], [], iter(batches)
    for step in range(settings.steps):
        total = {name: np.zeros_like(w) for name, w in weights.items()}
        for _ in range(settings.accumulate):
            pieces, found = next(batches), {name: np.empty_like(w) for name, w in weights.items()}
            seen += [text_model.compute_gradients(weights, pieces[:, :-1], pieces[:, 1:], found)]
            for name, gradient in found.items():
                total[name] += gradient / settings.accumulate
        norm = math.sqrt(sum((gradient**2).sum() for gradient in total.values()))
        total = {name: gradient / max(norm, 1.0) for name, gradient in total.items()}
        adamw(weights, total, moments, step, rate(settings, step), 0.05)
        for name, w in weights.items():
            average[name] += 0.02 * (w - average[name])
        if (step + 1) % settings.every == 0 or step + 1 == settings.steps:
            losses, seen = np.concatenate(seen), []
            history.append([step + 1, losses.mean(), mean_loss(average, held_out)])
    return average, np.array(history)
