"""What torch waits for: one call, in transit or done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from mpistrat.torch.worker import Worker

__all__ = ["AnyWork", "CallWork", "FailureNotice", "Finished", "TimedOut", "seconds_of"]

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
