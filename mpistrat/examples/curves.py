"""The picture of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

__all__ = ["Epoch", "draw", "draw_losses"]


class Epoch(NamedTuple):
    """What one epoch came to.

    Attributes:
      number: From 1.
      loss: Mean cross-entropy in nats of all training examples, each when its turn came.
      accuracy: The part of them that was classified right then.
      test_accuracy: The part of the test examples that is classified right after the epoch.
      seconds: Time taken to train, without the test.
      waiting: Seconds of them that this rank waited for others.
      communicating: Seconds of them that it communicated.
    """

    number: int
    loss: float
    accuracy: float
    test_accuracy: float
    seconds: float
    waiting: float = 0.0
    communicating: float = 0.0


def draw(history: Sequence[Epoch], title: str, path: str | Path) -> None:
    """Draw loss and accuracy over the epochs.

    Args:
      history: The epochs in order.
      title: Stands above both panels.
      path: Where the picture goes; the ending names the format.

    Raises:
      OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # a figure of its own draws with Agg and opens no window
    from matplotlib.ticker import LogLocator, MaxNLocator

    numbers = [epoch.number for epoch in history]
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    style = {"marker": "o", "markersize": 3.5}
    left.semilogy(numbers, [e.loss for e in history], color="C0", label="training", **style)
    left.set(title="Loss", ylabel="mean cross-entropy (nats per example)")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("")
    trained = [100 * e.accuracy for e in history]
    tested = [100 * e.test_accuracy for e in history]
    right.plot(numbers, trained, color="C0", label="training, during the epoch", **style)
    right.plot(numbers, tested, color="C1", label="test, after the epoch", **style)
    right.set(title="Accuracy", ylabel="images classified right (%)")
    for panel, corner in ((left, "upper right"), (right, "lower right")):
        panel.set_xlabel("epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        panel.grid(alpha=0.3, which="both")
        panel.legend(loc=corner)
    figure.savefig(path)


def draw_losses(rows: NDArray[Any], title: str, path: str | Path) -> None:
    """Draw two losses over the updates of the weights.

    Args:
      rows: One per evaluation: updates made before it, the loss on the training data since the
        evaluation before, the loss on held-out data.
      title: Stands above the panel.
      path: Where the picture goes; the ending names the format.

    Raises:
      OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
    panel = figure.subplots()
    names = ("training, since the last", "held out, averaged weights")
    panel.plot(rows[:, 0], rows[:, 1:], marker="o", markersize=3.5, label=names)
    panel.set(title=title, xlabel="updates", ylabel="mean cross-entropy (nats per symbol)")
    panel.grid(alpha=0.3)
    panel.legend(loc="upper right")
    figure.savefig(path)
