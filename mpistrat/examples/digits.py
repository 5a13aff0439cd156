"""Trains a classifier of handwritten digits: one program, the same answer on any number of ranks.

    python -m mpistrat.examples.digits
    mpistrat run -n 2 -m mpistrat.examples.digits --checkpoint digits

Who starts it again with the same ``--checkpoint`` continues after the last whole epoch, on any
number of ranks; a run that has ended continues with more ``--epochs``.

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
from mpistrat.examples.settings import ProgressBar, count, left
from mpistrat.metrics import Mean
from mpistrat.optim import SGD, Linear, Optimizer

__all__ = ["SEEDS", "Result", "Settings", "load", "main", "train"]

SEEDS = (0, 1, 2, 3, 4)  # the median of their test accuracies is at least 0.97
TRAINING = 1409  # 22 batches of 64, and one image
MOMENTUM = 0.9
ENOUGH = 512 * 1024  # images of a batch times hidden units: so much work is worth sharing
SAME = ("batch", "seed", "lr", "hidden")
NEEDED = ("matplotlib", "sklearn", "tqdm")
PANELS = {
    "mean cross-entropy (nats per example)": ["loss"],
    "part of the images that is classified right": ["accuracy", "test_accuracy"],
}
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
      checkpoint: A directory for checkpoints, from which it continues; empty for none.
    """

    epochs: int = 20
    batch: int = 64
    seed: int = 0
    lr: float = 0.15
    hidden: int = 128
    output: str = "digits.png"
    checkpoint: str = ""


class Result(NamedTuple):
    """What training came to.

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


def load(seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (x, y) to train on and (x, y) to test with, in which all digits are equally frequent.

    x is (images, 64), float64 from 0 to 1; y is (images,), the digits.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    cut = train_test_split(x / 16.0, y, train_size=TRAINING, stratify=y, random_state=seed)
    return (cut[0], cut[2]), (cut[1], cut[3])


def step(
    model: mlp.Parameters, optimizer: Optimizer, metrics: Sequence[Mean], x: Any, y: Any
) -> None:
    """Learn from this replica's part of a batch; replica code.

    The part may be empty. Gradients are weighted by the examples that they are the mean of, so the
    update goes by the gradient of the whole batch, on every replica the same.
    """
    gradient, *figures = mlp.gradients(mlp.Parameters(*map(np.asarray, model)), x, y)
    # Ordinary arrays: to copy so few numbers takes microseconds, which buffers would not repay.
    optimizer.apply_gradients(zip(gradient, model, strict=True), weight=len(y))
    for metric, values in zip(metrics, figures, strict=True):
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
        history = mpistrat.History()
    optimizer.build(model)
    state = mpistrat.Checkpoint(
        model=model, optimizer=optimizer, metrics=metrics, history=history, data=shuffled, step=0
    )
    begin, epochs = (time.perf_counter(), *strategy.time_spent()), 0
    for x, y in left(state, batches, settings, SAME, progress.say):
        strategy.run(step, args=(model, optimizer, metrics[:2], x, y))
        progress.step()
        state.step += 1
        if state.step % steps:
            continue
        times = np.subtract((time.perf_counter(), *strategy.time_spent()), begin).tolist()
        for x, y in tests:
            strategy.run(score, args=(model, metrics[2], x, y))
        figures = {metric.name: metric.result() for metric in metrics}
        spent = zip(("seconds", "waiting", "communicating"), times, strict=True)
        history.append(state.step // steps, **figures, **dict(spent))
        for metric in metrics:
            metric.reset_state()
        progress.say(line(history, settings.epochs))
        epochs += 1
        begin = time.perf_counter(), *strategy.time_spent()
    final = mlp.Parameters(*(variable.numpy() for variable in model))
    return Result(final, history, history.last("test_accuracy"), epochs)


def line(history: mpistrat.History, epochs: int) -> str:
    """Return what is printed about the last epoch."""
    number = history["loss"][0][-1]
    return (
        f"epoch {number:{len(str(epochs))}} of {epochs}   loss {history.last('loss'):.4f}   "
        f"train accuracy {history.last('accuracy'):.4f}   "
        f"test accuracy {history.last('test_accuracy'):.4f}   {history.last('seconds'):.2f} s"
    )


def on_first(strategy: mpistrat.Strategy, fn: Callable[..., None], *args: Any) -> None:
    """Call a function on replica 0 only; what it raises there is raised on every rank."""
    strategy.run(lambda: fn(*args) if strategy.rank == 0 else None)


def require() -> None:
    """Raise ImportError unless everything this example needs is installed here."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise ImportError(ADVICE)


def _settings(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.digits",
        description="Train a classifier of handwritten digits, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=count, help="times over the images")
    parser.add_argument("--batch", type=count, help="images in a whole batch")
    parser.add_argument("--seed", type=int, help="of test set, start and order")
    parser.add_argument("--lr", type=float, help="learning rate at the beginning")
    parser.add_argument("--hidden", type=count, help="hidden units")
    parser.add_argument("--output", help="where the picture goes")
    parser.add_argument("--checkpoint", help="directory of checkpoints, from which it continues")
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
    title = f"Handwritten digits: test accuracy {result.accuracy:.4f}"
    title += f", ranks: {strategy.num_replicas_in_sync}"
    result.history.draw(settings.output, PANELS, title=title, x="epoch")
    on_first(strategy, report, result, settings, strategy.num_replicas_in_sync)
    return 0


def report(result: Result, settings: Settings, ranks: int) -> None:
    """Print the summary."""
    print(f"test accuracy        {result.accuracy:.4f}")
    if result.epochs:  # those of an earlier start may be of other ranks
        table = result.history.table("seconds", "waiting", "communicating")[-result.epochs :, 1:]
        # The median: the first epoch also waits for what is loaded or compiled on first use.
        seconds, *parts = sorted(table.tolist())[len(table) // 2]
        waiting, communicating = np.divide(parts, seconds)
        print(
            f"examples per second  {TRAINING / seconds:,.0f} (median epoch)",
            f"computing            {1 - waiting - communicating:.0%} of a step (rank 0)",
            f"waiting              {waiting:.0%}, for other ranks",
            f"communicating        {communicating:.0%}",
            sep="\n",
        )
    advice = "make a step quicker, where each has a core"
    if settings.batch * settings.hidden < ENOUGH:
        advice = "too little work in a step to share; --batch 512 --hidden 1024 has enough"
    print(
        f"ranks                {ranks}",
        f"more ranks           {advice}",
        f"picture              {settings.output}",
        sep="\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
