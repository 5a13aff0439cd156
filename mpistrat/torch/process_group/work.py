"""What torch waits for: one call, in transit or done.

One thread that makes the collective calls of one group, in their order, beside the program.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist

from mpistrat.kernels.threads import block_signals

__all__ = [
    "AnyWork",
    "CallWork",
    "FailureNotice",
    "Finished",
    "TimedOut",
    "Worker",
    "seconds_of",
]


# Seconds that the thread stays when there is nothing to do: to start one takes longer than a call.
_LINGER = 30.0
# Seconds that it pauses after each call of a backward pass which has the rank's only core: in
# parallel the calls take longer than after it, as ranks find each other's threads without a core.
_PAUSE = 0.1


@final
class Worker:
    """A queue of calls, and the thread that makes them, unless the program waits for them first.

    Args:
      name: Of the thread, in stacks.
      can_use_thread: Any thread may call MPI; else everything is done by the caller, at once.

    Attributes:
      can_use_thread: As the argument.
      crowded: This rank has but one core.
    """

    def __init__(self, name: str, can_use_thread: bool):
        """Start no thread yet."""
        self.name, self.can_use_thread, self.crowded = name, can_use_thread, False
        self._todo: deque[Callable[[bool], None]] = deque()
        # The lock itself is taken where nobody waits: a Condition does so in Python.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._busy = self._thread = False
        self._owner = 0  # the thread whose turn it is
        self._waiting = 0  # how many threads wait for a turn to end
        self._earliest_start = 0.0  # when the thread may begin with what is queued
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
            if self._waiting:
                self._condition.notify_all()

    def queue(self, call: Callable[[bool], None]) -> None:
        """Have the thread make a call, behind all that came before.

        What a callback of a call asks for is made at once: it may wait for it, and so it has one
        place in the order on all ranks, however much was queued by then.

        Args:
          call: Is told whether the program continues beside it. It raises nothing.
        """
        if self.has_turn():
            call(False)
            return
        if not self.can_use_thread:
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
        with self._lock:
            self._earliest_start = time.monotonic() + _PAUSE if passing else 0.0
            self._todo.append(call)
            begins = not self._thread
            self._thread = True
            self._condition.notify_all()
        if begins:
            threading.Thread(target=self._run_queue, name=self.name, daemon=True).start()

    def help(self, done: Callable[[], bool]) -> None:
        """Return when something is done; make the next calls here if the thread has not yet.

        A program that waits makes a call sooner than a thread that has to wake up. A callback of a
        call has its turn, and nobody else can make what it waits for.
        """
        while not done():
            with self._lock:
                is_in_turn = self.has_turn()
                if not self._todo or (self._busy and not is_in_turn):
                    self._wait(lambda: done() or not self._busy)
                    continue
                if not is_in_turn:
                    self._begin()
                call = self._todo.popleft()
            try:
                call(False)
            finally:
                del call
                if not is_in_turn:
                    self.end_turn()

    def wait_for(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until something is done, so many seconds at most; tell whether it is."""
        with self._lock:
            return self._wait(done, seconds)

    def _catch_up(self) -> None:
        self.help(lambda: not self._todo)

    def _wait(self, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        self._waiting += 1
        try:
            return self._condition.wait_for(predicate, seconds)
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

    def _run_queue(self) -> None:
        block_signals()
        with np.errstate(all="ignore"):
            while (call := self._next()) is not None:
                try:
                    call(True)
                except BaseException:  # what ends a thread; the next call begins another
                    self._thread = False
                    raise
                finally:
                    del call  # and the tensors that it holds
                    self.end_turn()

    def _next(self) -> Callable[[bool], None] | None:
        """Return the next call when its turn has begun; None after a while without any."""
        with self._lock:
            while True:
                pause = self._earliest_start - time.monotonic()
                if not self._todo:
                    if not self._condition.wait(_LINGER) and not self._todo:
                        self._thread = False
                        return None
                elif pause > 0:
                    self._condition.wait(pause)
                elif self._busy:
                    self._wait(lambda: not self._busy)
                else:
                    self._begin()
                    return self._todo.popleft()


_NONE = timedelta(0)


class TimedOut(dist.DistBackendError):
    """A rank did not come within the `timeout` of its group, or of this ``wait``."""


def seconds_of(timeout: timedelta) -> float | None:
    """Return a timeout of torch in seconds; None if nothing was said (0, or less)."""
    return timeout.total_seconds() if timeout > _NONE else None


@final
class FailureNotice:
    """What a call has failed with, and whether the program has heard of it.

    Attributes:
      error: The exception; None if it has not failed.
      is_reported: Somebody has waited for it, or asked.
    """

    error: BaseException | None = None
    is_reported = False


class AnyWork(dist.Work):
    """The part that all have: an error that is raised once somebody asks, and a future.

    Args:
      outputs: What the future holds when it is done.

    Attributes:
      outputs: As the argument.
      failure_notice: What it has ended with.
    """

    # Here, as most are never asked for a future.
    _lock = threading.RLock()
    _base: torch.futures.Future[Any] | None = None
    _future: torch.futures.Future[Any] | None = None

    def __init__(self, outputs: Sequence[torch.Tensor]):
        """Start as a pending call."""
        super().__init__()
        self.outputs = list(outputs)
        self.failure_notice = FailureNotice()

    def is_completed(self) -> bool:
        """Tell whether it has ended."""
        raise NotImplementedError

    def complete_future(self) -> None:
        """Tell those who have asked for a future that it has ended."""
        if self._base is None:  # who asks from now on sees that it has ended
            return
        with self._lock:  # two threads may find that out at once
            base, self._base = self._base, None
        if base is not None:
            base.set_result(None)

    def is_success(self) -> bool:
        """Tell whether it has ended well."""
        return self.is_completed() and self.failure_notice.error is None

    def exception(self) -> BaseException | None:
        """Return what it has failed with, or None."""
        self.failure_notice.is_reported = self.failure_notice.is_reported or self.is_completed()
        return self.failure_notice.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it fills."""
        return self.outputs

    def check(self) -> None:
        """Raise what it has failed with."""
        self.failure_notice.is_reported = True
        if self.failure_notice.error is not None:
            raise self.failure_notice.error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors.

        An error is raised in a callback of a first future, as that is the one way in which torch's
        own code, such as the backward pass of DistributedDataParallel, survives it.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            base: torch.futures.Future[Any] = torch.futures.Future()
            self._future = base.then(self._return_outputs)
            self._base = base
        if self.is_completed():
            self.complete_future()
        return self._future

    def _return_outputs(self, _: Any) -> list[torch.Tensor]:
        self.check()
        return self.outputs


class CallWork(AnyWork):
    """A collective call.

    Args:
      outputs: The tensors that it fills.
      worker: Makes it.
      late: Returns the error of a ``wait`` that has taken so many seconds.

    Attributes:
      end_record: Ends its event in a profile; None without one.
    """

    end_record: Callable[[], None] | None = None

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        worker: Worker,
        make_late_error: Callable[[float], Exception],
    ):
        """Start as a pending call."""
        super().__init__(outputs)
        self._worker, self._make_late_error = worker, make_late_error
        self._completed = False

    def end(self, error: BaseException | None) -> None:
        """Note that it has ended, with this error."""
        self.failure_notice.error = error
        self._completed = True
        if self.end_record is not None:
            self.end_record()
        self.complete_future()

    def is_completed(self) -> bool:
        """Tell whether it has ended."""
        if not self._completed and self._worker.has_turn():
            self._worker.help(self._has_ended)  # in a callback nobody else would make it
        return self._completed

    def _has_ended(self) -> bool:
        return self._completed

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Wait until it has ended, and raise what it has failed with.

        Args:
          timeout: How long; 0 for what its group allows.

        Raises:
          TimedOut: A rank did not come in time.
          LockstepError: The ranks call different things.
          RemoteError: Another rank has failed, or left.
        """
        seconds = seconds_of(timeout)
        if seconds is None or self._worker.has_turn():
            self._worker.help(self._has_ended)
        elif not self._worker.wait_for(self._has_ended, min(seconds, threading.TIMEOUT_MAX)):
            raise self._make_late_error(seconds)
        self.check()
        return True


@final
class Finished(AnyWork):
    """What was done when the call returned, without tensors for a future."""

    def __init__(self) -> None:
        """Have nothing to wait for."""
        super().__init__(())

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Return True, at once."""
        return True
