"""Trains a language model on the source text of Python's standard library, and lets it write.

    python -m mpistrat.examples.text
    mpistrat run -n 2 -m mpistrat.examples.text --checkpoint run

All that a longer training run wants is here: schedule, clipping, accumulation, a moving average of
the weights, evaluation, early stopping, and checkpoints. Who starts it again with the same
``--checkpoint`` continues where the last start stopped, at any number of ranks, and further with
more ``--steps``.
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
from mpistrat.examples.settings import ProgressBar, begun, count, leaving, parsed

__all__ = [
    "HELD_OUT",
    "TRAINING",
    "TextResult",
    "TextSettings",
    "decoded",
    "encoded",
    "main",
    "train",
]

TRAINING = (
    *("argparse", "ast", "base64", "bdb", "cmd", "collections", "configparser", "contextlib"),
    *("copy", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "fileinput", "fractions"),
    *("ftplib", "functools", "gettext", "gzip", "hashlib", "heapq", "imaplib", "inspect"),
    *("ipaddress", "mailbox", "mimetypes", "optparse", "pdb", "pickle", "pickletools", "platform"),
    *("plistlib", "poplib", "pprint", "profile", "pstats", "pydoc", "queue", "random", "sched"),
    *("selectors", "shelve", "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics"),
    *("subprocess", "tarfile", "tempfile", "threading", "timeit", "tokenize", "trace"),
    *("traceback", "typing", "uuid", "weakref", "webbrowser", "zipapp"),
)
HELD_OUT = ("calendar", "glob", "numbers", "shlex", "textwrap")
INDENT = "\x7f"  # four spaces, as one symbol: the model would lose count of single ones
SYMBOLS = 97  # the end of a line, printable ASCII, and INDENT
NEEDED = ("matplotlib", "tqdm")
BEGIN = "def "  # of the text that the model writes


class TextSettings(NamedTuple):
    """What a user may choose; `MEANINGS` says what each is."""

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


MEANINGS = {
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
SAME = ("batch", "accumulate", "length", "channels", "layers", "lr", "every", "seed", "dtype")
KINDS = {"lr": float, "seed": int, "dtype": str}  # others are counts


class TextResult(NamedTuple):
    """What training came to.

    Attributes:
      weights: The moving average of the parameters, NumPy arrays, on every rank the same.
      history: At each evaluation, by the updates until then: ``training`` loss since the last
        evaluation, and loss on the ``held_out`` text, both in nats per symbol.
      rate: Symbols per second that all ranks together have trained on; a median, 0 if there was
        nothing to do.
    """

    weights: dict[str, Any]
    history: ms.History
    rate: float


def encoded(text: str) -> Any:
    r"""Return the numbers of the symbols of a text, uint8.

    Example:
      >>> encoded("a = 1\n")
      array([66,  1, 30,  1, 18,  0], dtype=uint8)
      >>> decoded(encoded("    é\n"))
      '    ?\n'
    """
    ascii_bytes = text.expandtabs().replace(" " * 4, INDENT).encode("ascii", "replace")
    return np.clip(np.frombuffer(ascii_bytes, np.uint8), 31, 127) - np.uint8(31)


def decoded(symbols: Iterable[int]) -> str:
    """Return the text that numbers of symbols stand for."""
    text = "".join(chr(symbol + 31) if symbol else "\n" for symbol in symbols)
    return text.replace(INDENT, " " * 4)


def source(module: str) -> Any:
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
    return encoded(text)


def read(strategy: ms.Strategy, modules: Sequence[str], length: int) -> Any:
    """Return the text of modules, cut into pieces: (pieces, length + 1), uint8.

    Each piece begins with the last symbol of the one before it, because the model is asked for the
    symbol that follows.

    Collective: that all ranks have read the same text is checked; another version of Python on one
    rank is an error on all.
    """
    texts: dict[str, Any] = {}
    strategy.run(lambda: texts.update({module: source(module) for module in modules}))
    strategy.check_same(texts)
    symbols = np.concatenate(list(texts.values()))
    begins = np.arange(0, len(symbols) - length, length)
    return symbols[begins[:, None] + np.arange(length + 1)]


def is_stale(losses: Any, patience: int) -> bool:
    """Tell whether the best loss is so many evaluations ago that training is to stop.

    Example:
      >>> is_stale([3.0, 2.0, 2.5], 2), is_stale([3.0, 2.0, 2.5, 2.1], 2), is_stale([], 2)
      (False, True, False)
    """
    return len(losses) > 0 and len(losses) - 1 - int(np.argmin(losses)) >= patience


class Trainer:
    """The model with all that its training needs and changes, as variables of a strategy.

    Collective: making it is, and so are its methods but `rows`.

    Args:
      strategy: On whose replicas.
      settings: The same on all ranks.
      directory: Where checkpoints are; if there is one, the newest is restored.
      pieces: The text to train on; its place is saved.
    """

    def __init__(
        self, strategy: ms.Strategy, settings: TextSettings, directory: Path, pieces: Any = None
    ):
        """Create the variables, and restore them."""
        self.strategy, self.settings = strategy, settings
        initial_options = (settings.channels, settings.layers, settings.seed, settings.dtype)
        with strategy.scope():
            self.model = {
                name: ms.Variable(value, name=name)
                for name, value in text_model.initial(SYMBOLS, *initial_options).items()
            }
            self.best = {name: ms.Variable(value) for name, value in self.model.items()}
            self.history = ms.History()
            self.loss = ms.metrics.Mean(name="loss")
        warm = max(settings.steps // 10, 1)
        fall = ms.optim.Cosine(settings.lr, max(settings.steps - warm, 1), settings.lr / 100)
        self.optimizer = ms.optim.AdamW(
            ms.optim.WarmUp(fall, warm),
            weight_decay=0.05,
            groups=[ms.optim.Group("*bias*", weight_decay=0.0)],
            clip=ms.optim.ClipByGlobalNorm(1.0),
            accumulate=settings.accumulate,
            ema=0.98,
        )
        self.optimizer.build(self.model.values())
        self.gradients = strategy.gradient_buffers(self.model)
        state = {"model": self.model, "optimizer": self.optimizer, "loss": self.loss}
        saved = ms.Checkpoint(**state, best=self.best, history=self.history, data=pieces, step=0)
        save_interval = f"{settings.every * settings.accumulate} steps"
        self.manager = ms.CheckpointManager(saved, directory, max_to_keep=2, every=save_interval)
        self.goes_on = begun(self.manager, {name: getattr(settings, name) for name in SAME})

    @property
    def done(self) -> int:
        """How many updates were made, in all starts together."""
        return int(self.optimizer.iterations)

    @property
    def over(self) -> bool:
        """Whether all updates were made, or no evaluation gets better."""
        stale = self.history.names and is_stale(self.history["held_out"][1], self.settings.patience)
        return bool(self.done >= self.settings.steps or stale)

    def learn(self, batch: Any) -> bool:
        """Train on a global batch; return whether it is time to evaluate."""
        previous_updates = self.done
        self.strategy.run(self._step, args=(batch,))
        self.manager.checkpoint.step = self.done
        is_evaluation_due = self.done % self.settings.every == 0 or self.done == self.settings.steps
        return is_evaluation_due and self.done > previous_updates

    def mean(self) -> float:
        """Return the mean loss since this was asked before."""
        mean = float(self.loss.result())
        self.loss.reset_state()
        return mean

    @property
    def average(self) -> dict[str, Any]:
        """The moving averages of the weights."""
        return {name: self.optimizer.average(value) for name, value in self.model.items()}

    def judge(self, batches: Iterable[Any]) -> float:
        """Return the mean loss of the averaged weights."""
        average = self.average
        for batch in batches:
            self.strategy.run(self._score, args=(average, batch))
        return self.mean()

    def evaluate(self, batches: Iterable[Any]) -> None:
        """Note the mean losses in training and of the averaged weights; remember the best ones."""
        self.history.append(self.done, training=self.mean(), held_out=self.judge(batches))
        losses = self.history["held_out"][1]
        if np.argmin(losses) == len(losses) - 1:
            for name, value in self.average.items():
                self.best[name].assign(value)

    def _step(self, batch: Any) -> None:
        """Learn from this replica's part of a batch, which may be empty; replica code."""
        weights = {name: np.asarray(value) for name, value in self.model.items()}
        loss = text_model.gradients(weights, batch[:, :-1], batch[:, 1:], self.gradients)
        self.loss.update_state(loss)
        pairs = [(self.gradients[name], value) for name, value in self.model.items()]
        self.optimizer.apply_gradients(pairs, weight=len(batch))

    def _score(self, model: Any, batch: Any) -> None:
        """Judge this replica's part of a batch; replica code."""
        weights = {name: np.asarray(value) for name, value in model.items()}
        self.loss.update_state(text_model.losses(weights, batch[:, :-1], batch[:, 1:]))


