"""Settings that a run was begun with, and those of the start that goes on with it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mpistrat as ms

__all__ = ["begun", "count"]


def count(text: str) -> int:
    """Return a number of at least 1, as an option of a command."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted 1 or more, got {text}")
    return int(text)


def begun(manager: ms.CheckpointManager, given: Mapping[str, Any]) -> str | None:
    """Restore the newest checkpoint, if the run was begun with the same settings.

    Collective: all ranks call it.

    Args:
      manager: Of a checkpoint that gets an attribute ``settings``.
      given: The settings of this start that have to be those of the run.

    Returns:
      The path of what was restored, or None for a new run.

    Raises:
      ValueError: The run has other settings.
      StructureError: It has other ones that made other variables.
    """
    checkpoint: Any = manager.checkpoint
    checkpoint.settings = dict(given)
    path = manager.restore_or_initialize()
    if checkpoint.settings != dict(given):
        was = checkpoint.settings
        other = [name for name in given if was.get(name) != given[name]]
        told = ", ".join(f"--{name} {was.get(name)}, not {given[name]}" for name in other)
        raise ValueError(
            f"the run in {Path(manager.directory)} was begun with {told}. Give the same, or "
            "another directory."
        )
    return path
