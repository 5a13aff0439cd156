"""How a directory of files comes to be there whole, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from pathlib import Path
from typing import final

from mpistrat.checkpoint import files

__all__ = ["Folder"]


@final
class Folder:
    """A directory that will be at `path` after `commit`, and whose files are written before that.

    Args:
      path: Where; directories above it are made.

    Attributes:
      path: Where it will be.
      part: Where it is until then.

    Raises:
      OSError: It cannot be made.
    """

    def __init__(self, path: Path):
        """Make it under a name of its own."""
        self.path = path
        self._descriptor, name = files.begin(path, folder=True)
        self.part = Path(name)

    def commit(self, replace: bool) -> None:
        """Rename the directory to its final name. All files in it have been forced to the disk.

        Args:
          replace: Take the place of what is there; else that is an error.

        Raises:
          OSError: It cannot be named. `path` is as it was.
          FileExistsError: It is there, and is not to be replaced; or another job has removed it.
        """
        os.fsync(self._descriptor)
        try:
            if replace and os.path.lexists(self.path):
                self._exchange()
            else:
                self.part.rename(self.path)
        except FileNotFoundError:
            if self.part.exists() or not self.part.parent.is_dir():
                raise
            text = "What was being written has been removed"
            raise FileExistsError(errno.EEXIST, text, str(self.path)) from None
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            text = os.strerror(errno.EEXIST)
            raise FileExistsError(errno.EEXIST, text, str(self.path)) from error
        try:
            files.sync_directory(self.path.parent)
        except OSError:
            if not replace:
                files.remove(self.path)  # what is told to have failed must not be restored
            raise

    def _exchange(self) -> None:
        """Exchange the names of what is written and what is there, if need be one by one."""
        try:
            _swap(self.part, self.path)
        except OSError as error:
            if error.errno not in (errno.EINVAL, *files.NO_LINKS):
                raise
            away = self.part.with_name(f".{self.path.name}.{secrets.token_hex(4)}{files.PART}")
            self.path.rename(away)
            self.part.rename(self.path)
            away.rename(self.part)

    def drop(self) -> None:
        """Remove what has no name, such as what was replaced. May be called twice."""
        with contextlib.suppress(OSError):  # else the next save removes it
            files.discard(self.part)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _swap(one: Path, two: Path) -> None:
    """Exchange two names in one step, as Linux can on most file systems (renameat2).

    Raises:
      OSError: It cannot be done; ENOSYS or EINVAL where the system or file system does not know it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(here, os.fsencode(one), here, os.fsencode(two), exchange):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(two))
