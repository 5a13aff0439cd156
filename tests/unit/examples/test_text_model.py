"""The language model: gradients against finite differences, and what it may look at."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.examples import text_model as model

RNG = np.random.default_rng(0)
PARAMETERS = model.make_parameters(7, 5, 3, seed=1, dtype="float64")
X, Y = RNG.integers(0, 7, (2, 3, 6))


@pytest.fixture
def parameters():
    """Parameters none of which is 0 or small, so that every path counts."""
    return {name: value + 0.3 * RNG.standard_normal(value.shape)
            for name, value in PARAMETERS.items()}  # fmt: skip


def test_gradients_are_finite_differences(parameters):
    out = {name: np.full_like(value, np.nan) for name, value in parameters.items()}
    losses = model.compute_gradients(parameters, X, Y, out)
    np.testing.assert_array_equal(losses, model.compute_losses(parameters, X, Y))
    for name, value in parameters.items():
        direction, slopes = RNG.standard_normal(value.shape), []
        for h in (1e-5, -1e-5):
            moved = parameters | {name: value + h * direction}
            slopes.append(model.compute_losses(moved, X, Y).mean())
        slope = (slopes[0] - slopes[1]) / 2e-5
        np.testing.assert_allclose(np.sum(out[name] * direction), slope, rtol=1e-6, err_msg=name)


def test_no_rows_have_gradient_0(parameters):
    out = {name: np.full_like(value, np.nan) for name, value in parameters.items()}
    none = np.zeros((0, 6), int)
    assert model.compute_gradients(parameters, none, none, out).shape == (0,)
    assert not any(value.any() for value in out.values())


def test_the_model_sees_the_last_symbols_and_no_later_ones(parameters):
    """Three layers see 8 symbols: a change reaches the 8 predictions from there on, no other."""
    x = RNG.integers(0, 7, (1, 20))
    changed = x.copy()
    changed[0, 6] = (x[0, 6] + 1) % 7
    logs = [model._forward(parameters, given)[0] for given in (x, changed)]
    differs = np.flatnonzero((logs[0] != logs[1]).any(axis=1))
    np.testing.assert_array_equal(differs, np.arange(6, 14))
    np.testing.assert_allclose(np.exp(logs[0]).sum(axis=1), 1.0)


def test_text_is_drawn_by_what_the_model_expects():
    """A model of no layers that expects symbol n + 1 after n, counted from 0 again after 6."""
    sure = {"embedding": np.eye(7), "output/weights": 50.0 * np.roll(np.eye(7), 1, axis=1)}
    sure["output/bias"] = np.zeros(7)
    assert model.generate_symbols(sure, np.array([5]), 4, seed=0).tolist() == [5, 6, 0, 1, 2]
    drawn = [
        model.generate_symbols(PARAMETERS, np.array([0]), 30, seed).tolist() for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
