"""Waiting for all ranks to make a strategy or a group, before there is a page that shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mpistrat.board.board import end_stuck
from mpistrat.board.observer import HUNG, Limits
from mpistrat.board.reporter import say
from mpistrat.comm.callsite import where

Clock = Callable[[], float]

_OTHERS = 5.0  # seconds that ranks leave the first and the last one to end the job
_UNKNOWN = "It is not known which ranks are missing; one may have failed earlier."


@contextmanager
def meeting(
    rank: int,
    size: int,
    who: str,
    advice: str,
    limits: Limits,
    clock: Clock = time.monotonic,
    what: str = "make a strategy",
) -> Iterator[None]:
    """Run the body, in which all ranks meet, and say so if it takes long; end the job at last.

    Nobody knows yet who is missing, so the first rank and the last one speak.

    Args:
      rank: The number of this rank.
      size: How many ranks meet. Of one, nobody waits.
      who: This rank, in words.
      advice: What may help to find the missing ones; may be empty.
      limits: How patient it is.
      clock: Returns the time in seconds.
      what: What all of them are to do, in words.
    """
    if size == 1:
        yield
        return
    met, speaks = threading.Event(), rank in (0, size - 1)
    said = f"mpistrat: {who} has waited {{:g}} s in {where()} for all of them to {what}."

    def watch() -> None:
        begun = last = clock()
        warned = not speaks
        while not met.wait(limits.tick):
            now = clock()
            if now - last > limits.stale:  # it stood still, so perhaps all did: wait again
                begun = now
            last, waited = now, now - begun
            if not warned and waited >= limits.warn:
                warned = True
                say(f"{said.format(limits.warn)} {_UNKNOWN}{advice}")
            if waited >= limits.timeout + (0 if speaks else _OTHERS):
                say(
                    f"{said.format(limits.timeout)} The job ends with exit code {HUNG}; "
                    "MPISTRAT_TIMEOUT changes that."
                )
                end_stuck(HUNG)
                return

    with suppress(RuntimeError):  # no thread can be started any more
        threading.Thread(target=watch, name="mpistrat meeting", daemon=True).start()
    try:
        yield
    finally:
        met.set()
