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

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import mpistrat
from mpistrat.examples import mlp
from mpistrat.examples.settings import ProgressBar, iterate_remaining, parse_count
from mpistrat.metrics import Mean
from mpistrat.optim import SGD, Linear, Optimizer

__all__ = ["SEEDS", "DigitsResult", "DigitsSettings", "load_images", "main", "train"]

SEEDS = (0, 1, 2, 3, 4)  # the median of their test accuracies is at least 0.97
TRAINING_COUNT = 1409  # 22 batches of 64, and one image
MOMENTUM = 0.9
MIN_SHARED_WORK = 512 * 1024  # images of a batch times hidden units that are worth sharing
FIXED_SETTINGS = ("batch", "seed", "lr", "hidden")
REQUIRED_PACKAGES = ("matplotlib", "sklearn", "tqdm")
ACTIVITIES = ("seconds", "waiting", "communicating")  # curves of the times of an epoch
PANELS = {
    "mean cross-entropy (nats per example)": ["loss"],
    "part of the images that is classified right": ["accuracy", "test_accuracy"],
}
INSTALL_ADVICE = (
    "This example needs scikit-learn, matplotlib and tqdm: pip install 'mpistrat[examples]'"
)


class DigitsSettings(NamedTuple):
    """The options of the program.

    Attributes:
      epochs: Times every training image is seen, at least 1.
      batch: Images in a global batch.
      seed: Rules the choice of the test images, the initial parameters and the order of examples.
      lr: Learning rate at the beginning; it falls in a straight line, to 0 after the last epoch.
      hidden: Units in the hidden layer.
      output: Where the picture goes.
      checkpoint: A directory for checkpoints, from which it continues; empty for none.
    """

    epochs: int = 20
    batch: int = 64
    seed: int = 0
    lr: float = 0.15
    hidden: int = 128
    output: str = "digits.png"
    checkpoint: str = ""


class DigitsResult(NamedTuple):
    """The result of training.

    Attributes:
      parameters: The final parameters, NumPy arrays, on every rank the same.
      history: For each epoch, from 1: ``loss``, the mean cross-entropy in nats of all training
        examples, each when its turn came; ``accuracy``, the part of them that was classified right
        then; ``test_accuracy`` after the epoch; and of the time to train, without the test,
        ``seconds``, and those that this rank was ``waiting`` and ``communicating``.
      accuracy: The part of the test images that is classified right in the end.
      epochs: How many of these epochs this start has trained.
    """

    parameters: mlp.Parameters
    history: mpistrat.History
    accuracy: float
    epochs: int


def load_images(seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (x, y) to train on and (x, y) to test with, in which all digits are equally frequent.

    x is (images, 64), float64 from 0 to 1; y is (images,), the digits.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16.0, y, train_size=TRAINING_COUNT, stratify=y, random_state=seed)
    return (parts[0], parts[2]), (parts[1], parts[3])


def train_step(
    model: mlp.Parameters, optimizer: Optimizer, metrics: Sequence[Mean], x: mlp.Array, y: mlp.Array
) -> None:
    """Train on this replica's part of a batch, which may be empty; replica code.

    Each gradient is a mean, weighted by its number of examples. So all replicas make the same
    update, by the gradient of the whole batch.
    """
    gradient, *batch_values = mlp.compute_gradients(mlp.Parameters(*map(np.asarray, model)), x, y)
    # Ordinary arrays: copying so few numbers takes microseconds; gradient buffers would not pay.
    optimizer.apply_gradients(zip(gradient, model, strict=True), weight=len(y))
    for metric, values in zip(metrics, batch_values, strict=True):
        metric.update_state(values)


def test_step(model: mlp.Parameters, accuracy: Mean, x: mlp.Array, y: mlp.Array) -> None:
    """Count the right answers in this replica's part of a batch; replica code."""
    accuracy.update_state(
        mlp.compute_losses_and_hits(mlp.Parameters(*map(np.asarray, model)), x, y)[1]
    )


