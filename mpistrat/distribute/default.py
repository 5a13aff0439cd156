"""The strategy that rules where no other does."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpistrat.comm.world import size_of_job
from mpistrat.distribute.mode import current
from mpistrat.errors import ContextError

if TYPE_CHECKING:
    from mpistrat.distribute.strategy import Strategy

__all__ = ["chosen", "current_strategy", "default_strategy", "refuse_unchosen"]

_chosen: contextvars.ContextVar[bool] = contextvars.ContextVar("mpistrat_chosen", default=False)


class _Made(threading.local):
    strategy: Strategy | None = None


# One per thread: it never communicates, but it remembers whether a run has failed.
_made = _Made()


def default_strategy() -> Strategy:
    """Return the default strategy of this thread: one replica, no communication."""
    if _made.strategy is None:
        # Strategies need variables, and variables need the strategy that rules: the one cycle of
        # this room, broken here.
        from mpistrat.distribute.strategies import DefaultStrategy

        _made.strategy = DefaultStrategy()
    return _made.strategy


def current_strategy() -> Strategy:
    """Return the strategy that rules where the running code is."""
    mode = current()
    return default_strategy() if mode is None else mode.strategy


@contextlib.contextmanager
def chosen() -> Iterator[None]:
    """Run the body as code that has chosen the default strategy, which rules in any case."""
    before = _chosen.get()
    _chosen.set(True)
    try:
        yield
    finally:
        _chosen.set(before)


def refuse_unchosen(what: str) -> None:
    """Raise if a call would stay on this rank only because no strategy rules here.

    Args:
      what: The call.

    Raises:
      ContextError: No strategy rules here, and none was chosen, in a job of several ranks.
    """
    if current() is not None or _chosen.get():
        return
    size = size_of_job()
    if size > 1:
        raise ContextError(
            f"{what} was called where no strategy rules, in a job of {size} ranks: each would keep "
            "its own value. Call it in the function that Strategy.run calls, in the thread that "
            "calls run; elsewhere use what a strategy of several ranks has, such as "
            "strategy.all_reduce(...). If each rank is meant to work alone, use a "
            "OneDeviceStrategy."
        )
