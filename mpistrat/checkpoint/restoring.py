"""Reading a checkpoint: replica 0 reads and checks all of it before any rank writes anything."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, bits
from mpistrat.checkpoint import files, format, sharded
from mpistrat.checkpoint.cells import Cell
from mpistrat.checkpoint.entries import Contents, Entry, fitting, formed
from mpistrat.checkpoint.first import patient
from mpistrat.checkpoint.gathering import gather
from mpistrat.checkpoint.saving import seen, specs
from mpistrat.checkpoint.sums import PARTS, is_part, wanted_parts
from mpistrat.checkpoint.values import NAME, Values
from mpistrat.distribute.kinds import VariableAggregation
from mpistrat.distribute.variables import Variable
from mpistrat.distribute.writes import exact_share
from mpistrat.errors import CheckpointError, StructureError
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
    """Restore variables from a file. Collective, in cross-replica code.

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
    every = {**mine, **wanted_parts(mine)}
    arrays: dict[str, Array] = {}
    told, manifest, failure = b"", b"", None
    if lockstep.comm.rank == 0:
        path = files.stored(path)
        told, manifest, arrays, failure = _read(lockstep, mine, every, path, partial)
    told, _, manifest = lockstep.share(call, told + b"\n" + manifest, failure)[0].partition(b"\n")
    counter, missing, unused, newest, shapes, stored = json.loads(told)
    path, what = path.with_name(stored), sharded.parsed(path, manifest) if manifest else None
    if number not in (None, counter):
        if what is not None:
            gather(lockstep, call, path, what, {})  # or the manifest is of another one
        return Restored(None), counter
    left = {*missing, *(every.keys() - mine - shapes.keys())}
    taken = {name: one for name, one in every.items() if name not in left}
    seen([path, path.with_name(newest)])
    if what is not None:
        held, place = gather(lockstep, call, path, what, taken)
    else:
        held, place = _broadcast(lockstep, call, taken, shapes, arrays), None
    _give(lockstep, call, mine, held, place)
    if NAME in missing:
        missing.remove(NAME)
        cell: Any = mine[NAME]
        missing += cell.values.wanted
    return Restored(os.fspath(path), tuple(missing), tuple(unused)), counter


def _read(
    lockstep: Lockstep,
    mine: Mapping[str, Variable],
    every: Mapping[str, Any],
    path: Path,
    partial: bool,
) -> tuple[bytes, bytes, dict[str, Array], BaseException | None]:
    """Read the file, or of a directory the manifest and the values.

    Args:
      lockstep: Tells the others that this rank reads.
      mine: The variables.
      every: And their parts, which are taken if they are there and fit.
      path: The file.
      partial: As of `restore`.

    Returns:
      What to tell all ranks, the manifest, the arrays of a file, and what reading failed with.
    """
    wanted = {name: Entry.of(variable.storage.array) for name, variable in every.items()}
    free = [name for name, each in every.items() if getattr(each, "free", False)]

    def check(there: Mapping[str, Entry]) -> None:
        wanted.setdefault(NAME, Entry.of(Values({}).cell().array))
        for name in {NAME, *free} & there.keys():
            if there[name].fits(wanted[name]):
                wanted[name] = there[name]
        for name in every.keys() - mine:
            if wanted[name] != there.get(name):
                del wanted[name]
        _compare(path, there, wanted, partial)

    manifest = b""
    try:
        if path.name.endswith(files.FOLDER):
            manifest, what = sharded.look(path)
            check(what.entries)
            fits = fitting(what.entries, wanted)
            arrays = dict.fromkeys(fits, np.empty(0)) | sharded.take(path, what, {NAME}, False)
            found = Contents(what.entries, arrays, what.counter)
        else:
            with patient(lockstep, f"read {path}", _size(path)):
                found = format.read(path, wanted, check)
        values = _compare_values(path, found.arrays.get(NAME), mine.get(NAME), partial)
    except BaseException as error:
        return b"", b"", {}, error
    shapes = {name: found.entries[name].shape for name in free if name in found.arrays}
    missing = [name for name in mine if name not in found.arrays] + values[0]
    left = [name for name in found.entries if name not in (NAME, *mine)]
    unused = [name for name in left if not is_part(name, found.entries)] + values[1]
    told = [found.counter, missing, unused, _newest(path).name, shapes, path.name]
    return json.dumps(told).encode(), manifest, found.arrays, None


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
    path: Path, found: Mapping[str, Entry], mine: Mapping[str, Entry], partial: bool
) -> None:
    wrong = []
    for name, here in mine.items():
        there = found.get(name)
        if there is not None and there != here:
            wrong.append(f"{name!r} is {there} there and {here} here")
    if not partial:
        known = _COUNTERS | {NAME}
        new = [name for name in mine if name not in found and name not in known]
        extra = [name for name in found if name not in mine and name not in known]
        extra = [name for name in extra if not is_part(name, found)]
        wrong += _sided(new, extra)
    _refuse(path, wrong, partial)


