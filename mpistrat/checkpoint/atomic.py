"""Atomic creation and removal of checkpoints.

A small checkpoint is a file, a large one a directory. Both are written under a name that begins
with a dot. Their bytes are forced to the disk, then they get their final name, and the directory
above is forced to the disk too. So a name that looks like a checkpoint is a complete one, whenever
the program or the machine stops. A file is linked to its name, which fails if that exists. The
umask decides who may read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import IO, NamedTuple, final

from mpistrat.checkpoint.files import (
    DIRECTORY_SUFFIX,
    FILE_SUFFIX,
    add_file_name,
    list_numbered_paths,
    split_numbered_path,
)
from mpistrat.watchdog.status_board import say

_PART_SUFFIX = ".part"
_LOCK_TRIES = 20  # files that others may remove before one that is being written is locked
# Errors of file systems without links (FAT, some network ones).
_UNSUPPORTED_ERRNOS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def check_mode(name: str, mode: object) -> None:
    """Raise ValueError unless an argument says which values are good.

    Args:
      name: Of the argument.
      mode: ``"min"`` if low ones are, ``"max"`` if high ones are.
    """
    if mode not in ("min", "max"):
        raise ValueError(f"{name} must be 'min' or 'max', got {mode!r:.60}.")


def find_best_index(metric_values: Sequence[float], mode: str) -> int | None:
    """Return the index of the first of the best values; None if all are NaN, which is never best.

    Args:
      metric_values: Numbers, such as a curve.
      mode: As of `check_mode`.

    Example:
      >>> find_best_index([2.0, float("nan"), 1.0, 1.0], "min")
      2
    """
    indices = [index for index, value in enumerate(metric_values) if not math.isnan(value)]
    choose = min if mode == "min" else max
    return choose(indices, key=metric_values.__getitem__, default=None)


class Criterion(NamedTuple):
    """What makes a checkpoint better than others.

    Attributes:
      metric: The name of one of the metrics that it was saved with.
      mode: ``"min"`` if low values are good, ``"max"`` if high ones are.
    """

    metric: str
    mode: str

    def find_best(self, metrics_by_path: Mapping[Path, Mapping[str, float]]) -> Path | None:
        """Return the first of the best; None if none has the metric, or NaN alone."""
        values = [metrics.get(self.metric, math.nan) for metrics in metrics_by_path.values()]
        best_index = find_best_index(values, self.mode)
        return None if best_index is None else [*metrics_by_path][best_index]


@final
class Retention:
    """Removes the oldest checkpoints of a name; replica 0 does, and all ranks know the best.

    Args:
      max_to_keep: How many of them are to stay; None for all.
      criterion: Says which one stays beside these; None for no other one.

    Attributes:
      damaged_paths: Checkpoints that are known to be unreadable. They do not count, and are removed
        with the good ones that are older. Equal on all ranks, as the metrics are.
      metrics_by_path: The metrics that checkpoints were saved with; of none without a criterion.
    """

    def __init__(self, max_to_keep: int | None = None, criterion: Criterion | None = None):
        """Create it; nothing has been printed yet of what cannot be removed."""
        self._max_to_keep, self._criterion = max_to_keep, criterion
        self.damaged_paths: set[Path] = set()
        self.metrics_by_path: dict[Path, Mapping[str, float]] = {}
        self._reported_paths: set[Path] = set()

    def record_checkpoint(self, path: Path, metrics: Mapping[str, float]) -> None:
        """Note on all ranks that a good checkpoint is at `path`, or in a moment.

        Args:
          path: The path.
          metrics: What it is saved with.
        """
        self.damaged_paths.discard(path)
        if self._criterion is not None:
            self.metrics_by_path[path] = metrics

    def forget_others(self, paths: Collection[Path]) -> None:
        """Drop the records of checkpoints that are no longer there; `paths` are."""
        self.damaged_paths.intersection_update(paths)
        for path in self.metrics_by_path.keys() - paths:
            del self.metrics_by_path[path]

    def __call__(self, directory: Path, name: str, new_path: Path) -> list[str]:
        """Remove the oldest beyond the limit, but never `new_path`; return the paths that remain.

        Errors of listing and removing are no failure: the next call tries again.
        """
        try:
            stored_paths = list(list_numbered_paths(directory, name).values())
        except OSError:
            return [os.fspath(path) for path in self.metrics_by_path or [new_path]]
        readable_paths = [path for path in stored_paths if path not in self.damaged_paths]
        kept_paths = (
            stored_paths if self._max_to_keep is None else readable_paths[-self._max_to_keep :]
        )
        best_path = self.find_best(stored_paths)
        for path in stored_paths[: stored_paths.index(kept_paths[0])] if kept_paths else ():
            if path != best_path and self._try_remove(path):
                stored_paths.remove(path)
        return [os.fspath(path) for path in stored_paths]

    def find_best(self, paths: Sequence[Path]) -> Path | None:
        """Return the best of some checkpoints, the oldest first; None if it is not known.

        Damaged ones are never best.
        """
        if self._criterion is None:
            return None
        metrics_by_path = {
            path: self.metrics_by_path.get(path, {})
            for path in paths
            if path not in self.damaged_paths
        }
        return self._criterion.find_best(metrics_by_path)

    def _try_remove(self, path: Path) -> bool:
        try:
            remove_checkpoint(path)
        except OSError as error:
            if path not in self._reported_paths:
                self._reported_paths.add(path)
                # No warning, which could be an exception, and on one rank.
                text = f"{path} is beyond max_to_keep, but cannot be removed: {error.strerror}."
                say(f"mpistrat: {text} Others are removed.")
            return False
        return True


@contextlib.contextmanager
def open_atomically(path: Path, should_replace: bool) -> Iterator[IO[bytes]]:
    """Open a file that will be at `path` when the body has ended well, and not be there otherwise.

    Args:
      path: Where; directories above it are made.
      should_replace: Take the place of a file that is there; else that is an error.

    Yields:
      The file, open for binary writing, of mode 0666 without the bits of the umask.

    Raises:
      OSError: As of `StagedPath` and `Part.commit`, or of writing; it names a file.
    """
    try:
        staged_path = StagedPath(path)
        try:
            with os.fdopen(staged_path.descriptor, "w+b", closefd=False) as file:
                yield file
            staged_path.commit(should_replace)
        finally:
            staged_path.discard()
    except OSError as error:
        raise add_file_name(error, path) from error.__cause__


@final
class StagedPath:
    """A file or directory that will be at `path` after `commit`, and is written before that.

    It is locked, so that other jobs do not take it for left; what such jobs have left is removed.

    Args:
      path: Where; directories above it are made.
      is_directory: It is a directory.

    Attributes:
      staging_path: Where it is until then.
      descriptor: Open for reading and writing if it is a file.

    Raises:
      OSError: It cannot be made.
    """

    def __init__(self, path: Path, is_directory: bool = False):
        """Make it under a name of its own."""
        self._path, self._is_directory = path, is_directory
        _make_directory(path.parent)
        _remove_leftovers(path)
        for _ in range(_LOCK_TRIES):
            self.staging_path = _make_hidden_path(path)
            if is_directory:
                self.staging_path.mkdir()  # of mode 0777 without the bits of the umask
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            else:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.descriptor = os.open(self.staging_path, flags, 0o666)
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_removed = not os.fstat(self.descriptor).st_nlink
            except BlockingIOError:  # another job is about to remove it
                is_removed = True
            except OSError:  # this file system has no locks
                is_removed = False
            if not is_removed:
                return
            self.discard()
        raise FileExistsError(errno.EEXIST, "Another job removes what is being written", str(path))

    def commit(self, should_replace: bool) -> None:
        """Rename it to its final name. All files of a directory have been forced to the disk.

        Args:
          should_replace: Replace an existing file or directory; without it that is an error.

        Raises:
          OSError: It cannot be named. `path` is as it was.
          FileExistsError: It is there, and is not to be replaced; or another job has removed it.
        """
        os.fsync(self.descriptor)
        try:
            if not self._is_directory:
                rename_file(self.staging_path, self._path, should_replace)
            elif should_replace and os.path.lexists(self._path):
                self._exchange_with_existing()
            else:
                self.staging_path.rename(self._path)
        except FileNotFoundError:
            if self.staging_path.exists() or not self.staging_path.parent.is_dir():
                raise
            error_text = "What was being written has been removed"
            raise FileExistsError(errno.EEXIST, error_text, str(self._path)) from None
        except OSError as error:
            if not self._is_directory or error.errno not in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            error_text = os.strerror(errno.EEXIST)
            raise FileExistsError(errno.EEXIST, error_text, str(self._path)) from error
        try:
            _sync_directory(self._path.parent)
        except OSError:
            if not should_replace:
                remove_checkpoint(self._path)  # a save that raises must not be restored later
            raise

    def _exchange_with_existing(self) -> None:
        """Exchange the names of the new and the existing directory, if need be one by one."""
        try:
            _exchange_names(self.staging_path, self._path)
        except OSError as error:
            if error.errno not in (errno.EINVAL, *_UNSUPPORTED_ERRNOS):
                raise
            hidden_path = _make_hidden_path(self._path)
            self._path.rename(hidden_path)
            self.staging_path.rename(self._path)
            hidden_path.rename(self.staging_path)

    def discard(self) -> None:
        """Remove the file or directory without a final name, also a replaced one; idempotent."""
        with contextlib.suppress(OSError):  # else the next save removes it
            _remove_tree(self.staging_path)
        descriptor, self.descriptor = self.descriptor, -1
        close_descriptor(descriptor)


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor, unless it is -1, of a file that is removed or forced to the disk.

    Errors are ignored: they say nothing about the data, and the descriptor is closed all the same.
    A second close could hit a file that another thread has opened meanwhile.
    """
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _make_hidden_path(path: Path) -> Path:
    """Return a name that nothing has, and that is not that of a checkpoint."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART_SUFFIX}")


def _make_directory(directory: Path) -> None:
    """Make a directory and those above it, so that they are there after a loss of power too."""
    missing_paths = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # no other job's checkpoint, as this error means elsewhere
        text = "Not a directory, but a file or a link that leads nowhere"
        raise NotADirectoryError(errno.ENOTDIR, text, str(directory)) from None
    for path in missing_paths:
        _sync_directory(path.parent)


def _remove_tree(path: Path) -> None:
    """Remove a file, or a directory and what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; a directory loses its name first, so that it is whole or not there."""
    if path.name.endswith(DIRECTORY_SUFFIX) and path.is_dir() and not path.is_symlink():
        hidden_path = _make_hidden_path(path)
        path.rename(hidden_path)
        _remove_tree(hidden_path)
    else:
        path.unlink(missing_ok=True)


def rename_file(staging_path: Path, path: Path, should_replace: bool) -> None:
    """Rename a written file; a file that is there already is an error unless `should_replace`."""
    if should_replace:
        staging_path.replace(path)
        return
    try:
        os.link(staging_path, path)  # unlike a rename it fails if another job was quicker
    except OSError as error:
        if error.errno == errno.EEXIST or (error.errno in _UNSUPPORTED_ERRNOS and path.exists()):
            # Without the name of the part, which says nothing to who has asked.
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
        staging_path.rename(path)


def _sync_directory(directory: Path) -> None:
    """Force the names in a directory to the disk, where its file system can do that.

    Raises:
      OSError: It does not.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *_UNSUPPORTED_ERRNOS):  # it knows no such thing
            raise
    finally:
        os.close(descriptor)


