"""The output of ranks: with rank labels, in one file per rank, or both.

A child process passes it on, so that a rank which crashes or is killed loses none of it. It is
made before MPI starts, after which a process should not be copied, and hears then which rank it
serves. What no file takes, where a disk is full or a host does not have the directory, is on the
terminal: a rank does not end for the sake of a line.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, final

# Signals that a launcher hands on to the ranks; what serves a rank lets them pass.
FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_SHOWN_RANK = 0  # the rank whose output is on the terminal, if that of all goes to files
_AT_ONCE = 1 << 16


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

    def known(rank: int, ranks: int) -> None:
        os.write(write_end, b"%d %d" % (rank, ranks))
        os.close(write_end)

    return known


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
                is_shown = _untaken(error)
        streams = {
            end: _Stream(number, is_shown, prefix, file)
            for end, number in zip(ends, (1, 2), strict=True)
        }
        while streams:
            for end in select.select(list(streams), [], [])[0]:
                if not streams[end].take(os.read(end, _AT_ONCE)):
                    del streams[end]


def _untaken(error: OSError) -> bool:
    """Say that a file takes nothing; return that its rank is on the terminal."""
    with contextlib.suppress(OSError):
        os.write(2, f"mpistrat: {error}: what it does not take is on the terminal\n".encode())
    return True


@final
class _Stream:
    """One of the two streams of a rank."""

    def __init__(self, number: int, is_shown: bool, prefix: bytes, file: IO[bytes] | None):
        """Take its descriptor, whether that shows it, what begins a line there, and a file."""
        self._number, self._shown, self._prefix, self._file = number, is_shown, prefix, file
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
                self._file, self._shown = None, _untaken(error)
        self._rest += piece
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r")) + 1 if piece else None
        lines, self._rest = self._rest[:end], self._rest[end:] if piece else b""
        if self._shown and lines:
            prefixed_lines = b"".join(
                self._prefix + line for line in lines.splitlines(keepends=True)
            )
            with contextlib.suppress(OSError):  # nobody may be there to read it
                while prefixed_lines:
                    prefixed_lines = prefixed_lines[os.write(self._number, prefixed_lines) :]
        return bool(piece)
