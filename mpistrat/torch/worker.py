"""One thread that makes the collective calls of one group, in their order, beside the program."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import final

import numpy as np

from mpistrat.kernels.threads import deaf

__all__ = ["Worker"]

# Seconds that the thread stays when there is nothing to do: to start one takes longer than a call.
_LINGER = 1.0


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
        self._todo: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._busy = self._thread = False
        self._pid = os.getpid()

    def here(self, call: Callable[[], None], after: bool = False) -> bool:
        """Make a call in this thread, if nothing comes before it; tell whether it was made.

        Args:
          call: Raises nothing.
          after: Wait until what comes before it has been done.
        """
        with self._changed:
            while after and (self._busy or self._todo):
                self._changed.wait()
            if self._busy or self._todo:
                return False
            self._busy = True
        try:
            call()
        finally:
            self._free()
        return True

    def queue(self, call: Callable[[], None]) -> None:
        """Have the thread make a call, behind all that came before."""
        if not self.beside:
            self.here(call, after=True)
            return
        with self._changed:
            self._todo.append(call)
            begins = not self._thread
            self._thread = True
            self._changed.notify_all()
        if begins:
            threading.Thread(target=self._beside, name=self.name, daemon=True).start()

    def _free(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until there is nothing to do, so many seconds at most; tell whether that is so."""
        if os.getpid() != self._pid:  # a child has none of its parent's threads
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._todo, seconds)

    def _beside(self) -> None:
        deaf()
        with np.errstate(all="ignore"):
            while (call := self._next()) is not None:
                try:
                    call()
                finally:
                    del call  # and the tensors that it holds
                    self._free()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._busy or not self._todo:
                if not self._changed.wait(_LINGER) and not self._todo and not self._busy:
                    self._thread = False
                    return None
            self._busy = True
            return self._todo.popleft()
