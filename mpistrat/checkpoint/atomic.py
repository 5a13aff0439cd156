"""Atomic creation and removal of checkpoints.

A small one is a file, a large one a directory. Either is written under a name that begins with a
dot, its bytes are forced to the disk, and then it gets its own name, which the directory above is
made to keep too. So a name that looks like a checkpoint is one, at whatever moment the program or
the machine stops. Who may read it is the umask's affair.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import IO, final

from mpistrat.checkpoint.files import FOLDER, SUFFIX, of_file, parted, saved
from mpistrat.watchdog.status_board import say

_PART = ".part"
_TRIES = 20  # files that others may remove before one that is being written is locked
# What a file system says that has no links (FAT, some network ones).
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@final
class Retention:
    """Removes the oldest checkpoints of a name.

    Args:
      keep: How many of them are to stay; None for all.

    Attributes:
      damaged: Those that are known not to be readable. They do not count, and go with the good ones
        that are older.
    """

    def __init__(self, keep: int | None = None):
        """Create it; nothing has been printed yet of what cannot be removed."""
        self._keep = keep
        self.damaged: set[Path] = set()
        self._reported_paths: set[Path] = set()

    def __call__(self, directory: Path, name: str, new: Path) -> list[str]:
        """Remove those that are too many, but not `new`, the newest; return those that are there.

        Errors of listing and removing are no failure: the next call tries again.
        """
        paths = [new]
        with contextlib.suppress(OSError):
            paths = list(saved(directory, name).values())
        self.damaged.discard(new)
        readable_paths = [path for path in paths if path not in self.damaged]
        kept_paths = paths if self._keep is None else readable_paths[-self._keep :]
        for path in paths[: paths.index(kept_paths[0])] if kept_paths else ():
            if self._try_remove(path):
                paths.remove(path)
        return [os.fspath(path) for path in paths]

    def _try_remove(self, path: Path) -> bool:
        try:
            remove(path)
        except OSError as error:
            if path not in self._reported_paths:
                self._reported_paths.add(path)
                # No warning, which could be an exception, and on one rank.
                text = f"{path} is beyond max_to_keep, but cannot be removed: {error.strerror}."
                say(f"mpistrat: {text} Others are removed.")
            return False
        return True


@contextlib.contextmanager
def open_atomically(path: Path, replace: bool) -> Iterator[IO[bytes]]:
    """Open a file that will be at `path` when the body has ended well, and not be there otherwise.

    Args:
      path: Where; directories above it are made.
      replace: Take the place of a file that is there; else that is an error.

    Yields:
      The file, open for binary writing, of mode 0666 without the bits of the umask.

    Raises:
      OSError: As of `Part` and `Part.commit`, or of writing; it names a file.
    """
    try:
        part = Part(path)
        try:
            with os.fdopen(part.descriptor, "w+b", closefd=False) as file:
                yield file
            part.commit(replace)
        finally:
            part.drop()
    except OSError as error:
        raise of_file(error, path) from error.__cause__


@final
class Part:
    """A file or directory that will be at `path` after `commit`, and is written before that.

    It is locked, so that other jobs do not take it for left; what such jobs have left is removed.

    Args:
      path: Where; directories above it are made.
      folder: It is a directory.

    Attributes:
      name: Where it is until then.
      descriptor: Open for reading and writing if it is a file.

    Raises:
      OSError: It cannot be made.
    """

    def __init__(self, path: Path, folder: bool = False):
        """Make it under a name of its own."""
        self._path, self._folder = path, folder
        _make(path.parent)
        _sweep(path)
        for _ in range(_TRIES):
            self.name = _hidden(path)
            if folder:
                self.name.mkdir()  # of mode 0777 without the bits of the umask
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            else:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.descriptor = os.open(self.name, flags, 0o666)
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                swept = not os.fstat(self.descriptor).st_nlink
            except BlockingIOError:  # another job is about to remove it
                swept = True
            except OSError:  # this file system has no locks
                swept = False
            if not swept:
                return
            self.drop()
        raise FileExistsError(errno.EEXIST, "Another job removes what is being written", str(path))

    def commit(self, replace: bool) -> None:
        """Rename it to its final name. All files of a directory have been forced to the disk.

        Args:
          replace: Take the place of what is there; else that is an error.

        Raises:
          OSError: It cannot be named. `path` is as it was.
          FileExistsError: It is there, and is not to be replaced; or another job has removed it.
        """
        os.fsync(self.descriptor)
        try:
            if not self._folder:
                put(self.name, self._path, replace)
            elif replace and os.path.lexists(self._path):
                self._exchange()
            else:
                self.name.rename(self._path)
        except FileNotFoundError:
            if self.name.exists() or not self.name.parent.is_dir():
                raise
            text = "What was being written has been removed"
            raise FileExistsError(errno.EEXIST, text, str(self._path)) from None
        except OSError as error:
            if not self._folder or error.errno not in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            text = os.strerror(errno.EEXIST)
            raise FileExistsError(errno.EEXIST, text, str(self._path)) from error
        try:
            _sync(self._path.parent)
        except OSError:
            if not replace:
                remove(self._path)  # what is told to have failed must not be restored
            raise

    def _exchange(self) -> None:
        """Exchange the names of what is written and what is there, if need be one by one."""
        try:
            _swap(self.name, self._path)
        except OSError as error:
            if error.errno not in (errno.EINVAL, *_NO_LINKS):
                raise
            hidden_path = _hidden(self._path)
            self._path.rename(hidden_path)
            self.name.rename(self._path)
            hidden_path.rename(self.name)

    def drop(self) -> None:
        """Remove what has no name, such as what was replaced. May be called twice."""
        with contextlib.suppress(OSError):  # else the next save removes it
            _discard(self.name)
        descriptor, self.descriptor = self.descriptor, -1
        close(descriptor)


def close(descriptor: int) -> None:
    """Close what has been forced to the disk, or is removed, if it is open (not -1).

    An error would tell of neither, and it is closed all the same: who closed it again would close
    what another thread has opened meanwhile.
    """
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _hidden(path: Path) -> Path:
    """Return a name that nothing has, and that is not that of a checkpoint."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")


