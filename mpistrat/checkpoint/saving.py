"""Writes a checkpoint: all ranks agree on contents and path, some write, all hear the outcome.

A small checkpoint is one file, which replica 0 writes; a large one is a directory (`shares`). The
number is one more than the highest in the directory. The numbers also show whether another job
saves there: if there is a higher number than this program has saved, or found when it restored a
checkpoint or made a manager, the save raises. Every rank keeps this number, and the handshake of a
save compares all of them, because strategies may have different first ranks.
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
import xxhash

from mpistrat.arrays import DIGEST_NBYTES, digest
from mpistrat.checkpoint import atomic, claim, files, format, sharded, shares
from mpistrat.checkpoint.background import BackgroundSaver
from mpistrat.checkpoint.files import explaining_write_errors, on_replica0
from mpistrat.checkpoint.format import NO_METRICS
from mpistrat.checkpoint.shares import SaveRequest
from mpistrat.checkpoint.values import VALUES_NAME, Cell, make_partial_cells
from mpistrat.comm.callsite import ranks_text, shorten
from mpistrat.lockstep.guards import VariableRegistry, warn
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.variables import on_read
from mpistrat.variables.variable import Variable

# Characters of the variables in the text of a call; a hash stands for the others.
_TEXT_LENGTH = 2000
# By directory and name: the newest number that this program knows of, for all its managers and
# checkpoints. Each rank records the numbers that all hear of, and a save asks all ranks of its
# strategy.
_NEWEST_NUMBERS: dict[str, int] = {}
_UNKNOWN = -1
_MAX_NAMES = 4
_DIFFERING_CELLS = (
    "{call}: on {ranks} {names} {verb} from rank {first_rank}, whose values are saved; a restore "
    "gives them to all ranks. No strategy keeps these values equal, so each rank may train a model "
    "of its own. Modules of PyTorch: call mpistrat.torch.replicate(model, strategy) before the "
    "first step. Arrays: begin by strategy.broadcast(tree, out=tree), and reduce gradients by "
    "ctx.all_reduce. Variables: create them in strategy.scope(). This is said once for each value."
)


def describe_variables(
    variables_by_name: Mapping[str, Variable | Cell], has_values: bool = False
) -> str:
    """Return a string that is equal on all ranks exactly if their variables are alike.

    Args:
      variables_by_name: The variables.
      has_values: Numbers and strings have to be equal, too.
    """
    cell: Any = variables_by_name.get(VALUES_NAME)
    text = f"{cell.program_values.describe()}; " if has_values and cell is not None else ""
    text += "; ".join(f"{name} {variable._spec()}" for name, variable in variables_by_name.items())
    if len(text) > _TEXT_LENGTH:
        text_digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8)
        text = f"{text[:_TEXT_LENGTH]}... {text_digest.hexdigest()}"
    return f"{len(variables_by_name)} variables: {text}"


def overwrite_checkpoint(
    lockstep: Lockstep, variables_by_name: Mapping[str, Variable | Cell], path: Path, counter: int
) -> Path:
    """Write variables to a file, or replace it. Collective, in cross-replica code.

    Args:
      lockstep: The lockstep of all ranks.
      variables_by_name: The variables.
      path: The file.
      counter: How many times they have been saved.

    Returns:
      Where they are: the file, or a directory beside it if they are large.

    Raises:
      OSError: It cannot be written; on every rank.
    """
    call = f"Checkpoint.write({str(path)!r}) of {describe_variables(variables_by_name, True)}"
    _, is_large, variables_by_name = _validate_save(lockstep, variables_by_name, call, path)
    path = (
        path
        if path.name.endswith(files.DIRECTORY_SUFFIX) == is_large
        else files.path_of_other_kind(path)
    )
    _write_checkpoint(
        SaveRequest(lockstep, variables_by_name, call, path, counter, True), lambda: []
    )
    return path


def save_checkpoint(
    lockstep: Lockstep,
    variables_by_name: Mapping[str, Variable | Cell],
    prefix: Path,
    counter: int,
    *,
    requested_number: int | None = None,
    metrics: Mapping[str, float] = NO_METRICS,
    retention: atomic.Retention | None = None,
    background_saver: BackgroundSaver | None = None,
) -> tuple[int, Path, list[str]]:
    """Write variables under a number. Collective, in cross-replica code.

    Args:
      lockstep: The lockstep of all ranks.
      variables_by_name: The variables.
      prefix: Directory, and the name before the number.
      counter: How many times they have been saved before.
      requested_number: The number; None for the next one.
      metrics: What they are saved with, equal on all ranks.
      retention: Removes the oldest of that name; None to keep all.
      background_saver: As of `SaveRequest`.

    Returns:
      The number, the path, and the paths of all that are there, the oldest first; no paths if it is
      written later.

    Raises:
      OSError: It cannot be written; on every rank.
      FileExistsError: There is a newer one that this program does not know of.
      ValueError: There are newer ones than `requested_number`.
    """
    specs = describe_variables(variables_by_name, True)
    call = f"Checkpoint.save({str(prefix)!r}, number {requested_number}"
    call += (f", metrics={dict(metrics)})" if metrics else ")") + f" of {specs}"
    known_number, is_large, variables_by_name = _validate_save(
        lockstep, variables_by_name, call, prefix
    )

    def choose_number() -> int:
        with explaining_write_errors(prefix, is_claimed=True):
            claim.check_claim(prefix.parent)
            return _choose_number(prefix, counter, requested_number, known_number)

    chosen_number: int = on_replica0(lockstep, f"{call}, its number", choose_number)
    suffix = files.DIRECTORY_SUFFIX if is_large else files.FILE_SUFFIX
    path = files.make_numbered_path(prefix.parent, prefix.name, chosen_number, suffix)
    retention = retention or atomic.Retention()
    retention.record_checkpoint(path, metrics)
    list_paths = functools.partial(retention, prefix.parent, prefix.name, path)
    save_request = SaveRequest(
        lockstep,
        variables_by_name,
        call,
        path,
        chosen_number,
        requested_number is not None,
        metrics,
        background_saver,
    )
    return chosen_number, path, _write_checkpoint(save_request, list_paths)


def list_compared_names(entries: Mapping[str, Any]) -> list[str]:
    """Return the names of values that each rank has of its own and that should be equal.

    Numbers and strings are not among them: the text of a save has them.
    """
    return [
        name
        for name, entry in entries.items()
        if isinstance(entry, Cell) and not (entry.can_differ or entry.program_values)
    ]


def warn_differing_cells(
    lockstep: Lockstep, call: str, digests: Mapping[str, bytes], prefix: Path | None
) -> None:
    """Warn of values that differ between ranks, of each once for each checkpoint. Collective.

    Cost: a gather of 16 bytes for each value, and a handshake.

    Args:
      lockstep: The ranks.
      call: The call that warns.
      digests: The digests of the values of `list_compared_names`; of the same names on all ranks.
      prefix: Where they are saved, without the number. None for nowhere: each call warns.
    """
    rank_digests = lockstep.gather_texts(b"".join(digests.values()))
    registry = lockstep.session.get_instance(VariableRegistry)
    warned_names = set[str]() if prefix is None else registry.warned_names
    differing_names: list[str] = []
    differing_ranks: set[int] = set()
    for index, name in enumerate(digests):
        start = DIGEST_NBYTES * index
        column = [text[start : start + DIGEST_NBYTES] for text in rank_digests]
        pairs = zip(lockstep.ranks, column, strict=True)
        ranks = {rank for rank, value_digest in pairs if value_digest != column[0]}
        if ranks and f"{prefix}/{name}" not in warned_names:
            differing_names.append(name)
            differing_ranks |= ranks
    if not differing_names:
        return
    warned_names.update(f"{prefix}/{name}" for name in differing_names)
    names_text = ", ".join(shorten([repr(name) for name in differing_names], _MAX_NAMES))
    text = _DIFFERING_CELLS.format(
        call=call,
        names=names_text,
        verb="differs" if len(differing_names) == 1 else "differ",
        first_rank=lockstep.ranks[0],
        ranks=ranks_text(sorted(differing_ranks)),
    )
    warn(lockstep, call, text)


def _validate_save(
    lockstep: Lockstep,
    variables_by_name: Mapping[str, Variable | Cell],
    call: str,
    prefix: Path,
) -> tuple[int, bool, Mapping[str, Any]]:
    """Validate the call on all ranks. Collective.

    Returns:
      The newest number that any rank knows; whether the checkpoint is a directory; the variables,
      and the parts of those that are sums of metrics.
    """
    with lockstep.validating_collectively(call):
        for key, variable in variables_by_name.items():
            on_read.check_can_save(call, key, variable)
        known_number = _NEWEST_NUMBERS.get(os.path.realpath(prefix), _UNKNOWN)
        # Arrays that are no variables may have other sizes on other ranks; replica 0's is saved.
        nbytes = sum(variable._storage.array.nbytes for variable in variables_by_name.values())
        compared_names = list_compared_names(variables_by_name) if lockstep.comm.size > 1 else []
        digests = {
            name: digest([variables_by_name[name]._storage.array]) for name in compared_names
        }
        own_digest = xxhash.xxh3_64_intdigest(b"".join(digests.values()))
    payloads = lockstep.gather_payloads(
        call, f"{known_number} {int(nbytes >= sharded.MIN_DIRECTORY_NBYTES)} {own_digest}".encode()
    )
    numbers_and_kinds = [tuple(map(int, payload.split())) for payload in payloads]
    if len({rank_digest for *_, rank_digest in numbers_and_kinds}) > 1:
        warn_differing_cells(lockstep, call.partition("(")[0], digests, prefix)
    with lockstep.validating_collectively(f"{call}, parts"):
        variables_by_name = {**variables_by_name, **make_partial_cells(lockstep, variables_by_name)}
    return (
        max(rank_number for rank_number, *_ in numbers_and_kinds),
        bool(numbers_and_kinds[0][1]),
        variables_by_name,
    )


def _write_checkpoint(save_request: SaveRequest, list_paths: Callable[[], list[str]]) -> list[str]:
    """Write, now or later; return replica 0's result of `list_paths`. Collective."""
    is_large = save_request.path.name.endswith(files.DIRECTORY_SUFFIX)
    write_function = (
        shares.write_directory(save_request) if is_large else _prepare_file(save_request)
    )

    def finish_save() -> list[str]:
        """Do the remaining work of this rank; return the paths of all checkpoints."""
        with explaining_write_errors(save_request.path):
            try:
                if write_function is not None:
                    write_function()
            except FileExistsError:  # it is another's
                raise
            except BaseException:
                record_known_paths([save_request.path])
                raise
        if save_request.lockstep.comm.rank:
            return []
        if save_request.can_replace:
            with contextlib.suppress(OSError):  # the older one, of the other kind
                atomic.remove_checkpoint(files.path_of_other_kind(save_request.path))
        record_known_paths([save_request.path])
        return list_paths()

    paths: list[str] = []
    if save_request.background_saver is not None:
        save_request.background_saver.start(finish_save if write_function is not None else None)
    else:
        nbytes = sum(variable._storage.array.nbytes for variable in save_request.variables.values())
        operation = f"write {save_request.path}"
        paths = on_replica0(
            save_request.lockstep, f"{save_request.call}, written", finish_save, operation, nbytes
        )
    record_known_paths([save_request.path])
    return paths


