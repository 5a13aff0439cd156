"""The stack frames of the threads of this process, read safely."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
