"""The files of checkpoints: their names and numbers, and how one comes to be there whole.

A small checkpoint is a file, a large one a directory (`folders`). Either is written under a name
that begins with a dot, its bytes are forced to the disk, and then it gets its own name, which the
directory above is made to keep too. So a name that looks like a checkpoint is one, at whatever
moment the program or the machine stops. Order is that of the numbers in the names; clocks are not
asked. Who may read it is the umask's affair.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, final

from mpistrat.errors import CheckpointError

__all__ = [
    "FOLDER",
    "NO_LINKS",
    "PART",
    "SUFFIX",
    "Retention",
    "begin",
    "checked_path",
    "discard",
    "forget_other",
    "latest_checkpoint",
    "numbered",
    "other",
    "parted",
    "put",
    "remove",
    "saved",
    "stored",
    "sync_directory",
    "whole",
]

SUFFIX, FOLDER = ".npz", ".arrays"  # of a file, and of a directory
_NAME = re.compile(rf"(.+)-(\d{{1,18}})({re.escape(SUFFIX)}|{re.escape(FOLDER)})")
PART = ".part"
_TRIES = 20  # files that others may remove before one that is being written is locked
# What a file system says that has no links (FAT, some network ones).
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def checked_path(call: str, argument: str, given: Any) -> Path:
    """Return an argument as a path.

    Args:
      call: What it is an argument of, for errors.
      argument: What it is called there.
      given: What was given.

    Raises:
      TypeError: It is not a text or path.

    Example:
      >>> checked_path("Checkpoint.read", "save_path", "run/ckpt").name
      'ckpt'
    """
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        kind = type(given).__name__
        raise TypeError(f"{call}: {argument} must be a str or a path, not {given!r:.60} ({kind}).")
    return Path(text)


def numbered(directory: Path, name: str, number: int, suffix: str = SUFFIX) -> Path:
    """Return the path of a checkpoint that is a file, or with `FOLDER` as suffix a directory.

    Example:
      >>> numbered(Path("run"), "ckpt", 3).as_posix()
      'run/ckpt-3.npz'
    """
    return directory / f"{name}-{number}{suffix}"


def other(path: Path) -> Path:
    """Return what a checkpoint would be called if it were of the other kind.

    Example:
      >>> other(Path("run/ckpt-3.npz")).as_posix()
      'run/ckpt-3.arrays'
    """
    is_file = path.name.endswith(SUFFIX)
    base = path.name.removesuffix(SUFFIX if is_file else FOLDER)
    return path.with_name(base + (FOLDER if is_file else SUFFIX))


def stored(path: Path) -> Path:
    """Return the path of a checkpoint, or of the other kind if only that is there."""
    return other(path) if not os.path.lexists(path) and os.path.lexists(other(path)) else path


def parted(path: Path) -> tuple[str, int] | None:
    """Return name and number of a path that `numbered` has made; None of another.

    Example:
      >>> parted(Path("run/ckpt-3.npz"))
      ('ckpt', 3)
      >>> parted(Path("run/ckpt-03.npz")) is None  # a number has one name
      True
    """
    match = _NAME.fullmatch(path.name)
    if match is None or path.name.startswith(".") or str(int(match[2])) != match[2]:
        return None
    return match[1], int(match[2])


def _numbers(directory: Path) -> dict[str, dict[int, Path]]:
    found: dict[str, dict[int, Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        parts = parted(path)
        if parts is not None and path.exists():  # no link that leads nowhere
            found.setdefault(parts[0], {})[parts[1]] = path
    return found


def saved(directory: Path, name: str) -> dict[int, Path]:
    """Return the checkpoints of that name in a directory, by number, the oldest first.

    A symbolic link whose target is gone is not a checkpoint.

    Raises:
      OSError: The directory cannot be read.
    """
    return dict(sorted(_numbers(directory).get(name, {}).items()))


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], name: str | None = None
) -> str | None:
    """Return the path of the newest checkpoint in a directory: that of the highest number.

    The file is not opened, so it may be damaged; `Checkpoint.restore` checks all of it, and
    ``CheckpointManager.restore_or_initialize`` passes over what is damaged. Symbolic links whose
    target is gone are passed over here too.

    Never communicates. Ranks that do not all see the directory ask a `CheckpointManager`, whose
    replica 0 looks for all of them.

    Args:
      checkpoint_dir: The directory.
      name: What comes before the number; any name if None.

    Returns:
      A path for `Checkpoint.restore`, or None if there is no checkpoint.

    Raises:
      CheckpointError: No name was given, and there are checkpoints of several.
      TypeError: `checkpoint_dir` is not a text or path.
      OSError: The directory cannot be read.

    As: ``tf.train.latest_checkpoint``.

    Example:
      >>> latest_checkpoint("no/such/directory") is None
      True
    """
    found = _numbers(checked_path("latest_checkpoint", "checkpoint_dir", checkpoint_dir))
    if name is None and len(found) > 1:
        raise CheckpointError(
            f"{os.fspath(checkpoint_dir)} has checkpoints of several names: {sorted(found)}. Say "
            "which is wanted: latest_checkpoint(directory, name)."
        )
    mine = found.get(name, {}) if name is not None else next(iter(found.values()), {})
    return os.fspath(mine[max(mine)]) if mine else None


@final
class Retention:
    """Removes the oldest checkpoints of a name.

    Args:
      keep: How many of them are to stay; None for all.
    """

    def __init__(self, keep: int | None = None):
        """Create it; nothing has been printed yet of what cannot be removed."""
        self._keep = keep
        self._told: set[Path] = set()

    def __call__(self, directory: Path, name: str, new: Path) -> list[str]:
        """Remove those that are too many, but never `new`, and return those that are there.

        What cannot be looked for or removed stops nothing: it is one of the oldest next time too.
        """
        there = [new]
        with contextlib.suppress(OSError):
            there = list(saved(directory, name).values())
        old = [path for path in there if path != new]
        for path in old[: max(0, len(old) + 1 - self._keep)] if self._keep is not None else ():
            if self._removed(path):
                there.remove(path)
        return [os.fspath(path) for path in there]

    def _removed(self, path: Path) -> bool:
        try:
            remove(path)
        except OSError as error:
            if path not in self._told:
                self._told.add(path)
                # No warning, which could be an exception, and on one rank.
                with contextlib.suppress(OSError, ValueError):
                    text = f"{path} is too old to be kept, but cannot be removed: {error.strerror}."
                    print(f"mpistrat: {text} Others are.", file=sys.stderr, flush=True)
            return False
        return True


@contextlib.contextmanager
def whole(path: Path, replace: bool) -> Iterator[IO[bytes]]:
    """Open a file that will be at `path` when the body has ended well, and not be there otherwise.

    Args:
      path: Where; directories above it are made.
      replace: Take the place of a file that is there; else that is an error.

    Yields:
      The file, open for binary writing, of mode 0666 without the bits of the umask.

    Raises:
      OSError: It cannot be written. `path` is as it was.
      FileExistsError: It is there, and is not to be replaced; or another job has removed what was
        being written.
    """
    descriptor, name = begin(path)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        _name(Path(name), path, replace)
    finally:
        with contextlib.suppress(OSError):  # else the next save removes it
            Path(name).unlink()
    try:
        sync_directory(path.parent)
    except OSError:
        if not replace:
            path.unlink(missing_ok=True)  # what is told to have failed must not be restored
        raise


def _make(directory: Path) -> None:
    """Make a directory and those above it, so that they are there after a loss of power too."""
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_directory(one.parent)


def begin(path: Path, folder: bool = False) -> tuple[int, str]:
    """Make what is to be written to, in a directory that is made too.

    It is locked, so that other jobs do not take it for left; what such jobs have left is removed.

    Args:
      path: What it will be called.
      folder: Make a directory, not a file.

    Returns:
      Its descriptor, open for reading and writing if it is a file, and its path until then.

    Raises:
      OSError: It cannot be made.
    """
    _make(path.parent)
    _sweep(path)
    for _ in range(_TRIES):
        name = os.fspath(path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}"))
        if folder:
            Path(name).mkdir()  # of mode 0777 without the bits of the umask
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            swept = not os.fstat(descriptor).st_nlink
        except BlockingIOError:  # another job is about to remove it
            swept = True
        except OSError:  # this file system has no locks
            swept = False
        if not swept:
            return descriptor, name
        os.close(descriptor)
        with contextlib.suppress(OSError):
            discard(Path(name))
    raise FileExistsError(errno.EEXIST, "Another job removes what is being written", str(path))


def discard(path: Path) -> None:
    """Remove a file, or a directory and what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; a directory loses its name first, so that it is whole or not there."""
    if path.name.endswith(FOLDER) and path.is_dir() and not path.is_symlink():
        away = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
        path.rename(away)
        discard(away)
    else:
        path.unlink(missing_ok=True)


def forget_other(path: Path) -> None:
    """Remove the older checkpoint of that name that is of the other kind; errors stop nothing."""
    with contextlib.suppress(OSError):
        remove(other(path))


def _name(part: Path, path: Path, replace: bool) -> None:
    try:
        put(part, path, replace)
    except FileNotFoundError:
        if part.exists() or not part.parent.is_dir():
            raise
        text = "What was being written has been removed"
        raise FileExistsError(errno.EEXIST, text, str(path)) from None


def put(part: Path, path: Path, replace: bool) -> None:
    """Rename a written file; a file that is there already is an error unless `replace`."""
    if replace:
        part.replace(path)
        return
    try:
        os.link(part, path)  # unlike a rename it fails if another job was quicker
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        part.rename(path)


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to the disk, where its file system can do that.

    Raises:
      OSError: It does not.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *NO_LINKS):  # it knows no such thing
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Say that this process writes the file; tell whether it could."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(path: Path) -> None:
    """Remove what stopped processes left that wrote to `path`, or to a number beside it."""
    match = _NAME.fullmatch(path.name)
    ends = (SUFFIX, FOLDER)
    names = [f"{_escaped(match[1])}-*{end}" for end in ends] if match else [_escaped(path.name)]
    for part in (part for name in names for part in path.parent.glob(f".{name}.*{PART}")):
        # What cannot be opened or removed is somebody else's; nothing of it may stop a save.
        with contextlib.suppress(OSError):
            _sweep_one(part)


def _sweep_one(part: Path) -> None:
    descriptor = os.open(part, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        ours = stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and f"{FOLDER}." in part.name)
        if ours and _lock(descriptor):
            discard(part)  # nobody writes it any more
    finally:
        os.close(descriptor)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
