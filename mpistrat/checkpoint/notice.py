"""Sources of preemption notices: signals, and functions that are polled.

Python runs the handler of a signal when the main thread comes back from C, which may be a wait in
MPI or a kernel. A thread that reads what the C handler writes (`signal.set_wakeup_fd`) hears of it
at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, final

from mpistrat.comm import callsite
from mpistrat.config import launched_by
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.watchdog.status_board import say

EXIT_CODE = 42  # TensorFlow's, outside of Google's cloud

_POLL_SECONDS = 1.0  # between two questions to a function
_SPEAKING = 4  # ranks that say at once that they are told; all are named when they leave
_NO_DESCRIPTOR = -1  # to signal.set_wakeup_fd


@final
class SignalListener:
    """A thread that hears the signals of this process, and tells every notice that listens."""

    def __init__(self) -> None:
        """Take the place of the descriptor that is there; it gets its bytes from here."""
        self.notices: list[Notice] = []
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="mpistrat-signals", daemon=True).start()

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while 0 not in (signal_bytes := os.read(self._read, 64)):
            for number in signal_bytes:
                for notice in tuple(self.notices):
                    notice.record_signal(number)
            if self._previous_descriptor != _NO_DESCRIPTOR:
                with contextlib.suppress(OSError):  # it is full, or closed
                    os.write(self._previous_descriptor, signal_bytes)
        os.close(self._read)
        os.close(self._write)

    def mute_child(self) -> None:
        """Hear nothing in a child: it must not tell this process of its own signals."""
        current_descriptor = signal.set_wakeup_fd(_NO_DESCRIPTOR)
        if current_descriptor not in (self._write, _NO_DESCRIPTOR):
            signal.set_wakeup_fd(current_descriptor)

    def close(self) -> bool:
        """Put back what was there and end; not if somebody else has taken this one's place."""
        if threading.current_thread() is not threading.main_thread():
            return False
        current_descriptor = signal.set_wakeup_fd(self._previous_descriptor)
        if current_descriptor != self._write:
            signal.set_wakeup_fd(current_descriptor)
            return False
        os.write(self._write, b"\0")
        return True


_listeners: list[SignalListener] = []  # one, or none
_listened_signals: set[int] = set()  # signals that have told any notice


_early_signals: set[int] = set()  # those that came before anybody listened


def before_listening(number: int, frame: FrameType | None) -> None:
    """Handle a signal for a program that may listen later: the first notice that does is told."""
    _early_signals.add(number)


def _ignore_signals() -> None:
    """Ignore them while the process leaves: the program is done, and its code known."""
    for number in _listened_signals:
        handler = signal.getsignal(number)
        if handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), Notice):
            signal.signal(number, signal.SIG_IGN)


def _mute_child() -> None:
    while _listeners:
        _listeners.pop().mute_child()


os.register_at_fork(after_in_child=_mute_child)


def listed(signals: Iterable[int | str], name: str) -> tuple[int | str, ...]:
    """Return names or numbers of signals.

    Raises:
      TypeError: It is one of them, or nothing of the kind.
    """
    if isinstance(signals, str) or not isinstance(signals, Iterable):
        expected_text = "a list of names or numbers, such as ['SIGTERM']"
        raise TypeError(f"{name}: signals must be {expected_text}, got {signals!r:.60}.")
    return tuple(signals)


def numbers_of(signals: Iterable[int | str], name: str) -> tuple[signal.Signals, ...]:
    """Return signals by their names or numbers.

    Raises:
      TypeError: As of `listed`.
      ValueError: One is unknown, or cannot be handled.
    """
    numbers: list[signal.Signals] = []
    for name_or_number in listed(signals, name):
        try:
            number = (
                signal.Signals[name_or_number]
                if isinstance(name_or_number, str)
                else signal.Signals(name_or_number)
            )
        except (KeyError, ValueError):
            raise ValueError(
                f"{name}: {name_or_number!r} is not a signal; give names such as 'SIGTERM'."
            ) from None
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{name}: {number.name} cannot be handled by a process.")
        numbers.append(number)
    return tuple(numbers)


def notices_text(lockstep: Lockstep, reason: str) -> str:
    """Return, in words, which ranks were told to end, and by what. Collective.

    Args:
      lockstep: The lockstep of all ranks.
      reason: The source of this rank's notice, such as a signal; empty without a notice.
    """
    ranks_by_reason = callsite.group_by_key(lockstep.texts(reason.encode()), lockstep.ranks)
    texts = [
        f"{callsite.ranks_text(ranks_by_reason[row])} by {row.decode()}"
        for row in ranks_by_reason
        if row
    ]
    return ", ".join(callsite.shorten(texts))


