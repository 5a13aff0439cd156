"""Trains a small transformer of PyTorch on the source text of Python's standard library.

    python -m mpistrat.examples.language_model_torch
    mpistrat run -n 2 -m mpistrat.examples.language_model_torch --checkpoint run

The text, the evaluation and what is written are those of `mpistrat.examples.text`; model and loop
are PyTorch. Start it again with the same ``--checkpoint``, at any number of ranks, and it continues
where the last start stopped, and further with more ``--steps``; the losses are the same at every
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
from mpistrat.examples.settings import ProgressBar, parse_options, restore_run, saving_before_end

__all__ = ["TransformerResult", "TransformerSettings", "main", "train"]


class TransformerSettings(NamedTuple):
    """The options of the program; `OPTION_HELP` explains each."""

    steps: int = 400
    batch: int = 32
    length: int = 128
    channels: int = 128
    heads: int = 4
    layers: int = 3
    lr: float = 2e-3
    every: int = 50
    seed: int = 0


OPTION_HELP = {
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


FIXED_SETTINGS = ("batch", "length", "channels", "heads", "layers", "lr", "every", "seed")


class TransformerResult(NamedTuple):
    """The result of training.

    Attributes:
      history: At each evaluation, by the updates until then: ``training`` loss since the last
        evaluation, and loss on the ``held_out`` text, both in nats per symbol.
      losses: The loss of each update of this start.
      symbols_per_second: Symbols per second that all ranks together have trained on; 0 without an
        update.
    """

    history: ms.History
    losses: list[float]
    symbols_per_second: float


class TransformerBlock(nn.Module):
    """Attention to earlier symbols, then two linear layers; each added to its input."""

    def __init__(self, channels: int, heads: int):
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.queries_keys_values = nn.Linear(channels, 3 * channels)
        self.attention_output = nn.Linear(channels, channels)
        self.expand, self.contract = (
            nn.Linear(channels, 4 * channels),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, length, channels)."""
        row_count, length, channels = x.shape
        stacked = self.queries_keys_values(self.attention_norm(x)).view(
            row_count, length, 3, self.heads, channels // self.heads
        )
        q, k, v = stacked.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).reshape(row_count, length, channels))
        return x + self.contract(functional.gelu(self.expand(self.feedforward_norm(x))))


class Transformer(nn.Module):
    """Expects the next symbol at each place of a text (Radford and others, "GPT-2", 2019)."""

    def __init__(self, choices: TransformerSettings):
        """Make the layers; the first and the last have their weight in common."""
        super().__init__()
        channels = choices.channels
        self.embedding = nn.Embedding(text.SYMBOL_COUNT, channels)
        self.positions = nn.Parameter(torch.zeros(choices.length, channels))
        self.blocks = nn.Sequential(
            *[TransformerBlock(channels, choices.heads) for _ in range(choices.layers)]
        )
        self.norm = nn.LayerNorm(channels)
        self.scores = nn.Linear(channels, text.SYMBOL_COUNT, bias=False)
        nn.init.normal_(self.scores.weight, std=0.02)
        self.embedding.weight = self.scores.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of all symbols at each place.

        Args:
          x: (rows, length), numbers of symbols.
        """
        hidden = self.embedding(x) + self.positions[: x.shape[1]]
        return self.scores(self.norm(self.blocks(hidden)))


def make_model(choices: TransformerSettings) -> Transformer:
    """Return a model with random weights, of the seed of the settings."""
    torch.manual_seed(choices.seed)
    return Transformer(choices)


def compute_loss(model: Any, batch: torch.Tensor) -> Any:
    """Return the mean cross-entropy of the symbols that follow, in nats."""
    batch = batch.long()
    scores = model(batch[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


class _Training:
    """The model and the state of its training. Collective: making it is."""

    def __init__(
        self,
        strategy: ms.Strategy,
        choices: TransformerSettings,
        directory: Path,
        dataset: ms.Dataset,
    ):
        """Make the model, and restore the newest checkpoint of the directory."""
        self.strategy = strategy
        self.model = mt.replicate(make_model(choices), strategy)
        warm_up_steps = max(choices.steps // 10, 1)
        decay = ms.optim.Cosine(choices.lr, max(choices.steps - warm_up_steps, 1), choices.lr / 10)
        self.optimizer = mt.FusedOptimizer(
            self.model,
            ms.optim.AdamW(
                ms.optim.WarmUp(decay, warm_up_steps),
                beta_2=0.98,
                clip=ms.optim.ClipByGlobalNorm(1.0),
            ),
        )
        with strategy.scope():
            self.history = ms.History()
        checkpoint = ms.Checkpoint(
            model=self.model, optimizer=self.optimizer, history=self.history, data=dataset, step=0
        )
        self.manager = ms.CheckpointManager(
            checkpoint, directory, max_to_keep=3, every=f"{choices.every} steps"
        )
        self.is_continued = restore_run(
            self.manager, {name: getattr(choices, name) for name in FIXED_SETTINGS}
        )

    @property
    def update_count(self) -> int:
        """How many updates were made, in all starts together."""
        return int(self.optimizer.optimizer.iterations)

    def compute_means(self, losses: Sequence[tuple[float, int]]) -> list[float]:
        """Return the means over the rows of all ranks, of losses and rows of this one."""
        pairs = np.array(
            [(loss * row_count if row_count else 0.0, row_count) for loss, row_count in losses]
        )
        sums = self.strategy.all_reduce("SUM", pairs)
        means: list[float] = (sums[:, 0] / sums[:, 1]).tolist()
        return means

    def train_batch(self, batch: torch.Tensor) -> tuple[float, int]:
        """Train on a batch, and return the loss of this rank's rows, and how many they are."""
        loss = compute_loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.manager.checkpoint.step = self.update_count
        return loss.item(), len(batch)

    def compute_test_loss(self, batches: Any) -> float:
        """Return the mean loss of batches."""
        with torch.no_grad():
            batch_losses = [
                (compute_loss(self.model, batch).item() if len(batch) else 0.0, len(batch))
                for batch in batches
            ]
        sums = np.array([(loss * row_count, row_count) for loss, row_count in batch_losses]).sum(0)
        total, row_count = self.strategy.all_reduce("SUM", sums)
        return float(total / row_count)

    def evaluate(self, batch_losses: Sequence[tuple[float, int]], test_batches: Any) -> list[float]:
        """Record the mean losses in training and on the held-out text.

        Args:
          batch_losses: The results of `train_batch` since the last evaluation.
          test_batches: The batches of the held-out text.

        Returns:
          The loss of each update since the last evaluation.
        """
        losses = self.compute_means(batch_losses)
        test_loss = self.compute_test_loss(test_batches)
        self.history.append(self.update_count, training=np.mean(losses), held_out=test_loss)
        return losses


