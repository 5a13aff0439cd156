"""Reading a checkpoint: replica 0 reads and checks all of it before any rank writes anything.

A large checkpoint, read by all ranks: those of a node read all of it, each its share.

Each byte comes from the disk once for a node, and nothing is given to a variable before all of it
has been checked, on all nodes. What the node has in common each rank reads into memory of its own,
of large pages, and writes to the variable from there; of what each rank has to itself all need all
bytes, so that is read into memory that they share. Where they cannot share any, each rank reads it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import platform
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import files, format, sharded
from mpistrat.checkpoint.files import patient
from mpistrat.checkpoint.format import Entry, checked, formed
from mpistrat.checkpoint.saving import note_known_paths, specs
from mpistrat.checkpoint.sharded import ChecksumRange, Manifest
from mpistrat.checkpoint.tree import SavedOptimizer, changes_text
from mpistrat.checkpoint.values import NAME, PARTS, Cell, Values, is_part, partial_targets
from mpistrat.comm.base import Comm
from mpistrat.comm.callsite import shorten
from mpistrat.errors import StructureError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import Caught
from mpistrat.shm.segments import populate
from mpistrat.shm.storage import NodeStorage
from mpistrat.strategy.shared_state import nodes_of
from mpistrat.variables import on_read
from mpistrat.variables.variable import Variable


def gather(
    lockstep: Lockstep, call: str, path: Path, manifest: Manifest, variables: Mapping[str, Any]
) -> tuple[dict[str, Array], Callable[[], None]]:
    """Read a directory, each node all of it once, and check it. Collective.

    Args:
      lockstep: Proves it.
      call: The call that reads it.
      path: The directory.
      manifest: The manifest of the directory.
      variables: The variables that take an array, by name. Other arrays are read only to check
        them.

    Returns:
      The arrays of the variables that each rank has for itself, by name, in memory that the ranks
      of a node have in common; and a function, collective over the node, that writes the other
      arrays to the variables of which the node has one copy. The call does not return before all
      ranks have read and checked their share.

    Raises:
      OSError: Some rank cannot read its share, or does not see the directory; on every rank.
      CheckpointError: It is damaged.
      MemoryError: Some rank has no memory for it.
    """
    node = nodes_of(lockstep).node
    regions = [region for region in manifest.regions if region.name in variables]
    storages = {region.name: variables[region.name].storage for region in regions}
    node_storages = {name: storage for name, storage in storages.items() if _of_node(storage, node)}
    other_regions = [region for region in regions if region.name not in node_storages]
    ends = list(itertools.accumulate((region.room for region in other_regions), initial=0))
    starts = {region.name: at for region, at in zip(other_regions, ends, strict=False)}
    pieces_by_rank = _shares(manifest, node.size, node_storages)
    shared_pieces = [[p for p in pieces if p.region.name in starts] for pieces in pieces_by_rank]
    kept_nbytes = [sum(p.stop - p.start for p in pieces) for pieces in shared_pieces]
    common = _common(node, ends[-1], kept_nbytes)
    own_pieces = pieces_by_rank[node.rank]
    if common is None:  # each rank reads all that it needs
        own_pieces += [
            p for r, pieces in enumerate(shared_pieces) if r != node.rank for p in pieces
        ]
    buffers: dict[str, dict[int, Array]] = {}

    def room(piece: ChecksumRange) -> Array | None:
        name = piece.region.name
        if name in starts:
            return image[starts[name] + piece.start : starts[name] + piece.stop]
        return buffers.get(name, {}).get(piece.start)

    def place() -> None:
        for name, storage in node_storages.items():
            storage.put(buffers.get(name, {}))

    with Caught() as caught:
        image = np.empty(ends[-1], np.uint8) if common is None else np.frombuffer(common, np.uint8)
        buffers.update(_rooms([p for p in own_pieces if p.region.name in node_storages]))
        with patient(lockstep, f"read {path}", sum(manifest.sizes)):
            _fetch(path, own_pieces, room, lockstep.comm.rank)
    lockstep.handshake(f"{call}, shares", failure=caught.failure)
    node.barrier()
    return {r.name: formed(r.entry, image[starts[r.name] :]) for r in other_regions}, place


def _of_node(storage: Any, node: Comm) -> bool:
    return isinstance(storage, NodeStorage) and storage.node.size == node.size


def _fetch(path: Path, pieces: Sequence[ChecksumRange], room: Any, rank: int) -> None:
    """Read pieces as `sharded.fetch` does; of a file that is not there say who does not see it."""
    try:
        sharded.fetch(path, pieces, room)
    except FileNotFoundError as error:
        text = f"Rank {rank} on {platform.node()} does not see this file, or it has been removed"
        raise FileNotFoundError(errno.ENOENT, text, error.filename) from None


def _shares(
    manifest: Manifest, ranks: int, node_names: Container[str]
) -> list[list[ChecksumRange]]:
    """Return the pieces that each rank of a node reads: for each rank a run of consecutive pieces.

    Of a large array in `node_names` a rank reads the pieces near its slice, whose pages it has.
    """
    pieces_by_rank: list[list[ChecksumRange]] = [[] for _ in range(ranks)]
    at, total = 0, sum(manifest.sizes)
    for piece in manifest.pieces():
        region = piece.region
        is_sliced = region.name in node_names and region.room >= ranks * manifest.chunk
        owner = piece.start * ranks // region.room if is_sliced else at * ranks // total
        pieces_by_rank[owner].append(piece)
        at += piece.stop - piece.start
    return pieces_by_rank


def _rooms(pieces: Sequence[ChecksumRange]) -> dict[str, dict[int, Array]]:
    """Return memory for pieces, of one block, by the name of the array and the first byte."""
    block, at = np.empty(sum(piece.stop - piece.start for piece in pieces), np.uint8), 0
    rooms: dict[str, dict[int, Array]] = {}
    for region, start, stop, _ in pieces:
        rooms.setdefault(region.name, {})[start] = block[at : at + stop - start]
        at += stop - start
    return rooms


def _common(node: Comm, nbytes: int, kept_nbytes: Sequence[int]) -> memoryview | None:
    """Return memory that the ranks of a node share; None on all of them without it. Collective."""
    memory = node.shared(nbytes) if node.size > 1 and nbytes else None
    low = sum(kept_nbytes[: node.rank])
    is_usable = memory is not None and populate(memory, [(low, low + kept_nbytes[node.rank])])
    return memory if node.reduce_integer(int(is_usable), "MIN") else None


_MISMATCH_ADVICE = (
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
            raise AssertionError(f"{self.path} also has {', '.join(shorten(self.unused))}.")
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> Restored:
        """Return this if every variable got a value.

        Raises:
          AssertionError: Not so, or nothing was restored.
        """
        self._check_path()
        if self.missing:
            raise AssertionError(f"{self.path} does not have {', '.join(shorten(self.missing))}.")
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
    variables: Mapping[str, Variable],
    path: Path,
    partial: bool,
    number: int | None = None,
    optimizers: Sequence[SavedOptimizer] = (),
) -> tuple[Restored, int]:
    """Restore variables from a file. Collective, in cross-replica code.

    Args:
      lockstep: Proves it.
      variables: The variables.
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
    call = f"Checkpoint.restore({str(path)!r}, partial={partial}) of {specs(variables)}"
    targets = {**variables, **partial_targets(variables)}
    arrays: dict[str, Array] = {}
    summary, manifest = b"", b""
    with Caught() as caught:
        if lockstep.comm.rank == 0:
            path = files.stored(path)
            with patient(lockstep, f"read {path}", _size(path)):
                summary, manifest, arrays = _read(variables, targets, path, partial, optimizers)
    rows = lockstep.gather_payloads(call, summary + b"\n" + manifest, caught.failure)
    summary, _, manifest = rows[0].partition(b"\n")
    counter, missing, unused, newest_name, shapes, stored_name = json.loads(summary)
    with checked(path):
        parsed_manifest = sharded.parsed(manifest) if manifest else None
    path = path.with_name(stored_name)
    if number not in (None, counter):
        if parsed_manifest is not None:
            gather(lockstep, call, path, parsed_manifest, {})  # or the manifest is of another one
        return Restored(None), counter
    free_names = [name for name, target in targets.items() if _is_free(target)]
    skipped_names = {*missing, *free_names} - shapes.keys()
    taken_targets = {name: target for name, target in targets.items() if name not in skipped_names}
    note_known_paths([path, path.with_name(newest_name)])
    if parsed_manifest is not None:
        received_arrays, place = gather(lockstep, call, path, parsed_manifest, taken_targets)
    else:
        received_arrays, place = _broadcast(lockstep, call, taken_targets, shapes, arrays), None
    _give(lockstep, call, variables, received_arrays, place)
    cell: Any = variables.get(NAME)
    names = (*variables, *(() if cell is None else cell.values.values))
    matched = tuple(name for name in names if name not in missing and name != NAME)
    return Restored(os.fspath(path), tuple(missing), tuple(unused), matched), counter


