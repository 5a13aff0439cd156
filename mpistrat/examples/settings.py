"""The code that the programs share: options, continued runs, a progress bar."""

from __future__ import annotations

import argparse
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mpistrat as ms
from mpistrat.training.progress import ProgressBar

__all__ = [
    "ProgressBar",
    "iterate_remaining",
    "parse_count",
    "parse_options",
    "restore_run",
    "saving_before_end",
]


def parse_count(text: str) -> int:
    """Return a number of at least 1, as an option of a command."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def parse_options(
    parser: argparse.ArgumentParser, default_output: str, argv: Sequence[str] | None
) -> tuple[dict[str, Any], Path, Path]:
    """Return the options of a program, its directory of output, and that of its checkpoints."""
    parser.add_argument(
        "--output", type=Path, default=Path(default_output), help="directory of what is written"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="directory of checkpoints to continue from; by default the output directory",
    )
    option_values = vars(parser.parse_args(argv))
    output_directory, checkpoint_directory = (
        option_values.pop("output"),
        option_values.pop("checkpoint"),
    )
    return option_values, output_directory, checkpoint_directory or output_directory


def restore_run(manager: ms.CheckpointManager, fixed_choices: Mapping[str, Any]) -> str | None:
    """Restore the newest checkpoint, if the run was begun with the same settings.

    Collective: all ranks call it.

    Args:
      manager: The manager of a checkpoint, which gets an attribute ``fixed_choices``.
      fixed_choices: The settings of this start that have to be those of the run.

    Returns:
      The path of the restored checkpoint, or None for a new run.

    Raises:
      ValueError: The run has other settings.
      StructureError: It has other ones that made other variables.
    """
    checkpoint: Any = manager.checkpoint
    checkpoint.settings = dict(fixed_choices)
    restored_path = manager.restore_or_initialize()
    if checkpoint.settings != dict(fixed_choices):
        saved_settings = checkpoint.settings
        changed_names = [
            name for name in fixed_choices if saved_settings.get(name) != fixed_choices[name]
        ]
        differences = ", ".join(
            f"--{name} {saved_settings.get(name)}, not {fixed_choices[name]}"
            for name in changed_names
        )
        raise ValueError(
            f"the run in {Path(manager.directory)} was begun with {differences}. Give the same, or "
            "another directory."
        )
    return restored_path


def saving_before_end(manager: ms.CheckpointManager) -> AbstractContextManager[Any]:
    """Return a context manager that saves and leaves with 42 if the job is about to be ended.

    Collective: all ranks call it. Ranks that are threads of one process get no signals.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    return ms.preemption(manager, signals=("SIGUSR1", "SIGTERM") if is_main_thread else ())


def iterate_remaining(
    checkpoint: Any,
    batches: Any,
    choices: Any,
    fixed_names: Sequence[str],
    print_text: Callable[[str], None],
) -> Iterator[Any]:
    """Yield the batches that are to come: of all epochs, or after the newest checkpoint.

    With checkpoints, a job that is about to be ended saves and leaves with code 42.

    Collective: all ranks call it.

    Args:
      checkpoint: The checkpoint, with a number ``step``.
      batches: The distributed batches.
      choices: An object with ``epochs``, and with ``checkpoint``, a directory or nothing.
      fixed_names: Names of the settings that have to be those with which the run was begun.
      print_text: Called with each line of text, on all ranks.
    """
    if not choices.checkpoint:
        yield from itertools.chain.from_iterable(itertools.repeat(batches, choices.epochs))
        return
    manager = ms.CheckpointManager(checkpoint, choices.checkpoint, max_to_keep=2)
    if restored_path := restore_run(
        manager, {name: getattr(choices, name) for name in fixed_names}
    ):
        print_text(f"continues after step {checkpoint.step}, as saved in {restored_path}")
    with saving_before_end(manager):
        yield from manager.resume(batches, choices.epochs)
