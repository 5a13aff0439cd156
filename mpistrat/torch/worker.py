"""One thread that makes the collective calls of one group, in their order, beside the program."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import torch

from mpistrat.kernels.threads import deaf

__all__ = ["Worker"]

# Seconds that the thread stays when there is nothing to do: to start one takes longer than a call.
_LINGER = 30.0
# Seconds within which a program waits at once. If it has so many times in a row, the thread is not
# told of the next call of that kind: it would ask for the interpreter, and until it has it, the
# system wakes it each time that the program lets go of it, as in every call of MPI, only for it to
# find that the program makes the call.
_AT_ONCE = 1e-3
_OFTEN = 8
_KINDS = 256  # of calls that are remembered so
# Seconds after which the thread looks for calls that it was not told of.
_LOOK = 0.1
# Seconds that it lies still during a backward pass which has the rank's only core: beside it the
# calls take longer than after it, as ranks find each other's threads without a core.
_STILL = 0.1


class _Queued(NamedTuple):
    """A call that nobody has begun.

    Attributes:
      call: As `Worker.queue` takes it.
      kind: As `Worker.queue` takes it.
      since: As `Worker.queue` takes it.
    """

    call: Callable[[bool], None]
    kind: str
    since: float


@final
class Worker:
    """A queue of calls, and the thread that makes them.

    Args:
      name: Of the thread, in stacks.
      beside: Any thread may call MPI; else everything is done by the caller, at once.

    Attributes:
      beside: As the argument.
      crowded: This rank has but one core.
    """

    def __init__(self, name: str, beside: bool):
        """Start no thread yet."""
        self.name, self.beside, self.crowded = name, beside, False
        self._todo: deque[_Queued] = deque()
        self._at_once: dict[str, int] = {}  # how often in a row calls were waited for at once
        # The lock itself is taken where nobody waits: a Condition does so in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._busy = self._thread = False
        self._owner = 0  # the thread whose turn it is
        self._asleep = self._held = False  # the thread; held up by a call that another one makes
        # When the thread may begin with what is queued; and at the earliest, in a backward pass.
        self._waiting, self._due, self._still = 0, 0.0, 0.0
        self._pid = os.getpid()

    def take_turn(self) -> bool:
        """Reserve the next call for this thread, if none is queued; tell whether it is."""
        with self._lock:
            if self._busy or self._todo:
                return False
            self._begin()
        return True

    def has_turn(self) -> bool:
        """Tell whether this thread makes a call now, as where a callback of the call runs."""
        return self._owner == threading.get_ident()

    def _begin(self) -> None:
        self._busy, self._owner = True, threading.get_ident()

    def end_turn(self) -> None:
        """End the turn that `take_turn` began, so that other threads can have theirs."""
        with self._lock:
            self._busy, self._owner = False, 0
            if self._waiting or self._held:
                self._changed.notify_all()

    def queue(self, call: Callable[[bool], None], kind: str, since: float) -> None:
        """Have the thread make a call, behind all that came before.

        What a callback of a call asks for is made at once: it may wait for it, and so it has one
        place in the order on all ranks, however much was queued by then.

        Args:
          call: Is told whether the program continues beside it. It raises nothing.
          kind: Calls of one kind are mostly waited for alike: at once, or later.
          since: When the program made it, seconds of the monotonic clock.
        """
        if self.has_turn():
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
        passing = self.crowded and torch._C._current_graph_task_id() >= 0
        if passing:  # it makes them itself as soon as it ends, before whatever waits for them
            torch.autograd.Variable._execution_engine.queue_callback(self._catch_up)
        still = time.monotonic() + _STILL if passing else 0.0
        often = self._at_once.get(kind, 0) >= _OFTEN
        due = still or (since + _AT_ONCE if often else 0.0)
        with self._lock:
            if passing or not self._todo or due < self._due:
                self._due = due
            self._still = still
            self._todo.append(_Queued(call, kind, since))
            begins = not self._thread
            self._thread = True
            if self._waiting or (self._asleep and not due):
                self._changed.notify_all()
        if begins:
            threading.Thread(target=self._beside, name=self.name, daemon=True).start()

    def help(self, done: Callable[[], bool]) -> None:
        """Return when something is done; make the next calls here if the thread has not yet.

        A program that waits makes a call sooner than a thread that has to wake up. A callback of a
        call has its turn, and nobody else can make what it waits for.
        """
        while not done():
            with self._lock:
                within = self.has_turn()
                if not self._todo or (self._busy and not within):
                    self._wait(lambda: done() or not self._busy)
                    continue
                if not within:
                    self._begin()
                queued = self._todo.popleft()
            try:
                queued.call(False)
            finally:
                del queued
                if not within:
                    self.end_turn()

    def learn(self, kind: str, since: float) -> None:
        """Note that the program waits for a call; or that it does not, where the thread does so.

        Args:
          kind: As `queue` takes it.
          since: As `queue` takes it.
        """
        known = self._at_once
        if time.monotonic() - since > _AT_ONCE:
            known.pop(kind, None)
            return
        if len(known) >= _KINDS and kind not in known:
            known.clear()
        known[kind] = known.get(kind, 0) + 1

    def hurry(self) -> None:
        """Wake the thread to make all queued calls now, also those that were queued without that.

        For callers that ask whether a call has ended and do not make it themselves. On a rank with
        one core, calls of a backward pass still wait for its end, 0.1 s at most.
        """
        with self._lock:
            self._due = self._still
            if self._asleep and self._todo and not self._still:
                self._changed.notify_all()

    def wait_for(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until something is done, so many seconds at most; tell whether it is."""
        self.hurry()
        with self._lock:
            return self._wait(done, seconds)

    def _catch_up(self) -> None:
        self.help(lambda: not self._todo)

    def _wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        self._waiting += 1
        try:
            return self._changed.wait_for(ready, seconds)
        finally:
            self._waiting -= 1

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until there is nothing to do, so many seconds at most; tell whether that is so.

        In a callback of a call it is not, and cannot become so: that call ends after it.
        """
        if os.getpid() != self._pid:  # a child has none of its parent's threads
            return True
        if self.has_turn():
            return False
        return self.wait_for(lambda: not self._busy and not self._todo, seconds)

    def _beside(self) -> None:
        deaf()
        with np.errstate(all="ignore"):
            while (queued := self._next()) is not None:
                try:
                    queued.call(True)
                except BaseException:  # what ends a thread; the next call begins another
                    self._thread = False
                    raise
                finally:
                    del queued  # and the tensors that it holds
                    self.end_turn()

    def _next(self) -> _Queued | None:
        idle = time.monotonic()
        with self._lock:
            while True:
                now = time.monotonic()
                if self._todo or self._busy:
                    idle = now
                if self._todo and not self._busy and now >= self._due:
                    self._begin()
                    queued = self._todo.popleft()
                    if now > queued.since + _AT_ONCE:
                        self.learn(queued.kind, queued.since)
                    return queued
                if now - idle > _LINGER:
                    self._thread = False
                    return None
                self._asleep, self._held = True, bool(self._todo) and now >= self._due
                self._changed.wait(_LOOK)
                self._asleep = self._held = False
