"""Values against SciPy, gradients against finite differences, any number of rows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from mpistrat.examples import mlp


def data(rows, features=5, classes=4, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, features)), rng.integers(classes, size=rows)


@pytest.fixture
def parameters():
    rng = np.random.default_rng(2)
    start = mlp.make_parameters(5, 7, 4, seed=3)
    return mlp.Parameters(*(value + 0.1 * rng.normal(size=value.shape) for value in start))


def test_losses_and_hits_are_those_of_scipy(parameters):
    x, y = data(20)
    hidden = (x @ parameters.hidden_weights + parameters.hidden_bias).clip(0)
    logs = log_softmax(hidden @ parameters.output_weights + parameters.output_bias, axis=1)
    losses, hits = mlp.compute_losses_and_hits(parameters, x, y)
    want = [-row[i] for row, i in zip(logs, y, strict=True)]
    np.testing.assert_allclose(losses, want, rtol=1e-13)
    np.testing.assert_array_equal(hits, np.argmax(logs, axis=1) == y)
    assert 0 < hits.sum() < 20


def test_gradients_are_finite_differences_of_the_mean_loss(parameters):
    x, y = data(9)
    gradient, losses, hits = mlp.compute_gradients(parameters, x, y)
    np.testing.assert_array_equal((losses, hits), mlp.compute_losses_and_hits(parameters, x, y))
    for name, value in parameters._asdict().items():
        slopes = np.empty_like(value)
        for at in np.ndindex(value.shape):
            ends = []
            for shift in (1e-6, -1e-6):
                moved = value.copy()
                moved[at] += shift
                changed = parameters._replace(**{name: moved})
                ends.append(mlp.compute_losses_and_hits(changed, x, y)[0].mean())
            slopes[at] = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(getattr(gradient, name), slopes, atol=1e-8, err_msg=name)


def test_large_scores_do_not_overflow(parameters):
    x, y = data(6)
    gradient, losses, _ = mlp.compute_gradients(parameters, 1e6 * x, y)
    assert np.isfinite(losses).all()
    assert all(np.isfinite(value).all() for value in gradient)


def test_no_rows_give_empty_values_and_a_gradient_of_zeros(parameters):
    x, y = data(0)
    gradient, losses, hits = mlp.compute_gradients(
        parameters, x, y
    )  # a warning would fail the test
    assert losses.shape == hits.shape == (0,)
    assert losses.dtype == hits.dtype == np.float64
    for value, parameter in zip(gradient, parameters, strict=True):
        np.testing.assert_array_equal(value, np.zeros(parameter.shape))


def test_gradients_of_parts_weighted_by_rows_are_the_gradient_of_the_whole(parameters):
    x, y = data(10)
    whole = mlp.compute_gradients(parameters, x, y)[0]
    first, second = (
        mlp.compute_gradients(parameters, x[p], y[p])[0] for p in (slice(7), slice(7, None))
    )
    for want, a, b in zip(whole, first, second, strict=True):
        np.testing.assert_allclose((7 * a + 3 * b) / 10, want, atol=1e-15)


def test_initial_parameters_have_the_variance_that_keeps_values_in_size():
    start = mlp.make_parameters(200, 300, 100, seed=0)
    assert [value.shape for value in start] == [(200, 300), (300,), (300, 100), (100,)]
    np.testing.assert_allclose(start.hidden_weights.std(), np.sqrt(2 / 200), rtol=0.02)
    np.testing.assert_allclose(start.output_weights.std(), np.sqrt(2 / 300), rtol=0.02)
    assert not start.hidden_bias.any()
    assert not start.output_bias.any()
