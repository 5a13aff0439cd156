"""A language model of symbols in plain NumPy: gated causal convolutions, forward and backward.

Every layer looks at the symbol before it and at the one 1, 2, 4, ... symbols further back, so
`layers` of them see the last ``2**layers`` symbols (van den Oord and others, "WaveNet", 2016;
Dauphin and others, "Language modeling with gated convolutional networks", 2017). Nothing here knows
of replicas. Every function takes any number of rows, none included, because a short last batch
leaves some replicas without rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Parameters",
    "compute_gradients",
    "compute_losses",
    "generate_symbols",
    "make_parameters",
]

Array: TypeAlias = NDArray[Any]
Parameters: TypeAlias = Mapping[str, Any]  # arrays, variables or gradients, by name


def make_parameters(
    symbols: int, channels: int, layers: int, seed: int, dtype: str = "float32"
) -> dict[str, Array]:
    """Return random parameters to begin with.

    Weights are normal with variance 1 / inputs, but those of the output are a tenth of that size,
    so that all symbols are equally likely at first; biases are 0.

    Example:
      >>> {name: value.shape for name, value in make_parameters(96, 8, 1, seed=0).items()}
      {'embedding': (96, 8), 'layer_0/weights': (16, 16), 'layer_0/bias': (16,),
      'output/weights': (8, 96), 'output/bias': (96,)}
    """
    rng = np.random.default_rng(seed)

    def normal(inputs: int, outputs: int, scale: float) -> Array:
        return (scale * rng.standard_normal((inputs, outputs))).astype(dtype)

    parameters = {"embedding": normal(symbols, channels, 1.0)}
    for layer in range(layers):
        parameters[f"layer_{layer}/weights"] = normal(
            2 * channels, 2 * channels, (2 * channels) ** -0.5
        )
        parameters[f"layer_{layer}/bias"] = np.zeros(2 * channels, dtype)
    parameters["output/weights"] = normal(channels, symbols, 0.1 * channels**-0.5)
    parameters["output/bias"] = np.zeros(symbols, dtype)
    return parameters


def _list_layers(parameters: Parameters) -> list[tuple[int, str]]:
    """Return how far back each layer looks, and the prefix of its parameters' names."""
    return [(2**layer, f"layer_{layer}") for layer in range((len(parameters) - 3) // 2)]


def _forward(parameters: Parameters, x: Array) -> tuple[Array, Array, list[Any]]:
    """Return logarithms of probabilities, the last hidden values, and the values of each layer.

    All have one row per symbol, those of the first row of `x` first, so that products of matrices
    are few and large.
    """
    (row_count, length), channels = x.shape, parameters["embedding"].shape[1]
    hidden = parameters["embedding"][x.reshape(-1)]
    layer_values: list[Any] = []
    for distance, name in _list_layers(parameters):
        inputs = np.zeros((row_count, length, 2, channels), hidden.dtype)
        inputs[:, :, 0] = hidden.reshape(row_count, length, channels)
        inputs[:, distance:, 1] = inputs[:, :-distance, 0]  # values before the first symbol are 0
        inputs = inputs.reshape(row_count * length, 2 * channels)
        mixed = inputs @ parameters[f"{name}/weights"]
        mixed += parameters[f"{name}/bias"]
        value, gate = np.split(mixed, 2, axis=1)
        gate = 0.5 * np.tanh(0.5 * gate) + 0.5
        layer_values.append((inputs, value, gate))
        hidden = hidden + value * gate
    scores = hidden @ parameters["output/weights"] + parameters["output/bias"]
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores, hidden, layer_values


def compute_losses(parameters: Parameters, x: Array, y: Array) -> Array:
    """Return the cross-entropy of every row: the mean over its symbols, in nats.

    Args:
      parameters: Arrays, as of `make_parameters`.
      x: (rows, length), numbers of symbols.
      y: (rows, length), the symbols that follow them.

    Returns:
      (rows,), of the dtype of the parameters.
    """
    return _compute_row_losses(_forward(parameters, x)[0], y)


def _compute_row_losses(log_probabilities: Array, y: Array) -> Array:
    target_logs = np.take_along_axis(log_probabilities, y.reshape(-1, 1).astype(np.intp), axis=1)
    loss: Array = -target_logs.reshape(y.shape).mean(axis=1)
    return loss


def compute_gradients(parameters: Parameters, x: Array, y: Array, out: Parameters) -> Array:
    """Write the gradient of the mean of `compute_losses` into `out`, and return the losses.

    The gradient of no rows is 0; in a weighted mean over replicas its weight is 0 as well.

    Args:
      parameters: Arrays, as of `make_parameters`.
      x: As in `compute_losses`.
      y: As in `compute_losses`.
      out: An array like each of the parameters.
    """
    (row_count, length), channels = x.shape, parameters["embedding"].shape[1]
    log_probabilities, hidden, layer_values = _forward(parameters, x)
    row_losses = _compute_row_losses(log_probabilities, y)
    by_score = np.exp(log_probabilities)
    by_score[np.arange(y.size), y.reshape(-1)] -= 1.0
    by_score /= max(y.size, 1)
    _write_linear_gradients(hidden, by_score, "output", out)
    by_hidden = by_score @ parameters["output/weights"].T
    for (distance, name), (inputs, value, gate) in reversed(
        list(zip(_list_layers(parameters), layer_values, strict=True))
    ):
        by_mixed = np.empty_like(inputs)
        np.multiply(by_hidden, gate, out=by_mixed[:, :channels])
        np.multiply(by_mixed[:, :channels], value * (1.0 - gate), out=by_mixed[:, channels:])
        _write_linear_gradients(inputs, by_mixed, name, out)
        by_inputs = (by_mixed @ parameters[f"{name}/weights"].T).reshape(
            row_count, length, 2, channels
        )
        by_hidden = by_hidden.reshape(row_count, length, channels) + by_inputs[:, :, 0]
        by_hidden[:, :-distance] += by_inputs[:, distance:, 1]
        by_hidden = by_hidden.reshape(row_count * length, channels)
    ones = np.eye(len(parameters["embedding"]), dtype=by_hidden.dtype)[x.reshape(-1)]
    np.matmul(ones.T, by_hidden, out=out["embedding"])
    return row_losses


def _write_linear_gradients(inputs: Array, by_output: Array, name: str, out: Parameters) -> None:
    np.matmul(inputs.T, by_output, out=out[f"{name}/weights"])
    np.sum(by_output, axis=0, out=out[f"{name}/bias"])


def generate_symbols(
    parameters: Parameters, prompt: Array, new_count: int, seed: int, temperature: float = 0.7
) -> Array:
    """Return `prompt` and `new_count` more symbols, drawn with the model's probabilities.

    Args:
      parameters: Arrays, as of `make_parameters`.
      prompt: (symbols,), at least one.
      new_count: How many more.
      seed: Of the draws.
      temperature: Logarithms of probabilities are divided by it: below 1, likely symbols become
        likelier.
    """
    rng, context_length = np.random.default_rng(seed), 2 ** len(_list_layers(parameters))
    symbols = list(prompt)
    for _ in range(new_count):
        log_probabilities = _forward(parameters, np.array([symbols[-context_length:]]))[0][
            -1
        ].astype(np.float64)
        probabilities = np.exp(log_probabilities / temperature)
        symbols.append(rng.choice(len(probabilities), p=probabilities / probabilities.sum()))
    return np.array(symbols)