def train(
    strategy: ms.Strategy,
    settings: TextSettings,
    directory: Path,
    progress: ProgressBar | None = None,
) -> TextResult:
    """Train on all replicas of `strategy`, or continue with what is saved in `directory`.

    Collective: all ranks call it, with the same settings.
    """
    progress = progress or ProgressBar(0, shown=False)
    pieces = ms.Dataset(read(strategy, TRAINING, settings.length))
    test_pieces = ms.Dataset(read(strategy, HELD_OUT, settings.length)).batch(settings.batch)
    strategy.run(lambda: directory.mkdir(parents=True, exist_ok=True))  # or fail before training
    endless = pieces.shuffle(seed=settings.seed).repeat().batch(settings.batch)
    batches = strategy.experimental_distribute_dataset(endless)
    tests = strategy.experimental_distribute_dataset(test_pieces)
    trainer, rates = Trainer(strategy, settings, directory, endless), []
    if trainer.goes_on:
        progress.say(f"continues after update {trainer.done}, as saved in {directory}")
    begin, calls = time.perf_counter(), 0
    with leaving(trainer.manager):
        for batch in trainer.manager.resume(batches):
            if trainer.over:  # asked before the batch is used, which does not count then
                break
            calls += 1
            evaluate = trainer.learn(batch)
            progress.step()
            if evaluate:
                seconds = time.perf_counter() - begin
                rates.append(calls * settings.batch * settings.length / seconds)
                trainer.evaluate(tests)
                progress.say(line(trainer.history.table()[-1], settings.steps, rates[-1]))
                begin, calls = time.perf_counter(), 0
    if rates and (trainer.goes_on or trainer.done % settings.every):  # else the last state is saved
        trainer.manager.save()
    best = {name: value.numpy() for name, value in trainer.best.items()}
    return TextResult(best, trainer.history, statistics.median(rates or [0.0]))