def create_model(
    strategy: mpistrat.Strategy, choices: DigitsSettings, steps_per_epoch: int
) -> tuple[mlp.Parameters, Optimizer]:
    """Return variables with random initial values, and their optimizer."""
    learning_rate = Linear(choices.lr, 0.0, choices.epochs)
    optimizer = SGD(lambda step: learning_rate(step // steps_per_epoch), momentum=MOMENTUM)
    with strategy.scope():
        initial_parameters = mlp.make_parameters(64, choices.hidden, 10, choices.seed)
        model = mlp.Parameters(*map(mpistrat.Variable, initial_parameters))
    optimizer.build(model)
    return model, optimizer


def train(
    strategy: mpistrat.Strategy, choices: DigitsSettings, progress: ProgressBar | None = None
) -> DigitsResult:
    """Train on all replicas of `strategy`, and test after every epoch.

    Collective: all ranks call it, with the same settings.
    """
    progress = progress or ProgressBar(0, is_shown=False)
    images, test_images = map(mpistrat.Dataset, load_images(choices.seed))
    shuffled = images.shuffle(seed=choices.seed).batch(choices.batch)
    batches = strategy.experimental_distribute_dataset(shuffled)
    test_batches = strategy.experimental_distribute_dataset(test_images.batch(choices.batch))
    steps_per_epoch = math.ceil(TRAINING_COUNT / choices.batch)
    model, optimizer = create_model(strategy, choices, steps_per_epoch)
    with strategy.scope():
        metrics = [Mean(name) for name in ("loss", "accuracy", "test_accuracy")]
        history = mpistrat.History()
    checkpoint = mpistrat.Checkpoint(
        model=model, optimizer=optimizer, metrics=metrics, history=history, data=shuffled, step=0
    )
    start_times, epoch_count = (time.perf_counter(), *strategy.time_spent()), 0
    for x, y in iterate_remaining(
        checkpoint, batches, choices, FIXED_SETTINGS, progress.print_line
    ):
        strategy.run(train_step, args=(model, optimizer, metrics[:2], x, y))
        progress.advance()
        checkpoint.step += 1
        if checkpoint.step % steps_per_epoch:
            continue
        end_times = time.perf_counter(), *strategy.time_spent()
        for x, y in test_batches:
            strategy.run(test_step, args=(model, metrics[2], x, y))
        means = {metric.name: metric.result() for metric in metrics}
        seconds = np.subtract(end_times, start_times).tolist()
        seconds_by_activity = dict(zip(ACTIVITIES, seconds, strict=True))
        history.append(checkpoint.step // steps_per_epoch, **means, **seconds_by_activity)
        for metric in metrics:
            metric.reset_state()
        progress.print_line(format_epoch(history, choices.epochs))
        epoch_count += 1
        start_times = time.perf_counter(), *strategy.time_spent()
    final = mlp.Parameters(*(variable.numpy() for variable in model))
    return DigitsResult(final, history, history.last("test_accuracy"), epoch_count)


def format_epoch(history: mpistrat.History, epoch_count: int) -> str:
    """Return the line about the last epoch."""
    epoch = history["loss"][0][-1]
    return (
        f"epoch {epoch:{len(str(epoch_count))}} of {epoch_count}   loss "
        f"{history.last('loss'):.4f}   train accuracy {history.last('accuracy'):.4f}   "
        f"test accuracy {history.last('test_accuracy'):.4f}   {history.last('seconds'):.2f} s"
    )


def call_on_replica0(
    strategy: mpistrat.Strategy, replica0_function: Callable[..., None], *args: Any
) -> None:
    """Call a function on replica 0 only; what it raises there is raised on every rank."""
    strategy.run(lambda: replica0_function(*args) if strategy.rank == 0 else None)


def check_packages() -> None:
    """Raise ImportError unless everything this example needs is installed here."""
    if any(importlib.util.find_spec(name) is None for name in REQUIRED_PACKAGES):
        raise ImportError(INSTALL_ADVICE)


def _parse_settings(argv: Sequence[str] | None) -> DigitsSettings:
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.digits",
        description="Train a classifier of handwritten digits, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=parse_count, help="times over the images")
    parser.add_argument("--batch", type=parse_count, help="images in a whole batch")
    parser.add_argument("--seed", type=int, help="of test set, start and order")
    parser.add_argument("--lr", type=float, help="learning rate at the beginning")
    parser.add_argument("--hidden", type=parse_count, help="hidden units")
    parser.add_argument("--output", help="where the picture goes")
    parser.add_argument("--checkpoint", help="directory of checkpoints, from which it continues")
    parser.set_defaults(**DigitsSettings()._asdict())
    return DigitsSettings(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    choices = _parse_settings(argv)
    strategy = mpistrat.MirroredStrategy()
    try:
        strategy.run(check_packages)
    except ImportError:  # raised on every rank, even if a package is missing on one only
        call_on_replica0(strategy, lambda: print(INSTALL_ADVICE, file=sys.stderr, flush=True))
        return 1
    # Comes with scikit-learn, and without type information.
    from threadpoolctl import threadpool_limits

    step_count = choices.epochs * math.ceil(TRAINING_COUNT / choices.batch)
    # One thread per rank: matrices this small gain nothing from more, and where several ranks share
    # the cores, threads that wait for one another make every product many times slower.
    with threadpool_limits(1), ProgressBar(step_count, strategy.rank == 0) as progress:
        result = train(strategy, choices, progress)
    title = f"Handwritten digits: test accuracy {result.accuracy:.4f}"
    title += f", ranks: {strategy.num_replicas_in_sync}"
    result.history.draw(choices.output, PANELS, title=title, x="epoch")
    call_on_replica0(strategy, print_report, result, choices, strategy.num_replicas_in_sync)
    return 0


def print_report(training_result: DigitsResult, choices: DigitsSettings, rank_count: int) -> None:
    """Print the summary."""
    print(f"test accuracy        {training_result.accuracy:.4f}")
    if training_result.epochs:  # epochs of an earlier start may have run on other ranks
        epoch_seconds = training_result.history.table(*ACTIVITIES)[-training_result.epochs :, 1:]
        # The median: the first epoch also loads and compiles code.
        seconds, *waiting_and_communicating = sorted(epoch_seconds.tolist())[
            len(epoch_seconds) // 2
        ]
        waiting, communicating = np.divide(waiting_and_communicating, seconds)
        print(
            f"examples per second  {TRAINING_COUNT / seconds:,.0f} (median epoch)",
            f"computing            {1 - waiting - communicating:.0%} of a step (rank 0)",
            f"waiting              {waiting:.0%}, for other ranks",
            f"communicating        {communicating:.0%}",
            sep="\n",
        )
    advice = "make a step quicker, where each has a core"
    if choices.batch * choices.hidden < MIN_SHARED_WORK:
        advice = "too little work in a step to share; --batch 512 --hidden 1024 has enough"
    print(
        f"ranks                {rank_count}",
        f"more ranks           {advice}",
        f"picture              {choices.output}",
        sep="\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
