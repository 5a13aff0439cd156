"""Trains a small transformer of PyTorch on the source text of Python's standard library.

    python -m mpistrat.examples.language_model_torch
    mpistrat run -n 2 -m mpistrat.examples.language_model_torch --checkpoint run

The text is that of `mpistrat.examples.text`; model and step are PyTorch. Start it again with the
same ``--checkpoint``, at any number of ranks, and it continues where the last start stopped, and
further with more ``--steps``; the losses are the same at every number of ranks, to rounding.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mpistrat as ms
import mpistrat.torch as mt
from mpistrat.examples import text, text_data
from mpistrat.examples.settings import collect_fixed_settings, option, parse_settings

__all__ = ["Transformer", "TransformerSettings", "main", "measure_loss", "train", "train_step"]


@dataclass(frozen=True)
class TransformerSettings:
    """The options of the program."""

    steps: int = option(400, "updates of the weights", can_change=True)
    batch: int = option(32, "pieces of text in a global batch")
    length: int = option(128, "symbols in a piece of text, and how far back the model looks")
    channels: int = option(128, "width of the model, a multiple of the heads")
    heads: int = option(4, "of attention, in each layer")
    layers: int = option(3, "of the model")
    lr: float = option(2e-3, "largest learning rate, after a tenth of the updates; it falls")
    every: int = option(50, "updates between two validations; after each, the run is saved")
    seed: int = option(0, "of the first weights, the order of the pieces, the text written")
    checkpoint: str = option(
        "transformer", "directory of the run, from which it continues", can_change=True
    )


def compute_losses(model: Any, batch: torch.Tensor) -> Any:
    """Return the mean cross-entropy of each piece, (rows,), in nats per symbol."""
    batch = batch.long()
    scores = model(batch[:, :-1]).transpose(1, 2)
    return functional.cross_entropy(scores, batch[:, 1:], reduction="none").mean(1)


def train_step(model: Any, optimizer: mt.FusedOptimizer, batch: torch.Tensor) -> dict[str, Any]:
    """Train on this rank's part of a batch, which may be empty; return the loss of each piece."""
    losses = compute_losses(model, batch)
    losses.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": losses}


def measure_loss(model: Any, batch: torch.Tensor) -> dict[str, Any]:
    """Return the loss of each piece of this rank's part of a batch."""
    with torch.no_grad():
        return {"loss": compute_losses(model, batch)}


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
        self.embedding = nn.Embedding(text_data.SYMBOL_COUNT, channels)
        self.positions = nn.Parameter(torch.zeros(choices.length, channels))
        self.blocks = nn.Sequential(
            *[TransformerBlock(channels, choices.heads) for _ in range(choices.layers)]
        )
        self.norm = nn.LayerNorm(channels)
        self.scores = nn.Linear(channels, text_data.SYMBOL_COUNT, bias=False)
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
    """Return a model with random weights."""
    torch.manual_seed(choices.seed)
    return Transformer(choices)


def train(
    strategy: ms.Strategy, choices: TransformerSettings, verbose: bool = True
) -> tuple[Any, ms.History]:
    """Train on all ranks of `strategy`, or continue the run in ``choices.checkpoint``.

    Collective: all ranks call it, with the same settings.

    Returns:
      The model, and the curves ``loss`` and ``validation/loss`` by updates.
    """
    dataset, held_out_dataset = text_data.read_datasets(
        strategy, choices.length, choices.batch, choices.seed
    )
    model = mt.replicate(make_model(choices), strategy)
    warm_up_steps = max(choices.steps // 10, 1)
    decay_steps = max(choices.steps - warm_up_steps, 1)
    rate = ms.optim.Cosine(choices.lr, decay_steps, choices.lr / 10)
    adam = ms.optim.AdamW(
        ms.optim.WarmUp(rate, warm_up_steps), beta_2=0.98, clip=ms.optim.ClipByGlobalNorm(1.0)
    )
    optimizer = mt.FusedOptimizer(model, adam)
    history = ms.fit(
        functools.partial(train_step, model, optimizer),
        mt.batches(dataset, strategy),
        steps=choices.steps,
        state={"model": model, "optimizer": optimizer},
        validate=functools.partial(measure_loss, model),
        validation_data=mt.batches(held_out_dataset, strategy),
        validate_every=f"{choices.every} steps",
        directory=choices.checkpoint,
        settings=collect_fixed_settings(choices),
        strategy=strategy,
        verbose=verbose,
    )
    return model, history


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
    module = "mpistrat.examples.language_model_torch"
    choices = parse_settings(TransformerSettings, module, str(__doc__), argv)
    strategy = ms.MultiWorkerMirroredStrategy()
    model, history = train(strategy, choices)
    if strategy.is_chief:
        prompt = text_data.encode_text(text.PROMPT)
        symbols = generate_symbols(model, prompt, 400, choices.seed)
        print(f"\n{text_data.decode_symbols(symbols)}\n")
    last_loss = history.last("validation/loss")
    strategy.print(text.format_report(last_loss, history, choices.batch * choices.length))
    strategy.print(f"ranks               {strategy.num_replicas_in_sync}")
    strategy.print(f"directory           {choices.checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
