"""Trains a language model on the source text of Python's standard library, and lets it write.

    python -m mpistrat.examples.text
    mpistrat run -n 2 -m mpistrat.examples.text --checkpoint run

It has all parts of a longer training run: schedule, clipping, accumulation, a moving average of the
weights, evaluation, early stopping, and checkpoints. Start it again with the same ``--checkpoint``,
at any number of ranks, and it continues where the last start stopped, and further with more
``--steps``.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mpistrat as ms
from mpistrat.examples import text_model
from mpistrat.examples.settings import (
    ProgressBar,
    parse_count,
    parse_options,
    restore_run,
    saving_before_end,
)

__all__ = [
    "HELD_OUT_MODULES",
    "TRAINING_MODULES",
    "TextResult",
    "TextSettings",
    "decode_symbols",
    "encode_text",
    "main",
    "train",
]

TRAINING_MODULES = (
    *("argparse", "ast", "base64", "bdb", "cmd", "collections", "configparser", "contextlib"),
    *("copy", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "fileinput", "fractions"),
    *("ftplib", "functools", "gettext", "gzip", "hashlib", "heapq", "imaplib", "inspect"),
    *("ipaddress", "mailbox", "mimetypes", "optparse", "pdb", "pickle", "pickletools", "platform"),
    *("plistlib", "poplib", "pprint", "profile", "pstats", "pydoc", "queue", "random", "sched"),
    *("selectors", "shelve", "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics"),
    *("subprocess", "tarfile", "tempfile", "threading", "timeit", "tokenize", "trace"),
    *("traceback", "typing", "uuid", "weakref", "webbrowser", "zipapp"),
)
HELD_OUT_MODULES = ("calendar", "glob", "numbers", "shlex", "textwrap")
INDENT = "\x7f"  # four spaces, as one symbol: the model would lose count of single ones
SYMBOL_COUNT = 97  # the end of a line, printable ASCII, and INDENT
REQUIRED_PACKAGES = ("matplotlib", "tqdm")
PROMPT = "def "  # of the text that the model writes


class TextSettings(NamedTuple):
    """The options of the program; `OPTION_HELP` explains each."""

    steps: int = 600
    batch: int = 32
    accumulate: int = 2
    length: int = 128
    channels: int = 128
    layers: int = 7
    lr: float = 4e-3
    every: int = 50
    patience: int = 4
    seed: int = 0
    dtype: str = "float32"


OPTION_HELP = {
    "steps": "updates of the weights",
    "batch": "pieces of text in a global batch",
    "accumulate": "batches that make an update",
    "length": "symbols in a piece of text",
    "channels": "width of the model",
    "layers": "of the model; n of them see the last 2^n symbols",
    "lr": "largest learning rate, after a tenth of the steps; it ends at a hundredth of it",
    "every": "updates between two evaluations; after each, a checkpoint is saved",
    "patience": "evaluations without a new lowest loss after which training stops",
    "seed": "of the first weights, the order of the pieces and the text that is written",
    "dtype": "of the weights: float32 or float64",
}
FIXED_SETTINGS = (
    "batch",
    "accumulate",
    "length",
    "channels",
    "layers",
    "lr",
    "every",
    "seed",
    "dtype",
)
OPTION_TYPES = {"lr": float, "seed": int, "dtype": str}  # others are counts


class TextResult(NamedTuple):
    """The result of training.

    Attributes:
      weights: The moving average of the parameters, NumPy arrays, on every rank the same.
      history: At each evaluation, by the updates until then: ``training`` loss since the last
        evaluation, and loss on the ``held_out`` text, both in nats per symbol.
      symbols_per_second: Symbols per second that all ranks together have trained on; a median, 0 if
        there was nothing to do.
    """

    weights: dict[str, Any]
    history: ms.History
    symbols_per_second: float


def encode_text(text: str) -> Any:
    r"""Return the numbers of the symbols of a text, uint8.

    Example:
      >>> encode_text("a = 1\n")
      array([66,  1, 30,  1, 18,  0], dtype=uint8)
      >>> decode_symbols(encode_text("    é\n"))
      '    ?\n'
    """
    ascii_bytes = text.expandtabs().replace(" " * 4, INDENT).encode("ascii", "replace")
    return np.clip(np.frombuffer(ascii_bytes, np.uint8), 31, 127) - np.uint8(31)


def decode_symbols(symbols: Iterable[int]) -> str:
    """Return the text that numbers of symbols stand for."""
    text = "".join(chr(symbol + 31) if symbol else "\n" for symbol in symbols)
    return text.replace(INDENT, " " * 4)


def read_source(module: str) -> Any:
    """Return the source text of a module, as numbers of symbols.

    Raises:
      ImportError: There is no such module, or not its source.
    """
    spec = importlib.util.find_spec(module)
    loader: Any = spec.loader if spec else None
    text = loader.get_source(module) if hasattr(loader, "get_source") else None
    if text is None:
        raise ImportError(
            f"This example reads the source text of Python's module {module!r}, which "
            f"{sys.executable} does not have. Use a Python with the source of its whole standard "
            "library."
        )
    return encode_text(text)


def read_pieces(strategy: ms.Strategy, modules: Sequence[str], length: int) -> Any:
    """Return the text of modules, cut into pieces: (pieces, length + 1), uint8.

    Each piece begins with the last symbol of the one before it, because the model is asked for the
    symbol that follows.

    Collective: that all ranks have read the same text is checked; another version of Python on one
    rank is an error on all.
    """
    symbols_by_module: dict[str, Any] = {}
    strategy.run(
        lambda: symbols_by_module.update({module: read_source(module) for module in modules})
    )
    strategy.check_same(symbols_by_module)
    symbols = np.concatenate(list(symbols_by_module.values()))
    piece_starts = np.arange(0, len(symbols) - length, length)
    return symbols[piece_starts[:, None] + np.arange(length + 1)]


def is_stale(losses: Sequence[float] | text_model.Array, patience: int) -> bool:
    """Return whether the best loss is so many evaluations ago that training is to stop.

    Example:
      >>> is_stale([3.0, 2.0, 2.5], 2), is_stale([3.0, 2.0, 2.5, 2.1], 2), is_stale([], 2)
      (False, True, False)
    """
    return len(losses) > 0 and len(losses) - 1 - int(np.argmin(losses)) >= patience


class Trainer:
    """The model and the state of its training, as variables of a strategy.

    Collective: making it is, and so are its methods.

    Args:
      strategy: On whose replicas.
      choices: The same on all ranks.
      directory: Where checkpoints are; if there is one, the newest is restored.
      dataset: The text to train on; its place is saved.
    """

    def __init__(
        self,
        strategy: ms.Strategy,
        choices: TextSettings,
        directory: Path,
        dataset: ms.Dataset | None = None,
    ):
        """Create the variables, and restore them."""
        self.strategy, self.choices = strategy, choices
        model_options = (choices.channels, choices.layers, choices.seed, choices.dtype)
        with strategy.scope():
            self.model = {
                name: ms.Variable(value, name=name)
                for name, value in text_model.make_parameters(SYMBOL_COUNT, *model_options).items()
            }
            self.best_weights = {name: ms.Variable(value) for name, value in self.model.items()}
            self.history = ms.History()
            self.mean_loss = ms.metrics.Mean(name="loss")
        warm_up_steps = max(choices.steps // 10, 1)
        decay = ms.optim.Cosine(choices.lr, max(choices.steps - warm_up_steps, 1), choices.lr / 100)
        self.optimizer = ms.optim.AdamW(
            ms.optim.WarmUp(decay, warm_up_steps),
            weight_decay=0.05,
            groups=[ms.optim.Group("*bias*", weight_decay=0.0)],
            clip=ms.optim.ClipByGlobalNorm(1.0),
            accumulate=choices.accumulate,
            ema=0.98,
        )
        self.optimizer.build(self.model.values())
        self.gradients = strategy.gradient_buffers(self.model)
        training_state = {"model": self.model, "optimizer": self.optimizer, "loss": self.mean_loss}
        checkpoint = ms.Checkpoint(
            **training_state, best=self.best_weights, history=self.history, data=dataset, step=0
        )
        save_interval = f"{choices.every * choices.accumulate} steps"
        self.manager = ms.CheckpointManager(
            checkpoint, directory, max_to_keep=2, every=save_interval
        )
        self.is_continued = restore_run(
            self.manager, {name: getattr(choices, name) for name in FIXED_SETTINGS}
        )

    @property
    def update_count(self) -> int:
        """How many updates were made, in all starts together."""
        return int(self.optimizer.iterations)

    @property
    def is_finished(self) -> bool:
        """Whether all updates were made, or no evaluation gets better."""
        has_stalled = self.history.names and is_stale(
            self.history["held_out"][1], self.choices.patience
        )
        return bool(self.update_count >= self.choices.steps or has_stalled)

    def train_batch(self, batch: text_model.Array) -> bool:
        """Train on a global batch; return whether it is time to evaluate."""
        previous_updates = self.update_count
        self.strategy.run(self._train_step, args=(batch,))
        self.manager.checkpoint.step = self.update_count
        is_evaluation_due = (
            self.update_count % self.choices.every == 0 or self.update_count == self.choices.steps
        )
        return is_evaluation_due and self.update_count > previous_updates

    def take_mean_loss(self) -> float:
        """Return the mean loss since the call before, and begin anew."""
        mean = float(self.mean_loss.result())
        self.mean_loss.reset_state()
        return mean

    @property
    def averaged_weights(self) -> dict[str, Any]:
        """The moving averages of the weights."""
        return {name: self.optimizer.average(value) for name, value in self.model.items()}

    def compute_test_loss(self, batches: Iterable[Any]) -> float:
        """Return the mean loss of the averaged weights."""
        average = self.averaged_weights
        for batch in batches:
            self.strategy.run(self._test_step, args=(average, batch))
        return self.take_mean_loss()

    def evaluate(self, batches: Iterable[Any]) -> None:
        """Record the mean losses in training and of the averaged weights; keep the best weights."""
        self.history.append(
            self.update_count,
            training=self.take_mean_loss(),
            held_out=self.compute_test_loss(batches),
        )
        losses = self.history["held_out"][1]
        if np.argmin(losses) == len(losses) - 1:
            for name, value in self.averaged_weights.items():
                self.best_weights[name].assign(value)

    def _train_step(self, batch: text_model.Array) -> None:
        """Train on this replica's part of a batch, which may be empty; replica code."""
        weights = {name: np.asarray(value) for name, value in self.model.items()}
        loss = text_model.compute_gradients(weights, batch[:, :-1], batch[:, 1:], self.gradients)
        self.mean_loss.update_state(loss)
        pairs = [(self.gradients[name], value) for name, value in self.model.items()]
        self.optimizer.apply_gradients(pairs, weight=len(batch))

    def _test_step(self, model: text_model.Parameters, batch: text_model.Array) -> None:
        """Record the losses of this replica's part of a batch; replica code."""
        weights = {name: np.asarray(value) for name, value in model.items()}
        self.mean_loss.update_state(text_model.compute_losses(weights, batch[:, :-1], batch[:, 1:]))


