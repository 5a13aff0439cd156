"""The wait of a rank for all others to make their first strategy, which no page shows yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpistrat.board.board import end_stuck
from mpistrat.board.observer import HUNG, Limits
from mpistrat.board.reporter import say
from mpistrat.comm.callsite import where

_OTHERS = 5.0  # seconds that ranks leave the first and the last one to end the job


@contextmanager
def meeting(rank: int, size: int, limits: Limits) -> Iterator[None]:
    """Run the body, in which all ranks meet, and say so if it takes long; end the job at last.

    Nobody knows yet who is missing, so the first rank and the last one speak.

    Args:
      rank: The number of this rank.
      size: How many ranks meet. Of one, nobody waits.
      limits: How patient it is.
    """
    if size == 1:
        yield
        return
    met = threading.Event()
    place = where()

    def watch() -> None:
        speaks = rank in (0, size - 1)
        who = f"mpistrat: rank {rank} of {size} has waited"
        here = f"in {place} for all of them to make a strategy."
        if met.wait(limits.warn):
            return
        if speaks:
            say(
                f"{who} {limits.warn:g} s {here} Which are missing is not known yet; one may have "
                f"failed before. `mpistrat run -n {size}` names it, and ends the job at once."
            )
        if met.wait(limits.timeout - limits.warn + (0 if speaks else _OTHERS)):
            return
        say(
            f"{who} {limits.timeout:g} s {here} The job ends with exit code {HUNG}; "
            "MPISTRAT_TIMEOUT changes that."
        )
        end_stuck(HUNG)

    with suppress(RuntimeError):  # no thread can be started any more
        threading.Thread(target=watch, name="mpistrat meeting", daemon=True).start()
    try:
        yield
    finally:
        met.set()
