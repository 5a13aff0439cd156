"""What shapes a graph there and changes nothing here: functions, scopes, devices, printing."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

__all__ = [
    "control_dependencies",
    "device",
    "executing_eagerly",
    "function",
    "group",
    "name_scope",
    "no_op",
    "print",
]


def function(func: Any = None, **_: Any) -> Any:
    """Return `func` as it is; everything runs eagerly. A decorator, with or without arguments."""
    return func if func is not None else lambda inner: inner


def executing_eagerly() -> Any:
    """Return True."""
    return True


def group(*inputs: Any, **_: Any) -> None:
    """Do nothing: values are there as soon as a call has returned them."""


def no_op(name: Any = None) -> None:
    """Do nothing; `name` has no effect."""


def print(*inputs: Any, output_stream: Any = None, **kwargs: Any) -> None:
    """Print `inputs`, as the built-in does, on every rank that comes here.

    Args:
      inputs: What to print.
      output_stream: A file; None for stderr.
      kwargs: ``sep`` and ``end`` as there; others have no effect.
    """
    chosen = {key: value for key, value in kwargs.items() if key in ("sep", "end")}
    file = sys.stderr if output_stream is None else output_stream
    builtins.print(*inputs, file=file, **chosen)


def device(device_name: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that changes nothing: `device_name` is a label here."""
    return contextlib.nullcontext()


def control_dependencies(control_inputs: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that changes nothing: what stands before runs before; `control_inputs`."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def name_scope(name: str) -> Iterator[str]:
    """Return a context that changes nothing; it gives `name` with a slash after it."""
    yield f"{name}/"
