"""Processes as the operating system shows them, and the stack frames of this one's threads.

`read_process` returns the state, the parent and the processor time of a process from ``/proc``.
`ComputeTracker` finds out when processes last computed; `LauncherProcesses` whether a launcher of
this process is gone. `get_current_frames` and `reading_frames` read the frames of other threads
without the hangs and crashes of Python 3.11.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, final

from mpistrat.config import LAUNCHERS

_ENDED_STATES = "ZXx"
# A process whose processor time grows by less than that share of the time, such as by its
# watchdog, does not compute. Its time is read in spans of so many seconds.
_MIN_SHARE, _SPAN_SECONDS = 0.03, 0.5
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Process(NamedTuple):
    """One process.

    Attributes:
      state: The letter of proc(5): R running, S sleeping, D waiting for a device, T stopped.
      parent_pid: Pid of its parent.
      start_ticks: When it started, clock ticks after boot; distinguishes it from a later process of
        the same pid.
      name: Its name, up to 15 characters.
      cpu_seconds: Seconds of processor time that all its threads have taken.
    """

    state: str
    parent_pid: int
    start_ticks: int
    name: str
    cpu_seconds: float = 0.0


# A process of which nothing can be known now, such as by a reader without a free file descriptor.
UNSEEN = Process("R", 0, 0, "")

ReadProcess = Callable[[int], "Process | None"]


def read_process(pid: int) -> Process | None:
    """Return a process as ``/proc`` shows it; None if it is not there, `UNSEEN` if unreadable.

    Example:
      >>> import os
      >>> own_process = read_process(os.getpid())
      >>> own_process is None or own_process.parent_pid == os.getppid()
      True
    """
    try:
        text = os.fsdecode(Path(f"/proc/{pid}/stat").read_bytes())  # a name is any bytes
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return UNSEEN
    # The name is in parentheses and may itself contain some.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    name, cpu_seconds = (
        head.partition("(")[2],
        (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
    )
    return Process(fields[0], int(fields[1]), int(fields[19]), name, cpu_seconds)


def has_signal_handler(pid: int, number: int) -> bool:
    """Tell whether a process has a handler of a signal; true also where that cannot be seen.

    A handler is gone if another program runs in the process, after ``os.execv``; then the signal
    would end it.

    Example:
      >>> import os, signal
      >>> previous_handler = signal.signal(signal.SIGUSR2, lambda number, frame: None)
      >>> has_signal_handler(os.getpid(), signal.SIGUSR2)
      True
      >>> _ = signal.signal(signal.SIGUSR2, previous_handler)
      >>> has_signal_handler(os.getpid(), signal.SIGRTMAX)
      False
    """
    with suppress(OSError):
        for line in os.fsdecode(Path(f"/proc/{pid}/status").read_bytes()).splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return True


def get_machine_id() -> str:
    """Return a string that is equal for processes that know each other by their pids.

    It has the id of this boot and the namespace of pids; without ``/proc`` it is the host's name.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return platform.node()


def is_process_finished(process: Process | None, start_ticks: int) -> bool:
    """Tell whether the process that started at `start_ticks` has ended, as far as can be seen."""
    if process is None:
        return True
    return process != UNSEEN and (
        process.start_ticks != start_ticks or process.state in _ENDED_STATES
    )


@final
class ComputeTracker:
    """The times when processes were last seen to compute, in whatever code.

    Args:
      read_process: Returns the state of a process.
    """

    def __init__(self, read_process: ReadProcess = read_process):
        """Create it without any process."""
        self._read_process = read_process
        # By pid: its processor time, when that was read, and when it was last seen to grow.
        self._samples: dict[int, tuple[float, int, int]] = {}

    def find_last_computing(self, pid: int, start_ticks: int, now_ns: int) -> int:
        """Read a process; return when it was last seen to compute, ns, or 0 for never.

        That takes two calls, half a second apart.

        Args:
          pid: The process.
          start_ticks: When it started, as `Process`.
          now_ns: The time, ns.
        """
        process = self._read_process(pid)
        if process is None or is_process_finished(process, start_ticks):
            return 0
        cpu_seconds, read_ns, computed_ns = self._samples.get(pid, (process.cpu_seconds, now_ns, 0))
        span = (now_ns - read_ns) / 1e9
        if span >= _SPAN_SECONDS:
            if process.cpu_seconds - cpu_seconds >= _MIN_SHARE * span:
                computed_ns = now_ns
            cpu_seconds, read_ns = process.cpu_seconds, now_ns
        self._samples[pid] = cpu_seconds, read_ns, computed_ns
        return computed_ns


@final
class LauncherProcesses:
    """The processes that this one was started by, and whether they are still there.

    These are the nearest launcher above this process and the launchers directly above that one
    (Hydra's proxy and ``mpiexec``). Where no launcher is known by name, it is the parent.

    Args:
      pid: This process.
      get_parent_pid: Returns the pid of its parent, as ``os.getppid``.
      read_process: Returns the state of a process.
    """

    def __init__(
        self, pid: int, get_parent_pid: Callable[[], int], read_process: ReadProcess = read_process
    ):
        """Find the launchers of this process."""
        self._read_process = read_process
        self._get_parent_pid = get_parent_pid
        self._first_parent_pid = get_parent_pid()
        self._launchers: list[tuple[int, int]] = []
        while (process := read_process(pid)) is not None and process.parent_pid > 0:
            pid = process.parent_pid
            parent = read_process(pid)
            if parent is not None and parent.name in LAUNCHERS:
                self._launchers.append((pid, parent.start_ticks))
            elif self._launchers:
                break

    def is_any_gone(self) -> bool:
        """Tell whether a launcher is gone."""
        if not self._launchers:
            return self._get_parent_pid() != self._first_parent_pid
        return any(
            is_process_finished(self._read_process(pid), start_ticks)
            for pid, start_ticks in self._launchers
        )


# Python 3.11 makes a frame object when somebody asks for it, which may begin a garbage collection:
# - `sys._current_frames` holds a lock of the interpreter meanwhile. The collection may free what
#   wants that lock too, and the process hangs for good, the lock of the interpreter held:
#   https://github.com/python/cpython/issues/106883.
# - `f_back` holds the address of the calling frame meanwhile. The collection may run a finalizer,
#   and so another thread, whose frame returns: then `f_back` is any object at that address.
# Up to 3.10 the frames are there already, from 3.12 on nothing is collected there.
_COLLECTS = sys.version_info[:2] == (3, 11)
_reading = threading.RLock()
if _COLLECTS:
    # No child begins with collections stopped, or with the lock held.
    os.register_at_fork(
        before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release
    )


@contextmanager
def reading_frames() -> Iterator[None]:
    """Let the body follow `f_back` of the frames of other threads, which run meanwhile."""
    if not _COLLECTS:
        yield
        return
    with _reading:
        # By the thresholds, not by `gc.disable`, which programs call, at any moment.
        thresholds = gc.get_threshold()
        gc.set_threshold(0)
        try:
            yield
        finally:
            if not gc.get_threshold()[0]:  # else the program has set them meanwhile
                gc.set_threshold(*thresholds)


def get_current_frames() -> dict[int, FrameType]:
    """Return the frame that each thread is in, by the identifier of the thread.

    To follow them to their callers, enter `reading_frames` before.
    """
    with reading_frames():
        return sys._current_frames()
