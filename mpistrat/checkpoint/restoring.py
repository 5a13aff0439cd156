"""Reading a checkpoint: replica 0 reads and checks all of it before any rank writes anything."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import files, format, sharded
from mpistrat.checkpoint.cells import PARTS, Cell, is_part, wanted_partials
from mpistrat.checkpoint.entries import Entry, checked, formed
from mpistrat.checkpoint.first import patient
from mpistrat.checkpoint.gathering import gather
from mpistrat.checkpoint.options import SavedOptimizer, changes_text
from mpistrat.checkpoint.saving import seen, specs
from mpistrat.checkpoint.values import NAME, Values
from mpistrat.comm.callsite import few
from mpistrat.distribute import on_read
from mpistrat.distribute.variables import Variable
from mpistrat.errors import StructureError
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import Caught

_OTHER_KIND = (
    "What has another shape, dtype or kind here cannot take the value there: leave it out of the "
    "Checkpoint that restores, or rename it, and call restore(path, partial=True)."
)
_ONE_SIDE = (
    "Attach all variables before restore. To skip what only one side has, call restore(path, "
    "partial=True) of the Checkpoint; a program with a CheckpointManager does so once, and saves."
)
# Of the library itself: they come and go with how a program runs, not with what it computes.
COUNTERS = frozenset({"checkpointed_runs"})


@final
@dataclass
class Restored:
    """What `Checkpoint.restore` has done; its methods are those of TensorFlow's status.

    Of an empty `Checkpoint`, what is attached later takes its values then, and changes this.

    Attributes:
      path: The file; None if there was nothing to restore.
      missing: Variables that the file does not have, and that are as they were; of the state of an
        optimizer, as in a new one.
      unused: Arrays of the file that no variable has taken.
      matched: Variables that have the values of the file.
      expects_partial: `expect_partial` was called.
    """

    path: str | None = None
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    matched: tuple[str, ...] = field(default=(), repr=False)
    expects_partial: bool = field(default=False, repr=False)

    def assert_consumed(self) -> Restored:
        """Return this if every array of the file went to a variable, and every variable got one.

        Raises:
          AssertionError: Not so, or nothing was restored.
        """
        if self.unused:
            raise AssertionError(f"{self.path} also has {', '.join(few(self.unused))}.")
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> Restored:
        """Return this if every variable got a value.

        Raises:
          AssertionError: Not so, or nothing was restored.
        """
        self._check_path()
        if self.missing:
            raise AssertionError(f"{self.path} does not have {', '.join(few(self.missing))}.")
        return self

    def assert_nontrivial_match(self) -> Restored:
        """Return this if at least one variable got a value.

        Raises:
          AssertionError: Not so, or nothing was restored.
        """
        self._check_path()
        if not self.matched:
            raise AssertionError(
                f"nothing of {self.path} was restored: no variable of the Checkpoint is in it."
            )
        return self

    def expect_partial(self) -> Restored:
        """Return this; what is never attached is not named at the next save, or at the end."""
        self.expects_partial = True
        return self

    def initialize_or_restore(self, session: None = None) -> None:
        """Do nothing: variables have their values when they are made, or attached."""

    def run_restore_ops(self, session: None = None) -> None:
        """Do nothing: variables have their values when they are restored, or attached."""

    def _check_path(self) -> None:
        if self.path is None:
            raise AssertionError("there was no checkpoint, so nothing was restored.")

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an AttributeError that says what there is."""
        raise AttributeError(
            f"what restore returns has no {name}. It has "
            f"{', '.join(name for name in dir(Restored) if not name.startswith('_'))}."
        )


def restore(
    lockstep: Lockstep,
    mine: Mapping[str, Variable],
    path: Path,
    partial: bool,
    number: int | None = None,
    optimizers: Sequence[SavedOptimizer] = (),
) -> tuple[Restored, int]:
    """Restore variables from a file. Collective, in cross-replica code.

    Args:
      lockstep: Proves it.
      mine: The variables.
      path: The file.
      partial: Pass over what only the file or only the program has.
      number: How many times it has to have been saved, else nothing is restored; None for any.
      optimizers: Those whose state is among the variables, for messages.

    Returns:
      What was done, and how many times the checkpoint had been saved.

    Raises:
      OSError: The file cannot be read; on every rank, as all of these.
      CheckpointError: It is damaged, or not a checkpoint.
      DataError: It is of another format.
      StructureError: It does not fit the variables.
    """
    call = f"Checkpoint.restore({str(path)!r}, partial={partial}) of {specs(mine)}"
    every = {**mine, **wanted_partials(mine)}
    arrays: dict[str, Array] = {}
    told, manifest = b"", b""
    with Caught() as caught:
        if lockstep.comm.rank == 0:
            path = files.stored(path)
            with patient(lockstep, f"read {path}", _size(path)):
                told, manifest, arrays = _read(mine, every, path, partial, optimizers)
    rows = lockstep.gather_payloads(call, told + b"\n" + manifest, caught.failure)
    told, _, manifest = rows[0].partition(b"\n")
    counter, missing, unused, newest, shapes, stored = json.loads(told)
    with checked(path):
        what = sharded.parsed(manifest) if manifest else None
    path = path.with_name(stored)
    if number not in (None, counter):
        if what is not None:
            gather(lockstep, call, path, what, {})  # or the manifest is of another one
        return Restored(None), counter
    left = {*missing, *(name for name, one in every.items() if _is_free(one))} - shapes.keys()
    taken = {name: one for name, one in every.items() if name not in left}
    seen([path, path.with_name(newest)])
    if what is not None:
        held, place = gather(lockstep, call, path, what, taken)
    else:
        held, place = _broadcast(lockstep, call, taken, shapes, arrays), None
    _give(lockstep, call, mine, held, place)
    cell: Any = mine.get(NAME)
    names = (*mine, *(() if cell is None else cell.values.values))
    matched = tuple(name for name in names if name not in missing and name != NAME)
    return Restored(os.fspath(path), tuple(missing), tuple(unused), matched), counter


