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
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import mpistrat
from mpistrat.examples import mlp
from mpistrat.examples.curves import Epoch, draw
from mpistrat.examples.progress import ProgressBar

__all__ = ["SEEDS", "Result", "Settings", "load", "main", "train"]

SEEDS = (0, 1, 2, 3, 4)  # the median of their test accuracies is at least 0.97
TRAINING = 1409  # 22 batches of 64, and one image
MOMENTUM = 0.9
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
    """

    epochs: int = 20
    batch: int = 64
    seed: int = 0
    lr: float = 0.15
    hidden: int = 128


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


def step(model: mlp.Parameters, velocity: mlp.Parameters, x: Any, y: Any, rate: float) -> Any:
    """Learn from this replica's part of a batch; replica code.

    The part may be empty. The mean of the gradients is weighted by the examples they come from,
    so it is the gradient of the whole batch, on every replica the same.
    """
    gradient, losses, hits = mlp.gradients(mlp.Parameters(*map(np.asarray, model)), x, y)
    context: Any = mpistrat.get_replica_context()
    gradient = context.all_reduce("MEAN", gradient, weight=len(y))
    for parameter, speed, slope in zip(model, velocity, gradient, strict=True):
        speed.assign(MOMENTUM * speed + slope)
        parameter.assign_sub(rate * speed)
    return losses, hits


def score(model: mlp.Parameters, x: Any, y: Any) -> Any:
    """Judge this replica's part of a batch; replica code."""
    return mlp.losses_and_hits(mlp.Parameters(*map(np.asarray, model)), x, y)


def means(strategy: mpistrat.Strategy, batches: Sequence[Any]) -> list[float]:
    """Return the means over all examples of the values that replicas returned batch by batch.

    The batches are joined first, so every example counts once. In a mean over the means of the
    batches, the one image of the last batch would count as much as the 64 of another.
    """

    def join(*parts: Any) -> list[Any]:
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    joined = strategy.run(join, args=batches)
    return [float(mean) for mean in strategy.reduce("MEAN", joined, axis=0)]


def create(strategy: mpistrat.Strategy, hidden: int, seed: int) -> tuple[Any, Any]:
    """Return the parameters and their velocities, as variables of `strategy`."""
    start = mlp.initial(64, hidden, 10, seed)
    with strategy.scope():
        model = mlp.Parameters(*map(mpistrat.Variable, start))
        velocity = mlp.Parameters(*(mpistrat.Variable(np.zeros_like(value)) for value in start))
    return model, velocity


def train(
    strategy: mpistrat.Strategy, settings: Settings, progress: ProgressBar | None = None
) -> Result:
    """Train on all replicas of `strategy`, and test after every epoch.

    Collective: all ranks call it, with the same settings.
    """
    progress = progress or ProgressBar(0, shown=False)
    images, test_images = load(settings.seed)
    model, velocity = create(strategy, settings.hidden, settings.seed)
    shuffled = mpistrat.Dataset(images).shuffle(seed=settings.seed).batch(settings.batch)
    batches = strategy.experimental_distribute_dataset(shuffled)
    in_order = mpistrat.Dataset(test_images).batch(settings.batch)
    tests = strategy.experimental_distribute_dataset(in_order)
    history: list[Epoch] = []
    for number in range(settings.epochs):
        begin = time.perf_counter()
        rate = settings.lr * (1 - number / settings.epochs)
        seen = []
        for x, y in batches:
            seen.append(strategy.run(step, args=(model, velocity, x, y, rate)))
            progress.step()
        loss, accuracy = means(strategy, seen)
        seconds = time.perf_counter() - begin
        judged = [strategy.run(score, args=(model, x, y)) for x, y in tests]
        history.append(Epoch(number + 1, loss, accuracy, means(strategy, judged)[1], seconds))
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

    def body() -> None:
        if is_first():
            fn(*args)

    strategy.run(body)


def is_first() -> bool:
    """Tell whether this is replica 0; replica code."""
    context: Any = mpistrat.get_replica_context()
    return bool(context.replica_id_in_sync_group == 0)


def require() -> None:
    """Raise ImportError unless everything this example needs is installed here."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise ImportError(ADVICE)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted 1 or more, got {text}")
    return int(text)


def _options(argv: Sequence[str] | None) -> tuple[Settings, str]:
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.digits",
        description="Train a classifier of handwritten digits, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    usual = Settings()
    parser.add_argument("--epochs", type=_count, default=usual.epochs, help="times over the images")
    parser.add_argument("--batch", type=_count, default=usual.batch, help="images in a whole batch")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of test set, start and order")
    parser.add_argument("--lr", type=float, default=usual.lr, help="learning rate at the beginning")
    parser.add_argument("--hidden", type=_count, default=usual.hidden, help="hidden units")
    parser.add_argument("--output", default="digits.png", help="where the picture goes")
    options = vars(parser.parse_args(argv))
    output = options.pop("output")
    return Settings(**options), output


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    settings, output = _options(argv)
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
    with threadpool_limits(1), ProgressBar(steps, strategy.run(is_first).local) as progress:
        result = train(strategy, settings, progress)
    on_first(strategy, report, result, strategy.num_replicas_in_sync, output)
    return 0


def report(result: Result, ranks: int, output: str) -> None:
    """Draw the curves and print the summary."""
    title = f"Handwritten digits: test accuracy {result.accuracy:.4f}, ranks: {ranks}"
    draw(result.history, title, output)
    # The median, because the first epoch also waits for what is loaded or compiled on first use.
    rate = TRAINING / statistics.median(epoch.seconds for epoch in result.history)
    print(f"test accuracy        {result.accuracy:.4f}")
    print(f"examples per second  {rate:,.0f} (median epoch)")
    print(f"ranks                {ranks}")
    print(f"picture              {output}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
