"""The stack frames of the threads of this process, read safely."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

# Python 3.11 holds a lock of the interpreter while it makes the frames. A garbage collection in the
# middle may free what wants that lock too, and the process hangs for good, the lock of the
# interpreter held: https://github.com/python/cpython/issues/106883. Up to 3.10 the frames are
# there already, from 3.12 on nothing is collected there.
_COLLECTS = sys.version_info[:2] == (3, 11)
_alone = threading.Lock()
if _COLLECTS:
    # No child begins with collections stopped, or with the lock held.
    os.register_at_fork(
        before=_alone.acquire, after_in_parent=_alone.release, after_in_child=_alone.release
    )


def current_frames() -> dict[int, FrameType]:
    """Return the frame that each thread is in, by the identifier of the thread."""
    if not _COLLECTS:
        return sys._current_frames()
    with _alone:
        # By the thresholds, not by `gc.disable`: that is what programs switch, at any moment.
        thresholds = gc.get_threshold()
        gc.set_threshold(0)
        try:
            return sys._current_frames()
        finally:
            if not gc.get_threshold()[0]:  # else the program has set them meanwhile
                gc.set_threshold(*thresholds)