def _read(
    variables: Mapping[str, Any],
    targets: Mapping[str, Any],
    path: Path,
    partial: bool,
    optimizers: Sequence[SavedOptimizer],
) -> tuple[bytes, bytes, dict[str, Array]]:
    """Read the file, or the manifest and the values of a directory.

    Args:
      variables: The variables.
      targets: The variables and their parts; a part is taken if the file has it and it fits.
      path: The file.
      partial: As of `restore`.
      optimizers: As of `restore`.

    Returns:
      The summary for all ranks, the manifest, and the arrays of a file.
    """
    entries = {name: Entry.from_array(variable.storage.array) for name, variable in targets.items()}
    entries.setdefault(NAME, Entry.from_array(Values({}).cell().array))
    free_names = [NAME, *(name for name, target in targets.items() if _is_free(target))]
    missing, unused = list[str](), list[str]()

    def check(file_entries: Mapping[str, Entry]) -> None:
        for name in free_names:
            if name in file_entries and file_entries[name].fits(entries[name]):
                entries[name] = file_entries[name]
            elif name not in variables and name != NAME:
                entries.pop(name)
        missing.extend(name for name in variables if name not in file_entries and name != NAME)
        unused.extend(n for n in file_entries if n not in entries and not is_part(n, file_entries))
        wrong_names = [n for n, entry in entries.items() if file_entries.get(n, entry) != entry]
        texts = [f"{n!r} is {file_entries[n]} there and {entries[n]} here" for n in wrong_names]
        _refuse(path, texts, missing, unused, partial, optimizers)

    manifest = b""
    if path.name.endswith(files.FOLDER):
        manifest, parsed_manifest = sharded.look(path)
        check(parsed_manifest.entries)
        arrays = sharded.take(path, parsed_manifest, {NAME}, False)
        file_entries, counter = parsed_manifest.entries, parsed_manifest.counter
    else:
        file_entries, arrays, counter = format.read(path, entries, check)
    values = variables[NAME].values if NAME in variables else Values({})
    with checked(path):
        absent_names, extras, wrong_texts = values.compare_with(arrays.get(NAME))
    _refuse(path, wrong_texts, absent_names, extras, partial)
    shared_names = file_entries.keys() & entries.keys() & targets.keys()
    shapes = {name: file_entries[name].shape for name in free_names if name in shared_names}
    row = [counter, missing + absent_names, unused + extras, _newest(path).name, shapes, path.name]
    return json.dumps(row).encode(), manifest, arrays


