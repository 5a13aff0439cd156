"""Passes on the output of a job, and continues reading when nobody reads it any more.

``mpistrat run train.py | head`` closes the pipe after ten lines, and the disk of a file may be
full. mpiexec of MPICH and prterun of Open MPI then end themselves and the job: hours of work for
the sake of a line. So the launcher gets a pipe of ours, unless it prints to a terminal or to
/dev/null, as which what is closed is opened: mpiexec does not start without it.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_PIECE = 1 << 16
_QUIET = 1.0  # seconds in which nothing comes from what outlives the launcher and holds the pipe


class _Relay:
    def __init__(self, target: int, report_loss: Callable[[], None]):
        self._source, self.end = os.pipe()
        self._target, self._lost = target, report_loss
        self._waiting, self._pieces = True, 0
        self._thread = threading.Thread(target=self._run, name="mpistrat relay", daemon=True)

    def _run(self) -> None:
        is_taken = True
        while piece := os.read(self._source, _PIECE):
            self._waiting = False
            self._pieces += 1
            if is_taken and not self._hand_on(piece):
                is_taken = False
                self._lost()
            self._waiting = True

    def _hand_on(self, piece: bytes) -> bool:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:  # whoever made the pipe does not wait in its writes
                select.select([], [self._target], [])
            except OSError:
                return False
        return True

    def begin(self) -> None:
        self._thread.start()
        os.close(self.end)  # which the launcher has now, and nobody else

    def finish(self) -> None:
        """Wait for the end of what comes, or for a child that does not end to be silent."""
        if self._thread.ident is None:  # there was nothing to begin with
            os.close(self.end)
            os.close(self._source)
        pieces = -1
        while self._thread.is_alive() and not (self._waiting and pieces == self._pieces):
            pieces = self._pieces
            self._thread.join(_QUIET)


def is_standard(descriptor: int) -> bool:
    """Tell whether a stream was given to this process, or opened by `open_standard`.

    Where one was closed, a library may have opened a file of its own as that number, as libffi does
    when `ctypes` is imported. Nobody else may write to it, and a child has none.
    """
    with contextlib.suppress(OSError):  # it is closed
        return os.get_inheritable(descriptor)
    return True


def open_standard() -> None:
    """Open /dev/null as those of stdin, stdout and stderr that are closed."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(opened, True)
    os.close(opened)


@contextlib.contextmanager
def streams(
    report_loss: Callable[[], None],
) -> Iterator[tuple[int | None, int | None, Callable[[], None]]]:
    """Yield stdout and stderr for a launcher, as Popen takes them, and what to call once it runs.

    On leaving, what it and its ranks have printed has been handed on.

    Args:
      report_loss: Called in a thread when output can no longer be written; at most once for each
        relay.
    """
    relays: dict[tuple[int, int], _Relay] = {}
    descriptors: list[int | None] = []
    nowhere = Path(os.devnull).stat().st_rdev
    for descriptor in (1, 2):
        kind = os.fstat(descriptor)
        if not is_standard(descriptor):
            descriptors.append(subprocess.DEVNULL)
        elif os.isatty(descriptor) or kind.st_rdev == nowhere:
            descriptors.append(None)
        else:  # one relay where both are one pipe, so that lines keep their order
            key = (kind.st_dev, kind.st_ino)
            relays[key] = relays.get(key) or _Relay(descriptor, report_loss)
            descriptors.append(relays[key].end)

    def begin() -> None:
        for relay in relays.values():
            relay.begin()

    try:
        yield descriptors[0], descriptors[1], begin
    finally:
        for relay in relays.values():
            relay.finish()
