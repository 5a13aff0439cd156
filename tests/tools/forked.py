"""A child process that a test forks, and how it ended."""

from __future__ import annotations

import gc
import os
import select
import signal
import warnings
from collections.abc import Callable


def fork(program: Callable[[], object]) -> int:
    """Run `program` in a child, which ends with code 0 after it, 1 if it raised; return its number.

    What threads of this process hold at that moment is never given back in the child. So the
    collector of garbage rests there: what others hang into it (JAX does) may wait for a lock.
    """
    collects = gc.isenabled()
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons': a fork beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            program()
            code = 0
        finally:
            os._exit(code)
    if collects:
        gc.enable()
    return child


def code(child: int, longest: float = 60.0) -> int:
    """Wait for a child; return its exit code, or less than 0 for a signal's number.

    Raises:
      TimeoutError: It had not ended after `longest` seconds, and has been killed.
    """
    watched = os.pidfd_open(child)
    try:
        late = not select.select([watched], [], [], longest)[0]
        if late:
            os.kill(child, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(watched)
    if late:
        raise TimeoutError(f"the forked child {child} had not ended after {longest:.0f} s")
    return ended
