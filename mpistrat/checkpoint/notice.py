"""Notices of preemption: signals, and functions that are polled.

Python runs the handler of a signal when the main thread comes back from C, which may be a wait in
MPI or a kernel. A thread that reads the bytes which the C handler writes (`signal.set_wakeup_fd`)
hears of the signal at once.
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
from typing import Any, NamedTuple, final

from mpistrat.comm import callsite
from mpistrat.config import launched_by
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.watchdog.status_board import say

EXIT_CODE = 42  # TensorFlow's, outside of Google's cloud

_POLL_SECONDS = 1.0  # between two questions to a function
_MAX_REPORTING_RANKS = 4  # ranks that print their notice at once; all are named when they leave
_NO_DESCRIPTOR = -1  # to signal.set_wakeup_fd
_INTERRUPT_REASON = "Ctrl-C"  # of a notice by SIGINT


@final
class SignalListener:
    """A thread that hears the signals of this process, and passes them to all notices."""

    def __init__(self) -> None:
        """Take the place of the descriptor that is there; it gets its bytes from here."""
        self.notices: list[Notice] = []
        self._read_descriptor, self._write_descriptor = os.pipe()
        os.set_blocking(self._write_descriptor, False)
        self._previous_descriptor = signal.set_wakeup_fd(
            self._write_descriptor, warn_on_full_buffer=False
        )
        threading.Thread(target=self._listen, name="mpistrat-signals", daemon=True).start()

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while 0 not in (signal_bytes := os.read(self._read_descriptor, 64)):
            for number in signal_bytes:
                for notice in tuple(self.notices):
                    notice.record_signal(number)
            if self._previous_descriptor != _NO_DESCRIPTOR:
                with contextlib.suppress(OSError):  # it is full, or closed
                    os.write(self._previous_descriptor, signal_bytes)
        os.close(self._read_descriptor)
        os.close(self._write_descriptor)

    def mute_child(self) -> None:
        """Hear nothing in a child: this process must not hear of the child's own signals."""
        current_descriptor = signal.set_wakeup_fd(_NO_DESCRIPTOR)
        if current_descriptor not in (self._write_descriptor, _NO_DESCRIPTOR):
            signal.set_wakeup_fd(current_descriptor)

    def close(self) -> bool:
        """Put back what was there and end; not if somebody else has taken this one's place."""
        if threading.current_thread() is not threading.main_thread():
            return False
        current_descriptor = signal.set_wakeup_fd(self._previous_descriptor)
        if current_descriptor != self._write_descriptor:
            signal.set_wakeup_fd(current_descriptor)
            return False
        os.write(self._write_descriptor, b"\0")
        return True


_listeners: list[SignalListener] = []  # one, or none
_handled_signals: set[int] = set()  # signals that have told any notice


_early_signals: set[int] = set()  # those that came before anybody listened


