"""Trains a small transformer of PyTorch on the source text of Python's standard library.

    python -m mpistrat.examples.language_model_torch
    mpistrat run -n 2 -m mpistrat.examples.language_model_torch --checkpoint run

The text, the evaluation and what is written are those of `mpistrat.examples.text`; model and loop
are PyTorch. Who starts it again with the same ``--checkpoint`` continues where the last start
stopped, at any number of ranks, and further with more ``--steps``; the losses are the same at every
number of ranks, to rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import mpistrat as ms
import mpistrat.torch as mt
from mpistrat.examples import text
from mpistrat.examples.settings import ProgressBar, begun, leaving, parsed

__all__ = ["TransformerResult", "TransformerSettings", "main", "train"]


class TransformerSettings(NamedTuple):
    """What a user may choose; `MEANINGS` says what each is."""

    steps: int = 400
    batch: int = 32
    length: int = 128
    channels: int = 128
    heads: int = 4
    layers: int = 3
    lr: float = 2e-3
    every: int = 50
    seed: int = 0


MEANINGS = {
    "steps": "updates of the weights",
    "batch": "pieces of text in a global batch",
    "length": "symbols in a piece of text, and how far back the model looks",
    "channels": "width of the model, a multiple of the heads",
    "heads": "of attention, in each layer",
    "layers": "of the model",
    "lr": "largest learning rate, after a tenth of the steps; it ends at a tenth of it",
    "every": "updates between two evaluations; after each, a checkpoint is saved",
    "seed": "of the first weights, the order of the pieces and the text that is written",
}


SAME = ("batch", "length", "channels", "heads", "layers", "lr", "every", "seed")


class TransformerResult(NamedTuple):
    """What training came to.

    Attributes:
      history: At each evaluation, by the updates until then: ``training`` loss since the last
        evaluation, and loss on the ``held_out`` text, both in nats per symbol.
      losses: The loss of each update of this start.
      rate: Symbols per second that all ranks together have trained on; 0 without an update.
    """

    history: ms.History
    losses: list[float]
    rate: float


class TransformerBlock(nn.Module):
    """Attention to what came before, then two linear layers; each added to its input."""

    def __init__(self, channels: int, heads: int):
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.queries = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.wide, self.narrow = (
            nn.Linear(channels, 4 * channels),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, x: Any) -> Any:
        """Return (rows, length, channels)."""
        rows, length, channels = x.shape
        parts = self.queries(self.one(x)).view(rows, length, 3, self.heads, channels // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, channels))
        return x + self.narrow(functional.gelu(self.wide(self.two(x))))


class Transformer(nn.Module):
    """Expects the next symbol at each place of a text (Radford and others, "GPT-2", 2019)."""

    def __init__(self, settings: TransformerSettings):
        """Make the layers; the first and the last have their weight in common."""
        super().__init__()
        channels = settings.channels
        self.symbols = nn.Embedding(text.SYMBOLS, channels)
        self.places = nn.Parameter(torch.zeros(settings.length, channels))
        self.blocks = nn.Sequential(
            *[TransformerBlock(channels, settings.heads) for _ in range(settings.layers)]
        )
        self.norm = nn.LayerNorm(channels)
        self.scores = nn.Linear(channels, text.SYMBOLS, bias=False)
        nn.init.normal_(self.scores.weight, std=0.02)
        self.symbols.weight = self.scores.weight

    def forward(self, x: Any) -> Any:
        """Return the scores of all symbols at each place.

        Args:
          x: (rows, length), numbers of symbols.
        """
        hidden = self.symbols(x) + self.places[: x.shape[1]]
        return self.scores(self.norm(self.blocks(hidden)))


def initial(settings: TransformerSettings) -> Transformer:
    """Return a model with random weights, of the seed of the settings."""
    torch.manual_seed(settings.seed)
    return Transformer(settings)


def loss_of(model: Any, batch: Any) -> Any:
    """Return the mean cross-entropy of the symbols that follow, in nats."""
    batch = batch.long()
    scores = model(batch[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


class _Training:
    """The model with all that its training needs and changes. Collective: making it is."""

    def __init__(
        self, strategy: ms.Strategy, settings: TransformerSettings, directory: Path, data: Any
    ):
        """Make the model, and restore what is in the directory."""
        self.strategy = strategy
        self.model = mt.replicate(initial(settings), strategy)
        warm = max(settings.steps // 10, 1)
        fall = ms.optim.Cosine(settings.lr, max(settings.steps - warm, 1), settings.lr / 10)
        self.optimizer = mt.FusedOptimizer(
            self.model,
            ms.optim.AdamW(
                ms.optim.WarmUp(fall, warm), beta_2=0.98, clip=ms.optim.ClipByGlobalNorm(1.0)
            ),
        )
        with strategy.scope():
            self.history = ms.History()
        saved = ms.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            history=self.history,
            data=data,
            step=0,
        )
        self.manager = ms.CheckpointManager(
            saved, directory, max_to_keep=3, every=f"{settings.every} steps"
        )
        self.goes_on = begun(self.manager, {name: getattr(settings, name) for name in SAME})

    @property
    def done(self) -> int:
        """How many updates were made, in all starts together."""
        return int(self.optimizer.optimizer.iterations)

    def mean(self, losses: Sequence[tuple[float, int]]) -> list[float]:
        """Return the means over the rows of all ranks, of losses and rows of this one."""
        pairs = np.array([(loss * rows if rows else 0.0, rows) for loss, rows in losses])
        sums = self.strategy.all_reduce("SUM", pairs)
        means: list[float] = (sums[:, 0] / sums[:, 1]).tolist()
        return means

    def learn(self, batch: Any) -> tuple[float, int]:
        """Train on a batch, and return the loss of this rank's rows, and how many they are."""
        loss = loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.manager.checkpoint.step = self.done
        return loss.item(), len(batch)

    def judge(self, batches: Any) -> float:
        """Return the mean loss of batches."""
        with torch.no_grad():
            batch_losses = [
                (loss_of(self.model, batch).item() if len(batch) else 0.0, len(batch))
                for batch in batches
            ]
        sums = np.array([(loss * rows, rows) for loss, rows in batch_losses]).sum(0)
        total, rows = self.strategy.all_reduce("SUM", sums)
        return float(total / rows)


