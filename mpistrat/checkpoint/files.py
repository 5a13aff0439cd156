"""The names and numbers of checkpoints, and file operations that replica 0 does for all ranks.

Checkpoints are ordered by the numbers in their names; no clock is read. While one rank reads or
writes, the status board lists it as a long operation.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpistrat.errors import CheckpointError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import FailureCatcher

FILE_SUFFIX, DIRECTORY_SUFFIX = ".npz", ".arrays"  # of a file, and of a directory
_NUMBERED_NAME = re.compile(
    rf"(.+)-(\d{{1,18}})({re.escape(FILE_SUFFIX)}|{re.escape(DIRECTORY_SUFFIX)})"
)


def check_path(call: str, argument: str, path_like: object) -> Path:
    """Return an argument as a path.

    Args:
      call: The call that has this argument, for errors.
      argument: The name of the argument.
      path_like: The argument.

    Raises:
      TypeError: It is not a string or path.
      FileNotFoundError: It is relative to a directory that is not there any more.

    Example:
      >>> check_path("Checkpoint.read", "save_path", "run/ckpt").name
      'ckpt'
    """
    text = os.fspath(path_like) if isinstance(path_like, str | os.PathLike) else None
    if not isinstance(text, str):
        type_name = type(path_like).__name__
        raise TypeError(
            f"{call}: {argument} must be a str or a path, not {path_like!r:.60} ({type_name})."
        )
    path = Path(text)
    if not path.is_absolute():
        try:
            Path.cwd()
        except FileNotFoundError:
            reason = "The current directory of this process has been removed; give an absolute path"
            raise FileNotFoundError(errno.ENOENT, f"{call}: {reason} as {argument}", text) from None
    return path


def make_numbered_path(directory: Path, name: str, number: int, suffix: str = FILE_SUFFIX) -> Path:
    """Return the path of a numbered checkpoint, a file or (`DIRECTORY_SUFFIX`) a directory.

    Example:
      >>> make_numbered_path(Path("run"), "ckpt", 3).as_posix()
      'run/ckpt-3.npz'
    """
    return directory / f"{name}-{number}{suffix}"


def path_of_other_kind(path: Path) -> Path:
    """Return the name that a checkpoint would have if it were of the other kind.

    Example:
      >>> path_of_other_kind(Path("run/ckpt-3.npz")).as_posix()
      'run/ckpt-3.arrays'
    """
    is_file = path.name.endswith(FILE_SUFFIX)
    base = path.name.removesuffix(FILE_SUFFIX if is_file else DIRECTORY_SUFFIX)
    return path.with_name(base + (DIRECTORY_SUFFIX if is_file else FILE_SUFFIX))


def find_stored_path(path: Path) -> Path:
    """Return the path of a checkpoint, or of the other kind if only that is there."""
    return (
        path_of_other_kind(path)
        if not os.path.lexists(path) and os.path.lexists(path_of_other_kind(path))
        else path
    )


def find_checkpoint(path_like: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a path means: with or without its ending, or a directory's newest.

    Raises:
      TypeError: The path is not a string or path.
      FileNotFoundError: There is no such checkpoint, or it is a directory without any.
      CheckpointError: It is a directory with checkpoints of several names, or a file of another
        kind.
    """
    path = check_path("A checkpoint", "the path", path_like)
    has_suffix = path.name.endswith((FILE_SUFFIX, DIRECTORY_SUFFIX))
    if has_suffix or not path.is_dir():
        expected_path = path if has_suffix else path.with_name(path.name + FILE_SUFFIX)
        stored_path = find_stored_path(expected_path)
        if os.path.lexists(stored_path):
            return stored_path
        if path.exists():
            text = f"its name does not end with {FILE_SUFFIX} or {DIRECTORY_SUFFIX}"
            raise CheckpointError(f"{path} is not a checkpoint: {text}.")
        raise FileNotFoundError(
            f"there is no checkpoint {expected_path} or {path_of_other_kind(expected_path)}."
        )
    newest = latest_checkpoint(path)
    if newest is None:
        raise FileNotFoundError(f"there is no checkpoint in {path}.")
    return Path(newest)


def split_numbered_path(path: Path) -> tuple[str, int] | None:
    """Return name and number of a path that `make_numbered_path` has made; None of another.

    Example:
      >>> split_numbered_path(Path("run/ckpt-3.npz"))
      ('ckpt', 3)
      >>> split_numbered_path(Path("run/ckpt-03.npz")) is None  # a number has one name
      True
    """
    match = _NUMBERED_NAME.fullmatch(path.name)
    if match is None or path.name.startswith(".") or str(int(match[2])) != match[2]:
        return None
    return match[1], int(match[2])


