"""Trains a classifier of handwritten digits with JAX and optax: one program, any number of ranks.

    python -m mpistrat.examples.digits_jax
    mpistrat run -n 2 -m mpistrat.examples.digits_jax --net conv --checkpoint conv

The data and their distribution are those of `mpistrat.examples.digits`. A step is a jitted
gradient, an all-reduce weighted by the examples of this replica, and a jitted update. Start it
again with the same ``--checkpoint``, and it continues after the last whole epoch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpistrat
import mpistrat.jax as mj
from mpistrat.examples.digits import MOMENTUM, TRAINING_COUNT, call_on_replica0, load_images
from mpistrat.examples.settings import iterate_remaining
from mpistrat.metrics import Mean

__all__ = ["NETS", "JaxResult", "JaxSettings", "main", "train"]

FIXED_SETTINGS = ("batch", "seed", "lr", "net")


class JaxSettings(NamedTuple):
    """The options of the program.

    Attributes:
      epochs: Times every training image is seen, at least 1.
      batch: Images in a global batch.
      seed: Rules the choice of the test images, the initial parameters and the order of examples.
      lr: Learning rate at the beginning; it falls to 0.
      net: A key of `NETS`.
      checkpoint: A directory for checkpoints, from which it continues; empty for none.
    """

    epochs: int = 20
    batch: int = 64
    seed: int = 0
    lr: float = 0.15
    net: str = "mlp"
    checkpoint: str = ""


class JaxResult(NamedTuple):
    """The result of training.

    Attributes:
      parameters: A tree of JAX arrays, on every rank the same.
      losses: The mean loss of each epoch.
      accuracy: The part of the test images that is classified right in the end.
    """

    parameters: Any
    losses: list[float]
    accuracy: float


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


def _jit_functions(
    compute_scores: Callable[[Any, Any], Any], optimizer: Any
) -> tuple[Any, Any, Any]:
    """Return jitted functions: the gradient of the mean loss, the update, the right answers."""

    def compute_loss(parameters: Any, x: jax.Array, y: jax.Array) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(compute_scores(parameters, x), y)
        return losses.sum() / max(len(y), 1), losses  # the mean of no examples is 0

    def update(parameters: Any, state: Any, gradients: Any) -> Any:
        changes, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state

    def compare_with_labels(parameters: Any, x: jax.Array, y: jax.Array) -> Any:
        return compute_scores(parameters, x).argmax(axis=1) == y

    return (
        jax.jit(jax.grad(compute_loss, has_aux=True)),
        jax.jit(update),
        jax.jit(compare_with_labels),
    )


def train(
    strategy: mpistrat.Strategy, choices: JaxSettings, print_text: Callable[[str], None] = print
) -> JaxResult:
    """Train on all replicas of `strategy`, and test at the end.

    Collective: all ranks call it, with the same settings.
    """
    steps_per_epoch = math.ceil(TRAINING_COUNT / choices.batch)
    learning_rate = optax.linear_schedule(choices.lr, 0.0, choices.epochs * steps_per_epoch)
    optimizer = optax.sgd(learning_rate, MOMENTUM)
    gradient, update, compare_with_labels = _jit_functions(NETS[choices.net][1], optimizer)

    def train_step(x: jax.Array, y: jax.Array) -> None:
        gradients, losses = gradient(model.value["parameters"], x.astype(np.float32), y)
        gradients = mj.all_reduce("mean", gradients, weight=len(y))
        parameters, state = update(*model.value.values(), gradients)
        model.value = {"parameters": parameters, "state": state}
        loss.update_state(losses)

    def test_step(x: jax.Array, y: jax.Array) -> None:
        accuracy.update_state(
            compare_with_labels(model.value["parameters"], x.astype(np.float32), y)
        )

    images, test_images = map(mpistrat.Dataset, load_images(choices.seed))
    shuffled = images.shuffle(seed=choices.seed).batch(choices.batch)
    batches = strategy.experimental_distribute_dataset(shuffled)
    with strategy.scope():
        parameters = mj.replicate(NETS[choices.net][0](jax.random.key(choices.seed)))
        model = mj.TrainState({"parameters": parameters, "state": optimizer.init(parameters)})
        loss, accuracy, history = Mean("loss"), Mean("accuracy"), mpistrat.History()
    checkpoint = mpistrat.Checkpoint(model=model, loss=loss, history=history, data=shuffled, step=0)
    for batch in iterate_remaining(checkpoint, batches, choices, FIXED_SETTINGS, print_text):
        strategy.run(train_step, args=batch)
        checkpoint.step += 1
        if checkpoint.step % steps_per_epoch == 0:
            epoch = checkpoint.step // steps_per_epoch
            history.append(epoch, loss=loss.result())
            loss.reset_state()
            print_text(f"epoch {epoch} of {choices.epochs}   loss {history.last('loss'):.4f}")
    for batch in strategy.experimental_distribute_dataset(test_images.batch(choices.batch)):
        strategy.run(test_step, args=batch)
    losses = history["loss"][1].tolist()
    return JaxResult(model.value["parameters"], losses, float(accuracy.result()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.digits_jax",
        description="Train a classifier of handwritten digits with JAX, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, help="times over the images")
    parser.add_argument("--batch", type=int, help="images in a whole batch")
    parser.add_argument("--seed", type=int, help="of test set, start and order")
    parser.add_argument("--lr", type=float, help="learning rate at the beginning")
    parser.add_argument("--checkpoint", help="directory of checkpoints, from which it continues")
    parser.add_argument("--net", choices=NETS, help="layers: dense ones, or convolutions")
    parser.set_defaults(**JaxSettings()._asdict())
    choices = JaxSettings(**vars(parser.parse_args(argv)))
    strategy = mpistrat.MirroredStrategy()

    def print_on_replica0(text: str) -> None:
        if strategy.rank == 0:
            print(text, flush=True)

    result = train(strategy, choices, print_on_replica0)
    call_on_replica0(strategy, print, f"test accuracy {result.accuracy:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
