"""The strategy that rules where no other does, and whichever rules here."""

from __future__ import annotations

import threading
from typing import cast

from mpistrat.distribute.mode import current
from mpistrat.distribute.strategies import DefaultStrategy
from mpistrat.distribute.strategy import Strategy


class _Made(threading.local):
    strategy: Strategy | None = None


# One per thread: it never communicates, but it remembers whether a run has failed.
_made = _Made()


def default_strategy() -> Strategy:
    """Return the default strategy of this thread: one replica, no communication."""
    if _made.strategy is None:
        _made.strategy = DefaultStrategy()
    return _made.strategy


def current_strategy() -> Strategy:
    """Return the strategy that rules where the running code is."""
    mode = current()
    return default_strategy() if mode is None else cast("Strategy", mode.strategy)
