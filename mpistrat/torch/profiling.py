"""Communication in profiles of ``torch.profiler``: an event for each call, as long as the call.

Nothing is recorded, and nothing made, while no profiler is on in the thread that calls.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

__all__ = ["begin_record", "is_profiled", "record_call"]

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled
_NO_RECORD = contextlib.nullcontext()
_WORD = re.compile(r"[\w.]+")


def record_call(text: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that records its body as an event.

    Args:
      text: The call in words. The event has its first word: ``"mpistrat:all_reduce"`` of
        ``"all_reduce(SUM) of float32[3]"``.
    """
    return record_function(_event_name(text)) if is_profiled() else _NO_RECORD


def begin_record(text: str) -> Callable[[], None] | None:
    """Begin the event of a call that another thread may end; return what ends it.

    Args:
      text: As `record_call` takes it.

    Returns:
      A function to call once, in any thread; None while no profiler is on.
    """
    if not is_profiled():
        return None
    record = record_function(_event_name(text))
    record.__enter__()
    # An event belongs to the thread that begins it; only a future may end it from another one.
    future: torch.futures.Future[None] = torch.futures.Future()
    record._call_end_callbacks_on_future(future)

    def end() -> None:
        future.set_result(None)

    return end


def _event_name(text: str) -> str:
    word = _WORD.match(text)
    return f"mpistrat:{word.group() if word else text}"
