"""The recorded results: one `Case` per program, case and number of replicas."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("golden.json")
SIZES = (2, 4)


class Case(NamedTuple):
    """One recorded result.

    Attributes:
      program: The program that gave it.
      name: The case in it.
      size: The number of replicas.
      recorded: ``{"ok": value}``, ``{"error": {...}}`` or, where the process died, its status.
    """

    program: str
    name: str
    size: int
    recorded: dict[str, Any]

    @property
    def key(self) -> str:
        """Program and case, as the lists of differences name it."""
        return f"{self.program}/{self.name}"

    def __str__(self) -> str:
        """Return the id of the test of this case."""
        return f"{self.key}-n{self.size}"


def _cases(program: str, size: int, found: dict[str, Any], prefix: str = "") -> Iterator[Case]:
    for name, value in found.items():
        if {"ok", "error"} & set(value) or name == "__process__":
            yield Case(program, prefix + name, size, value)
        else:  # a program that records a table: one row per kind of variable
            yield from _cases(program, size, value, f"{prefix}{name}/")


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return every recorded case at every recorded size."""
    programs = json.loads(FILE.read_text())["programs"]
    return tuple(
        case
        for program, sizes in programs.items()
        for size in SIZES
        for case in _cases(program, size, sizes.get(f"n={size}", {}))
    )
