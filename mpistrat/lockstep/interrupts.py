"""Ctrl-C never lands between a handshake and its payload, and is never lost.

A KeyboardInterrupt there would take one rank out of a call that the others have entered. So while
the running code is the library's own, the signal is kept, and raised where the program calls the
library next, or where a function that ``run`` has called returns: from both the other ranks hear of
it as of any exception. In the program's code it raises at once.

What a handler of the program's own raises in a handshake (a timer that runs out, SIGTERM that calls
``sys.exit``) is kept likewise: ranks wait there most of the time, and the others continue the call.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import final

from mpistrat.comm import callsite

_STANDARD = str(Path(os.__file__).parent)
_LATER = 0.05  # seconds until the signal is looked at again


def in_library(frame: FrameType | None) -> bool:
    """Tell whether the code that runs in `frame` is called by mpistrat, not by the program.

    Code of NumPy and of the standard library belongs to whoever called it.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if callsite.ours(name) or module.split(".")[0] == "mpistrat":
            return True
        # What a named tuple is made of has no file; it belongs to whoever makes one.
        made = module.startswith("namedtuple_")
        if not made and not name.startswith("<frozen") and not _third_party(name):
            return False
        frame = frame.f_back
    return False


def _third_party(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(_STANDARD)


@final
class Interrupted:
    """A Ctrl-C that came while the library ran, kept until it can be raised.

    One that is armed is kept by the handler of the signal.

    Attributes:
      pending: It has not been raised yet.
      kept: What is to be raised in its place: what a handler of the program's own has raised.
      again: The signal that comes next is not from outside; it only looks once more.
    """

    pending = False
    again = False
    kept: BaseException | None = None

    def check(self) -> None:
        """Raise KeyboardInterrupt if one is pending, or what was kept."""
        if self.pending:
            kept, self.kept, self.pending = self.kept, None, False
            raise KeyboardInterrupt if kept is None else kept

    def keeps(self, error: BaseException, exchanged: bool) -> bool:
        """Keep the first exception that signal handlers raise in a handshake, for `check`.

        Args:
          error: What a call of MPI has raised.
          exchanged: It has done its work all the same.

        Returns:
          Whether it is kept, so that this rank continues the call, as the others do.
        """
        if not exchanged or type(error).__module__ == "mpi4py.MPI":
            return False
        self.kept, self.pending = self.kept or error, True
        return True

    def arm(self) -> None:
        """Take the signal over, unless the program handles it itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.again
        self.again = False
        if again and not self.pending:
            return  # it has been raised meanwhile
        if not in_library(frame):
            self.pending = self.kept is not None
            raise KeyboardInterrupt
        # It is raised at the next call; or here, if the program computes for long before that.
        self.pending = True
        timer = threading.Timer(_LATER, self._again, (number,))
        timer.daemon = True
        timer.start()

    def _again(self, number: int) -> None:
        if not self.pending:
            return  # it has been raised meanwhile
        self.again = True
        os.kill(os.getpid(), number)
