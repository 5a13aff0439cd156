"""What the texts of calls say of the leaves."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.arrays import spec_text
from mpistrat.collectives.part import Part

__all__ = ["described", "spec_of"]


def described(call: str, parts: Sequence[Part]) -> str:
    """Return the text of a call with the names, dtypes and shapes of its parts."""
    return f"{call} {', '.join(spec_of(part.path, spec_text(part.value)) for part in parts)}"


def spec_of(path: str, spec: str) -> str:
    """Return how a text shows a leaf: its name, if it has one, and its dtype and shape."""
    return f"{path}: {spec}" if path else spec