def _compare_values(
    path: Path, there: Array | None, cell: Any, partial: bool
) -> tuple[list[str], list[str]]:
    """Return the names of values that the file lacks, and of those that only it has."""
    mine = Values({}) if cell is None else cell.values
    if there is None:
        lacks, extra, odd = mine.wanted, [], []
    else:
        try:
            lacks, extra, odd = mine.wrong(there)
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged, or not a checkpoint: {error}") from error
    _refuse(path, odd + ([] if partial else _sided(lacks, extra)), partial)
    return lacks if there is not None else [], extra


def _sided(new: Sequence[str], extra: Sequence[str]) -> list[str]:
    texts = [f"{name!r} is not in the file" for name in new]
    return texts + [f"{name!r} is only in the file" for name in extra]


def _refuse(path: Path, wrong: Sequence[str], partial: bool) -> None:
    if wrong:
        hint = "" if partial else " What one side only has may be passed over: partial=True."
        raise StructureError(f"{path} does not fit these variables: {listed(wrong)}.{hint}")


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
    lockstep: Lockstep,
    call: str,
    taken: Mapping[str, Variable],
    shapes: Mapping[str, Sequence[int]],
    arrays: Mapping[str, Array],
) -> dict[str, Array]:
    """Return the values that replica 0 has read, as views of one block. Collective."""
    with lockstep.preparing(call):
        # All the memory that ranks need for it, before anything is written.
        likes = {name: Entry.of(one.storage.array) for name, one in taken.items()}
        likes |= {name: likes[name]._replace(shape=tuple(shapes[name])) for name in shapes}
        regions = sharded.plan(likes, 0, 1)
        block = np.empty(sum(sharded.sizes_of(regions)), np.uint8)
    if lockstep.comm.rank == 0:
        for one in regions:
            flat = np.ascontiguousarray(arrays[one.name]).reshape(-1).view(np.uint8)
            block[one.offset : one.offset + one.nbytes] = flat
    lockstep.prove(f"{call}, values")
    lockstep.comm.bcast(block, 0)
    return {one.name: formed(one.entry, block[one.offset :]) for one in regions}


def _give(
    lockstep: Lockstep,
    call: str,
    mine: Mapping[str, Any],
    held: Mapping[str, Array],
    place: Callable[[], None] | None,
) -> None:
    """Assign values that all ranks have; of a sum this replica's part. Collective.

    What is no variable comes first: to write it can fail, and then nothing is restored.
    """
    cells = [name for name in held if isinstance(mine.get(name), Cell)]
    with lockstep.preparing(call):
        for name in cells:
            mine[name].store("assign", held[name], None)
    if cells:
        lockstep.prove(f"{call}, what is no variable")
    if place is not None:
        place()
    for name, value in held.items():
        if name in mine and name not in cells:
            parts = held.get(name + PARTS) if name + PARTS not in mine else None
            mine[name].store("assign", _own(lockstep, mine[name], value, parts), None)


def _own(lockstep: Lockstep, variable: Variable, value: Array, parts: Array | None) -> Array:
    """Return what this replica has of a value: of a sum its part. Collective.

    That is the one that was saved, if there are as many and what reads is the same.
    """
    if not variable.on_read or variable.aggregation is not VariableAggregation.SUM:
        return value
    rank, size = lockstep.comm.rank, lockstep.comm.size
    reduced = functools.partial(variable.reduced, f"restore({variable.spec()}), its sum")
    if parts is not None and len(parts) == size > 1:
        own: Array = parts[rank]
        if np.array_equal(bits(reduced(own)), bits(value)):
            return own
    return exact_share(reduced, rank, size, value)
