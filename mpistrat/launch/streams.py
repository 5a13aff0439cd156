"""The output of ranks: with rank labels, in one file per rank, or both.

A child process passes it on, so that a rank which crashes or is killed loses none of it. It is
made before MPI starts, after which a process should not be copied, and hears then which rank it
serves. What no file takes, where a disk is full or a host does not have the directory, is on the
terminal: a rank does not end for the sake of a line.

Passes on the output of a job, and continues reading when nobody reads it any more.

``mpistrat run train.py | head`` closes the pipe after ten lines, and the disk of a file may be
full. mpiexec of MPICH and prterun of Open MPI then end themselves and the job: hours of work for
the sake of a line. So the launcher gets a pipe of ours, unless it prints to a terminal or to
/dev/null, as which what is closed is opened: mpiexec does not start without it.

Standard input of a job: rank 0 reads that of `mpistrat run`, and the other ranks read nothing.

Launchers do it otherwise. Under MPICH's the input of other ranks than 0 never ends; under that of
Open MPI 5 the input of rank 0 never does, whatever it is. So rank 0 opens the input of
`mpistrat run` by itself where it is on the same host. A terminal, which a process in the background
may not read, and a socket, which has no name, are left to the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, final

# Signals that a launcher hands on to the ranks; what serves a rank lets them pass.
FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_SHOWN_RANK = 0  # the rank whose output is on the terminal, if that of all goes to files
_READ_NBYTES = 1 << 16


class Output(NamedTuple):
    """Where the output of the ranks goes.

    Attributes:
      directory: For one file of each rank, ``rank-0.txt``, ...; only rank 0 is then on the
        terminal too. Empty for the terminal alone.
      label: Whether each line on the terminal begins with ``[rank@host]``.
    """

    directory: str = ""
    label: bool = False


TERMINAL = Output()  # of all ranks, as they print it


def redirect(output: Output) -> Callable[[int, int], None]:
    """Let a child process pass on what this process and its children print from now on.

    Args:
      output: Where to.

    Returns:
      A function that is called with the rank of this process and the number of ranks when they are
      known; until then nothing is passed on.

    Raises:
      OSError: The system has no room for another process.
    """
    read_end, write_end = os.pipe()
    pipes = [os.pipe(), os.pipe()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses nothing of threads
        child = os.fork()
    if not child:
        os.close(write_end)
        for _, end in pipes:
            os.close(end)
        code = 1
        try:
            _serve(output, read_end, [end for end, _ in pipes])
            code = 0
        finally:
            os._exit(code)
    os.close(read_end)
    for (end, other), number in zip(pipes, (1, 2), strict=True):
        os.dup2(other, number)
        os.close(other)
        os.close(end)

    def report_rank(rank: int, ranks: int) -> None:
        os.write(write_end, b"%d %d" % (rank, ranks))
        os.close(write_end)

    return report_rank


def _serve(output: Output, rank_pipe: int, ends: list[int]) -> None:
    """Pass on what comes, until nobody can write any more."""
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
    words = os.read(rank_pipe, 64).split()  # nothing, if it has ended before MPI had started
    rank, ranks = map(int, words) if words else (-1, 1)
    name = str(rank).zfill(len(str(ranks - 1))) if words else f"unknown-{os.getppid()}"
    prefix = f"[{name}@{platform.node()}] ".encode() if output.label else b""
    is_shown = not output.directory or rank in (_SHOWN_RANK, -1)
    with contextlib.ExitStack() as stack:
        file: IO[bytes] | None = None
        if output.directory:
            path = Path(output.directory, f"rank-{name}.txt")
            try:
                file = stack.enter_context(path.open("ab", buffering=0))
            except OSError as error:
                is_shown = _is_still_shown(error)
        streams = {
            end: _Stream(number, is_shown, prefix, file)
            for end, number in zip(ends, (1, 2), strict=True)
        }
        while streams:
            for end in select.select(list(streams), [], [])[0]:
                if not streams[end].take(os.read(end, _READ_NBYTES)):
                    del streams[end]


def _is_still_shown(error: OSError) -> bool:
    """Say that a file takes nothing; return that its rank is on the terminal."""
    with contextlib.suppress(OSError):
        os.write(2, f"mpistrat: {error}: what it does not take is on the terminal\n".encode())
    return True


@final
class _Stream:
    """One of the two streams of a rank."""

    def __init__(self, number: int, is_shown: bool, prefix: bytes, file: IO[bytes] | None):
        """Take its descriptor, whether that shows it, what begins a line there, and a file."""
        self._number, self._is_shown, self._prefix, self._file = number, is_shown, prefix, file
        self._rest = b""

    def take(self, piece: bytes) -> bool:
        """Pass on all whole lines, and at the end what is left; return whether there may be more.

        A line is written at once, so that those of several ranks do not mix. The steps of a
        progress bar, each of which goes back to the beginning of the line, count as lines.
        """
        if self._file is not None and piece:
            try:
                self._file.write(piece)
            except OSError as error:
                error.filename = self._file.name
                self._file, self._is_shown = None, _is_still_shown(error)
        self._rest += piece
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r")) + 1 if piece else None
        lines, self._rest = self._rest[:end], self._rest[end:] if piece else b""
        if self._is_shown and lines:
            prefixed_lines = b"".join(
                self._prefix + line for line in lines.splitlines(keepends=True)
            )
            with contextlib.suppress(OSError):  # nobody may be there to read it
                while prefixed_lines:
                    prefixed_lines = prefixed_lines[os.write(self._number, prefixed_lines) :]
        return bool(piece)


_PIECE = 1 << 16
_QUIET = 1.0  # seconds in which nothing comes from what outlives the launcher and holds the pipe


class _Relay:
    def __init__(self, target: int, report_loss: Callable[[], None]):
        self._source, self.end = os.pipe()
        self._target, self._report_loss = target, report_loss
        self._waiting, self._pieces = True, 0
        self._thread = threading.Thread(target=self._run, name="mpistrat relay", daemon=True)

    def _run(self) -> None:
        is_taken = True
        while piece := os.read(self._source, _PIECE):
            self._waiting = False
            self._pieces += 1
            if is_taken and not self._write_piece(piece):
                is_taken = False
                self._report_loss()
            self._waiting = True

    def _write_piece(self, piece: bytes) -> bool:
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


_LINK = "stdin"


def leave_input(directory: Path) -> bool:
    """Let rank 0 find the standard input of this process; tell whether it can take it.

    Args:
      directory: That of the job, on the host of rank 0.
    """
    mode = os.fstat(0).st_mode
    if os.isatty(0) or not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return False
    path = Path(f"/proc/{os.getpid()}/fd/0")
    try:  # another system than Linux, or a file of another user
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    (directory / _LINK).symlink_to(path)
    return True


def take_input(rank: int, directory: Path | None) -> None:
    """Give a rank the standard input that it is to have.

    Args:
      rank: Its number in the job.
      directory: In which `leave_input` may have left that of rank 0; None without `mpistrat run`.
    """
    path = Path(os.devnull) if rank or directory is None else directory / _LINK
    if rank == 0 and not path.is_symlink():
        return
    if sys.stdin is None:  # closed: its number may belong to MPI
        return
    with contextlib.suppress(OSError):  # what the launcher has given it stays
        # Not blocking, as the writers of a pipe with a name may have ended.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(opened, fcntl.F_SETFL, 0)
        with contextlib.suppress(OSError):  # what is no file has no position
            os.lseek(opened, _position(path), os.SEEK_SET)
        os.dup2(opened, 0)
        os.close(opened)


def _position(link: Path) -> int:
    """Return how far the owner of an open file, which is linked to, has read it."""
    if not link.is_symlink():
        return 0
    process = link.readlink().parent.parent
    text = (process / "fdinfo" / "0").read_text(encoding="ascii")
    position = re.search(r"pos:\s*(\d+)", text)
    return int(position[1]) if position else 0
