"""One thread that makes the collective calls of one group, in their order, beside the program."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final

import numpy as np

from mpistrat.kernels.threads import deaf

__all__ = ["Worker"]

# Seconds that the thread stays when there is nothing to do: to start one takes longer than a call.
_LINGER = 1.0
# Seconds that it looks for more itself before it has to be woken, and how often: to wake it takes
# the interpreter from a program that is about to wait, and would then do the call itself.
_AWAKE, _NAP = 5e-3, 1e-4


@final
class Worker:
    """A queue of calls, and the thread that makes them.

    Args:
      name: Of the thread, in stacks.
      beside: Any thread may call MPI; else everything is done by the caller, at once.

    Attributes:
      beside: As the argument.
    """

    def __init__(self, name: str, beside: bool):
        """Start no thread yet."""
        self.name, self.beside = name, beside
        self._todo: deque[Callable[[bool], None]] = deque()
        self._changed = threading.Condition()
        self._busy = self._thread = False
        self._owner = 0  # the thread whose turn it is
        self._asleep = False
        self._waiting = 0
        self._pid = os.getpid()

    def take_turn(self) -> bool:
        """Reserve the next call for this thread, if none is queued; tell whether it is."""
        with self._changed:
            if self._busy or self._todo:
                return False
            self._begin()
        return True

    def _begin(self) -> None:
        self._busy, self._owner = True, threading.get_ident()

    def end_turn(self) -> None:
        """Let others go on after `take_turn`."""
        with self._changed:
            self._busy, self._owner = False, 0
            if self._waiting or self._asleep:
                self._changed.notify_all()

    def queue(self, call: Callable[[bool], None]) -> None:
        """Have the thread make a call, behind all that came before.

        What a callback of a call asks for is made at once: it may wait for it, and so it has one
        place in the order on all ranks, however much was queued by then.

        Args:
          call: Is told whether the program goes on beside it. It raises nothing.
        """
        if self._owner == threading.get_ident():
            call(False)
            return
        if not self.beside:
            while not self.take_turn():
                self.drain()
            try:
                call(False)
            finally:
                self.end_turn()
            return
        with self._changed:
            self._todo.append(call)
            begins = not self._thread
            self._thread = True
            if self._waiting or self._asleep:
                self._changed.notify_all()
        if begins:
            threading.Thread(target=self._beside, name=self.name, daemon=True).start()

    def help(self, done: Callable[[], bool]) -> None:
        """Return when something is done; make the next calls here if the thread has not yet.

        A program that waits makes a call sooner than a thread that has to wake up.
        """
        while not done():
            with self._changed:
                if self._busy or not self._todo:
                    self._wait(lambda: done() or not self._busy)
                    continue
                self._begin()
                call = self._todo.popleft()
            try:
                call(False)
            finally:
                del call
                self.end_turn()

    def _wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        self._waiting += 1
        try:
            return self._changed.wait_for(ready, seconds)
        finally:
            self._waiting -= 1

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until there is nothing to do, so many seconds at most; tell whether that is so."""
        if os.getpid() != self._pid:  # a child has none of its parent's threads
            return True
        with self._changed:
            return self._wait(lambda: not self._busy and not self._todo, seconds)

    def _beside(self) -> None:
        deaf()
        with np.errstate(all="ignore"):
            while (call := self._next()) is not None:
                try:
                    call(True)
                finally:
                    del call  # and the tensors that it holds
                    self.end_turn()

    def _next(self) -> Callable[[bool], None] | None:
        awake = time.monotonic() + _AWAKE
        while True:
            with self._changed:
                if self._busy:
                    awake = time.monotonic() + _AWAKE
                elif self._todo:
                    self._begin()
                    return self._todo.popleft()
                elif time.monotonic() > awake:
                    self._asleep = True
                    more = self._changed.wait_for(lambda: self._todo and not self._busy, _LINGER)
                    self._asleep = False
                    if not more:
                        self._thread = False
                        return None
                    continue
            time.sleep(_NAP)
