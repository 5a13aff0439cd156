"""What tells a rank that its job is about to be ended: signals, and a function that is asked."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, final

__all__ = ["Notice"]

_POLL = 1.0  # seconds between two questions to termination_watcher_fn


@final
class Notice:
    """What has told this rank that it is about to be ended.

    Attributes:
      why: What told, or an empty text.
      at: When, on the monotonic clock.
      error: What the function that was asked has raised.
    """

    def __init__(self) -> None:
        """Create it; nothing has told this rank anything yet."""
        self.why = ""
        self.at = 0.0
        self.error: BaseException | None = None
        self.over = threading.Event()  # nobody waits for it any more
        self.left = False  # all is saved, and the process is on its way out
        self._before: dict[int, Any] = {}

    def tell(self, why: str) -> None:
        """Take note, the first time."""
        if not self.why:
            self.at = time.monotonic()
            self.why = why

    def forget(self) -> None:
        """Take the notice back."""
        self.why = ""

    def listen(self, numbers: Sequence[signal.Signals]) -> None:
        """Let signals tell; the handlers that were there are called too."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "PreemptionCheckpointHandler was made in the thread "
                f"{threading.current_thread().name!r}, but Python gives signals to the main thread "
                "only. Make it there, or give TerminationConfig(termination_watcher_fn=...)."
            )
        for number in numbers:
            before = signal.signal(number, self.heard)
            owner = getattr(before, "__self__", None)
            if isinstance(owner, Notice) and owner.over.is_set():
                before = owner._before.get(number)  # of a handler that is gone
            self._before[number] = before

    def heard(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal; if nobody waits for it any more, do what was done before."""
        over, before = self.over.is_set(), self._before.get(number)
        if not over:
            self.tell(signal.Signals(number).name)
        if callable(before) and before is not signal.default_int_handler:
            # A handler that ends the process must not do so before the checkpoint is there.
            with contextlib.nullcontext() if over else contextlib.suppress(SystemExit):
                before(number, frame)
        elif over and before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end(self) -> None:
        """Wait no more; but a signal that comes while the process leaves is not to kill it."""
        if not self.left:
            self.over.set()

    def ask(self, watcher: Callable[[], Any]) -> None:
        """Ask a function every second, until this is over."""
        while not self.over.is_set():
            try:
                if not self.why and self.error is None and watcher():
                    self.tell("termination_watcher_fn")
            except BaseException as error:  # told by the thread that trains, on all ranks
                self.error = error
            self.over.wait(_POLL)