def _prepare_file(save_request: SaveRequest) -> Callable[[], None] | None:
    """Return a function that writes the file on replica 0; None on other ranks. Collective."""
    arrays = {}
    # All ranks read each spread variable together, one variable after the other. Each read has a
    # handshake, so a failure of one rank is raised on the others wherever they are.
    with save_request.lockstep.validating_collectively(save_request.call):
        for key, variable in save_request.variables.items():
            array = np.asarray(variable)
            if save_request.lockstep.comm.rank == 0:
                # Nobody writes to it before the call has ended.
                arrays[key] = array if save_request.background_saver is None else array.copy()
    if save_request.background_saver is not None:  # else the handshake after the write shows it
        save_request.lockstep.handshake(f"{save_request.call}, copied")

    def write_file() -> None:
        with atomic.open_atomically(save_request.path, save_request.can_replace) as file:
            format.write_archive(file, arrays, save_request.counter, save_request.metrics)
            claim.check_claim(save_request.path.parent)

    return None if save_request.lockstep.comm.rank else write_file


def record_known_paths(paths: Iterable[Path]) -> None:
    """Note that this program knows of numbered checkpoints, and of those with smaller numbers."""
    for path in paths:
        name, number = files.split_numbered_path(path) or (None, 0)
        if name is not None:
            key = os.path.realpath(path.with_name(name))
            _NEWEST_NUMBERS[key] = max(number, _NEWEST_NUMBERS.get(key, number))