def line(row: Any, steps: int, rate: float) -> str:
    """Return what is printed about one evaluation."""
    done, training_loss, held_out_loss = row
    return (
        f"update {int(done):{len(str(steps))}} of {steps}   training loss {training_loss:.4f}   "
        f"held-out loss {held_out_loss:.4f}   {rate:,.0f} symbols/s"
    )


def _options(argv: Sequence[str] | None) -> tuple[TextSettings, Path, Path]:
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.text",
        description="Train a language model on Python's source text, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, usual in TextSettings()._asdict().items():
        kind = KINDS.get(name, count)
        parser.add_argument(f"--{name}", type=kind, default=usual, help=MEANINGS[name])
    options, output, directory = parsed(parser, "text", argv)
    return TextSettings(**options), output, directory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code, the same on every rank."""
    settings, output, directory = _options(argv)
    strategy = ms.MirroredStrategy()
    strategy.run(require)
    with ProgressBar(settings.steps * settings.accumulate, strategy.rank == 0) as progress:
        result = train(strategy, settings, directory, progress)
    picture = output / "curve.png"
    draw(result.history, picture)
    report_arguments = (result, settings, strategy.num_replicas_in_sync, picture)
    # An error in the report is raised on all ranks.
    strategy.run(lambda: report(*report_arguments) if strategy.rank == 0 else None)
    return 0


def draw(history: ms.History, picture: Path) -> None:
    """Draw the curves. Collective."""
    title = f"Python's source text: held-out loss {history['held_out'][1].min():.3f}"
    panels = {"mean cross-entropy (nats per symbol)": ["training", "held_out"]}
    history.draw(picture, panels, title=title, x="updates")


def require() -> None:
    """Raise ImportError unless what the end of the program needs is installed here."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        names = " and ".join(missing)
        raise ImportError(f"This example needs {names}: pip install 'mpistrat[examples]'")


def report(result: TextResult, settings: TextSettings, ranks: int, picture: Path) -> None:
    """Let the model write, and print the summary."""
    best = result.history["held_out"][1].min()
    text = text_model.generate(result.weights, encoded(BEGIN), 600, settings.seed)
    print(f"\n{decoded(text)}\n")
    print(f"held-out loss       {best:.4f} nats per symbol")
    rate = f"{result.rate:,.0f} (median)" if result.rate else "no update was left to do"
    print(f"symbols per second  {rate}")
    print(f"ranks               {ranks}")
    print(f"picture             {picture}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