def _read(
    mine: Mapping[str, Any],
    every: Mapping[str, Any],
    path: Path,
    partial: bool,
    optimizers: Sequence[SavedOptimizer],
) -> tuple[bytes, bytes, dict[str, Array]]:
    """Read the file, or of a directory the manifest and the values.

    Args:
      mine: The variables.
      every: And their parts, which are taken if they are there and fit.
      path: The file.
      partial: As of `restore`.
      optimizers: As of `restore`.

    Returns:
      What to tell all ranks, the manifest, and the arrays of a file.
    """
    wanted = {name: Entry.of(variable.storage.array) for name, variable in every.items()}
    wanted.setdefault(NAME, Entry.of(Values({}).cell().array))
    free = [NAME, *(name for name, one in every.items() if _is_free(one))]
    missing, unused = list[str](), list[str]()

    def check(there: Mapping[str, Entry]) -> None:
        for name in free:
            if name in there and there[name].fits(wanted[name]):
                wanted[name] = there[name]
            elif name not in mine and name != NAME:
                wanted.pop(name)
        missing.extend(name for name in mine if name not in there and name != NAME)
        unused.extend(name for name in there if name not in wanted and not is_part(name, there))
        wrong = {name: here for name, here in wanted.items() if there.get(name, here) != here}
        texts = [f"{name!r} is {there[name]} there and {wrong[name]} here" for name in wrong]
        _refuse(path, texts, missing, unused, partial, optimizers)

    manifest = b""
    if path.name.endswith(files.FOLDER):
        manifest, what = sharded.look(path)
        check(what.entries)
        arrays, entries = sharded.take(path, what, {NAME}, False), what.entries
        counter = what.counter
    else:
        entries, arrays, counter = format.read(path, wanted, check)
    values = mine[NAME].values if NAME in mine else Values({})
    with checked(path):
        lacks, extra, odd = values.wrong(arrays.get(NAME))
    _refuse(path, odd, lacks, extra, partial)
    both = entries.keys() & wanted.keys() & every.keys()
    shapes = {name: entries[name].shape for name in free if name in both}
    told = [counter, missing + lacks, unused + extra, _newest(path).name, shapes, path.name]
    return json.dumps(told).encode(), manifest, arrays


def _is_free(one: Any) -> bool:
    """Tell whether the array in a file may have another first axis."""
    return getattr(one, "free", False)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        directory = path.with_suffix("")
        if not directory.is_dir():
            raise
        text = "Is a directory (latest_checkpoint returns the newest checkpoint in it)"
        raise IsADirectoryError(errno.EISDIR, text, str(directory)) from None


def _refuse(
    path: Path,
    wrong: Sequence[str],
    new: Sequence[str],
    extra: Sequence[str],
    partial: bool,
    optimizers: Sequence[SavedOptimizer] = (),
) -> None:
    """Raise StructureError if something does not fit, or without `partial` one side has more."""
    hints = [_OTHER_KIND] * bool(wrong)
    if not partial:
        sides = (new, "is not in the file"), (extra, "is only in the file")
        lines = [f"{n!r} {text}" for names, text in sides for n in names if n not in COUNTERS]
        hints += [_ONE_SIDE] * bool(lines)
        wrong = [*wrong, *lines]
    if wrong:
        text = ", ".join(few(wrong))
        options = "" if partial else changes_text(optimizers, new, extra)
        hints += [f"Options of optimizers: {options}."] if options else []
        raise StructureError(f"{path} does not fit these variables: {text}. {' '.join(hints)}")


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
    lockstep.handshake(f"{call}, values")
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

    What is not a variable comes first: to write it can fail, and then nothing is restored.
    """
    cells = dict.fromkeys(name for name in held if isinstance(mine.get(name), Cell))
    with lockstep.preparing(call):
        for name in cells:
            mine[name].store("assign", held[name], None)
    if cells:
        lockstep.handshake(f"{call}, what is not a variable")
    if place is not None:
        place()
    for name, value in held.items():
        if name in mine and name not in cells:
            partials = held.get(name + PARTS) if name + PARTS not in mine else None
            own = on_read.restored_copy(lockstep, mine[name], value, partials)
            mine[name].store("assign", own, None)
