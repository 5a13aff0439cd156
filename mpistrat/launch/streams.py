"""The standard streams of ranks and of their launcher. No job ends for the sake of a line.

Output of a rank (`redirect`): with rank labels, in one file per rank, or both. A child process
passes it on, so that a rank which crashes or is killed loses none of it. The child is made before
MPI starts, after which a process should not be copied, and gets the rank's number later. Where a
disk is full or a host does not have the directory, lines are printed on the terminal instead.

Output of the launcher (`relaying_streams`): ``mpistrat run train.py | head`` closes the pipe after
ten lines, and the disk of a file may be full. mpiexec of MPICH and prterun of Open MPI then end
themselves and the job. So the launcher gets a pipe of ours, which is read to its end, unless it
prints to a terminal or to /dev/null. Closed streams are opened as /dev/null, as mpiexec does not
start without them.

Input (`leave_input`, `take_input`): rank 0 reads the standard input of `mpistrat run`, and the
other ranks read nothing. Launchers do it otherwise: under MPICH's, the input of other ranks than 0
never ends; under Open MPI 5's, the input of rank 0 never ends. So rank 0 opens the input of
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

# Signals that a launcher hands on to the ranks; the children that serve ranks ignore them.
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_SHOWN_RANK = 0  # the rank whose output is on the terminal, if that of all goes to files
_READ_NBYTES = 1 << 16


class Output(NamedTuple):
    """The place for the output of the ranks.

    Attributes:
      directory: For one file of each rank, ``rank-0.txt``, ...; only rank 0 is then on the
        terminal too. Empty for the terminal alone.
      has_labels: Whether each line on the terminal begins with ``[rank@host]``.
    """

    directory: str = ""
    has_labels: bool = False


TERMINAL = Output()  # of all ranks, as they print it


def redirect(output: Output) -> Callable[[int, int], None]:
    """Let a child process pass on the output of this process and its children from now on.

    Args:
      output: The place for it.

    Returns:
      A function to call with the rank of this process and the number of ranks when they are known;
      until then nothing is passed on.

    Raises:
      OSError: The system has no room for another process.
    """
    read_end, write_end = os.pipe()
    pipes = [os.pipe(), os.pipe()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses nothing of threads
        child_pid = os.fork()
    if not child_pid:
        os.close(write_end)
        for _, pipe_read_end in pipes:
            os.close(pipe_read_end)
        code = 1
        try:
            _serve_rank(output, read_end, [pipe_read_end for pipe_read_end, _ in pipes])
            code = 0
        finally:
            os._exit(code)
    os.close(read_end)
    for (pipe_read_end, pipe_write_end), descriptor in zip(pipes, (1, 2), strict=True):
        os.dup2(pipe_write_end, descriptor)
        os.close(pipe_write_end)
        os.close(pipe_read_end)

    def report_rank(rank: int, rank_count: int) -> None:
        os.write(write_end, b"%d %d" % (rank, rank_count))
        os.close(write_end)

    return report_rank


def _serve_rank(output: Output, rank_pipe: int, read_ends: list[int]) -> None:
    """Pass on all output, until nobody can write any more."""
    for signal_number in FORWARDED_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    rank_words = os.read(rank_pipe, 64).split()  # nothing, if it has ended before MPI had started
    rank, rank_count = map(int, rank_words) if rank_words else (-1, 1)
    rank_name = (
        str(rank).zfill(len(str(rank_count - 1))) if rank_words else f"unknown-{os.getppid()}"
    )
    prefix = f"[{rank_name}@{platform.node()}] ".encode() if output.has_labels else b""
    is_shown = not output.directory or rank in (_SHOWN_RANK, -1)
    with contextlib.ExitStack() as stack:
        file: IO[bytes] | None = None
        if output.directory:
            path = Path(output.directory, f"rank-{rank_name}.txt")
            try:
                file = stack.enter_context(path.open("ab", buffering=0))
            except OSError as error:
                is_shown = _report_file_error(error)
        rank_streams = {
            read_end: _Stream(signal_number, is_shown, prefix, file)
            for read_end, signal_number in zip(read_ends, (1, 2), strict=True)
        }
        while rank_streams:
            for read_end in select.select(list(rank_streams), [], [])[0]:
                if not rank_streams[read_end].pass_on(os.read(read_end, _READ_NBYTES)):
                    del rank_streams[read_end]


def _report_file_error(file_error: OSError) -> bool:
    """Print that a file takes nothing; return True, as its rank is shown on the terminal."""
    with contextlib.suppress(OSError):
        os.write(2, f"mpistrat: {file_error}: what it does not take is on the terminal\n".encode())
    return True


@final
class _Stream:
    """One of the two streams of a rank."""

    def __init__(self, descriptor: int, is_shown: bool, line_prefix: bytes, file: IO[bytes] | None):
        """Take its descriptor, whether that shows it, the prefix of lines there, and a file."""
        self._descriptor, self._is_shown = descriptor, is_shown
        self._line_prefix, self._file = line_prefix, file
        self._unfinished_line = b""

    def pass_on(self, piece: bytes) -> bool:
        """Pass on all whole lines, and at the end the rest; return whether there may be more.

        A line is written at once, so that those of several ranks do not mix. The steps of a
        progress bar, each of which goes back to the beginning of the line, count as lines.
        """
        if self._file is not None and piece:
            try:
                self._file.write(piece)
            except OSError as error:
                error.filename = self._file.name
                self._file, self._is_shown = None, _report_file_error(error)
        text = self._unfinished_line + piece
        line_end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 if piece else len(text)
        lines, self._unfinished_line = text[:line_end], text[line_end:]
        if self._is_shown and lines:
            prefixed_lines = b"".join(
                self._line_prefix + line for line in lines.splitlines(keepends=True)
            )
            with contextlib.suppress(OSError):  # nobody may be there to read it
                while prefixed_lines:
                    prefixed_lines = prefixed_lines[os.write(self._descriptor, prefixed_lines) :]
        return bool(piece)


# Seconds without output of a process that outlives the launcher and holds the pipe.
_QUIET_SECONDS = 1.0


class _Relay:
    def __init__(self, descriptor: int, report_loss: Callable[[], None]):
        self._read_end, self.write_end = os.pipe()
        self._descriptor, self._report_loss = descriptor, report_loss
        self._is_waiting, self._piece_count = True, 0
        self._thread = threading.Thread(target=self._run, name="mpistrat relay", daemon=True)

    def _run(self) -> None:
        is_taken = True
        while piece := os.read(self._read_end, _READ_NBYTES):
            self._is_waiting = False
            self._piece_count += 1
            if is_taken and not self._write_piece(piece):
                is_taken = False
                self._report_loss()
            self._is_waiting = True

    def _write_piece(self, piece: bytes) -> bool:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # whoever made the pipe does not wait in its writes
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True

    def start(self) -> None:
        self._thread.start()
        os.close(self.write_end)  # which the launcher has now, and nobody else

    def finish(self) -> None:
        """Wait for the end of the output, or until a child that does not end is silent."""
        if self._thread.ident is None:  # there was nothing to begin with
            os.close(self.write_end)
            os.close(self._read_end)
        piece_count = -1
        while self._thread.is_alive():
            if self._is_waiting and piece_count == self._piece_count:
                return
            piece_count = self._piece_count
            self._thread.join(_QUIET_SECONDS)


def is_standard(descriptor: int) -> bool:
    """Tell whether a stream was given to this process, or opened by `open_standard_streams`.

    Where one was closed, a library may have opened a file of its own as that number, as libffi does
    when `ctypes` is imported. Nobody else may write to it, and a child has none.
    """
    with contextlib.suppress(OSError):  # it is closed
        return os.get_inheritable(descriptor)
    return True


def open_standard_streams() -> None:
    """Open /dev/null as those of stdin, stdout and stderr that are closed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@contextlib.contextmanager
