"""Settings that a run was begun with, and those of the start that continues with it.

What is shown while a program runs: by one rank, and on a terminal with a bar.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import mpistrat as ms
from mpistrat import config

__all__ = [
    "ProgressBar",
    "begun",
    "count",
    "leaving",
    "left",
    "parsed",
]


def count(text: str) -> int:
    """Return a number of at least 1, as an option of a command."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def parsed(
    parser: argparse.ArgumentParser, output: str, argv: Sequence[str] | None
) -> tuple[dict[str, Any], Path, Path]:
    """Return the options of a program, its directory of output, and that of its checkpoints."""
    parser.add_argument(
        "--output", type=Path, default=Path(output), help="directory of what is written"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="directory of checkpoints to continue from; by default the output directory",
    )
    options = vars(parser.parse_args(argv))
    written, checkpoint = options.pop("output"), options.pop("checkpoint")
    return options, written, checkpoint or written


def begun(manager: ms.CheckpointManager, settings: Mapping[str, Any]) -> str | None:
    """Restore the newest checkpoint, if the run was begun with the same settings.

    Collective: all ranks call it.

    Args:
      manager: The manager of a checkpoint, which gets an attribute ``settings``.
      settings: The settings of this start that have to be those of the run.

    Returns:
      The path of what was restored, or None for a new run.

    Raises:
      ValueError: The run has other settings.
      StructureError: It has other ones that made other variables.
    """
    checkpoint: Any = manager.checkpoint
    checkpoint.settings = dict(settings)
    path = manager.restore_or_initialize()
    if checkpoint.settings != dict(settings):
        saved_settings = checkpoint.settings
        changed_names = [name for name in settings if saved_settings.get(name) != settings[name]]
        differences = ", ".join(
            f"--{name} {saved_settings.get(name)}, not {settings[name]}" for name in changed_names
        )
        raise ValueError(
            f"the run in {Path(manager.directory)} was begun with {differences}. Give the same, or "
            "another directory."
        )
    return path


def leaving(manager: ms.CheckpointManager) -> AbstractContextManager[Any]:
    """Return a context manager in which a job that is about to be ended saves and leaves with 42.

    Collective: all ranks call it. Ranks that are threads of one process get no signals.
    """
    main = threading.current_thread() is threading.main_thread()
    return ms.preemption(manager, signals=("SIGUSR1", "SIGTERM") if main else ())


def left(
    state: Any,
    batches: Any,
    settings: Any,
    same: Sequence[str],
    print_text: Callable[[str], None],
) -> Iterator[Any]:
    """Yield the batches that are to come: of all epochs, or after the newest checkpoint.

    With checkpoints, a job that is about to be ended saves and leaves with code 42.

    Collective: all ranks call it.

    Args:
      state: The checkpoint, with a number ``step``.
      batches: The distributed batches.
      settings: An object with ``epochs``, and with ``checkpoint``, a directory or nothing.
      same: Names of the settings that have to be those with which the run was begun.
      print_text: Called with each line of text, on all ranks.
    """
    if not settings.checkpoint:
        yield from itertools.chain.from_iterable(itertools.repeat(batches, settings.epochs))
        return
    manager = ms.CheckpointManager(state, settings.checkpoint, max_to_keep=2)
    if path := begun(manager, {name: getattr(settings, name) for name in same}):
        print_text(f"continues after step {state.step}, as saved in {path}")
    with leaving(manager):
        yield from manager.resume(batches, settings.epochs)


@final
class ProgressBar:
    """A bar that moves and lines above it; lines alone where stderr is not a terminal.

    Lines go to stdout, the bar to stderr. A bar is drawn with control characters, which belong in
    no file.

    A rank that a launcher started sees a pipe; `mpistrat run` says whether a terminal is behind it.

    Args:
      steps: How many steps there will be.
      shown: Whether this rank shows anything; say True on one rank.

    Example:
      >>> with ProgressBar(2, shown=True) as progress:
      ...     progress.step()
      ...     progress.say("half done")
      half done
    """

    def __init__(self, steps: int, shown: bool):
        """Show a bar at 0, if there is a terminal."""
        self._shown = shown
        self._bar: Any = None
        if shown and (sys.stderr.isatty() or config.read_options().terminal):
            from tqdm import tqdm

            self._bar = tqdm(total=steps, unit="step", leave=False)

    def __enter__(self) -> ProgressBar:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def step(self) -> None:
        """Move the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def say(self, line: str) -> None:
        """Print a line, above the bar."""
        if self._bar is not None:
            self._bar.write(line)
        elif self._shown:
            # A file or pipe is buffered, and somebody may be watching it.
            print(line, flush=True)
