"""Recorded cases of parts of the interface that mpistrat does not have yet.

A row names what is missing; once that exists, the row must go and its cases be compared.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Later(NamedTuple):
    """Why cases are not compared yet.

    Attributes:
      part: The part of the interface.
      missing: The path of what does not exist, from ``mpistrat``.
    """

    part: str
    missing: str


LATER: dict[str, Later] = {}


def exists(path: str) -> bool:
    """Tell whether mpistrat has something at this path."""
    found: Any = importlib.import_module("mpistrat")
    at = "mpistrat"
    for name in path.split("."):
        at = f"{at}.{name}"
        if name not in dir(found) and name not in vars(found):
            try:
                found = importlib.import_module(at)
            except ImportError:
                return False
        else:
            found = getattr(found, name)
    return True