def _list_paths_by_name(directory: Path) -> dict[str, dict[int, Path]]:
    paths_by_name: dict[str, dict[int, Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        name_and_number = split_numbered_path(path)
        if name_and_number is not None and path.exists():  # no link that leads nowhere
            paths_by_name.setdefault(name_and_number[0], {})[name_and_number[1]] = path
    return paths_by_name


def list_numbered_paths(directory: Path, name: str) -> dict[int, Path]:
    """Return the checkpoints of that name in a directory, by number, the oldest first.

    A symbolic link whose target is gone is not a checkpoint.

    Raises:
      OSError: The directory cannot be read, or is a file.
    """
    if directory.exists() and not directory.is_dir():
        text = "Not a directory, but a file; checkpoints need a directory, give another one"
        raise NotADirectoryError(errno.ENOTDIR, text, str(directory))
    return dict(sorted(_list_paths_by_name(directory).get(name, {}).items()))


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], name: str | None = None
) -> str | None:
    """Return the path of the newest checkpoint in a directory: that of the highest number.

    The file is not opened, so it may be damaged; `Checkpoint.restore` checks all of it, and
    ``CheckpointManager.restore_or_initialize`` skips damaged checkpoints. Symbolic links whose
    target is gone are skipped here too.

    Never communicates. Ranks that do not all see the directory ask a `CheckpointManager`, whose
    replica 0 looks for all of them.

    Args:
      checkpoint_dir: The directory.
      name: The part before the number; any name if None.

    Returns:
      A path for `Checkpoint.restore`, or None if there is no checkpoint.

    Raises:
      CheckpointError: No name was given, and there are checkpoints of several.
      TypeError: `checkpoint_dir` is not a string or path.
      OSError: The directory cannot be read.

    Like: ``tf.train.latest_checkpoint``.

    Example:
      >>> latest_checkpoint("no/such/directory") is None
      True
    """
    paths_by_name = _list_paths_by_name(
        check_path("latest_checkpoint", "checkpoint_dir", checkpoint_dir)
    )
    if name is None and len(paths_by_name) > 1:
        raise CheckpointError(
            f"{os.fspath(checkpoint_dir)} has checkpoints of several names: "
            f"{sorted(paths_by_name)}. Choose one: latest_checkpoint(directory, name)."
        )
    numbered_paths = (
        paths_by_name.get(name, {}) if name is not None else next(iter(paths_by_name.values()), {})
    )
    return os.fspath(numbered_paths[max(numbered_paths)]) if numbered_paths else None


def add_file_name(error: OSError, path: Path) -> OSError:
    """Return an error with the file that it is of; reading what is open raises it without.

    Example:
      >>> print(add_file_name(OSError(5, "Input/output error"), Path("ckpt-3.npz")))
      [Errno 5] Input/output error: 'ckpt-3.npz'
    """
    if error.errno is None or error.filename is not None:
        return error
    return OSError(error.errno, error.strerror, str(path))


# Reading and writing may keep the other ranks waiting: seconds, and seconds for each byte.
OPERATION_SECONDS, OPERATION_SECONDS_PER_BYTE = 600.0, 1e-7
_WRITE_ADVICE = "Fix that, or save elsewhere, and save again"
_OTHER_JOB_ADVICE = "Another job saves here; give each job its own directory"


def announcing_operation(lockstep: Lockstep, operation: str, nbytes: int = 0) -> Any:
    """Return a context manager in which this rank reads or writes, while the others wait."""
    return lockstep.session.board.long_operation(
        operation, OPERATION_SECONDS + nbytes * OPERATION_SECONDS_PER_BYTE
    )


@contextlib.contextmanager
def explaining_write_errors(path: Path, is_claimed: bool = False) -> Iterator[None]:
    """Raise errors of writing a checkpoint, in the body, as users are to see them.

    Args:
      path: The file or directory that is written.
      is_claimed: A FileExistsError of the body says by itself which job saves here.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or (is_claimed and isinstance(error, FileExistsError)):
            raise
        text = f"{error.strerror}: {path} was not written; earlier checkpoints are unchanged. "
        text += _OTHER_JOB_ADVICE if isinstance(error, FileExistsError) else _WRITE_ADVICE
        raise OSError(error.errno, text) from error


def on_replica0(
    lockstep: Lockstep,
    call: str,
    replica0_function: Callable[[], Any],
    operation: str = "",
    nbytes: int = 0,
) -> Any:
    """Return what a function returns on replica 0; the other ranks do not call it. Collective.

    Args:
      lockstep: The lockstep of all ranks.
      call: The text of the call, equal on all ranks.
      replica0_function: The function. JSON has to know its result; its exceptions are raised on
        every rank.
      operation: A text for messages about waiting ranks; if empty, `call`.
      nbytes: How many it may read or write.
    """
    return_value = None
    with FailureCatcher() as caught:
        if lockstep.comm.rank == 0:
            with announcing_operation(lockstep, operation or call, nbytes):
                return_value = replica0_function()
    return json.loads(
        lockstep.gather_payloads(call, json.dumps(return_value).encode(), caught.failure)[0]
    )


def find_newest_sibling(path: Path) -> Path:
    """Return the newest checkpoint that is there of the name of `path`; that if it has no number.

    A program that goes back to an older one has seen those that are newer.
    """
    name_and_number = split_numbered_path(path)
    with contextlib.suppress(OSError):
        if name_and_number is not None:
            return next(
                reversed(list_numbered_paths(path.parent, name_and_number[0]).values()), path
            )
    return path