def _make(directory: Path) -> None:
    """Make a directory and those above it, so that they are there after a loss of power too."""
    missing_paths = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # no other job's checkpoint, as this error means elsewhere
        text = "Not a directory, but a file or a link that leads nowhere"
        raise NotADirectoryError(errno.ENOTDIR, text, str(directory)) from None
    for path in missing_paths:
        _sync(path.parent)


def _discard(path: Path) -> None:
    """Remove a file, or a directory and what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; a directory loses its name first, so that it is whole or not there."""
    if path.name.endswith(FOLDER) and path.is_dir() and not path.is_symlink():
        hidden_path = _hidden(path)
        path.rename(hidden_path)
        _discard(hidden_path)
    else:
        path.unlink(missing_ok=True)


def put(part: Path, path: Path, replace: bool) -> None:
    """Rename a written file; a file that is there already is an error unless `replace`."""
    if replace:
        part.replace(path)
        return
    try:
        os.link(part, path)  # unlike a rename it fails if another job was quicker
    except OSError as error:
        if error.errno == errno.EEXIST or (error.errno in _NO_LINKS and path.exists()):
            # Without the name of the part, which says nothing to who has asked.
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        if error.errno not in _NO_LINKS:
            raise
        part.rename(path)


def _sync(directory: Path) -> None:
    """Force the names in a directory to the disk, where its file system can do that.

    Raises:
      OSError: It does not.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *_NO_LINKS):  # it knows no such thing
            raise
    finally:
        os.close(descriptor)


def _swap(first_path: Path, second_path: Path) -> None:
    """Exchange two names in one step, as Linux can on most file systems (renameat2).

    Raises:
      OSError: It cannot be done; ENOSYS or EINVAL where the system or file system does not know it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(cwd, os.fsencode(first_path), cwd, os.fsencode(second_path), exchange):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second_path))


def _sweep(path: Path) -> None:
    """Remove what stopped processes left that wrote to `path`, or to a number beside it."""
    parts = parted(path)
    names = [f"{escape(parts[0])}-*{end}" for end in (SUFFIX, FOLDER)] if parts else []
    names = names or [escape(path.name)]
    for part in (part for name in names for part in path.parent.glob(f".{name}.*{_PART}")):
        # What cannot be opened or removed is somebody else's; nothing of it may stop a save.
        with contextlib.suppress(OSError):
            _sweep_one(part)


def _sweep_one(part: Path) -> None:
    descriptor = os.open(part, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        is_partial_save = stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and f"{FOLDER}." in part.name)
        if is_partial_save:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _discard(part)  # nobody writes it any more
    finally:
        os.close(descriptor)