def train(
    strategy: ms.Strategy,
    settings: TransformerSettings,
    directory: Path,
    progress: ProgressBar | None = None,
) -> TransformerResult:
    """Train on all ranks of `strategy`, or continue with what is saved in `directory`.

    Collective: all ranks call it, with the same settings.
    """
    return _train(strategy, settings, directory, progress)[0]


def _train(
    strategy: ms.Strategy, settings: TransformerSettings, directory: Path, progress: Any
) -> tuple[TransformerResult, Any]:
    progress = progress or ProgressBar(0, shown=False)
    pieces = ms.Dataset(text.read(strategy, text.TRAINING, settings.length))
    tests = ms.Dataset(text.read(strategy, text.HELD_OUT, settings.length)).batch(settings.batch)
    endless = pieces.shuffle(seed=settings.seed).repeat().batch(settings.batch)
    batches, test_batches = mt.batches(endless, strategy), mt.batches(tests, strategy)
    run = _Training(strategy, settings, directory, endless)
    if run.goes_on:
        progress.say(f"continues after update {run.done}, as saved in {directory}")
    losses: list[float] = []
    batch_losses: list[tuple[float, int]] = []
    seconds, rate, begin = 0.0, 0.0, time.perf_counter()
    with leaving(run.manager):
        for batch in run.manager.resume(batches):
            if (
                run.done >= settings.steps
            ):  # asked before the batch is used, which does not count then
                break
            batch_losses.append(run.learn(batch))
            progress.step()
            if run.done % settings.every and run.done < settings.steps:
                continue
            seconds += time.perf_counter() - begin
            new, batch_losses = run.mean(batch_losses), []
            losses += new
            run.history.append(run.done, training=np.mean(new), held_out=run.judge(test_batches))
            rate = len(losses) * settings.batch * settings.length / seconds
            progress.say(text.line(run.history.table()[-1], settings.steps, rate))
            begin = time.perf_counter()
    if losses and (run.goes_on or run.done % settings.every):  # else the last state is saved
        run.manager.save()
    return TransformerResult(run.history, losses, rate), run.model


def generate(model: Any, begin: Any, length: int, seed: int, temperature: float = 0.7) -> Any:
    """Return `begin` and `length` more symbols, each drawn by what the model expects there."""
    generator, symbols = torch.Generator().manual_seed(seed), torch.tensor(begin).long()[None]
    context_length = len(model.places)
    with torch.no_grad():
        for _ in range(length):
            scores = model(symbols[:, -context_length:])[:, -1] / temperature
            next_symbol = torch.multinomial(scores.softmax(1), 1, generator=generator)
            symbols = torch.cat([symbols, next_symbol], 1)
    return symbols[0].numpy()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.language_model_torch",
        description="Train a transformer on Python's source text, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, usual in TransformerSettings()._asdict().items():
        parser.add_argument(f"--{name}", type=type(usual), default=usual, help=MEANINGS[name])
    options, output, directory = parsed(parser, "transformer", argv)
    settings, strategy = TransformerSettings(**options), ms.MultiWorkerMirroredStrategy()
    strategy.run(text.require)
    with ProgressBar(settings.steps, strategy.rank == 0) as progress:
        result, model = _train(strategy, settings, directory, progress)
    text.draw(result.history, output / "curve.png")
    if strategy.rank == 0:
        report(result, model, settings, output / "curve.png")
    return 0


def report(
    result: TransformerResult, model: Any, settings: TransformerSettings, picture: Path
) -> None:
    """Let the model write, and print the summary."""
    last = result.history.last("held_out")
    written = generate(model, text.encoded(text.BEGIN), 400, settings.seed)
    print(f"\n{text.decoded(written)}\n")
    print(f"held-out loss       {last:.4f} nats per symbol")
    print(f"symbols per second  {result.rate:,.0f}")
    print(f"picture             {picture}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