def _is_free(target: Any) -> bool:
    """Return whether the array in a file may have another first axis."""
    return getattr(target, "free", False)


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
    wrong_texts: Sequence[str],
    new: Sequence[str],
    extra: Sequence[str],
    partial: bool,
    optimizers: Sequence[SavedOptimizer] = (),
) -> None:
    """Raise StructureError if something does not fit, or without `partial` one side has more."""
    hints = [_MISMATCH_ADVICE] * bool(wrong_texts)
    if not partial:
        sides = (new, "is not in the file"), (extra, "is only in the file")
        lines = [f"{n!r} {text}" for names, text in sides for n in names if n not in COUNTERS]
        hints += [_ONE_SIDE] * bool(lines)
        wrong_texts = [*wrong_texts, *lines]
    if wrong_texts:
        text = ", ".join(shorten(wrong_texts))
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
    targets: Mapping[str, Variable],
    shapes: Mapping[str, Sequence[int]],
    arrays: Mapping[str, Array],
) -> dict[str, Array]:
    """Return the values that replica 0 has read, as views of one block. Collective."""
    with lockstep.preparing(call):
        # All the memory that ranks need for it, before anything is written.
        likes = {name: Entry.from_array(target.storage.array) for name, target in targets.items()}
        likes |= {name: likes[name]._replace(shape=tuple(shapes[name])) for name in shapes}
        regions = sharded.plan(likes, 0, 1)
        block = np.empty(sum(sharded.sizes_of(regions)), np.uint8)
    if lockstep.comm.rank == 0:
        for region in regions:
            flat = np.ascontiguousarray(arrays[region.name]).reshape(-1).view(np.uint8)
            block[region.offset : region.offset + region.nbytes] = flat
    lockstep.handshake(f"{call}, values")
    lockstep.comm.bcast(block, 0)
    return {region.name: formed(region.entry, block[region.offset :]) for region in regions}


def _give(
    lockstep: Lockstep,
    call: str,
    variables: Mapping[str, Any],
    values: Mapping[str, Array],
    place: Callable[[], None] | None,
) -> None:
    """Assign values that all ranks have; a sum gets this replica's part. Collective.

    Cells come first, because a write to one can fail, and then nothing is restored.
    """
    cells = dict.fromkeys(name for name in values if isinstance(variables.get(name), Cell))
    with lockstep.preparing(call):
        for name in cells:
            variables[name].store("assign", values[name], None)
    if cells:
        lockstep.handshake(f"{call}, what is not a variable")
    if place is not None:
        place()
    for name, value in values.items():
        if name in variables and name not in cells:
            partials = values.get(name + PARTS) if name + PARTS not in variables else None
            own_value = on_read.restored_copy(lockstep, variables[name], value, partials)
            variables[name].store("assign", own_value, None)
