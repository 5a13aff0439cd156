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

from mpistrat.kernels.threads import deaf

__all__ = [
    "BaseWork",
    "CallTimeoutError",
    "CallWork",
    "FailureNotice",
    "FinishedWork",
    "Worker",
    "convert_timeout",
]


# Seconds that the thread stays when there is nothing to do: to start one takes longer than a call.
_LINGER_SECONDS = 30.0
# Seconds that it pauses after each call of a backward pass which has the rank's only core: in
# parallel the calls take longer than after it, as ranks find each other's threads without a core.
_PAUSE_SECONDS = 0.1


@final
class Worker:
    """A queue of calls, and the thread that makes them, unless the program waits for them first.

    Args:
      name: Of the thread, in stacks.
      can_use_thread: Any thread may call MPI; else everything is done by the caller, at once.

    Attributes:
      can_use_thread: As the argument.
      has_one_core: This rank has but one core.
    """

    def __init__(self, name: str, can_use_thread: bool):
        """Start no thread yet."""
        self.name, self.can_use_thread, self.has_one_core = name, can_use_thread, False
        self._queued_calls: deque[Callable[[bool], None]] = deque()
        # The lock itself is taken where nobody waits: a Condition does so in Python.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._is_busy = self._has_thread = False
        self._turn_thread_id = 0  # the thread whose turn it is
        self._waiter_count = 0  # how many threads wait for a turn to end
        self._earliest_start = 0.0  # when the thread may begin with what is queued
        self._pid = os.getpid()

    def take_turn(self) -> bool:
        """Reserve the next call for this thread, if none is queued; tell whether it is."""
        with self._lock:
            if self._is_busy or self._queued_calls:
                return False
            self._begin_turn()
        return True

    def has_turn(self) -> bool:
        """Tell whether this thread makes a call now, as where a callback of the call runs."""
        return self._turn_thread_id == threading.get_ident()

    def _begin_turn(self) -> None:
        self._is_busy, self._turn_thread_id = True, threading.get_ident()

    def end_turn(self) -> None:
        """End the turn that `take_turn` began, so that other threads can have theirs."""
        with self._lock:
            self._is_busy, self._turn_thread_id = False, 0
            if self._waiter_count:
                self._condition.notify_all()

    def queue_call(self, run_call: Callable[[bool], None]) -> None:
        """Have the thread make a call, behind all that came before.

        What a callback of a call asks for is made at once: it may wait for it, and so it has one
        place in the order on all ranks, however much was queued by then.

        Args:
          run_call: Is told whether the program continues beside it. It raises nothing.
        """
        if self.has_turn():
            run_call(False)
            return
        if not self.can_use_thread:
            while not self.take_turn():
                self.drain()
            try:
                run_call(False)
            finally:
                self.end_turn()
            return
        is_in_backward = self.has_one_core and torch._C._current_graph_task_id() >= 0
        if (
            is_in_backward
        ):  # it makes them itself as soon as it ends, before whatever waits for them
            torch.autograd.Variable._execution_engine.queue_callback(self._make_queued_calls)
        with self._lock:
            self._earliest_start = time.monotonic() + _PAUSE_SECONDS if is_in_backward else 0.0
            self._queued_calls.append(run_call)
            needs_thread = not self._has_thread
            self._has_thread = True
            self._condition.notify_all()
        if needs_thread:
            threading.Thread(target=self._run_worker, name=self.name, daemon=True).start()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Return when something is done; make the next calls here if the thread has not yet.

        A program that waits makes a call sooner than a thread that has to wake up. A callback of a
        call has its turn, and nobody else can make what it waits for.
        """
        while not is_done():
            with self._lock:
                is_in_turn = self.has_turn()
                if not self._queued_calls or (self._is_busy and not is_in_turn):
                    self._wait_until(lambda: is_done() or not self._is_busy)
                    continue
                if not is_in_turn:
                    self._begin_turn()
                run_call = self._queued_calls.popleft()
            try:
                run_call(False)
            finally:
                del run_call
                if not is_in_turn:
                    self.end_turn()

    def wait_until(self, is_done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until something is done, so many seconds at most; tell whether it is."""
        with self._lock:
            return self._wait_until(is_done, seconds)

    def _make_queued_calls(self) -> None:
        self.run_until(lambda: not self._queued_calls)

    def _wait_until(self, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        self._waiter_count += 1
        try:
            return self._condition.wait_for(predicate, seconds)
        finally:
            self._waiter_count -= 1

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until there is nothing to do, so many seconds at most; tell whether that is so.

        In a callback of a call it is not, and cannot become so: that call ends after it.
        """
        if os.getpid() != self._pid:  # a child has none of its parent's threads
            return True
        if self.has_turn():
            return False
        return self.wait_until(lambda: not self._is_busy and not self._queued_calls, seconds)

    def _run_worker(self) -> None:
        deaf()
        with np.errstate(all="ignore"):
            while (run_call := self._take_next_call()) is not None:
                try:
                    run_call(True)
                except BaseException:  # what ends a thread; the next call begins another
                    self._has_thread = False
                    raise
                finally:
                    del run_call  # and the tensors that it holds
                    self.end_turn()

    def _take_next_call(self) -> Callable[[bool], None] | None:
        """Return the next call when its turn has begun; None after a while without any."""
        with self._lock:
            while True:
                pause = self._earliest_start - time.monotonic()
                if not self._queued_calls:
                    if not self._condition.wait(_LINGER_SECONDS) and not self._queued_calls:
                        self._has_thread = False
                        return None
                elif pause > 0:
                    self._condition.wait(pause)
                elif self._is_busy:
                    self._wait_until(lambda: not self._is_busy)
                else:
                    self._begin_turn()
                    return self._queued_calls.popleft()


_NONE = timedelta(0)


class CallTimeoutError(dist.DistBackendError):
    """A rank did not come within the `timeout` of its group, or of this ``wait``."""


def convert_timeout(timeout: timedelta) -> float | None:
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


class BaseWork(dist.Work):
    """The part that all have: an error that is raised once somebody asks, and a future.

    Args:
      outputs: What the future holds when it is done.

    Attributes:
      outputs: As the argument.
      failure_notice: What it has ended with.
    """

    # Here, as most are never asked for a future.
    _future_lock = threading.RLock()
    _pending_future: torch.futures.Future[Any] | None = None
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
        if self._pending_future is None:  # who asks from now on sees that it has ended
            return
        with self._future_lock:  # two threads may find that out at once
            pending_future, self._pending_future = self._pending_future, None
        if pending_future is not None:
            pending_future.set_result(None)

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

    def raise_failure(self) -> None:
        """Raise what it has failed with."""
        self.failure_notice.is_reported = True
        if self.failure_notice.error is not None:
            raise self.failure_notice.error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors.

        An error is raised in a callback of a first future, as that is the one way in which torch's
        own code, such as the backward pass of DistributedDataParallel, survives it.
        """
        with self._future_lock:
            if self._future is not None:
                return self._future
            pending_future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = pending_future.then(self._return_outputs)
            self._pending_future = pending_future
        if self.is_completed():
            self.complete_future()
        return self._future

    def _return_outputs(self, _: Any) -> list[torch.Tensor]:
        self.raise_failure()
        return self.outputs


class CallWork(BaseWork):
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
        self._is_completed = False

    def end(self, error: BaseException | None) -> None:
        """Note that it has ended, with this error."""
        self.failure_notice.error = error
        self._is_completed = True
        if self.end_record is not None:
            self.end_record()
        self.complete_future()

    def is_completed(self) -> bool:
        """Tell whether it has ended."""
        if not self._is_completed and self._worker.has_turn():
            self._worker.run_until(self._check_completed)  # in a callback nobody else would make it
        return self._is_completed

    def _check_completed(self) -> bool:
        return self._is_completed

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Wait until it has ended, and raise what it has failed with.

        Args:
          timeout: How long; 0 for what its group allows.

        Raises:
          CallTimeoutError: A rank did not come in time.
          LockstepError: The ranks call different things.
          RemoteError: Another rank has failed, or left.
        """
        seconds = convert_timeout(timeout)
        if seconds is None or self._worker.has_turn():
            self._worker.run_until(self._check_completed)
        elif not self._worker.wait_until(
            self._check_completed, min(seconds, threading.TIMEOUT_MAX)
        ):
            raise self._make_late_error(seconds)
        self.raise_failure()
        return True


@final
class FinishedWork(BaseWork):
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
