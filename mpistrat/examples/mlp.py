"""A multi-layer perceptron with one hidden layer in plain NumPy: its values and its gradients.

Nothing here knows of replicas. Every function takes any number of rows, none included, because a
short last batch leaves some replicas without examples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Parameters", "compute_gradients", "compute_losses_and_hits", "make_parameters"]

Array = NDArray[Any]


class Parameters(NamedTuple):
    """The numbers that are trained, or their gradients, or anything else with one value for each.

    Attributes:
      hidden_weights: (features, hidden).
      hidden_bias: (hidden,).
      output_weights: (hidden, classes).
      output_bias: (classes,).
    """

    hidden_weights: Any
    hidden_bias: Any
    output_weights: Any
    output_bias: Any


def make_parameters(features: int, hidden: int, classes: int, seed: int) -> Parameters:
    """Return random parameters to begin with, float64.

    Weights are normal with variance 2 / inputs, which keeps the size of the values from layer to
    layer when half of them are cut off at 0 (He et al., ICCV 2015).

    Example:
      >>> [p.shape for p in make_parameters(64, 16, 10, seed=0)]
      [(64, 16), (16,), (16, 10), (10,)]
    """
    rng = np.random.default_rng(seed)
    return Parameters(
        rng.normal(0.0, np.sqrt(2 / features), (features, hidden)),
        np.zeros(hidden),
        rng.normal(0.0, np.sqrt(2 / hidden), (hidden, classes)),
        np.zeros(classes),
    )


def _forward(parameters: Parameters, x: Array) -> tuple[Array, Array]:
    """Return the hidden layer and the logarithms of the probabilities of the classes."""
    hidden = np.maximum(x @ parameters.hidden_weights + parameters.hidden_bias, 0.0)
    scores = hidden @ parameters.output_weights + parameters.output_bias
    scores = scores - scores.max(axis=1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def compute_losses_and_hits(parameters: Parameters, x: Array, y: Array) -> tuple[Array, Array]:
    """Return the cross-entropy of every example, and 1.0 where the likeliest class is right.

    Args:
      parameters: Arrays of float64.
      x: (rows, features), float64.
      y: (rows,), the number of the right class.

    Returns:
      Two arrays of shape (rows,), float64.
    """
    _, log_probabilities = _forward(parameters, x)
    return _compare_with_labels(log_probabilities, y)


def _compare_with_labels(log_probabilities: Array, y: Array) -> tuple[Array, Array]:
    return -log_probabilities[np.arange(len(y)), y], (log_probabilities.argmax(axis=1) == y).astype(
        np.float64
    )


def compute_gradients(
    parameters: Parameters, x: Array, y: Array
) -> tuple[Parameters, Array, Array]:
    """Return the gradient of the mean cross-entropy, and the losses and hits of these rows.

    The gradient of no rows is 0; in a weighted mean over replicas its weight is 0 as well.
    """
    hidden, log_probabilities = _forward(parameters, x)
    by_score = np.exp(log_probabilities)
    by_score[np.arange(len(y)), y] -= 1.0
    by_score /= max(len(y), 1)
    by_hidden = (by_score @ parameters.output_weights.T) * (hidden > 0.0)
    gradient = Parameters(x.T @ by_hidden, by_hidden.sum(0), hidden.T @ by_score, by_score.sum(0))
    return gradient, *_compare_with_labels(log_probabilities, y)
