"""The thread that keeps this rank's slot up to date and, on one process of a node, watches all."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from mpistrat.board.link import Link
from mpistrat.board.observer import Observer
from mpistrat.board.page import BETWEEN, INSIDE, LEAVING, LEFT
from mpistrat.board.proc import Parents
from mpistrat.board.reporter import Reporter, say
from mpistrat.board.status import AWAY, TROUBLES, Status

ORPHANED = 76  # the launcher is gone

_SECOND = 1e9
_STAYING = (AWAY, *TROUBLES)
_CLOSING = 0.01  # seconds between two looks while the last messages are exchanged


@final
@dataclass(eq=False)
class Watchdog:
    """Watches, from a thread of its own; sleeps in between.

    Attributes:
      index: The number of this rank on its node.
      reporter: Writes this rank's slot.
      observer: Reads all slots of the node. Every process has one, and the first process of the
        node that runs Python uses it.
      link: To the other nodes; None where there are none, or on a process that does not lead.
      launcher: What started this process, or None if it may live on without.
      clock: Returns the time in ns, monotonic.
      leave: Ends this process at once with an exit code.
      kill: Sends a signal to a process.
    """

    index: int
    reporter: Reporter
    observer: Observer
    link: Link | None = None
    launcher: Parents | None = None
    clock: Callable[[], int] = time.monotonic_ns
    leave: Callable[[int], None] = os._exit
    kill: Callable[[int, int], None] = os.kill

    def __post_init__(self) -> None:
        """Do not run yet."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._looked = self._ticked = self.clock()
        self._resumed = self._went_on = 0
        self._rows: list[Status] = []
        self._failed = False

    def start(self) -> None:
        """Watch from now on."""
        self._thread = threading.Thread(target=self._run, name="mpistrat watchdog", daemon=True)
        self._thread.start()

    def stop(self, patience: float) -> bool:
        """Stop watching. The thread is then outside MPI and will not enter it again.

        Args:
          patience: Seconds to wait for the last messages of other nodes.

        Returns:
          Whether the thread has ended; if not, MPI must not be finalized.
        """
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(self.observer.limits.tick):
            try:
                self.tick()
            except Exception as error:
                # The program continues; a watchdog that dies silently would be worse than none.
                if not self._failed:
                    self._failed = True
                    say(f"mpistrat: the watchdog failed (reported once): {error!r}")
                    traceback.print_exception(error, file=sys.__stderr__)
        while self.link is not None and not self.link.done:
            self.link.step(self.clock() / _SECOND, self._own_rows, closing=True)
            time.sleep(_CLOSING)

    def tick(self) -> None:
        """Look once."""
        now_ns = self.clock()
        if self.launcher is not None and self.launcher.lost():
            self._orphaned(now_ns)
            return
        if now_ns - self._ticked > self.observer.limits.stale * _SECOND:
            # This process stood still, so perhaps all did (SLURM suspends jobs): wait again.
            self._resumed = now_ns
        self._ticked = now_ns
        page = self.observer.page
        self.reporter.look(now_ns, page.asked(self.index))
        if self.link is not None:
            self.link.step(now_ns / _SECOND, self._own_rows, closing=False)
        seconds = (now_ns - self._looked) / _SECOND
        if seconds >= self.observer.limits.interval and self._acts(now_ns):
            self._looked = now_ns
            self._watch(now_ns)

    def _acts(self, now_ns: int) -> bool:
        """Tell whether no process before this one on its node runs Python."""
        oldest = now_ns - self.observer.limits.stale * _SECOND
        page = self.observer.page
        return all(page.heartbeat(index) < oldest for index in range(self.index))

    def _own_rows(self) -> Sequence[Status]:
        return self._rows

    def _watch(self, now_ns: int) -> None:
        self._rows = self.observer.rows(now_ns)
        rows, speaks = self._rows, True
        if self.link is not None:
            seconds = now_ns / _SECOND
            rows = self.link.everybody(seconds, rows)
            self._tell(now_ns, rows)
            speaks = self.link.leads or self.link.cut_off(seconds)
        if self._resumed:
            max_age = (now_ns - self._resumed) / _SECOND
            rows = [row._replace(age=min(row.age, max_age)) for row in rows]
        self.observer.act(self._patient(now_ns, rows), speaks)

    def _patient(self, now_ns: int, rows: Sequence[Status]) -> Sequence[Status]:
        """Return the rows; waits on other communicators count from the last progress anywhere."""
        ages = [row.age for row in rows if row.state == BETWEEN and row.doing not in _STAYING]
        self._went_on = max([self._went_on, *(now_ns - int(max(0, age) * _SECOND) for age in ages)])
        max_age = (now_ns - self._went_on) / _SECOND
        if INSIDE not in {row.state for row in rows}:
            # Nobody waits for a call of those that go on, such as a trial: only for their end.
            rows = [r._replace(age=min(r.age, r.still)) if r.state == BETWEEN else r for r in rows]
        return [r._replace(age=min(r.age, max_age)) if r.doing == AWAY else r for r in rows]

    def _tell(self, now_ns: int, rows: Sequence[Status]) -> None:
        """Write down, for ranks of this node that wait to leave, what the other nodes do."""
        other_rows = [row for row in rows if row.home != self.observer.home]
        inside_key = max((row.key for row in other_rows if row.state == INSIDE), default=0)
        staying = [row for row in other_rows if row.state not in (LEAVING, LEFT)]
        # Seconds since one of them moved, went on in its Python code, and computed.
        ages = zip(*((row.age, row.still, row.idle) for row in staying), strict=True)
        moved, stirred, computed = [
            max(0, now_ns - int(min(seconds) * _SECOND)) for seconds in ages
        ] or (0, 0, 0)
        self.observer.page.tell_elsewhere(inside_key, moved)
        self.observer.page.tell_signs(stirred, computed)

    def _orphaned(self, now_ns: int) -> None:
        """End this process, and those of the node that are stopped and cannot do it themselves."""
        say("mpistrat: the launcher of this job is gone; this rank exits.")
        for pid in self.observer.stuck(now_ns):
            with suppress(OSError):
                self.kill(pid, signal.SIGKILL)
        self.leave(ORPHANED)
