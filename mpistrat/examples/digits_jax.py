"""Trains a classifier of handwritten digits with JAX and optax: one program, any number of ranks.

    python -m mpistrat.examples.digits_jax
    mpistrat run -n 2 -m mpistrat.examples.digits_jax --net conv --checkpoint conv

The data and their distribution are those of `mpistrat.examples.digits`. A step is a jitted
gradient, an all-reduce weighted by the examples of this replica, and a jitted update. Start it
again with the same ``--checkpoint``, and it continues after the last whole epoch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpistrat as ms
import mpistrat.jax as mj
from mpistrat.examples.digits import MOMENTUM, TRAINING_COUNT, load_images
from mpistrat.examples.settings import collect_fixed_settings, option, parse_settings

__all__ = ["NETS", "JaxSettings", "main", "train"]


@dataclass(frozen=True)
class JaxSettings:
    """The options of the program."""

    epochs: int = option(20, "times over the images", can_change=True)
    batch: int = option(64, "images in a global batch")
    seed: int = option(0, "of the choice of test images, the first weights and the order")
    lr: float = option(0.15, "learning rate at the beginning; it falls to 0")
    net: str = option("mlp", "layers: dense ones, or convolutions", allowed_values=("mlp", "conv"))
    checkpoint: str = option(
        "", "directory of checkpoints, from which it continues", can_change=True
    )


ReplicaFunction = Callable[[Any], dict[str, Any]]


def make_steps(
    model: mj.TrainState,
    optimizer: Any,
    compute_scores: Callable[[Any, Any], Any],
) -> tuple[ReplicaFunction, ReplicaFunction]:
    """Return replica code: a training step, and the accuracy of a batch."""

    def compute_mean_loss(parameters: Any, x: jax.Array, y: jax.Array) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(compute_scores(parameters, x), y)
        return losses.sum() / max(len(y), 1), losses  # the mean of no images is 0

    def update_model(parameters: Any, state: Any, gradients: Any) -> Any:
        changes, state = optimizer.update(gradients, state, parameters)
        return {"parameters": optax.apply_updates(parameters, changes), "state": state}

    def compare_with_labels(parameters: Any, x: jax.Array, y: jax.Array) -> Any:
        return compute_scores(parameters, x).argmax(axis=1) == y

    compute_gradients = jax.jit(jax.grad(compute_mean_loss, has_aux=True))
    jitted_update, jitted_comparison = jax.jit(update_model), jax.jit(compare_with_labels)

    def train_step(batch: tuple[Any, Any]) -> dict[str, Any]:
        x, y = batch
        gradients, losses = compute_gradients(model.value["parameters"], x, y)
        gradients = mj.all_reduce("mean", gradients, weight=len(y))
        model.value = jitted_update(model.value["parameters"], model.value["state"], gradients)
        return {"loss": losses}

    def measure_accuracy(batch: tuple[Any, Any]) -> dict[str, Any]:
        return {"accuracy": jitted_comparison(model.value["parameters"], *batch)}

    return train_step, measure_accuracy


def _make_dense(key: jax.Array, input_count: int, output_count: int) -> dict[str, Any]:
    w = jax.random.normal(key, (input_count, output_count)) * math.sqrt(2 / input_count)
    return {"w": w, "b": jnp.zeros(output_count)}


def _make_mlp(key: jax.Array) -> Any:
    keys = jax.random.split(key)
    return [_make_dense(keys[0], 64, 128), _make_dense(keys[1], 128, 10)]


def _compute_mlp_scores(parameters: Any, x: jax.Array) -> Any:
    hidden, output_layer = parameters
    return jax.nn.relu(x @ hidden["w"] + hidden["b"]) @ output_layer["w"] + output_layer["b"]


def _make_conv(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    filters = [
        jax.random.normal(keys[i], (3, 3, a, b)) * math.sqrt(2 / (9 * a))
        for i, (a, b) in enumerate([(1, 8), (8, 16)])
    ]
    return {"filters": filters, "out": _make_dense(keys[2], 16 * 4 * 4, 10)}


def _compute_conv_scores(parameters: Any, x: jax.Array) -> Any:
    x = x.reshape(len(x), 8, 8, 1)
    for kernel, stride in zip(parameters["filters"], (1, 2), strict=True):
        dimension_numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, "SAME", dimension_numbers=dimension_numbers
        )
        x = jax.nn.relu(x)
    return x.reshape(len(x), 256) @ parameters["out"]["w"] + parameters["out"]["b"]


NetFunctions = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]
# By name: a function that makes parameters, and one that computes the scores of the ten digits.
NETS: dict[str, NetFunctions] = {
    "mlp": (_make_mlp, _compute_mlp_scores),
    "conv": (_make_conv, _compute_conv_scores),
}


def train(
    strategy: ms.Strategy, choices: JaxSettings, verbose: bool = True
) -> tuple[Any, ms.History]:
    """Train on all replicas of `strategy`, and test after every epoch.

    Collective: all ranks call it, with the same settings.

    Returns:
      The parameters, a tree of JAX arrays, on every rank the same; and the curves ``loss`` and
      ``validation/accuracy`` by epochs.
    """
    (x, y), (x_test, y_test) = load_images(choices.seed)
    images = ms.Dataset((x.astype(np.float32), y)).shuffle(seed=choices.seed)
    test_images = ms.Dataset((x_test.astype(np.float32), y_test))
    make_parameters, compute_scores = NETS[choices.net]
    step_count = choices.epochs * math.ceil(TRAINING_COUNT / choices.batch)
    optimizer = optax.sgd(optax.linear_schedule(choices.lr, 0.0, step_count), MOMENTUM)
    with strategy.scope():
        parameters = mj.replicate(make_parameters(jax.random.key(choices.seed)))
        model = mj.TrainState({"parameters": parameters, "state": optimizer.init(parameters)})
    train_step, measure_accuracy = make_steps(model, optimizer, compute_scores)
    history = ms.fit(
        train_step,
        images.batch(choices.batch),
        epochs=choices.epochs,
        state={"model": model},
        validate=measure_accuracy,
        validation_data=test_images.batch(choices.batch),
        directory=choices.checkpoint or None,
        settings=collect_fixed_settings(choices),
        strategy=strategy,
        verbose=verbose,
    )
    return model.value["parameters"], history


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    choices = parse_settings(JaxSettings, "mpistrat.examples.digits_jax", str(__doc__), argv)
    strategy = ms.MirroredStrategy()
    _, history = train(strategy, choices)
    strategy.print(f"test accuracy {history.last('validation/accuracy'):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
