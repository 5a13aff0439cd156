"""Ctrl-C never lands between a proof and its payload.

A KeyboardInterrupt there would take one rank out of a call that the others have entered. So while
the running code is the library's own, the signal is put off a little; in the program's code it
raises at once, and from there reaches the other ranks like any exception.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType

from mpistrat.collectives import blame

__all__ = ["defer_interrupts", "in_library"]

_STANDARD = str(Path(os.__file__).parent)
_LATER = 0.05  # seconds until the signal is looked at again


def in_library(frame: FrameType | None) -> bool:
    """Tell whether the code that runs in `frame` is called by mpistrat, not by the program.

    Code of NumPy and of the standard library belongs to whoever called it.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if blame.ours(name):
            return True
        if not name.startswith("<frozen") and not _third_party(name):
            return False
        frame = frame.f_back
    return False


def _third_party(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(_STANDARD)


def _handle(number: int, frame: FrameType | None) -> None:
    if not in_library(frame):
        raise KeyboardInterrupt
    again = threading.Timer(_LATER, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def defer_interrupts() -> None:
    """Put off Ctrl-C while the library runs, unless the program handles the signal itself."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)