def read_datasets(
    strategy: ms.Strategy, *, length: int, batch: int, seed: int
) -> tuple[ms.Dataset, ms.Dataset]:
    """Return batches to train on, without end, and batches to test with. Collective."""
    training_pieces = read_pieces(strategy, TRAINING_MODULES, length)
    test_pieces = read_pieces(strategy, HELD_OUT_MODULES, length)
    endless = ms.Dataset(training_pieces).shuffle(seed=seed).repeat().batch(batch)
    return endless, ms.Dataset(test_pieces).batch(batch)


def train(
    strategy: ms.Strategy,
    choices: TextSettings,
    directory: Path,
    progress: ProgressBar | None = None,
) -> TextResult:
    """Train on all replicas of `strategy`, or continue from the checkpoint in `directory`.

    Collective: all ranks call it, with the same settings.
    """
    progress = progress or ProgressBar(0, is_shown=False)
    endless, test_dataset = read_datasets(
        strategy, length=choices.length, batch=choices.batch, seed=choices.seed
    )
    strategy.run(lambda: directory.mkdir(parents=True, exist_ok=True))  # or fail before training
    batches, test_batches = map(strategy.experimental_distribute_dataset, (endless, test_dataset))
    trainer, rates = Trainer(strategy, choices, directory, endless), []
    if trainer.is_continued:
        progress.print_line(
            f"continues after update {trainer.update_count}, as saved in {directory}"
        )
    start_time, batch_count = time.perf_counter(), 0
    with saving_before_end(trainer.manager):
        for batch in trainer.manager.resume(batches):
            if trainer.is_finished:  # checked before the batch is used, so it does not count
                break
            batch_count += 1
            is_evaluation_due = trainer.train_batch(batch)
            progress.advance()
            if is_evaluation_due:
                seconds = time.perf_counter() - start_time
                rates.append(batch_count * choices.batch * choices.length / seconds)
                trainer.evaluate(test_batches)
                progress.print_line(
                    format_evaluation(trainer.history.table()[-1], choices.steps, rates[-1])
                )
                start_time, batch_count = time.perf_counter(), 0
    is_saved = not (trainer.is_continued or trainer.update_count % choices.every)
    if rates and not is_saved:
        trainer.manager.save()
    best_weights = {name: value.numpy() for name, value in trainer.best_weights.items()}
    return TextResult(best_weights, trainer.history, statistics.median(rates or [0.0]))


