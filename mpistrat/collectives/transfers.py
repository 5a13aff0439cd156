"""A thread that does one thing after the other while the program continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import final
from weakref import WeakValueDictionary

import numpy as np

from mpistrat.kernels.threads import deaf


@final
class Transfer:
    """What the thread does for one call.

    Attributes:
      number: How many were begun before, and one.
      work: What it does.
      end_event: Is set when that is over.
      error: What it has raised, if it has.
    """

    def __init__(self, number: int, work: Callable[[], None]):
        """Do nothing yet."""
        self.number, self.work = number, work
        self.end_event = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        """Wait until it is over, and raise what it has raised."""
        self.end_event.wait()
        if self.error is not None:
            raise self.error


@final
class Transfers:
    """The queue of a thread that lives as long as there is something in it.

    So none is left at rest: a program that forks between its calls, or ends, has no thread to think
    of but one that is at work.

    Args:
      failed: Is called in the thread with what a transfer has raised.
    """

    name = "mpistrat overlap"

    def __init__(self, failed: Callable[[Exception], None]):
        """Begin nothing yet."""
        self._failed, self._pid = failed, os.getpid()
        self.count = 0  # of those that have begun
        # What nobody can wait for any more, and is over, goes by itself.
        self._open: WeakValueDictionary[int, Transfer] = WeakValueDictionary()
        self._todo: list[Transfer] = []
        self._lock = threading.Lock()
        self._running = False

    @property
    def oldest(self) -> int:
        """The number of the first that some part of the program may still want; else the next."""
        return min((transfer.number for transfer in self._living()), default=self.count + 1)

    def _living(self) -> list[Transfer]:
        # A copy is taken first: in the thread another one may go at any time.
        return [transfer for ref in self._open.valuerefs() if (transfer := ref()) is not None]

    def begin(self, work: Callable[[], None]) -> Transfer:
        """Queue this for the thread, behind all that came before."""
        self.count += 1
        self._open[self.count] = transfer = Transfer(self.count, work)
        with self._lock:
            self._todo.append(transfer)
            begins, self._running = not self._running, True
        if begins:
            try:
                threading.Thread(target=self._run_in_thread, name=self.name, daemon=True).start()
            except RuntimeError:  # no thread can be started any more: the results are the same
                self._run()
        return transfer

    def done(self, transfer: Transfer) -> None:
        """Note that the program has what it wanted of a transfer."""
        self._open.pop(transfer.number, None)

    def drain(self) -> None:
        """Return when nothing moves any more: memory may go then, and MPI be finalized."""
        if os.getpid() == self._pid:  # a child has none of its parent's threads
            for transfer in self._living():
                transfer.end_event.wait()

    def _run_in_thread(self) -> None:
        deaf()
        self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._running = False
                    return
                transfer = self._todo.pop(0)
            try:
                with np.errstate(all="ignore"):
                    transfer.work()
            except Exception as error:
                transfer.error = error
                self._failed(error)
            finally:
                transfer.end_event.set()
