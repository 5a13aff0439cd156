"""The programming model of tf.distribute for NumPy on MPI; one MPI rank is one replica.

Importing mpistrat starts neither MPI nor Numba: names are bound when they are first used, and MPI
starts when the first strategy is made. The public names are the rows of ``__init__.pyi``, which
type checkers read as it is.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from mpistrat.bytecode import use as _use

__version__ = "0.1.0"  # nowhere else

_use(__path__[0])
importlib.import_module("mpistrat.environment").check_system()

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_ROWS = [row.split() for row in _STUB.replace("(\n", "").splitlines() if row.startswith("from ")]
_HOMES = {name.rstrip(","): module for _, module, _, _, _, name in _ROWS}

__all__ = sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> Any:
    """Bind a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mpistrat' has no attribute {name!r}")
    if _HOMES[name] == __name__:
        found: Any = importlib.import_module(f"{__name__}.{name}")
    else:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