def format_evaluation(
    evaluation: text_model.Array, step_count: int, symbols_per_second: float
) -> str:
    """Return the line about one evaluation."""
    update_count, training_loss, held_out_loss = evaluation
    return (
        f"update {int(update_count):{len(str(step_count))}} of {step_count}   training loss "
        f"{training_loss:.4f}   "
        f"held-out loss {held_out_loss:.4f}   {symbols_per_second:,.0f} symbols/s"
    )


def _parse_settings(argv: Sequence[str] | None) -> tuple[TextSettings, Path, Path]:
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.text",
        description="Train a language model on Python's source text, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in TextSettings()._asdict().items():
        option_type = OPTION_TYPES.get(name, parse_count)
        parser.add_argument(f"--{name}", type=option_type, default=default, help=OPTION_HELP[name])
    option_values, output_directory, checkpoint_directory = parse_options(parser, "text", argv)
    return TextSettings(**option_values), output_directory, checkpoint_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    choices, output_directory, checkpoint_directory = _parse_settings(argv)
    strategy = ms.MirroredStrategy()
    strategy.run(check_packages)
    with ProgressBar(choices.steps * choices.accumulate, strategy.rank == 0) as progress:
        result = train(strategy, choices, checkpoint_directory, progress)
    picture_path = output_directory / "curve.png"
    draw_curves(result.history, picture_path)
    report_arguments = (result, choices, strategy.num_replicas_in_sync, picture_path)
    # An error in the report is raised on all ranks.
    strategy.run(lambda: print_report(*report_arguments) if strategy.rank == 0 else None)
    return 0