def relaying_streams(
    report_loss: Callable[[], None],
) -> Iterator[tuple[int | None, int | None, Callable[[], None]]]:
    """Yield stdout and stderr for a launcher, as Popen takes them, and a function to call then.

    On leaving, all output of the launcher and its ranks has been handed on.

    Args:
      report_loss: Called in a thread when output can no longer be written; at most once for each
        relay.
    """
    relays: dict[tuple[int, int], _Relay] = {}
    descriptors: list[int | None] = []
    null_device = Path(os.devnull).stat().st_rdev
    for descriptor in (1, 2):
        status = os.fstat(descriptor)
        if not is_standard(descriptor):
            descriptors.append(subprocess.DEVNULL)
        elif os.isatty(descriptor) or status.st_rdev == null_device:
            descriptors.append(None)
        else:  # one relay where both are one pipe, so that lines keep their order
            key = (status.st_dev, status.st_ino)
            relays[key] = relays.get(key) or _Relay(descriptor, report_loss)
            descriptors.append(relays[key].write_end)

    def start_relays() -> None:
        for relay in relays.values():
            relay.start()

    try:
        yield descriptors[0], descriptors[1], start_relays
    finally:
        for relay in relays.values():
            relay.finish()


_LINK_NAME = "stdin"


def leave_input(directory: Path) -> bool:
    """Let rank 0 find the standard input of this process; return whether it can take it.

    Args:
      directory: The directory of the job, on the host of rank 0.
    """
    mode = os.fstat(0).st_mode
    if os.isatty(0) or not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return False
    path = Path(f"/proc/{os.getpid()}/fd/0")
    try:  # another system than Linux, or a file of another user
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    (directory / _LINK_NAME).symlink_to(path)
    return True


def take_input(rank: int, directory: Path | None) -> None:
    """Give a rank the standard input that it is to have.

    Args:
      rank: Its number in the job.
      directory: The directory of the job, in which `leave_input` may have left the input of rank
        0; None without `mpistrat run`.
    """
    path = Path(os.devnull) if rank or directory is None else directory / _LINK_NAME
    if rank == 0 and not path.is_symlink():
        return
    if sys.stdin is None:  # closed: its number may belong to MPI
        return
    with contextlib.suppress(OSError):  # else the launcher's stays
        # Not blocking, as the writers of a pipe with a name may have ended.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
        with contextlib.suppress(OSError):  # only files have a position
            os.lseek(descriptor, _read_position(path), os.SEEK_SET)
        os.dup2(descriptor, 0)
        os.close(descriptor)


def _read_position(link: Path) -> int:
    """Return the position to which the owner of an open file, the target of a link, has read it."""
    if not link.is_symlink():
        return 0
    process_directory = link.readlink().parent.parent
    text = (process_directory / "fdinfo" / "0").read_text(encoding="ascii")
    match = re.search(r"pos:\s*(\d+)", text)
    return int(match[1]) if match else 0
