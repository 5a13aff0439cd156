"""Trains a classifier of handwritten digits: one program, the same answer on any number of ranks.

    python -m mpistrat.examples.digits
    mpistrat run -n 2 -m mpistrat.examples.digits --checkpoint digits

Start it again with the same ``--checkpoint``, on any number of ranks, and it continues after the
last whole epoch; a run that has ended continues with more ``--epochs``.

The data are scikit-learn's 1,797 images of 8 x 8 pixels. 1,409 of them are trained on, in global
batches of 64; the last batch of every epoch has one image, so all replicas but one meet an empty
batch. They take part with weight 0, and the parameters come out the same as on one rank.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import mpistrat as ms
from mpistrat.examples import mlp
from mpistrat.examples.settings import collect_fixed_settings, option, parse_settings

__all__ = ["DigitsSettings", "load_images", "main", "measure_accuracy", "train", "train_step"]

TRAINING_COUNT = 1409  # 22 batches of 64, and one image
MOMENTUM = 0.9
PANELS = {
    "mean cross-entropy (nats per image)": ["loss"],
    "part of the images that is classified right": ["accuracy", "validation/accuracy"],
}


@dataclass(frozen=True)
class DigitsSettings:
    """The options of the program."""

    epochs: int = option(20, "times over the images", can_change=True)
    batch: int = option(64, "images in a global batch")
    seed: int = option(0, "of the choice of test images, the first weights and the order")
    lr: float = option(0.15, "learning rate at the beginning; it falls to 0")
    hidden: int = option(128, "units in the hidden layer")
    output: str = option("digits.png", "picture of the curves", can_change=True)
    checkpoint: str = option(
        "", "directory of checkpoints, from which it continues", can_change=True
    )


def train_step(
    model: mlp.Parameters, optimizer: ms.optim.Optimizer, batch: tuple[Any, Any]
) -> dict[str, Any]:
    """Train on this replica's part of a batch, which may be empty; replica code.

    Each gradient is a mean, weighted by its number of images. So all replicas make the same update,
    by the gradient of the whole batch.

    Returns:
      The loss of each image, in nats, and 1.0 where it was classified right.
    """
    x, y = batch
    weights = mlp.Parameters(*map(np.asarray, model))
    gradient, losses, hits = mlp.compute_gradients(weights, x, y)
    optimizer.apply_gradients(zip(gradient, model, strict=True), weight=len(y))
    return {"loss": losses, "accuracy": hits}


def measure_accuracy(model: mlp.Parameters, batch: tuple[Any, Any]) -> dict[str, Any]:
    """Return 1.0 for each image of this replica's part that is classified right; replica code."""
    _, hits = mlp.compute_losses_and_hits(mlp.Parameters(*map(np.asarray, model)), *batch)
    return {"accuracy": hits}


def load_images(seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (x, y) to train on and (x, y) to test with, in which all digits are equally frequent.

    x is (images, 64), float64 from 0 to 1; y is (images,), the digits.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16.0, y, train_size=TRAINING_COUNT, stratify=y, random_state=seed)
    return (parts[0], parts[2]), (parts[1], parts[3])


def train(
    strategy: ms.Strategy, choices: DigitsSettings, verbose: bool = True
) -> tuple[mlp.Parameters, ms.History]:
    """Train on all replicas of `strategy`, and test after every epoch.

    Collective: all ranks call it, with the same settings.

    Returns:
      The variables, and the curves ``loss``, ``accuracy`` and ``validation/accuracy`` by epochs.
    """
    images, test_images = map(ms.Dataset, load_images(choices.seed))
    steps_per_epoch = math.ceil(TRAINING_COUNT / choices.batch)
    learning_rate = ms.optim.Linear(choices.lr, 0.0, choices.epochs)
    optimizer = ms.optim.SGD(lambda step: learning_rate(step // steps_per_epoch), momentum=MOMENTUM)
    with strategy.scope():
        first_weights = mlp.make_parameters(64, choices.hidden, 10, choices.seed)
        model = mlp.Parameters(*map(ms.Variable, first_weights))
    optimizer.build(model)
    history = ms.fit(
        functools.partial(train_step, model, optimizer),
        images.shuffle(seed=choices.seed).batch(choices.batch),
        epochs=choices.epochs,
        state={"model": model, "optimizer": optimizer},
        metrics=("loss", "accuracy"),
        validate=functools.partial(measure_accuracy, model),
        validation_data=test_images.batch(choices.batch),
        directory=choices.checkpoint or None,
        settings=collect_fixed_settings(choices),
        strategy=strategy,
        verbose=verbose,
    )
    return model, history


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    choices = parse_settings(DigitsSettings, "mpistrat.examples.digits", str(__doc__), argv)
    strategy = ms.MirroredStrategy()
    strategy.run(check_packages)  # or fail before training
    # One thread of BLAS for each rank, as matrices this small gain nothing from more.
    with threadpool_limits(1):
        _, history = train(strategy, choices)
    accuracy, rank_count = history.last("validation/accuracy"), strategy.num_replicas_in_sync
    title = f"Handwritten digits: test accuracy {accuracy:.4f}, ranks: {rank_count}"
    history.draw(choices.output, PANELS, title=title, x="epoch")
    strategy.print(format_report(history, rank_count, choices.output))
    return 0


def check_packages() -> None:
    """Raise ImportError unless the packages that this example needs are installed here."""
    if any(importlib.util.find_spec(name) is None for name in ("sklearn", "matplotlib")):
        raise ImportError(
            "This example needs scikit-learn and matplotlib: pip install 'mpistrat[examples]'"
        )


def format_report(history: ms.History, rank_count: int, picture_path: str) -> str:
    """Return lines about the result, the speed, and what to try next."""
    epochs = history.table("seconds", "waiting", "communicating")[:, 1:].tolist()
    # The median: the first epoch also loads and compiles code.
    seconds, waiting, communicating = sorted(epochs)[len(epochs) // 2]
    job = f"{os.path.relpath(sys.executable)} -m mpistrat run -n 2 -m mpistrat.examples.digits"
    return f"""\
test accuracy        {history.last("validation/accuracy"):.4f}
examples per second  {TRAINING_COUNT / seconds:,.0f} (median epoch)
computing            {1 - (waiting + communicating) / seconds:.0%} of a step (rank 0)
waiting              {waiting / seconds:.0%}, for other ranks
communicating        {communicating / seconds:.0%}
ranks                {rank_count}
picture              {picture_path}

Try next:
  {job} --batch 512 --hidden 1024
    more work in each step: compare the examples per second with -n 1
  {job} --epochs 1000 --checkpoint digits
    stop it with Ctrl-C, and start it again with any -n: it continues
  docs/train.md
    your own data and model: this program is one call of ms.fit"""


if __name__ == "__main__":
    sys.exit(main())
