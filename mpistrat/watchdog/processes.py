"""The operating system's view of a process: its state, its parent, whether it exists.

The stack frames of the threads of this process, read safely.
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
# watchdog, does not compute. It is looked at in spans of so many seconds.
_SHARE, _SPAN = 0.03, 0.5
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # in a second


class Process(NamedTuple):
    """One process.

    Attributes:
      state: The letter of proc(5): R running, S sleeping, D waiting for a device, T stopped.
      parent: Pid of its parent.
      born: When it started, clock ticks after boot; tells it from a later process of the same pid.
      name: What it is called, up to 15 characters.
      spent: Seconds of processor time that all its threads have taken.
    """

    state: str
    parent: int
    born: int
    name: str
    spent: float = 0.0


# One of which nothing can be known now, such as by a process with no file descriptor left.
UNSEEN = Process("R", 0, 0, "")

Look = Callable[[int], "Process | None"]


def look(pid: int) -> Process | None:
    """Return what ``/proc`` says of a process, None if it has none there, or `UNSEEN`.

    Example:
      >>> import os
      >>> mine = look(os.getpid())
      >>> mine is None or mine.parent == os.getppid()
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
    name, spent = head.partition("(")[2], (int(fields[11]) + int(fields[12])) / _TICKS
    return Process(fields[0], int(fields[1]), int(fields[19]), name, spent)


def catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler of a signal, or that cannot be seen.

    One that it had is gone if another program runs in the process, after ``os.execv``; then the
    signal would end it.

    Example:
      >>> import os, signal
      >>> catches(os.getpid(), signal.SIGINT)
      True
      >>> catches(os.getpid(), signal.SIGRTMAX)
      False
    """
    with suppress(OSError):
        for line in os.fsdecode(Path(f"/proc/{pid}/status").read_bytes()).splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return True


def machine() -> str:
    """Return a string that is equal for processes that know each other by their pids.

    The host's name where ``/proc`` does not tell; else this boot of it, and the namespace of pids.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return platform.node()


def ended(process: Process | None, born: int) -> bool:
    """Tell whether the process that started at `born` has ended, as far as it can be seen."""
    if process is None:
        return True
    return process != UNSEEN and (process.born != born or process.state in _ENDED_STATES)


@final
class Activity:
    """When processes were last seen to compute, in whatever code.

    Args:
      look: Looks at a process.
    """

    def __init__(self, look: Look = look):
        """Know nothing of any process yet."""
        self._look = look
        # Of each process: its processor time, when that was looked at, when it was seen to grow.
        self._seen: dict[int, tuple[float, int, int]] = {}

    def computed(self, pid: int, born: int, now_ns: int) -> int:
        """Look at a process, and return when it was last seen to compute, ns; 0 for never.

        It takes two looks, half a second apart.

        Args:
          pid: The process.
          born: When it started, as `Process`.
          now_ns: The time, ns.
        """
        process = self._look(pid)
        if process is None or ended(process, born):
            return 0
        spent, since_ns, computed = self._seen.get(pid, (process.spent, now_ns, 0))
        span = (now_ns - since_ns) / 1e9
        if span >= _SPAN:
            computed = now_ns if process.spent - spent >= _SHARE * span else computed
            spent, since_ns = process.spent, now_ns
        self._seen[pid] = spent, since_ns, computed
        return computed


@final
class Parents:
    """The processes that this one was started by, and whether they are still there.

    These are the nearest launcher above this process and the launchers directly above that one
    (Hydra's proxy and ``mpiexec``). Where no launcher is known by name, it is the parent.

    Args:
      pid: This process.
      parent: Returns the pid of its parent, as ``os.getppid``.
      look: Looks at a process.
    """

    def __init__(self, pid: int, parent: Callable[[], int], look: Look = look):
        """Find the launchers of this process."""
        self._look = look
        self._parent = parent
        self._first = parent()
        self._watched: list[tuple[int, int]] = []
        at = pid
        while (process := look(at)) is not None and process.parent > 0:
            at = process.parent
            above = look(at)
            is_launcher = above is not None and above.name in LAUNCHERS
            if above is not None and is_launcher:
                self._watched.append((at, above.born))
            elif self._watched:
                break

    def lost(self) -> bool:
        """Tell whether a launcher is gone."""
        if not self._watched:
            return self._parent() != self._first
        return any(ended(self._look(pid), born) for pid, born in self._watched)


# Python 3.11 makes a frame object when somebody asks for it, which may begin a garbage collection:
# - `sys._current_frames` holds a lock of the interpreter meanwhile. The collection may free what
#   wants that lock too, and the process hangs for good, the lock of the interpreter held:
#   https://github.com/python/cpython/issues/106883.
# - `f_back` holds the address of the calling frame meanwhile. The collection may run a finalizer,
#   and so another thread, whose frame returns: then `f_back` is whatever has come to that address.
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
    """Let the body walk along `f_back` of the frames of other threads, which go on meanwhile."""
    if not _COLLECTS:
        yield
        return
    with _reading:
        # By the thresholds, not by `gc.disable`: that is what programs switch, at any moment.
        thresholds = gc.get_threshold()
        gc.set_threshold(0)
        try:
            yield
        finally:
            if not gc.get_threshold()[0]:  # else the program has set them meanwhile
                gc.set_threshold(*thresholds)


def current_frames() -> dict[int, FrameType]:
    """Return the frame that each thread is in, by the identifier of the thread.

    Who goes on to their callers begins `reading_frames` before.
    """
    with reading_frames():
        return sys._current_frames()
