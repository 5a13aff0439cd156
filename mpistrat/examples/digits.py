"""Trains a classifier of handwritten digits: one program, the same answer on any number of ranks.

    python -m mpistrat.examples.digits
    mpistrat run -n 2 -m mpistrat.examples.digits

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
from mpistrat.examples.curves import Epoch, draw
from mpistrat.examples.progress import ProgressBar
from mpistrat.metrics import Mean
from mpistrat.optim import SGD, Linear, Optimizer

__all__ = ["SEEDS", "Result", "Settings", "load", "main", "train"]

SEEDS = (0, 1, 2, 3, 4)  # the median of their test accuracies is at least 0.97
TRAINING = 1409  # 22 batches of 64, and one image
MOMENTUM = 0.9
ENOUGH = 512 * 1024  # images of a batch times hidden units: so much work is worth sharing
NEEDED = ("matplotlib", "sklearn", "tqdm")
ADVICE = "This example needs scikit-learn, matplotlib and tqdm: pip install 'mpistrat[examples]'"


class Settings(NamedTuple):
    """What a user may choose.

    Attributes:
      epochs: Times every training image is seen, at least 1.
      batch: Images in a global batch.
      seed: Rules the choice of the test images, the initial parameters and the order of examples.
      lr: Learning rate at the beginning; it falls in a straight line, to 0 after the last epoch.
      hidden: Units in the hidden layer.
      output: Where the picture goes.
    """

    epochs: int = 20
    batch: int = 64
    seed: int = 0
    lr: float = 0.15
    hidden: int = 128
    output: str = "digits.png"


class Result(NamedTuple):
    """What training came to.

    Attributes:
      parameters: The final parameters, NumPy arrays, on every rank the same.
      history: One entry per epoch.
      accuracy: The part of the test images that is classified right in the end.
    """

    parameters: mlp.Parameters
    history: list[Epoch]
    accuracy: float


def load(seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (x, y) to train on and (x, y) to test with, in which all digits are equally frequent.

    x is (images, 64), float64 from 0 to 1; y is (images,), the digits.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    cut = train_test_split(x / 16.0, y, train_size=TRAINING, stratify=y, random_state=seed)
    return (cut[0], cut[2]), (cut[1], cut[3])


def step(model: mlp.Parameters, optimizer: Optimizer, seen: Sequence[Mean], x: Any, y: Any) -> None:
    """Learn from this replica's part of a batch; replica code.

    The part may be empty. Gradients are weighted by the examples that they are the mean of, so the
    update goes by the gradient of the whole batch, on every replica the same.
    """
    gradient, *figures = mlp.gradients(mlp.Parameters(*map(np.asarray, model)), x, y)
    # Ordinary arrays: to copy so few numbers takes microseconds, which buffers would not repay.
    optimizer.apply_gradients(zip(gradient, model, strict=True), weight=len(y))
    for metric, values in zip(seen, figures, strict=True):
        metric.update_state(values)


def score(model: mlp.Parameters, accuracy: Mean, x: Any, y: Any) -> None:
    """Judge this replica's part of a batch; replica code."""
    accuracy.update_state(mlp.losses_and_hits(mlp.Parameters(*map(np.asarray, model)), x, y)[1])


