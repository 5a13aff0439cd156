"""Where the threads of this process are, looked at without a risk for it."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

__all__ = ["current_frames"]

# Python 3.11 holds a lock of the interpreter while it makes the frames. A garbage collection in the
# middle may free what wants that lock too, and the process hangs for good, the lock of the
# interpreter held: https://github.com/python/cpython/issues/106883. Up to 3.10 the frames are
# there already, from 3.12 on nothing is collected there.
_COLLECTS = sys.version_info[:2] == (3, 11)
_alone = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """Return the frame that each thread is in, by the identifier of the thread."""
    if not _COLLECTS:
        return sys._current_frames()
    with _alone:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