@final
class Notice:
    """What has told this rank that it is about to be ended.

    Attributes:
      reason: What told, or an empty string.
      at: When, on the monotonic clock.
      error: What a function that was asked has raised.
      kill_wait: Seconds from SIGTERM to the end, if the batch system says so.
    """

    def __init__(self, rank: int = 0, grace: float | None = None):
        """Create it; nothing has told this rank anything yet.

        Args:
          rank: Of this process, for what is said.
          grace: Seconds from the notice to the end; None if nobody knows.
        """
        self.reason = ""
        self.at = 0.0
        self.error: BaseException | None = None
        self.kill_wait: float | None = None
        self.end_event = threading.Event()  # nobody waits for it any more
        self.is_leaving = False  # all is saved, and the process is about to exit
        self._rank, self._grace, self._pid = rank, grace, os.getpid()
        # Told by the main thread's handler and by other threads: whoever is first.
        self._first_lock = threading.Lock()
        self._previous_handlers: dict[int, Any] = {}

    def record(self, reason: str, seconds: float | None = None) -> None:
        """Take note, the first time, and say so.

        Args:
          reason: The source of the notice, such as the name of a signal.
          seconds: The time that is left; None for the grace period.
        """
        if not self._first_lock.acquire(blocking=False):
            return
        self.at, self.reason = time.monotonic(), reason
        seconds_left = self._grace if seconds is None else seconds
        text = "at a time that is not known" if not seconds_left else f"in {seconds_left:.0f} s"
        if self.kill_wait is not None and reason == signal.SIGTERM.name:
            text = f"in {self.kill_wait:.0f} s (KillWait of Slurm), unless --signal asked for it"
        if self._rank < _SPEAKING:
            say(f"mpistrat: rank {self._rank} got {reason}: the job will be ended {text}.")

    def forget(self) -> None:
        """Take the notice back."""
        if self.reason:
            self.reason = ""
            self._first_lock.release()

    def listen(self, numbers: Sequence[signal.Signals], caller: str) -> None:
        """Take signals as notices; the handlers that were there are called too."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"{caller} was made in the thread {threading.current_thread().name!r}, but Python "
                "gives signals to the main thread only. Make it there, or give no signal and "
                "a function that is asked."
            )
        mpirun = launched_by() == "mpiexec of Open MPI"
        if mpirun and self._rank == 0 and signal.SIGTERM in numbers:
            say(
                "mpistrat: mpirun of Open MPI kills ranks 0.25 s after SIGTERM, which is "
                "too short to save. Let the batch system send SIGUSR1, and use that signal."
            )
        for number in numbers:
            previous_handler = signal.signal(number, self.handle_signal)
            owner = getattr(previous_handler, "__self__", None)
            if isinstance(owner, Notice) and owner.end_event.is_set():
                previous_handler = owner._previous_handlers.get(number)  # of a handler that is gone
            self._previous_handlers[number] = (
                signal.SIG_DFL if previous_handler is before_listening else previous_handler
            )
        if not _listened_signals:  # after the session's, so it is called before that
            atexit.register(_ignore_signals)
        _listened_signals.update(numbers)
        if not _listeners:
            _listeners.append(SignalListener())
        _listeners[0].notices.append(self)
        for early_signal in _early_signals.intersection(numbers):
            _early_signals.remove(early_signal)
            self.record_signal(early_signal)

    def record_signal(self, number: int) -> None:
        """Take note of a signal if it is one of this notice's; in any thread."""
        if (
            number in self._previous_handlers
            and not self.end_event.is_set()
            and not self.is_leaving
        ):
            self.record(signal.Signals(number).name)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal; if nobody waits for it any more, do what was done before."""
        is_over, previous_handler = self.end_event.is_set(), self._previous_handlers.get(number)
        is_over = is_over or os.getpid() != self._pid  # a child that was forked
        if not is_over:
            self.record_signal(number)
        if callable(previous_handler) and previous_handler is not signal.default_int_handler:
            # A handler that ends the process must not do so before the checkpoint is there.
            with contextlib.nullcontext() if is_over else contextlib.suppress(SystemExit):
                previous_handler(number, frame)
        elif is_over and previous_handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end(self) -> None:
        """Wait no more, and put back the handlers that were there.

        A signal that comes later must not kill a job that has nothing more to save: where there was
        no handler it is ignored from now on; SIGTERM, by which people end jobs, not before the
        process leaves.
        """
        if self.is_leaving:
            return
        self.end_event.set()
        if threading.current_thread() is threading.main_thread():
            for number, previous_handler in self._previous_handlers.items():
                if signal.getsignal(number) == self.handle_signal and previous_handler is not None:
                    is_ignored = previous_handler == signal.SIG_DFL and number != signal.SIGTERM
                    signal.signal(number, signal.SIG_IGN if is_ignored else previous_handler)
        for listener in tuple(_listeners):
            with contextlib.suppress(ValueError):
                listener.notices.remove(self)
            if not listener.notices and listener.close():
                _listeners.remove(listener)

    def ask_watchers(self, watchers: Mapping[str, Callable[[], Any]]) -> None:
        """Ask functions every second, until this is over.

        Args:
          watchers: The functions, by their names in messages. A true result is a notice; a float
            is the number of seconds that are left.
        """
        while not self.end_event.is_set() and not self.is_leaving:
            for name, watcher in watchers.items():
                try:
                    if not self.reason and self.error is None and (answer := watcher()):
                        is_seconds = isinstance(answer, float)
                        self.record(name, answer if is_seconds else None)
                except BaseException as error:  # told by the thread that trains, on all ranks
                    self.error = error
            self.end_event.wait(_POLL_SECONDS)

    def watch(self, watchers: Mapping[str, Callable[[], Any]]) -> None:
        """Let a thread of its own `ask_watchers`; it knows this notice only, and ends with it."""
        if watchers:
            threading.Thread(
                target=self.ask_watchers, args=(watchers,), name="mpistrat-preemption", daemon=True
            ).start()
