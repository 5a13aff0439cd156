"""The work objects for which a program waits, and the worker thread of a group.

A `Worker` makes the collective calls of one group, in their order, beside the program. A `CallWork`
is one collective call, in transit or ended. `wait` raises the error of the call. A future raises it
in a callback of another future, as DistributedDataParallel needs. The next calls of the group raise
an error for which nobody has waited.
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
    "BaseWork",
    "CallTimeoutError",
    "CallWork",
    "FailureNotice",
    "FinishedWork",
    "Worker",
    "convert_timeout",
]


# Seconds that an idle thread stays: to start a thread takes longer than a call.
_LINGER_SECONDS = 30.0
# Seconds that it pauses during a backward pass on the rank's only core: the calls take longer then,
# as the threads of other ranks have no core either.
_PAUSE_SECONDS = 0.1
# The timeout of torch that means the timeout of the group.
_NO_TIMEOUT = timedelta(0)


@final
class Worker:
    """A queue of calls, and a thread that makes those for which the program does not wait.

    Args:
      name: The name of the thread.
      can_use_thread: Whether any thread may call MPI; else the caller makes each call at once.

    Attributes:
      can_use_thread: The argument.
      has_one_core: Whether this rank has only one core.
    """

    def __init__(self, name: str, can_use_thread: bool):
        """Begin without a thread."""
        self.name, self.can_use_thread, self.has_one_core = name, can_use_thread, False
        self._queued_calls: deque[Callable[[bool], None]] = deque()
        # `with` on the lock is quicker than on the Condition, which takes it in Python.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._is_busy = self._has_thread = False
        self._turn_thread_id = 0  # the thread that makes a call now
        self._waiter_count = 0  # how many threads wait for a turn to end
        self._earliest_start = 0.0  # when the thread may begin with queued calls
        self._pid = os.getpid()

    def take_turn(self) -> bool:
        """Reserve the next call for this thread if none is queued; return whether it did."""
        with self._lock:
            if self._is_busy or self._queued_calls:
                return False
            self._begin_turn()
        return True

    def has_turn(self) -> bool:
        """Return whether this thread makes a call now, as in a callback of the call."""
        return self._turn_thread_id == threading.get_ident()

    def _begin_turn(self) -> None:
        self._is_busy, self._turn_thread_id = True, threading.get_ident()

    def end_turn(self) -> None:
        """End the turn that `take_turn` began, and wake threads that wait for it."""
        with self._lock:
            self._is_busy, self._turn_thread_id = False, 0
            if self._waiter_count:
                self._condition.notify_all()

    def queue_call(self, run_call: Callable[[bool], None]) -> None:
        """Queue a call for the thread, behind all earlier calls.

        A call by a callback of another call is made at once: the callback may wait for it, and so
        it has the same position in the order on all ranks, however many calls are queued.

        Args:
          run_call: Makes the call. It gets whether the program continues beside it, and raises
            nothing.
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
        if is_in_backward:  # the pass makes the calls at its end
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
        """Return when a condition is true; make calls here that the thread has not begun.

        A program that waits makes a call sooner than a thread that has to wake up. A callback has
        the turn of its call, so no other thread can make the call for which it waits.
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
        """Wait until a condition is true, at most some seconds; return whether it is."""
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
        """Wait until all calls have ended, at most some seconds; return whether they have.

        In a callback of a call the result is False: that call ends after its callback.
        """
        if os.getpid() != self._pid:  # a child process has no threads of its parent
            return True
        if self.has_turn():
            return False
        return self.wait_until(lambda: not self._is_busy and not self._queued_calls, seconds)

    def _run_worker(self) -> None:
        block_signals()
        with np.errstate(all="ignore"):
            while (run_call := self._take_next_call()) is not None:
                try:
                    run_call(True)
                except BaseException:  # it ends the thread; the next call starts another
                    self._has_thread = False
                    raise
                finally:
                    del run_call  # and the tensors that it holds
                    self.end_turn()

    def _take_next_call(self) -> Callable[[bool], None] | None:
        """Return the next call, whose turn has begun; None after a while without calls."""
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


class CallTimeoutError(dist.DistBackendError):
    """A rank did not come within the timeout of its group, or of this ``wait``."""


def convert_timeout(timeout: timedelta) -> float | None:
    """Return a timeout of torch in seconds; None for 0 or less, the timeout of the group."""
    return timeout.total_seconds() if timeout > _NO_TIMEOUT else None


@final
class FailureNotice:
    """The error of a call, and whether the program has got it.

    Attributes:
      error: The exception; None if the call has not failed.
      is_reported: Whether the program has waited for the call, or asked for the error.
    """

    error: BaseException | None = None
    is_reported = False


class BaseWork(dist.Work):
    """The common part of work objects: an error, and a future.

    Args:
      outputs: The tensors that the future returns.

    Attributes:
      outputs: The argument.
      failure_notice: The error.
    """

    # Class attributes, as most work objects never have a future.
    _future_lock = threading.RLock()
    _pending_future: torch.futures.Future[Any] | None = None
    _future: torch.futures.Future[Any] | None = None

    def __init__(self, outputs: Sequence[torch.Tensor]):
        """Begin as pending."""
        super().__init__()
        self.outputs = list(outputs)
        self.failure_notice = FailureNotice()

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        raise NotImplementedError

    def complete_future(self) -> None:
        """Set the future, if there is one, as the call has ended."""
        if self._pending_future is None:  # `get_future` checks `is_completed` itself
            return
        with self._future_lock:  # two threads may complete it at once
            pending_future, self._pending_future = self._pending_future, None
        if pending_future is not None:
            pending_future.set_result(None)

    def is_success(self) -> bool:
        """Return whether it has ended without an error."""
        return self.is_completed() and self.failure_notice.error is None

    def exception(self) -> BaseException | None:
        """Return its error, or None."""
        self.failure_notice.is_reported = self.failure_notice.is_reported or self.is_completed()
        return self.failure_notice.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the call fills."""
        return self.outputs

    def raise_failure(self) -> None:
        """Raise its error, if there is one."""
        self.failure_notice.is_reported = True
        if self.failure_notice.error is not None:
            raise self.failure_notice.error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors.

        An error is raised in a callback of a first future: torch's own code, such as the backward
        pass of DistributedDataParallel, handles no other.
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
      outputs: The tensors that the call fills.
      worker: Makes the call.
      make_late_error: Returns the error of a ``wait`` that has taken this many seconds.

    Attributes:
      end_record: Ends the event of the call in a profile; None without one.
    """

    end_record: Callable[[], None] | None = None

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        worker: Worker,
        make_late_error: Callable[[float], Exception],
    ):
        """Begin as pending."""
        super().__init__(outputs)
        self._worker, self._make_late_error = worker, make_late_error
        self._is_completed = False

    def end(self, error: BaseException | None) -> None:
        """Record that the call has ended, with an error or None."""
        self.failure_notice.error = error
        self._is_completed = True
        if self.end_record is not None:
            self.end_record()
        self.complete_future()

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        if not self._is_completed and self._worker.has_turn():
            self._worker.run_until(
                self._check_completed
            )  # no other thread makes it during a callback
        return self._is_completed

    def _check_completed(self) -> bool:
        return self._is_completed

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the call has ended, and raise its error.

        Args:
          timeout: How long; 0 for the timeout of its group.

        Raises:
          CallTimeoutError: A rank did not come in time.
          LockstepError: The calls differ between ranks.
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
    """A call that had ended when it returned, without tensors for a future."""

    def __init__(self) -> None:
        """Begin as ended."""
        super().__init__(())

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True, at once."""
        return True
