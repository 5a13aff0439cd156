"""Standard input of a job: rank 0 reads that of `mpistrat run`, and the other ranks read nothing.

Launchers do it otherwise. Under MPICH's the input of other ranks than 0 never ends; under that of
Open MPI 5 the input of rank 0 never does, whatever it is. So rank 0 opens the input of
`mpistrat run` by itself where it is on the same host. A terminal, which a process in the background
may not read, and a socket, which has no name, are left to the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import sys
from pathlib import Path

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
