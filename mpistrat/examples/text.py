"""Trains a language model on the source text of Python's standard library, and lets it write.

    python -m mpistrat.examples.text
    mpistrat run -n 2 -m mpistrat.examples.text --checkpoint run

It has all parts of a longer training run: schedule, clipping, accumulation, a moving average of the
weights, validation, early stopping, and checkpoints. Start it again with the same ``--checkpoint``,
at any number of ranks, and it continues where the last start stopped, and further with more
``--steps``. That directory also gets the curves, ``history.csv`` and ``curves.png``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpistrat as ms
from mpistrat.examples import text_data, text_model
from mpistrat.examples.settings import collect_fixed_settings, option, parse_settings

__all__ = ["TextSettings", "create_model", "main", "measure_loss", "train", "train_step"]

PROMPT = "def "  # of the text that the model writes


@dataclass(frozen=True)
class TextSettings:
    """The options of the program."""

    steps: int = option(600, "updates of the weights", can_change=True)
    batch: int = option(32, "pieces of text in a global batch")
    accumulate: int = option(2, "batches that make an update")
    length: int = option(128, "symbols in a piece of text")
    channels: int = option(128, "width of the model")
    layers: int = option(7, "of the model; n of them see the last 2^n symbols")
    lr: float = option(4e-3, "largest learning rate, after a tenth of the updates; it falls")
    every: int = option(50, "updates between two validations; after each, the run is saved")
    patience: int = option(
        4, "validations without a new lowest loss that end the training", can_change=True
    )
    seed: int = option(0, "of the first weights, the order of the pieces, the text written")
    dtype: str = option("float32", "of the weights", allowed_values=("float32", "float64"))
    checkpoint: str = option(
        "text", "directory of the run, from which it continues", can_change=True
    )


def train_step(
    model: text_model.Parameters,
    optimizer: ms.optim.Optimizer,
    gradient_buffers: text_model.Parameters,
    batch: text_model.Array,
) -> dict[str, Any]:
    """Train on this replica's part of a batch, which may be empty; replica code.

    Args:
      model: Variables by name.
      optimizer: It updates them by a mean over all pieces of the batch, or of several batches.
      gradient_buffers: Arrays by name, which the gradients are written to.
      batch: (pieces, length + 1), numbers of symbols.

    Returns:
      The loss of each piece, in nats per symbol.
    """
    weights = {name: np.asarray(value) for name, value in model.items()}
    losses = text_model.compute_gradients(weights, batch[:, :-1], batch[:, 1:], gradient_buffers)
    pairs = [(gradient_buffers[name], value) for name, value in model.items()]
    optimizer.apply_gradients(pairs, weight=len(batch))
    return {"loss": losses}


def measure_loss(model: text_model.Parameters, batch: text_model.Array) -> dict[str, Any]:
    """Return the loss of each piece of this replica's part; replica code."""
    weights = {name: np.asarray(value) for name, value in model.items()}
    return {"loss": text_model.compute_losses(weights, batch[:, :-1], batch[:, 1:])}


def create_model(
    strategy: ms.Strategy, choices: TextSettings
) -> tuple[dict[str, ms.Variable], ms.optim.Optimizer]:
    """Return variables with random initial values, and their optimizer. Collective."""
    first_weights = text_model.make_parameters(
        text_data.SYMBOL_COUNT, choices.channels, choices.layers, choices.seed, choices.dtype
    )
    with strategy.scope():
        model = {name: ms.Variable(value, name=name) for name, value in first_weights.items()}
    warm_up_steps = max(choices.steps // 10, 1)
    decay_steps = max(choices.steps - warm_up_steps, 1)
    optimizer = ms.optim.AdamW(
        ms.optim.WarmUp(ms.optim.Cosine(choices.lr, decay_steps, choices.lr / 100), warm_up_steps),
        weight_decay=0.05,
        groups=[ms.optim.Group("*bias*", weight_decay=0.0)],
        clip=ms.optim.ClipByGlobalNorm(1.0),
        accumulate=choices.accumulate,
        ema=0.98,
    )
    optimizer.build(model.values())
    return model, optimizer


def train(
    strategy: ms.Strategy, choices: TextSettings, verbose: bool = True
) -> tuple[dict[str, ms.Variable], ms.History]:
    """Train on all replicas of `strategy`, or continue the run in ``choices.checkpoint``.

    Collective: all ranks call it, with the same settings.

    Returns:
      The best moving averages of the weights, by name, and the curves ``loss`` and
      ``validation/loss`` by batches.
    """
    dataset, held_out_dataset = text_data.read_datasets(
        strategy, choices.length, choices.batch, choices.seed
    )
    model, optimizer = create_model(strategy, choices)
    averages = {name: optimizer.average(value) for name, value in model.items()}
    gradient_buffers = strategy.gradient_buffers(model)
    history = ms.fit(
        functools.partial(train_step, model, optimizer, gradient_buffers),
        dataset,
        steps=choices.steps * choices.accumulate,
        state={"model": model, "optimizer": optimizer},
        validate=functools.partial(measure_loss, averages),
        validation_data=held_out_dataset,
        validate_every=f"{choices.every * choices.accumulate} steps",
        directory=choices.checkpoint,
        patience=choices.patience,
        restore_best=True,
        settings=collect_fixed_settings(choices),
        strategy=strategy,
        verbose=verbose,
    )
    return averages, history


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    choices = parse_settings(TextSettings, "mpistrat.examples.text", str(__doc__), argv)
    strategy = ms.MirroredStrategy()
    averages, history = train(strategy, choices)
    if strategy.is_chief:
        weights = {name: np.asarray(value) for name, value in averages.items()}
        prompt = text_data.encode_text(PROMPT)
        symbols = text_model.generate_symbols(weights, prompt, 600, choices.seed)
        print(f"\n{text_data.decode_symbols(symbols)}\n")
    best_loss = np.nanmin(history["validation/loss"][1])
    strategy.print(format_report(best_loss, history, choices.batch * choices.length))
    strategy.print(f"ranks               {strategy.num_replicas_in_sync}")
    strategy.print(f"directory           {choices.checkpoint}")
    return 0


def format_report(held_out_loss: float, history: ms.History, symbols_per_step: int) -> str:
    """Return lines about the result, and the speed of all ranks together."""
    steps, seconds = history["seconds"]
    rates = np.diff(steps, prepend=0) * symbols_per_step / seconds
    return (
        f"held-out loss       {held_out_loss:.4f} nats per symbol\n"
        f"symbols per second  {np.median(rates):,.0f} (median)"
    )


if __name__ == "__main__":
    sys.exit(main())
