"""Losses beside torch, finite differences and the whole batch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import losses
from mpistrat.testing import run_ranks

MSE, BCE = losses.mean_squared_error, losses.binary_cross_entropy
SCCE = losses.sparse_categorical_cross_entropy
RNG = np.random.default_rng
# By name: the function, and predictions and targets of n examples.
CASES = {
    "mse": (MSE, lambda n, rng: (rng.normal(size=n), rng.normal(size=n))),
    "mse rows": (MSE, lambda n, rng: (rng.normal(size=(n, 3)), rng.normal(size=(n, 3)))),
    "bce": (BCE, lambda n, rng: (3 * rng.normal(size=n), rng.integers(0, 2, n))),
    "bce soft": (BCE, lambda n, rng: (rng.normal(size=(n, 2, 2)), rng.random((n, 2, 2)))),
    "scce": (SCCE, lambda n, rng: (3 * rng.normal(size=(n, 4)), rng.integers(0, 4, n))),
    "scce text": (SCCE, lambda n, rng: (rng.normal(size=(n, 5, 4)), rng.integers(0, 4, (n, 5)))),
}
cases = pytest.mark.parametrize("name", CASES)
dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


def by_torch(function, predictions, targets):
    """Return the losses of examples and the gradient of their mean, by autograd."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(predictions, requires_grad=True)
    functional = torch.nn.functional
    if function is SCCE:
        flat = x.reshape(-1, x.shape[-1]), torch.tensor(targets.reshape(-1))
        values = functional.cross_entropy(*flat, reduction="none")
    else:
        call = (
            functional.mse_loss if function is MSE else functional.binary_cross_entropy_with_logits
        )
        values = call(x, torch.tensor(targets, dtype=x.dtype), reduction="none")
    values = values.reshape(len(predictions), -1).mean(1)
    values.mean().backward()
    return values.detach().numpy(), x.grad.numpy()


@cases
@dtypes
def test_values_and_gradients_are_those_of_torch(name, dtype):
    function, make = CASES[name]
    predictions, targets = make(17, RNG(0))
    predictions = predictions.astype(dtype)
    loss = function(predictions, targets)
    assert loss.values.dtype == loss.gradient.dtype == dtype
    assert loss.values.shape == (17,) and loss.gradient.shape == predictions.shape
    tolerance = 1e-12 if dtype == "float64" else 2e-6
    for value, wanted in zip(loss, by_torch(function, predictions, targets), strict=True):
        np.testing.assert_allclose(value, wanted, tolerance, tolerance)


@cases
def test_gradients_are_finite_differences(name):
    function, make = CASES[name]
    predictions, targets = make(3, RNG(1))
    gradient, h = function(predictions, targets).gradient, 1e-6
    for index in np.ndindex(predictions.shape):
        means = []
        for sign in (1, -1):
            moved = predictions.copy()
            moved[index] += sign * h
            means.append(function(moved, targets).values.mean())
        assert gradient[index] == pytest.approx((means[0] - means[1]) / (2 * h), abs=1e-8)