def _exchange_names(first_path: Path, second_path: Path) -> None:
    """Exchange two names in one step, as Linux can on most file systems (renameat2).

    Raises:
      OSError: It cannot be done; ENOSYS or EINVAL where the system or file system does not know it.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    current_directory, exchange_flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(
        current_directory,
        os.fsencode(first_path),
        current_directory,
        os.fsencode(second_path),
        exchange_flag,
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second_path))


def _remove_leftovers(path: Path) -> None:
    """Remove what stopped processes left that wrote to `path`, or to a number beside it."""
    name_and_number = split_numbered_path(path)
    name_patterns = (
        [f"{escape(name_and_number[0])}-*{end}" for end in (FILE_SUFFIX, DIRECTORY_SUFFIX)]
        if name_and_number
        else []
    )
    name_patterns = name_patterns or [escape(path.name)]
    for leftover_path in (
        leftover_path
        for name_pattern in name_patterns
        for leftover_path in path.parent.glob(f".{name_pattern}.*{_PART_SUFFIX}")
    ):
        # Files that cannot be opened or removed belong to others; they must not stop a save.
        with contextlib.suppress(OSError):
            _remove_leftover(leftover_path)


def _remove_leftover(leftover_path: Path) -> None:
    descriptor = os.open(leftover_path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        is_unfinished_save = stat.S_ISREG(mode) or (
            stat.S_ISDIR(mode) and f"{DIRECTORY_SUFFIX}." in leftover_path.name
        )
        if is_unfinished_save:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(leftover_path)  # nobody writes it any more
    finally:
        os.close(descriptor)
