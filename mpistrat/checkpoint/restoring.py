"""Reading a checkpoint: all of it is read and checked before any rank writes anything.

Replica 0 reads a file, and broadcasts; of a directory each node reads all of it (`gathering`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import files, format, sharded
from mpistrat.checkpoint.gathering import gather
from mpistrat.checkpoint.saving import seen, specs
from mpistrat.checkpoint.shares import patient
from mpistrat.distribute.kinds import VariableAggregation
from mpistrat.distribute.variables import Variable
from mpistrat.distribute.writes import exact_share
from mpistrat.errors import StructureError
from mpistrat.lockstep.lockstep import Lockstep

__all__ = ["Restored", "restore"]

# Of the library itself: they come and go with how a program runs, not with what it computes.
_COUNTERS = frozenset({"checkpointed_runs"})
_SHOWN = 20  # names that one message lists


def listed(texts: Sequence[str]) -> str:
    """Return texts as a message shows them: the first few, and how many more there are.

    Example:
      >>> listed(["a", "b"])
      'a, b'
    """
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


@final
class Restored(NamedTuple):
    """What `Checkpoint.restore` has done; its methods are those of TensorFlow's status.

    Attributes:
      path: The file; None if there was nothing to restore.
      missing: Variables that the file does not have, and that are as they were.
      unused: Arrays of the file that no variable has taken.
    """

    path: str | None
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def assert_consumed(self) -> Restored:
        """Return this if every array of the file went to a variable, and every variable got one.

        Raises:
          AssertionError: Not so, or nothing was restored.
        """
        if self.unused:
            raise AssertionError(f"{self.path} also has {listed(self.unused)}.")
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> Restored:
        """Return this if every variable got a value.

        Raises:
          AssertionError: Not so, or nothing was restored.
        """
        if self.path is None:
            raise AssertionError("there was no checkpoint, so nothing was restored.")
        if self.missing:
            raise AssertionError(f"{self.path} does not have {listed(self.missing)}.")
        return self

    def expect_partial(self) -> Restored:
        """Return this; what the file has beyond the variables gives no warning here anyway."""
        return self


def restore(
    lockstep: Lockstep,
    mine: Mapping[str, Variable],
    path: Path,
    partial: bool,
    number: int | None = None,
) -> tuple[Restored, int]:
    """Give variables the values of a file. Collective, in cross-replica code.

    Args:
      lockstep: Proves it.
      mine: The variables.
      path: The file.
      partial: Pass over what only the file or only the program has.
      number: How many times it has to have been saved, else nothing is restored; None for any.

    Returns:
      What was done, and how many times the checkpoint had been saved.

    Raises:
      OSError: The file cannot be read; on every rank, as all of these.
      CheckpointError: It is damaged, or not a checkpoint.
      DataError: It is of another format.
      StructureError: It does not fit the variables.
    """
    call = f"Checkpoint.restore({str(path)!r}, partial={partial}) of {specs(mine)}"
    with lockstep.preparing(call):
        # All the memory that ranks need for it, before anything is written.
        scratch = np.empty(max(v.storage.array.nbytes for v in mine.values()), np.uint8)
    found, failure, manifest = None, None, b""
    if lockstep.comm.rank == 0:
        path = files.stored(path)
        found, manifest, failure = _read(lockstep, mine, path, partial)
    told = b"" if found is None else _told(found, mine, path)
    told, _, manifest = lockstep.share(call, told + b"\n" + manifest, failure)[0].partition(b"\n")
    counter, missing, unused, newest, stored = json.loads(told)
    path, what = path.with_name(stored), sharded.parsed(path, manifest) if manifest else None
    if number not in (None, counter):
        if what is not None:
            gather(lockstep, call, path, what, ())  # or the manifest is of another one
        return Restored(None), counter
    seen([path, path.with_name(newest)])
    names = sorted(set(mine) - set(missing))
    if what is not None:
        arrays = gather(lockstep, call, path, what, names)
        for name in names:
            _give(lockstep, mine[name], arrays[name])
    else:
        for name in names:
            array = None if found is None else found.arrays[name]
            _give(lockstep, mine[name], _broadcast(lockstep, mine[name], array, scratch))
    return Restored(os.fspath(path), tuple(missing), tuple(unused)), counter


def _read(
    lockstep: Lockstep, mine: Mapping[str, Variable], path: Path, partial: bool
) -> tuple[format.Contents | None, bytes, BaseException | None]:
    """Read the file, or the manifest of a directory; return also what that failed with."""

    def check(there: Mapping[str, format.Entry]) -> None:
        _compare(path, there, mine, partial)

    try:
        if path.name.endswith(files.FOLDER):
            manifest, what = sharded.look(path)
            check(what.entries)
            fits = {
                name: np.empty(0)
                for name, entry in what.entries.items()
                if name in mine and format.Entry.of(mine[name].storage.array) == entry
            }
            return format.Contents(what.entries, fits, what.counter), manifest, None
        with patient(lockstep, f"read {path}", _size(path)):
            wanted = {name: v.storage.array for name, v in mine.items()}
            return format.read(path, wanted, check), b"", None
    except BaseException as error:
        return None, b"", error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        directory = path.with_suffix("")
        if not directory.is_dir():
            raise
        text = "Is a directory (latest_checkpoint tells the newest file in it)"
        raise IsADirectoryError(errno.EISDIR, text, str(directory)) from None


def _compare(
    path: Path, found: Mapping[str, format.Entry], mine: Mapping[str, Variable], partial: bool
) -> None:
    wrong = []
    for name, variable in mine.items():
        here, there = format.Entry.of(variable.storage.array), found.get(name)
        if there is not None and there != here:
            wrong.append(f"{name!r} is {there} there and {here} here")
    if not partial:
        new = [name for name in mine if name not in found and name not in _COUNTERS]
        wrong += [f"{name!r} is not in the file" for name in new]
        extra = [name for name in found if name not in mine and name not in _COUNTERS]
        wrong += [f"{name!r} is only in the file" for name in extra]
    if wrong:
        hint = "" if partial else " What one side only has may be passed over: partial=True."
        raise StructureError(f"{path} does not fit these variables: {listed(wrong)}.{hint}")


def _told(found: format.Contents, mine: Mapping[str, Variable], path: Path) -> bytes:
    missing = [name for name in mine if name not in found.arrays]
    unused = [name for name in found.entries if name not in mine]
    newest = _newest(path).name
    return json.dumps([found.counter, missing, unused, newest, path.name]).encode()


def _newest(path: Path) -> Path:
    """Return the newest checkpoint that is there of the name of `path`; that if it has no number.

    Who goes back to an older one has seen those that are newer.
    """
    parts = files.parted(path)
    with contextlib.suppress(OSError):
        if parts is not None:
            return next(reversed(files.saved(path.parent, parts[0]).values()), path)
    return path


def _broadcast(
    lockstep: Lockstep, variable: Variable, array: Array | None, scratch: Array
) -> Array:
    """Return the value that replica 0 has read. Collective."""
    like = variable.storage.array
    room = scratch[: like.nbytes]
    if array is not None:
        room[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    lockstep.prove(f"restore({variable.spec()})")
    lockstep.comm.bcast(room, 0)
    return room.view(like.dtype).reshape(like.shape)


def _give(lockstep: Lockstep, variable: Variable, value: Array) -> None:
    """Give a variable a value that all ranks have."""
    if variable.on_read and variable.aggregation is VariableAggregation.SUM:
        fold = functools.partial(variable.folded, f"restore({variable.spec()}), its sum")
        value = exact_share(fold, lockstep.comm.rank, lockstep.comm.size, value)
    variable.store("assign", value, None)