@cases
@dtypes
def test_no_examples_give_no_losses_and_no_warning(name, dtype):
    function, make = CASES[name]
    predictions, targets = make(0, RNG(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = function(predictions.astype(dtype), targets)
    assert loss.values.shape == (0,) and loss.gradient.shape == predictions.shape
    assert loss.values.dtype == loss.gradient.dtype == dtype
    if name == "scce":
        assert (np.ones((2, 0)) @ loss.gradient).tolist() == [[0.0] * 4] * 2


@dtypes
def test_large_logits_overflow_nowhere(dtype):
    x = np.array([1e4, -1e4, 1e4, -1e4], dtype)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss = BCE(x, [1, 0, 0, 1])
        assert loss.values.tolist() == [0.0, 0.0, 1e4, 1e4]
        assert loss.gradient.tolist() == [0.0, 0.0, 0.25, -0.25]
        loss = SCCE(np.stack([x, -x], 1), [0, 1, 1, 0])
    assert loss.values.tolist() == [0.0, 0.0, 2e4, 2e4]
    assert loss.gradient[2].tolist() == [0.25, -0.25]


@dtypes
def test_small_gradients_keep_their_digits(dtype):
    x = np.array([40.0], dtype)
    assert BCE(x, [1]).gradient[0] == pytest.approx(-np.exp(-40), rel=1e-5)
    assert SCCE(np.array([[40.0, 0.0]], dtype), [0]).gradient[0].tolist() == pytest.approx(
        [-np.exp(-40), np.exp(-40)], rel=1e-5
    )


def test_a_class_without_probability_is_allowed():
    loss = SCCE(np.array([[0.0, -np.inf, 0.0]]), [0])
    assert loss.values[0] == pytest.approx(np.log(2))
    assert loss.gradient.tolist() == [[-0.5, 0.0, 0.5]]


@pytest.mark.parametrize(
    ("function", "arguments", "error", "words"),
    [
        (MSE, (np.zeros((3, 1)), np.zeros(3)), ms.StructureError, r"\(3, 1\), targets \(3,\)"),
        (MSE, (1.0, 2.0), ms.StructureError, "along the first axis"),
        (MSE, ([1, 2], [1, 2]), ms.LeafTypeError, "predictions have dtype int64; .* float64"),
        (MSE, ([1.0], [1j]), ms.LeafTypeError, "targets have dtype complex128"),
        (BCE, (np.zeros(3), [0, 1, 2]), ValueError, r"targets\[2\] is 2.0; targets are 0 to 1"),
        (BCE, (np.zeros((1, 2)), [[0, np.nan]]), ValueError, r"targets\[0, 1\] is nan"),
        (SCCE, (np.zeros((4, 3)), [0, 1, 3, -1]), ValueError, r"labels\[2\] is 3; .* 0 to 2"),
        (SCCE, (np.zeros((1, 2, 3)), [[0, -1]]), ValueError, r"labels\[0, 1\] is -1"),
        (SCCE, (np.zeros((2, 3)), np.zeros((2, 3), int)), ms.StructureError, "one-hot rows"),
        (SCCE, (np.zeros((2, 3)), [0.0, 1.0]), ms.LeafTypeError, "labels have dtype float64"),
        (SCCE, (np.zeros((2, 0)), [0, 0]), ms.StructureError, "examples, classes"),
    ],
)
def test_what_does_not_fit_is_an_error(function, arguments, error, words):
    with pytest.raises(error, match=words):
        function(*arguments)


@cases
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_update_is_that_of_the_whole_batch(name, size):
    """With uneven parts, and one without examples."""
    function, make = CASES[name]
    n = 4  # five ranks: one has none
    predictions, targets = make(n, RNG(2))
    wanted = -function(predictions, targets).gradient.sum(axis=0)

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            bias, mean = ms.Variable(np.zeros(predictions.shape[1:]), name="b"), ms.metrics.Mean()
        optimizer = ms.optim.SGD(1.0)

        def step(batch):
            x, y = batch
            loss = function(x + bias, y)
            optimizer.apply_gradients([(loss.gradient.sum(axis=0), bias)], weight=len(y))
            mean.update_state(loss.values)

        dataset = ms.Dataset((predictions, targets)).batch(n)
        for batch in strategy.experimental_distribute_dataset(dataset):
            strategy.run(step, args=(batch,))
        np.testing.assert_allclose(bias.numpy(), wanted, 1e-12, 1e-15)
        assert mean.result() == pytest.approx(function(predictions, targets).values.mean())

    run_ranks(program, size)


def test_variables_are_predictions_too():
    loss = MSE(ms.Variable(np.ones(2), name="w"), [0.0, 1.0])
    assert loss.values.tolist() == [1.0, 0.0]