def _choose_number(
    prefix: Path, counter: int, requested_number: int | None, known_number: int
) -> int:
    newest_number = max(files.list_numbered_paths(prefix.parent, prefix.name), default=0)
    if newest_number > known_number != _UNKNOWN:
        raise FileExistsError(
            errno.EEXIST,
            f"There is {prefix.name}-{newest_number}, which this program has neither saved nor "
            "restored, so nothing was written. If another job saves here, give each job its "
            "own directory; if that job has ended, restore the newest checkpoint and save "
            "again",
            os.fspath(prefix.parent),
        )
    if requested_number is None:
        requested_number = max(counter, newest_number) + 1
        while os.path.lexists(
            files.find_stored_path(
                files.make_numbered_path(prefix.parent, prefix.name, requested_number)
            )
        ):
            requested_number += 1  # taken by a link that leads nowhere
        if requested_number >= 10**18:
            raise ValueError(
                f"there is no number after {newest_number} for {prefix}; use another name."
            )
        return requested_number
    if requested_number < newest_number:
        raise ValueError(
            f"checkpoint number {requested_number} is not the newest: {prefix.parent} has "
            f"{prefix.name}-{newest_number}, and the newest is what will be restored. Remove "
            f"those above {requested_number}, or count on from {newest_number}."
        )
    return requested_number