def record_early_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal for a program that may listen later; its first notice records it."""
    _early_signals.add(number)


def _ignore_signals() -> None:
    """Ignore them while the process leaves: the program is done, and its code known."""
    for number in _handled_signals:
        handler = signal.getsignal(number)
        if handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), Notice):
            signal.signal(number, signal.SIG_IGN)


def _mute_child() -> None:
    while _listeners:
        _listeners.pop().mute_child()


os.register_at_fork(after_in_child=_mute_child)


def check_signal_list(signals: Iterable[int | str], name: str) -> tuple[int | str, ...]:
    """Return names or numbers of signals.

    Raises:
      TypeError: It is one of them, or nothing of the kind.
    """
    if isinstance(signals, str) or not isinstance(signals, Iterable):
        expected_text = "a list of names or numbers, such as ['SIGTERM']"
        raise TypeError(f"{name}: signals must be {expected_text}, got {signals!r:.60}.")
    return tuple(signals)


def parse_signals(signals: Iterable[int | str], name: str) -> tuple[signal.Signals, ...]:
    """Return signals by their names or numbers.

    Raises:
      TypeError: As of `check_signal_list`.
      ValueError: One is unknown, or cannot be handled.
    """
    parsed_signals: list[signal.Signals] = []
    for name_or_number in check_signal_list(signals, name):
        try:
            parsed_signal = (
                signal.Signals[name_or_number]
                if isinstance(name_or_number, str)
                else signal.Signals(name_or_number)
            )
        except (KeyError, ValueError):
            raise ValueError(
                f"{name}: {name_or_number!r} is not a signal; give names such as 'SIGTERM'."
            ) from None
        if parsed_signal in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{name}: {parsed_signal.name} cannot be handled by a process.")
        parsed_signals.append(parsed_signal)
    return tuple(parsed_signals)


class NoticeSummary(NamedTuple):
    """The notices of all ranks; equal on all ranks.

    Attributes:
      text: Which ranks were told to end, and by what.
      is_interrupt: Whether Ctrl-C was the only source.
    """

    text: str
    is_interrupt: bool


def summarize_notices(lockstep: Lockstep, reason: str) -> NoticeSummary:
    """Return the notices of all ranks, in words. Collective.

    Args:
      lockstep: The lockstep of all ranks.
      reason: The source of this rank's notice, such as a signal; empty without a notice.
    """
    ranks_by_reason = callsite.group_by_key(lockstep.gather_texts(reason.encode()), lockstep.ranks)
    ranks_by_reason.pop(b"", None)
    texts = [
        f"{callsite.ranks_text(ranks)} by {encoded_reason.decode()}"
        for encoded_reason, ranks in ranks_by_reason.items()
    ]
    is_interrupt = [*ranks_by_reason] == [_INTERRUPT_REASON.encode()]
    return NoticeSummary(", ".join(callsite.shorten(texts)), is_interrupt)


@final
class Notice:
    """The notice that this rank is about to be ended, if it has had one.

    Attributes:
      reason: The source of the notice, or an empty string.
      notice_time: When, on the monotonic clock.
      watcher_error: What a function that was asked has raised.
      kill_wait_seconds: Seconds from SIGTERM to the end, if the batch system says so.
    """

    def __init__(self, rank: int = 0, grace: float | None = None):
        """Create it; nothing has told this rank anything yet.

        Args:
          rank: The rank of this process, for messages.
          grace: Seconds from the notice to the end; None if nobody knows.
        """
        self.reason = ""
        self.notice_time = 0.0
        self.watcher_error: BaseException | None = None
        self.kill_wait_seconds: float | None = None
        self.end_event = threading.Event()  # nobody waits for it any more
        self.is_leaving = False  # all is saved, and the process is about to exit
        self._rank, self._grace, self._pid = rank, grace, os.getpid()
        # Told by the main thread's handler and by other threads: whoever is first.
        self._first_lock = threading.Lock()
        self._previous_handlers: dict[int, Any] = {}
        self._has_handled_interrupt = False

    @property
    def is_interrupt(self) -> bool:
        """Whether Ctrl-C was its source."""
        return self.reason == _INTERRUPT_REASON

    def record(self, reason: str, seconds: float | None = None) -> None:
        """Take note, the first time, and say so.

        Args:
          reason: The source of the notice, such as the name of a signal.
          seconds: The time that is left; None for the grace period.
        """
        if not self._first_lock.acquire(blocking=False):
            return
        self.notice_time, self.reason = time.monotonic(), reason
        if self.is_interrupt:  # usually of all ranks
            if self._rank == 0:
                say("mpistrat: Ctrl-C: saves after this step; a second one ends at once, unsaved.")
            return
        seconds_left = self._grace if seconds is None else seconds
        time_text = (
            "at a time that is not known" if not seconds_left else f"in {seconds_left:.0f} s"
        )
        if self.kill_wait_seconds is not None and reason == signal.SIGTERM.name:
            time_text = f"in {self.kill_wait_seconds:.0f} s (KillWait of Slurm)"
            time_text += ", unless --signal asked for it"
        if self._rank < _MAX_REPORTING_RANKS:
            say(f"mpistrat: rank {self._rank} got {reason}: the job will be ended {time_text}.")

    def clear(self) -> None:
        """Take the notice back."""
        if self.reason:
            self.reason, self._has_handled_interrupt = "", False
            self._first_lock.release()

    def warn_of_open_mpi(self, signals: Sequence[signal.Signals]) -> None:
        """Say, on rank 0, that SIGTERM comes too late, where it does."""
        is_open_mpi = launched_by() == "mpiexec of Open MPI"
        if is_open_mpi and self._rank == 0 and signal.SIGTERM in signals:
            say(
                "mpistrat: mpirun of Open MPI kills ranks 0.25 s after SIGTERM, which is "
                "too short to save. Let the batch system send SIGUSR1, and use that signal."
            )

    def listen_for_signals(self, signals: Sequence[signal.Signals], caller: str) -> None:
        """Take signals as notices; the handlers that were there are called too."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"{caller} was made in the thread {threading.current_thread().name!r}, but Python "
                "gives signals to the main thread only. Make it there, or give no signal and "
                "a function that is asked."
            )
        for signal_number in signals:
            previous_handler = signal.signal(signal_number, self.handle_signal)
            owner = getattr(previous_handler, "__self__", None)
            if isinstance(owner, Notice) and owner.end_event.is_set():
                previous_handler = owner._previous_handlers.get(
                    signal_number
                )  # of a handler that is gone
            self._previous_handlers[signal_number] = (
                signal.SIG_DFL if previous_handler is record_early_signal else previous_handler
            )
        if not _handled_signals:  # after the session's, so it is called before that
            atexit.register(_ignore_signals)
        _handled_signals.update(signals)
        if not _listeners:
            _listeners.append(SignalListener())
        _listeners[0].notices.append(self)
        for early_signal in _early_signals.intersection(signals):
            _early_signals.remove(early_signal)
            self.record_signal(early_signal)

    def record_signal(self, number: int) -> None:
        """Take note of a signal if it is one of this notice's; in any thread."""
        if (
            number in self._previous_handlers
            and not self.end_event.is_set()
            and not self.is_leaving
        ):
            is_interrupt = number == signal.SIGINT
            self.record(_INTERRUPT_REASON if is_interrupt else signal.Signals(number).name)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal; if nobody waits for it any more, do what was done before.

        The first Ctrl-C raises nothing, and a further one does what was done before.
        """
        is_over, previous_handler = self.end_event.is_set(), self._previous_handlers.get(number)
        is_over = is_over or os.getpid() != self._pid  # a child that was forked
        if not is_over:
            self.record_signal(number)
        if number == signal.SIGINT and not is_over:
            is_first, self._has_handled_interrupt = not self._has_handled_interrupt, True
            if is_first:
                return
        if callable(previous_handler):
            # A handler that ends the process must not do so before the checkpoint is there.
            with contextlib.nullcontext() if is_over else contextlib.suppress(SystemExit):
                previous_handler(number, frame)
        elif is_over and previous_handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop_listening(self) -> None:
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

    def poll_watchers(self, watchers: Mapping[str, Callable[[], Any]]) -> None:
        """Ask functions every second, until this is over.

        Args:
          watchers: The functions, by their names in messages. A true result is a notice; a float
            is the number of seconds that are left.
        """
        while not self.end_event.is_set() and not self.is_leaving:
            for name, watcher in watchers.items():
                try:
                    if (
                        not self.reason
                        and self.watcher_error is None
                        and (watcher_result := watcher())
                    ):
                        is_seconds = isinstance(watcher_result, float)
                        self.record(name, watcher_result if is_seconds else None)
                except BaseException as error:  # told by the thread that trains, on all ranks
                    self.watcher_error = error
            self.end_event.wait(_POLL_SECONDS)

    def start_watchers(self, watchers: Mapping[str, Callable[[], Any]]) -> None:
        """Let a thread of its own `poll_watchers`; it knows this notice only, and ends with it."""
        if watchers:
            threading.Thread(
                target=self.poll_watchers, args=(watchers,), name="mpistrat-preemption", daemon=True
            ).start()
