"""What a process writes about itself, about four times a second, from its own thread."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import final

from mpistrat.board.frames import current_frames, reading_frames
from mpistrat.board.page import Slot
from mpistrat.comm.callsite import compiles, motion_of, place_of

_SECOND = 1_000_000_000
# Looking for the compiler walks the whole stack, so only where a rank stays for a while.
_MIN_STAY_NS = _SECOND
_COMPILES = 10 * _SECOND
# No compilation of one kernel takes longer; whatever does is watched again.
_COMPILES_AT_MOST = 3600 * _SECOND


def frame_of(thread: int) -> FrameType | None:
    """Return where a thread is now."""
    return current_frames().get(thread)


def say(text: str) -> None:
    """Write a line to standard error as one piece, whatever holds the lock of `sys.stderr`."""
    with suppress(OSError):  # nobody reads it any more
        os.write(2, f"{text}\n".encode(errors="replace"))


def dump_stacks(rank: int) -> None:
    """Print the stacks of all threads to standard error."""
    say(f"mpistrat: the stacks of rank {rank}:")
    faulthandler.dump_traceback(2, all_threads=True)


@functools.cache
def dump_signal() -> int:
    """Return a signal that makes this process print its stacks, also while a C call holds the GIL.

    The handler is faulthandler's, which runs in C. The signal is sent only when the job is about
    to be ended: a handler of any kind can cut a system call short. 0 if the signal is in use or
    there is none to spare.
    """
    last: int = getattr(signal, "SIGRTMAX", 0)
    number = last - 5
    if not last or signal.getsignal(number) is not signal.SIG_DFL:
        return 0
    faulthandler.register(number, file=2, all_threads=True, chain=False)
    return number


# How many calls a process has made on other communicators, the text of the one that it is inside
# of, and the end of the operation that it has declared there, ns.
Others = Callable[[], tuple[int, str, int]]


def nothing_else() -> tuple[int, str, int]:
    """Return the calls of a process that communicates on one communicator only: none elsewhere."""
    return 0, "", 0


@final
@dataclass(eq=False)
class Reporter:
    """Keeps the slot of this process up to date.

    Attributes:
      slot: The slot.
      rank: Whose it is.
      thread: Identifier of the thread that makes the calls.
      frame: Returns the frame that a thread is in.
      dump: Prints the stacks of this process; gets the rank.
      others: Returns what this process does on other communicators.
    """

    slot: Slot
    rank: int
    thread: int
    frame: Callable[[int], FrameType | None] = frame_of
    dump: Callable[[int], None] = dump_stacks
    others: Others = nothing_else

    def __post_init__(self) -> None:
        """Know nothing of the thread yet."""
        self._last: tuple[int, str, str, str] = (0, "", "", "")
        self._calls: tuple[int, str] = (0, "")
        self._word = self._since = 0
        self._compiles_since = 0
        self._motion = 0

    def look(self, now_ns: int, needs_stacks: bool) -> None:
        """Write down where the thread is.

        Args:
          now_ns: The time, ns.
          needs_stacks: Somebody wants to see the stacks.
        """
        slot = self.slot
        calls, text, deadline = self.others()
        if (calls, text) != self._calls or deadline > now_ns:  # what is declared there continues
            self._calls = calls, text
            slot.elsewhere(now_ns, bool(text))
        word = slot.word
        if word != self._word:
            self._word, self._since = word, now_ns
        with reading_frames():
            frame = self.frame(self.thread)
            place, motion = place_of(frame), motion_of(frame)
            compiling = self._compiling(now_ns, frame)
        entry = (word, place, slot.operation, text)
        if entry != self._last and slot.describe(place, text):
            self._last = entry
        if motion != self._motion:
            self._motion = motion
            slot.stir(now_ns)
        slot.beat(now_ns, compiling)
        if needs_stacks:
            self.dump(self.rank)

    def _compiling(self, now_ns: int, frame: FrameType | None) -> int:
        """Return until when this process is known to compile, or 0."""
        if now_ns - self._since < _MIN_STAY_NS or not compiles(frame):
            self._compiles_since = 0
            return 0
        self._compiles_since = self._compiles_since or now_ns
        return now_ns + _COMPILES if now_ns - self._compiles_since < _COMPILES_AT_MOST else 0
