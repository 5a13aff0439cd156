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

    Locks that threads of this process hold at that moment are never released in the child. So the
    garbage collector is off there: its callbacks (JAX has some) may wait for a lock.
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
        is_late = not select.select([watched], [], [], longest)[0]
        if is_late:
            os.kill(child, signal.SIGKILL)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(watched)
    if is_late:
        raise TimeoutError(f"the forked child {child} had not ended after {longest:.0f} s")
    return exit_code
