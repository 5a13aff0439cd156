"""The names and numbers of checkpoints.

Order is that of the numbers in the names; clocks are not asked.

File operations that replica 0 does for all ranks, and their results on all ranks.
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

SUFFIX, FOLDER = ".npz", ".arrays"  # of a file, and of a directory
_NAME = re.compile(rf"(.+)-(\d{{1,18}})({re.escape(SUFFIX)}|{re.escape(FOLDER)})")


def checked_path(call: str, argument: str, value: Any) -> Path:
    """Return an argument as a path.

    Args:
      call: The call that has this argument, for errors.
      argument: The name of the argument.
      value: The argument.

    Raises:
      TypeError: It is not a string or path.
      FileNotFoundError: It is relative to a directory that is not there any more.

    Example:
      >>> checked_path("Checkpoint.read", "save_path", "run/ckpt").name
      'ckpt'
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        kind = type(value).__name__
        raise TypeError(f"{call}: {argument} must be a str or a path, not {value!r:.60} ({kind}).")
    path = Path(text)
    if not path.is_absolute():
        try:
            Path.cwd()
        except FileNotFoundError:
            reason = "The current directory of this process has been removed; give an absolute path"
            raise FileNotFoundError(errno.ENOENT, f"{call}: {reason} as {argument}", text) from None
    return path


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


def found(path_like: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a path means: with or without its ending, or a directory's newest.

    Raises:
      TypeError: The path is not a string or path.
      FileNotFoundError: There is no such checkpoint, or it is a directory without any.
      CheckpointError: It is a directory with checkpoints of several names, or a file of another
        kind.
    """
    path = checked_path("A checkpoint", "the path", path_like)
    has_suffix = path.name.endswith((SUFFIX, FOLDER))
    if has_suffix or not path.is_dir():
        expected_path = path if has_suffix else path.with_name(path.name + SUFFIX)
        stored_path = stored(expected_path)
        if os.path.lexists(stored_path):
            return stored_path
        if path.exists():
            text = f"its name does not end with {SUFFIX} or {FOLDER}"
            raise CheckpointError(f"{path} is not a checkpoint: {text}.")
        raise FileNotFoundError(
            f"there is no checkpoint {expected_path} or {other(expected_path)}."
        )
    newest = latest_checkpoint(path)
    if newest is None:
        raise FileNotFoundError(f"there is no checkpoint in {path}.")
    return Path(newest)


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
    paths_by_name: dict[str, dict[int, Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        parts = parted(path)
        if parts is not None and path.exists():  # no link that leads nowhere
            paths_by_name.setdefault(parts[0], {})[parts[1]] = path
    return paths_by_name


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
      TypeError: `checkpoint_dir` is not a string or path.
      OSError: The directory cannot be read.

    Like: ``tf.train.latest_checkpoint``.

    Example:
      >>> latest_checkpoint("no/such/directory") is None
      True
    """
    paths_by_name = _numbers(checked_path("latest_checkpoint", "checkpoint_dir", checkpoint_dir))
    if name is None and len(paths_by_name) > 1:
        raise CheckpointError(
            f"{os.fspath(checkpoint_dir)} has checkpoints of several names: "
            f"{sorted(paths_by_name)}. Choose one: latest_checkpoint(directory, name)."
        )
    numbered_paths = (
        paths_by_name.get(name, {}) if name is not None else next(iter(paths_by_name.values()), {})
    )
    return os.fspath(numbered_paths[max(numbered_paths)]) if numbered_paths else None


def of_file(error: OSError, path: Path) -> OSError:
    """Return an error with the file that it is of; reading what is open raises it without.

    Example:
      >>> print(of_file(OSError(5, "Input/output error"), Path("ckpt-3.npz")))
      [Errno 5] Input/output error: 'ckpt-3.npz'
    """
    if error.errno is None or error.filename is not None:
        return error
    return OSError(error.errno, error.strerror, str(path))


# Reading and writing may keep the other ranks waiting: seconds, and seconds for each byte.
PATIENCE, SLOWEST = 600.0, 1e-7
_ADVICE = "Fix that, or save elsewhere, and save again"
_OTHER = "Another job saves here; give each job its own directory"


def patient(lockstep: Lockstep, operation: str, nbytes: int = 0) -> Any:
    """Return a context manager in which this rank reads or writes, while the others wait."""
    return lockstep.session.board.long_operation(operation, PATIENCE + nbytes * SLOWEST)


@contextlib.contextmanager
def unwritten(path: Path, claims: bool = False) -> Iterator[None]:
    """Raise errors of writing a checkpoint, in the body, as users are to see them.

    Args:
      path: The file or directory that is written.
      claims: A FileExistsError of the body says by itself which job saves here.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or (claims and isinstance(error, FileExistsError)):
            raise
        text = f"{error.strerror}: {path} was not written; earlier checkpoints are unchanged. "
        text += _OTHER if isinstance(error, FileExistsError) else _ADVICE
        raise OSError(error.errno, text) from error


def on_replica0(
    lockstep: Lockstep, call: str, fn: Callable[[], Any], operation: str = "", nbytes: int = 0
) -> Any:
    """Return what a function returns on replica 0; the other ranks do not call it. Collective.

    Args:
      lockstep: Proves it.
      call: The text of the call, equal on all ranks.
      fn: The function. JSON has to know its result; its exceptions are raised on every rank.
      operation: A text for messages about waiting ranks; if empty, `call`.
      nbytes: How many it may read or write.
    """
    result = None
    with FailureCatcher() as caught:
        if lockstep.comm.rank == 0:
            with patient(lockstep, operation or call, nbytes):
                result = fn()
    return json.loads(
        lockstep.gather_payloads(call, json.dumps(result).encode(), caught.failure)[0]
    )
