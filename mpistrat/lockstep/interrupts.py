"""Ctrl-C never lands between a handshake and its payload, and is never lost.

A KeyboardInterrupt there would take one rank out of a call that the others have entered. So while
the running code is the library's own, the signal is kept, and raised where the program calls the
library next, or where a function that ``run`` has called returns: from both the other ranks hear of
it as of any exception. In the program's code it raises at once.

What a handler of the program's own raises (a timer that runs out, SIGTERM that calls ``sys.exit``)
is kept likewise in a job of several ranks: handlers that are set by ``signal.signal``, before or
after the first strategy, are called in a guard.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, final

from mpistrat.comm import callsite

_STANDARD = str(Path(os.__file__).parent)
_RESEND_SECONDS = 0.05  # seconds until the signal is looked at again
_Handler: TypeAlias = "Callable[[int, FrameType | None], Any]"


def in_library(frame: FrameType | None) -> bool:
    """Return whether the code that runs in `frame` is called by mpistrat, not by the program.

    Code of NumPy and of the standard library belongs to whoever called it.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if callsite.ours(name) or module.split(".")[0] == "mpistrat":
            return True
        # The code of a named tuple has no file; it belongs to the code that makes one.
        is_named_tuple_code = module.startswith("namedtuple_")
        if not is_named_tuple_code and not name.startswith("<frozen") and not _third_party(name):
            return False
        frame = frame.f_back
    return False


def _is_in_torch_call(frame: FrameType | None) -> bool:
    """Tell whether a call of torch.distributed runs, which gives up its group if interrupted."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("mpistrat.torch."):
            return True
        frame = frame.f_back
    return False


def _unguarded(handler: Any) -> Any:
    return handler.handler if isinstance(handler, GuardedHandler) else handler


def _third_party(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(_STANDARD)


@final
class GuardedHandler:
    """A handler of the program's own whose exception is kept while the library runs.

    Attributes:
      handler: What the program has set.
    """

    def __init__(self, handler: _Handler, interrupted: Interrupted):
        """Guard a handler."""
        self.handler, self._interrupted = handler, interrupted

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Call it, and raise its exception, or keep that while the library runs."""
        interrupted = self._interrupted
        if interrupted.is_own_signal:  # the signal is this library's own
            interrupted.look_again(number, frame)
            return
        try:
            self.handler(number, frame)
        except BaseException as error:
            if not in_library(frame) or _is_in_torch_call(frame):
                raise
            interrupted.keep(error)
            interrupted.look_later(number)


@final
class Interrupted:
    """A Ctrl-C that came while the library ran, kept until it can be raised.

    One that is armed is kept by the handler of the signal.

    Attributes:
      pending: It has not been raised yet.
      kept_error: What is to be raised in its place: what a handler of the program's own has raised.
      is_own_signal: The signal that comes next is not from outside; it only looks once more.
    """

    pending = False
    is_own_signal = False
    kept_error: BaseException | None = None
    _guards = False

    def guard(self) -> None:
        """Keep what handlers raise while the library runs; also those that are set from now on."""
        if self._guards or threading.current_thread() is not threading.main_thread():
            return
        self._guards = True
        set_handler, get_handler = signal.signal, signal.getsignal

        @functools.wraps(get_handler)
        def getsignal(signalnum: int) -> Any:
            return _unguarded(get_handler(signalnum))

        @functools.wraps(set_handler)
        def set_guarded(signalnum: int, handler: Any) -> Any:
            return _unguarded(set_handler(signalnum, self._guarded(handler)))

        for number in signal.valid_signals():
            handler = get_handler(number)
            if callable(handler) and handler != self._handle:
                set_handler(number, self._guarded(handler))
        setattr(signal, "signal", set_guarded)  # noqa: B010  # of another type to mypy
        setattr(signal, "getsignal", getsignal)  # noqa: B010

    def _guarded(self, handler: Any) -> Any:
        # What the library sets, and what is no function, such as SIG_DFL, raises nothing.
        if not callable(handler) or isinstance(handler, signal.Handlers) or handler == self._handle:
            return handler
        return GuardedHandler(handler, self)

    def keep(self, error: BaseException) -> None:
        """Keep the first exception of handlers for `check`."""
        self.kept_error, self.pending = self.kept_error or error, True

    def look_again(self, number: int, frame: FrameType | None) -> None:
        """Raise what is pending if the program's code runs; else look later once more."""
        self.is_own_signal = False
        if not self.pending:
            return  # it has been raised meanwhile
        if in_library(frame):
            self.look_later(number)
        else:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if one is pending, or the error that was kept."""
        if self.pending:
            pending_error, self.kept_error, self.pending = self.kept_error, None, False
            raise KeyboardInterrupt if pending_error is None else pending_error

    def can_continue(self, error: BaseException, exchanged: bool) -> bool:
        """Keep an exception that a signal handler raised in a handshake, if that can go on.

        Args:
          error: What a call of MPI has raised.
          exchanged: It has done its work all the same.

        Returns:
          Whether it is kept, so that this rank continues the call, as the others do.
        """
        if not exchanged or type(error).__module__ == "mpi4py.MPI":
            return False
        self.keep(error)
        return True

    def arm(self, has_other_ranks: bool = False) -> None:
        """Take the signal over, unless the program handles it itself.

        Args:
          has_other_ranks: There are other ranks, so the program's own handlers are guarded too.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
        if has_other_ranks:
            self.guard()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_own_signal:
            self.look_again(number, frame)
            return
        if not in_library(frame):
            self.pending = self.kept_error is not None
            raise KeyboardInterrupt
        # It is raised at the next call; or here, if the program computes for long before that.
        self.pending = True
        self.look_later(number)

    def look_later(self, number: int) -> None:
        """Send this process the signal once more, soon, to `look_again`."""
        timer = threading.Timer(_RESEND_SECONDS, self._resend_signal, (number,))
        timer.daemon = True
        timer.start()

    def _resend_signal(self, number: int) -> None:
        if not self.pending:
            return  # it has been raised meanwhile
        self.is_own_signal = True
        os.kill(os.getpid(), number)