def train(
    strategy: mpistrat.Strategy, settings: Settings, progress: ProgressBar | None = None
) -> Result:
    """Train on all replicas of `strategy`, and test after every epoch.

    Collective: all ranks call it, with the same settings.
    """
    progress = progress or ProgressBar(0, shown=False)
    images, test_images = map(mpistrat.Dataset, load(settings.seed))
    shuffled = images.shuffle(seed=settings.seed).batch(settings.batch)
    batches = strategy.experimental_distribute_dataset(shuffled)
    tests = strategy.experimental_distribute_dataset(test_images.batch(settings.batch))
    steps = math.ceil(TRAINING / settings.batch)
    rate = Linear(settings.lr, 0.0, settings.epochs)
    optimizer = SGD(lambda step: rate(step // steps), momentum=MOMENTUM)
    with strategy.scope():
        start = mlp.initial(64, settings.hidden, 10, settings.seed)
        model = mlp.Parameters(*map(mpistrat.Variable, start))
        metrics = [Mean(name) for name in ("loss", "accuracy", "test_accuracy")]
    history: list[Epoch] = []
    for number in range(1, settings.epochs + 1):
        begin = time.perf_counter(), *strategy.time_spent()
        for x, y in batches:
            strategy.run(step, args=(model, optimizer, metrics[:2], x, y))
            progress.step()
        times = np.subtract((time.perf_counter(), *strategy.time_spent()), begin).tolist()
        for x, y in tests:
            strategy.run(score, args=(model, metrics[2], x, y))
        history.append(Epoch(number, *(metric.result() for metric in metrics), *times))
        for metric in metrics:
            metric.reset_state()
        progress.say(line(history[-1], settings.epochs))
    final = mlp.Parameters(*(variable.numpy() for variable in model))
    return Result(final, history, history[-1].test_accuracy)


def line(epoch: Epoch, epochs: int) -> str:
    """Return what is printed about one epoch."""
    return (
        f"epoch {epoch.number:{len(str(epochs))}} of {epochs}   loss {epoch.loss:.4f}   "
        f"train accuracy {epoch.accuracy:.4f}   test accuracy {epoch.test_accuracy:.4f}   "
        f"{epoch.seconds:.2f} s"
    )


def on_first(strategy: mpistrat.Strategy, fn: Callable[..., None], *args: Any) -> None:
    """Call a function on replica 0 only; what it raises there is raised on every rank."""
    strategy.run(lambda: fn(*args) if strategy.rank == 0 else None)


def require() -> None:
    """Raise ImportError unless everything this example needs is installed here."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise ImportError(ADVICE)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted 1 or more, got {text}")
    return int(text)


def _settings(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.digits",
        description="Train a classifier of handwritten digits, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=_count, help="times over the images")
    parser.add_argument("--batch", type=_count, help="images in a whole batch")
    parser.add_argument("--seed", type=int, help="of test set, start and order")
    parser.add_argument("--lr", type=float, help="learning rate at the beginning")
    parser.add_argument("--hidden", type=_count, help="hidden units")
    parser.add_argument("--output", help="where the picture goes")
    parser.set_defaults(**Settings()._asdict())
    return Settings(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    settings = _settings(argv)
    strategy = mpistrat.MirroredStrategy()
    try:
        strategy.run(require)
    except ImportError:  # on every rank, even if something is missing on one of them only
        on_first(strategy, lambda: print(ADVICE, file=sys.stderr, flush=True))
        return 1
    # Comes with scikit-learn, and without type information.
    from threadpoolctl import threadpool_limits

    steps = settings.epochs * math.ceil(TRAINING / settings.batch)
    # One thread per rank: matrices this small gain nothing from more, and where several ranks share
    # the cores, threads that wait for one another make every product many times slower.
    with threadpool_limits(1), ProgressBar(steps, strategy.rank == 0) as progress:
        result = train(strategy, settings, progress)
    on_first(strategy, report, result, settings, strategy.num_replicas_in_sync)
    return 0


def report(result: Result, settings: Settings, ranks: int) -> None:
    """Draw the curves and print the summary."""
    title = f"Handwritten digits: test accuracy {result.accuracy:.4f}, ranks: {ranks}"
    draw(result.history, title, settings.output)
    # The median, because the first epoch also waits for what is loaded or compiled on first use.
    epoch = sorted(result.history, key=lambda epoch: epoch.seconds)[len(result.history) // 2]
    waiting, communicating = epoch.waiting / epoch.seconds, epoch.communicating / epoch.seconds
    few = "too little work in a step to share; --batch 512 --hidden 1024 has enough"
    many = "make a step quicker, where each has a core"
    print(
        f"test accuracy        {result.accuracy:.4f}",
        f"examples per second  {TRAINING / epoch.seconds:,.0f} (median epoch)",
        f"computing            {1 - waiting - communicating:.0%} of a step (rank 0)",
        f"waiting              {waiting:.0%}, for other ranks",
        f"communicating        {communicating:.0%}",
        f"ranks                {ranks}",
        f"more ranks           {few if settings.batch * settings.hidden < ENOUGH else many}",
        f"picture              {settings.output}",
        sep="\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