def train(
    strategy: ms.Strategy,
    choices: TransformerSettings,
    directory: Path,
    progress: ProgressBar | None = None,
) -> TransformerResult:
    """Train on all ranks of `strategy`, or continue from the checkpoint in `directory`.

    Collective: all ranks call it, with the same settings.
    """
    return _train(strategy, choices, directory, progress)[0]


def _train(
    strategy: ms.Strategy,
    choices: TransformerSettings,
    directory: Path,
    progress: ProgressBar | None,
) -> tuple[TransformerResult, Any]:
    progress = progress or ProgressBar(0, is_shown=False)
    endless, test_dataset = text.read_datasets(
        strategy, length=choices.length, batch=choices.batch, seed=choices.seed
    )
    batches, test_batches = mt.batches(endless, strategy), mt.batches(test_dataset, strategy)
    training = _Training(strategy, choices, directory, endless)
    if training.is_continued:
        progress.print_line(
            f"continues after update {training.update_count}, as saved in {directory}"
        )
    losses: list[float] = []
    batch_losses: list[tuple[float, int]] = []
    seconds, symbols_per_second, start_time = 0.0, 0.0, time.perf_counter()
    with saving_before_end(training.manager):
        for batch in training.manager.resume(batches):
            # Asked before the batch is used, which does not count then.
            if training.update_count >= choices.steps:
                break
            batch_losses.append(training.train_batch(batch))
            progress.advance()
            if training.update_count % choices.every and training.update_count < choices.steps:
                continue
            seconds += time.perf_counter() - start_time
            losses += training.evaluate(batch_losses, test_batches)
            batch_losses = []
            symbols_per_second = len(losses) * choices.batch * choices.length / seconds
            evaluation = training.history.table()[-1]
            line = text.format_evaluation(evaluation, choices.steps, symbols_per_second)
            progress.print_line(line)
            start_time = time.perf_counter()
    is_saved = not (training.is_continued or training.update_count % choices.every)
    if losses and not is_saved:
        training.manager.save()
    return TransformerResult(training.history, losses, symbols_per_second), training.model


def generate_symbols(
    model: Any, prompt: Any, new_count: int, seed: int, temperature: float = 0.7
) -> Any:
    """Return `prompt` and `new_count` more symbols, drawn with the model's probabilities."""
    generator, symbols = torch.Generator().manual_seed(seed), torch.tensor(prompt).long()[None]
    context_length = len(model.positions)
    with torch.no_grad():
        for _ in range(new_count):
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
    for name, default in TransformerSettings()._asdict().items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=OPTION_HELP[name]
        )
    option_values, output_directory, checkpoint_directory = parse_options(
        parser, "transformer", argv
    )
    choices, strategy = (TransformerSettings(**option_values), ms.MultiWorkerMirroredStrategy())
    strategy.run(text.check_packages)
    with ProgressBar(choices.steps, strategy.rank == 0) as progress:
        result, model = _train(strategy, choices, checkpoint_directory, progress)
    text.draw_curves(result.history, output_directory / "curve.png")
    if strategy.rank == 0:
        print_report(result, model, choices, output_directory / "curve.png")
    return 0


def print_report(
    training_result: TransformerResult, model: Any, choices: TransformerSettings, picture_path: Path
) -> None:
    """Let the model write, and print the summary."""
    last_loss = training_result.history.last("held_out")
    symbols = generate_symbols(model, text.encode_text(text.PROMPT), 400, choices.seed)
    print(f"\n{text.decode_symbols(symbols)}\n")
    print(f"held-out loss       {last_loss:.4f} nats per symbol")
    print(f"symbols per second  {training_result.symbols_per_second:,.0f}")
    print(f"picture             {picture_path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