def draw_curves(history: ms.History, picture_path: Path) -> None:
    """Draw the curves. Collective."""
    title = f"Python's source text: held-out loss {history['held_out'][1].min():.3f}"
    panels = {"mean cross-entropy (nats per symbol)": ["training", "held_out"]}
    history.draw(picture_path, panels, title=title, x="updates")


def check_packages() -> None:
    """Raise ImportError unless the packages for the end of the program are installed here."""
    if missing := [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]:
        names = " and ".join(missing)
        raise ImportError(f"This example needs {names}: pip install 'mpistrat[examples]'")


def print_report(
    training_result: TextResult, choices: TextSettings, rank_count: int, picture_path: Path
) -> None:
    """Let the model write, and print the summary."""
    best_loss = training_result.history["held_out"][1].min()
    text = text_model.generate_symbols(
        training_result.weights, encode_text(PROMPT), 600, choices.seed
    )
    print(f"\n{decode_symbols(text)}\n")
    print(f"held-out loss       {best_loss:.4f} nats per symbol")
    rate = (
        f"{training_result.symbols_per_second:,.0f} (median)"
        if training_result.symbols_per_second
        else "no update was left to do"
    )
    print(f"symbols per second  {rate}")
    print(f"ranks               {rank_count}")
    print(f"picture             {picture_path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
