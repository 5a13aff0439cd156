"""Writing a checkpoint: all ranks agree on what and where, some write, all are told how.

What is small is one file, which replica 0 writes; what is large a directory (`shares`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.checkpoint import atomic, claim, files, format, sharded, shares
from mpistrat.checkpoint.background import Background
from mpistrat.checkpoint.files import on_replica0, unwritten
from mpistrat.checkpoint.shares import Save
from mpistrat.checkpoint.values import NAME, saved_partials
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.variables import on_read
from mpistrat.variables.variable import Variable

# Characters of the variables in the text of a call; what is further on has a hash.
_TEXT_LENGTH = 2000
# By directory and name: the newest number that this program knows of, for all its managers and
# checkpoints. Each rank notes what all are told, and a save asks all ranks of its strategy.
_NEWEST_NUMBERS: dict[str, int] = {}
_UNKNOWN = -1


def specs(variables: Mapping[str, Variable], values: bool = False) -> str:
    """Return a string that is equal on all ranks exactly if their variables are alike.

    Args:
      variables: The variables.
      values: Numbers and strings have to be equal, too.
    """
    cell: Any = variables.get(NAME)
    text = f"{cell.values.to_text()}; " if values and cell is not None else ""
    text += "; ".join(f"{name} {variable._spec()}" for name, variable in variables.items())
    if len(text) > _TEXT_LENGTH:
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        text = f"{text[:_TEXT_LENGTH]}... {digest}"
    return f"{len(variables)} variables: {text}"


def overwrite(
    lockstep: Lockstep, variables: Mapping[str, Variable], path: Path, counter: int
) -> Path:
    """Write variables to a file, in place of what is there. Collective, in cross-replica code.

    Args:
      lockstep: Proves it.
      variables: The variables.
      path: The file.
      counter: How many times they have been saved.

    Returns:
      Where they are: the file, or a directory beside it if they are large.

    Raises:
      OSError: It cannot be written; on every rank.
    """
    call = f"Checkpoint.write({str(path)!r}) of {specs(variables, True)}"
    _, is_large, variables = _handshake_save(lockstep, variables, call)
    path = path if path.name.endswith(files.FOLDER) == is_large else files.other(path)
    _write_checkpoint(Save(lockstep, variables, call, path, counter, True), lambda: [])
    return path


def save(
    lockstep: Lockstep,
    variables: Mapping[str, Variable],
    prefix: Path,
    counter: int,
    number: int | None = None,
    keep: atomic.Retention | None = None,
    background: Background | None = None,
) -> tuple[int, Path, list[str]]:
    """Write variables under a number. Collective, in cross-replica code.

    Args:
      lockstep: Proves it.
      variables: The variables.
      prefix: Directory, and the name before the number.
      counter: How many times they have been saved before.
      number: The number; None for the next one.
      keep: Removes the oldest of that name; None to keep all.
      background: As of `Save`.

    Returns:
      The number, the path, and the paths of all that are there, the oldest first; no paths if it is
      written later.

    Raises:
      OSError: It cannot be written; on every rank.
      FileExistsError: There is a newer one that this program does not know of.
      ValueError: There are newer ones than `number`.
    """
    call = f"Checkpoint.save({str(prefix)!r}, number {number}) of {specs(variables, True)}"
    known_number, is_large, variables = _handshake_save(lockstep, variables, call, prefix)

    def choose_number() -> int:
        with unwritten(prefix, claims=True):
            claim.check(prefix.parent)
            return _choose_number(prefix, counter, number, known_number)

    chosen_number: int = on_replica0(lockstep, f"{call}, its number", choose_number)
    suffix = files.FOLDER if is_large else files.SUFFIX
    path = files.numbered(prefix.parent, prefix.name, chosen_number, suffix)
    list_paths = functools.partial(keep or atomic.Retention(), prefix.parent, prefix.name, path)
    save_request = Save(
        lockstep, variables, call, path, chosen_number, number is not None, background
    )
    return chosen_number, path, _write_checkpoint(save_request, list_paths)


def _handshake_save(
    lockstep: Lockstep, variables: Mapping[str, Variable], call: str, prefix: Path | None = None
) -> tuple[int, bool, Mapping[str, Any]]:
    """Prove the call; return the newest number that any rank knows, if it is a directory, and all.

    All are the variables, and the parts of those that are sums of metrics.
    """
    with lockstep.preparing(call):
        for key, variable in variables.items():
            on_read.check_can_save(call, key, variable)
        known_number = (
            _UNKNOWN if prefix is None else _NEWEST_NUMBERS.get(os.path.realpath(prefix), _UNKNOWN)
        )
        # Arrays that are no variables may have other sizes on other ranks; replica 0's is saved.
        nbytes = sum(variable._storage.array.nbytes for variable in variables.values())
    payloads = lockstep.gather_payloads(
        call, f"{known_number} {int(nbytes >= sharded.MIN_DIRECTORY_NBYTES)}".encode()
    )
    answers = [tuple(map(int, small.split())) for small in payloads]
    with lockstep.preparing(f"{call}, parts"):
        variables = {**variables, **saved_partials(lockstep, variables)}
    return max(answer_number for answer_number, _ in answers), bool(answers[0][1]), variables


def _write_checkpoint(save_request: Save, list_paths: Callable[[], list[str]]) -> list[str]:
    """Write, now or later; return what replica 0 then finds, by `list_paths`. Collective."""
    is_large = save_request.path.name.endswith(files.FOLDER)
    work = shares.write_large(save_request) if is_large else _prepare_file(save_request)

    def finish_save() -> list[str]:
        """What is left to do on this rank."""
        with unwritten(save_request.path):
            try:
                if work is not None:
                    work()
            except FileExistsError:  # it is another's
                raise
            except BaseException:
                note_known_paths([save_request.path])
                raise
        if save_request.lockstep.comm.rank:
            return []
        if save_request.replace:
            with contextlib.suppress(OSError):  # the older one, of the other kind
                atomic.remove(files.other(save_request.path))
        note_known_paths([save_request.path])
        return list_paths()

    paths: list[str] = []
    if save_request.background is not None:
        save_request.background.start(finish_save if work is not None else None)
    else:
        nbytes = sum(variable._storage.array.nbytes for variable in save_request.variables.values())
        operation = f"write {save_request.path}"
        paths = on_replica0(
            save_request.lockstep, f"{save_request.call}, written", finish_save, operation, nbytes
        )
    note_known_paths([save_request.path])
    return paths


def _prepare_file(save_request: Save) -> Callable[[], None] | None:
    """Return what replica 0 does to write a file; None on other ranks. Collective."""
    values = {}
    # All ranks read each spread variable together, one variable after the other. Each read has a
    # handshake, so a failure of one rank is raised on the others wherever they are.
    with save_request.lockstep.preparing(save_request.call):
        for key, variable in save_request.variables.items():
            value = np.asarray(variable)
            if save_request.lockstep.comm.rank == 0:
                # Nobody writes to it before the call has ended.
                values[key] = value if save_request.background is None else value.copy()
    if save_request.background is not None:  # else the handshake of what is written shows it
        save_request.lockstep.handshake(f"{save_request.call}, copied")

    def work() -> None:
        with atomic.open_atomically(save_request.path, save_request.replace) as file:
            format.write(file, values, save_request.counter)
            claim.check(save_request.path.parent)

    return None if save_request.lockstep.comm.rank else work


def note_known_paths(paths: Iterable[Path]) -> None:
    """Note that this program knows of numbered checkpoints, and of those with smaller numbers."""
    for path in paths:
        name, number = files.parted(path) or (None, 0)
        if name is not None:
            key = os.path.realpath(path.with_name(name))
            _NEWEST_NUMBERS[key] = max(number, _NEWEST_NUMBERS.get(key, number))


def _choose_number(prefix: Path, counter: int, number: int | None, known_number: int) -> int:
    newest = max(files.saved(prefix.parent, prefix.name), default=0)
    if newest > known_number != _UNKNOWN:
        raise FileExistsError(
            errno.EEXIST,
            f"There is {prefix.name}-{newest}, which this program has neither saved nor "
            "restored, so nothing was written. If another job saves here, give each job its "
            "own directory; if that job has ended, restore the newest checkpoint and save "
            "again",
            os.fspath(prefix.parent),
        )
    if number is None:
        number = max(counter, newest) + 1
        while os.path.lexists(files.stored(files.numbered(prefix.parent, prefix.name, number))):
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
