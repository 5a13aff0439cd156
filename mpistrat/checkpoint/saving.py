"""Writing a checkpoint: all ranks agree on what and where, replica 0 writes, all are told how."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import claim, files, format
from mpistrat.checkpoint.values import NAME
from mpistrat.distribute.kinds import VariableAggregation
from mpistrat.distribute.variables import Variable
from mpistrat.lockstep.lockstep import Lockstep

__all__ = ["overwrite", "patient", "save", "seen", "specs"]

# Reading and writing may keep the other ranks waiting: seconds, and seconds for each byte.
_PATIENCE, _SLOWEST = 600.0, 1e-7
# Characters of the variables in the text of a call; what is further on has a hash.
_SHOWN = 2000
_ADVICE = "Mend that, or save elsewhere, and save again"
_OTHER = "Another job saves here; give each a directory of its own"
# By directory and name: the newest number that this program knows of, for all its managers and
# checkpoints. Each rank notes what all are told, and a save asks all ranks of its strategy.
_SEEN: dict[str, int] = {}
_UNKNOWN = -1


def patient(lockstep: Lockstep, what: str, nbytes: int) -> Any:
    """Return a context manager in which this rank reads or writes, while the others wait."""
    return lockstep.session.board.long_operation(what, _PATIENCE + nbytes * _SLOWEST)


def specs(mine: Mapping[str, Variable], values: bool = False) -> str:
    """Return a text that is equal on all ranks exactly if their variables are alike.

    Args:
      mine: The variables.
      values: Numbers and texts have to be equal, too.
    """
    cell: Any = mine.get(NAME)
    text = f"{cell.values.shown()}; " if values and cell is not None else ""
    text += "; ".join(f"{name} {variable.spec()}" for name, variable in mine.items())
    if len(text) > _SHOWN:
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        text = f"{text[:_SHOWN]}... {digest}"
    return f"{len(mine)} variables: {text}"


def overwrite(lockstep: Lockstep, mine: Mapping[str, Variable], path: Path, counter: int) -> None:
    """Write variables to a file, in place of what is there. Collective, in cross-replica code.

    Args:
      lockstep: Proves it.
      mine: The variables.
      path: The file.
      counter: How many times they have been saved.

    Raises:
      OSError: It cannot be written; on every rank.
    """
    call = f"Checkpoint.write({str(path)!r}) of {specs(mine, True)}"
    values, _ = _values(lockstep, mine, call)
    failure = None
    if lockstep.comm.rank == 0:
        failure = _attempt(lockstep, path, values, counter, replace=True)
    lockstep.prove(f"{call}, written", failure=failure)
    seen([path])  # its name may be that of a number


def save(
    lockstep: Lockstep,
    mine: Mapping[str, Variable],
    prefix: Path,
    counter: int,
    number: int | None = None,
    keep: files.Retention | None = None,
) -> tuple[int, list[str]]:
    """Write variables to a file with a number. Collective, in cross-replica code.

    Args:
      lockstep: Proves it.
      mine: The variables.
      prefix: Directory, and the name before the number.
      counter: How many times they have been saved before.
      number: The number; None for the next one.
      keep: Removes the oldest of that name; None to keep all.

    Returns:
      The number, and the paths of all that are there, the oldest first.

    Raises:
      OSError: It cannot be written; on every rank.
      FileExistsError: There is a newer one that this program does not know of.
      ValueError: There are newer ones than `number`.
    """
    call = f"Checkpoint.save({str(prefix)!r}, number {number}) of {specs(mine, True)}"
    values, known = _values(lockstep, mine, call, prefix)
    chosen, failure = b"", None
    if lockstep.comm.rank == 0:
        try:
            claim.check(prefix.parent)
            chosen = str(_number(prefix, counter, number, known)).encode()
        except Exception as error:
            failure = error
    told = int(lockstep.share(f"{call}, its number", chosen, failure)[0])
    path = files.numbered(prefix.parent, prefix.name, told)
    there: list[str] = []
    failing: BaseException | None = None
    if lockstep.comm.rank == 0:
        failing = _attempt(lockstep, path, values, told, replace=number is not None)
        if not isinstance(failing, FileExistsError):  # else it is another's
            seen([path])
        if failing is None:
            there = (keep or files.Retention())(prefix.parent, prefix.name, path)
    everything = lockstep.share(f"{call}, written", json.dumps(there).encode(), failing)[0]
    seen([path])
    return told, json.loads(everything)


def _values(
    lockstep: Lockstep, mine: Mapping[str, Variable], call: str, prefix: Path | None = None
) -> tuple[dict[str, Array], int]:
    """Prove the call; return what is to be written, and the newest number that any rank knows."""
    with lockstep.preparing(call):
        for key, variable in mine.items():
            if variable.on_read and variable.aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f"{call}: {key!r} is ON_READ with aggregation NONE, so it has no one value. "
                    "Choose an aggregation, or leave it out of the checkpoint."
                )
        known = _UNKNOWN if prefix is None else _SEEN.get(os.path.realpath(prefix), _UNKNOWN)
    known = max(map(int, lockstep.share(call, str(known).encode())))
    # What is always equal is not copied: nobody writes to it before this call has ended. What is
    # spread is read by all ranks, one variable after the other, and kept by the one that writes.
    values = {}
    for key, variable in mine.items():
        value = np.asarray(variable)
        if lockstep.comm.rank == 0:
            values[key] = value
    return values, known


def seen(paths: Iterable[Path]) -> None:
    """Note that this program knows of numbered checkpoints, and of those with smaller numbers."""
    for path in paths:
        name, number = files.parted(path) or (None, 0)
        if name is not None:
            key = os.path.realpath(path.with_name(name))
            _SEEN[key] = max(number, _SEEN.get(key, number))


def _number(prefix: Path, counter: int, number: int | None, known: int) -> int:
    newest = max(files.saved(prefix.parent, prefix.name), default=0)
    if newest > known != _UNKNOWN:
        raise FileExistsError(
            errno.EEXIST,
            f"There is {prefix.name}-{newest}, which this program has neither saved nor seen when "
            "it restored, so nothing was written. If another job saves here, give each a directory "
            "of its own; if that has ended, restore the newest, and save again",
            os.fspath(prefix.parent),
        )
    if number is None:
        number = max(counter, newest) + 1
        while os.path.lexists(files.numbered(prefix.parent, prefix.name, number)):
            number += 1  # taken by a link that leads nowhere
        if number >= 10**18:
            raise ValueError(f"there is no number after {newest} for {prefix}; use another name.")
        return number
    if number < newest:
        raise ValueError(
            f"checkpoint number {number} is not the newest: {prefix.parent} has "
            f"{prefix.name}-{newest}, and the newest is what will be restored. Remove those above "
            f"{number}, or count on from {newest}."
        )
    return number


def _attempt(
    lockstep: Lockstep, path: Path, values: Mapping[str, Array], counter: int, replace: bool
) -> BaseException | None:
    """Write the file; return what it failed with, which all ranks have to know."""
    try:
        total = sum(array.nbytes for array in values.values())
        with patient(lockstep, f"write {path}", total), files.whole(path, replace) as file:
            format.write(file, values, counter)
            claim.check(path.parent)
    except OSError as error:
        if error.errno is None:
            return error
        why = f"{error.strerror}: {path} was not written; checkpoints before it are as they were. "
        why += _OTHER if isinstance(error, FileExistsError) else _ADVICE
        found = OSError(error.errno, why)
        found.__cause__ = error
        return found
    except BaseException as error:
        return error
    return None
