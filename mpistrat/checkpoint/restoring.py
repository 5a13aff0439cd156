"""Restores a checkpoint: all of it is read and checked before any rank writes anything.

Replica 0 reads the whole of a file into its memory. Sizes are checked first, against each other and
against the variables, so a file that does not fit costs no memory; then names, shapes and dtypes.
After the handshake that follows, the values are broadcast.

All ranks read a directory: those of a node read all of it, each its share, so each byte comes from
the disk once for a node. No variable is changed before all nodes have checked all bytes, so a
restore needs memory for a second copy. For an array of which the node has one copy, each rank reads
pieces into memory of its own, of large pages, and writes them to the variable from there. An array
of which each rank has a copy is read into memory that the ranks of the node share; where they
cannot share any, each rank reads it.

An ON_READ sum is divided: each replica gets a part (`on_read.make_restored_copy`).
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import platform
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import files, format, sharded
from mpistrat.checkpoint.files import announcing_operation
from mpistrat.checkpoint.format import Entry, explaining_read_errors, form_array
from mpistrat.checkpoint.saving import describe_variables, record_known_paths
from mpistrat.checkpoint.sharded import ChecksumRange, Manifest
from mpistrat.checkpoint.tree import SavedOptimizer, describe_option_changes
from mpistrat.checkpoint.values import (
    PARTS_SUFFIX,
    VALUES_NAME,
    Cell,
    ProgramValues,
    is_parts_entry,
    make_partial_targets,
)
from mpistrat.comm.base import Comm
from mpistrat.comm.callsite import shorten
from mpistrat.errors import StructureError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import FailureCatcher
from mpistrat.shm.segments import populate
from mpistrat.shm.storage import NodeStorage
from mpistrat.strategy.shared_state import find_node_groups
from mpistrat.variables import on_read
from mpistrat.variables.variable import Variable


def read_directory(
    lockstep: Lockstep,
    call: str,
    path: Path,
    manifest: Manifest,
    variables_by_name: Mapping[str, Any],
) -> tuple[dict[str, Array], Callable[[], None]]:
    """Read a directory, each node all of it once, and check it. Collective.

    Args:
      lockstep: The lockstep of all ranks.
      call: The call that reads it.
      path: The directory.
      manifest: The manifest of the directory.
      variables_by_name: The variables that take an array, by name. Other arrays are read only to
        check them.

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
    node = find_node_groups(lockstep).node
    buffers = _DirectoryBuffers(manifest, node, variables_by_name)
    with FailureCatcher() as caught:
        buffers.allocate()
        with announcing_operation(lockstep, f"read {path}", sum(manifest.file_sizes)):
            _read_pieces(path, buffers.own_pieces, buffers.find_buffer, lockstep.comm.rank)
    lockstep.handshake(f"{call}, shares", failure=caught.failure)
    node.barrier()
    return buffers.form_arrays(), buffers.write_node_storages


@final
class _DirectoryBuffers:
    """The pieces of a directory that this rank reads, and the memory that they are read into.

    Attributes:
      own_pieces: The pieces that this rank reads.
    """

    def __init__(self, manifest: Manifest, node: Comm, variables_by_name: Mapping[str, Any]):
        """Assign the pieces to the ranks of the node. Collective over the node."""
        regions = [region for region in manifest.regions if region.name in variables_by_name]
        storages = {region.name: variables_by_name[region.name]._storage for region in regions}
        self._node_storages = {
            name: storage for name, storage in storages.items() if _is_shared_by_node(storage, node)
        }
        self._regions = [region for region in regions if region.name not in self._node_storages]
        lengths = [region.padded_nbytes for region in self._regions]
        *starts, self._nbytes = itertools.accumulate(lengths, initial=0)
        self._starts = {
            region.name: start for region, start in zip(self._regions, starts, strict=True)
        }
        pieces_by_rank = _assign_pieces(manifest, node.size, self._node_storages)
        shared_pieces = [
            [p for p in pieces if p.region.name in self._starts] for pieces in pieces_by_rank
        ]
        kept_nbytes = [sum(p.stop - p.start for p in pieces) for pieces in shared_pieces]
        self._shared_memory = _allocate_shared_memory(node, self._nbytes, kept_nbytes)
        self.own_pieces = pieces_by_rank[node.rank]
        if self._shared_memory is None:  # each rank reads all that it needs
            for rank, pieces in enumerate(shared_pieces):
                self.own_pieces += pieces if rank != node.rank else []

    def allocate(self) -> None:
        """Allocate the memory that is not shared."""
        self._array_bytes = (
            np.empty(self._nbytes, np.uint8)
            if self._shared_memory is None
            else np.frombuffer(self._shared_memory, np.uint8)
        )
        node_pieces = [p for p in self.own_pieces if p.region.name in self._node_storages]
        self._node_buffers = _allocate_buffers(node_pieces)

    def find_buffer(self, piece: ChecksumRange) -> Array | None:
        """Return the memory for a piece; None for pieces that are only checked."""
        name = piece.region.name
        if name in self._starts:
            start = self._starts[name]
            return self._array_bytes[start + piece.start : start + piece.stop]
        return self._node_buffers.get(name, {}).get(piece.start)

    def write_node_storages(self) -> None:
        """Write what was read to the variables of which the node has one copy. Collective."""
        for name, storage in self._node_storages.items():
            storage.put(self._node_buffers.get(name, {}))

    def form_arrays(self) -> dict[str, Array]:
        """Return the arrays of the other variables, by name."""
        return {
            region.name: form_array(region.entry, self._array_bytes[self._starts[region.name] :])
            for region in self._regions
        }


def _is_shared_by_node(storage: object, node: Comm) -> bool:
    return isinstance(storage, NodeStorage) and storage.node.size == node.size


def _read_pieces(
    path: Path,
    pieces: Sequence[ChecksumRange],
    find_buffer: Callable[[ChecksumRange], Array | None],
    rank: int,
) -> None:
    """Read pieces as `sharded.read_pieces` does; errors for missing files name rank and host."""
    try:
        sharded.read_pieces(path, pieces, find_buffer)
    except FileNotFoundError as error:
        text = f"Rank {rank} on {platform.node()} does not see this file, or it has been removed"
        raise FileNotFoundError(errno.ENOENT, text, error.filename) from None


def _assign_pieces(
    manifest: Manifest, rank_count: int, node_names: Container[str]
) -> list[list[ChecksumRange]]:
    """Return the pieces that each rank of a node reads: for each rank a run of consecutive pieces.

    For a large array in `node_names`, a rank reads the pieces near its slice, whose pages it has.
    """
    pieces_by_rank: list[list[ChecksumRange]] = [[] for _ in range(rank_count)]
    offset, total_nbytes = 0, sum(manifest.file_sizes)
    for piece in manifest.list_pieces():
        region = piece.region
        is_sliced = (
            region.name in node_names and region.padded_nbytes >= rank_count * manifest.chunk_nbytes
        )
        reading_rank = (
            piece.start * rank_count // region.padded_nbytes
            if is_sliced
            else offset * rank_count // total_nbytes
        )
        pieces_by_rank[reading_rank].append(piece)
        offset += piece.stop - piece.start
    return pieces_by_rank


def _allocate_buffers(pieces: Sequence[ChecksumRange]) -> dict[str, dict[int, Array]]:
    """Return memory for pieces, of one block, by the name of the array and the first byte."""
    block, offset = np.empty(sum(piece.stop - piece.start for piece in pieces), np.uint8), 0
    buffers: dict[str, dict[int, Array]] = {}
    for region, start, stop, _ in pieces:
        buffers.setdefault(region.name, {})[start] = block[offset : offset + stop - start]
        offset += stop - start
    return buffers


def _allocate_shared_memory(
    node: Comm, nbytes: int, kept_nbytes: Sequence[int]
) -> memoryview | None:
    """Return memory that the ranks of a node share; None on all of them without it. Collective."""
    shared_memory = node.shared(nbytes) if node.size > 1 and nbytes else None
    own_start = sum(kept_nbytes[: node.rank])
    is_usable = shared_memory is not None and populate(
        shared_memory, [(own_start, own_start + kept_nbytes[node.rank])]
    )
    return shared_memory if node.reduce_integer(int(is_usable), "MIN") else None


_MISMATCH_ADVICE = (
    "What has another shape, dtype or kind here cannot take the value there: leave it out of the "
    "Checkpoint that restores, or rename it, and call restore(path, partial=True)."
)
_PARTIAL_ADVICE = (
    "Attach all variables before restore. To skip what only one side has, call restore(path, "
    "partial=True) of the Checkpoint; a program with a CheckpointManager does so once, and saves."
)
# Variables of the library itself: they depend on how a program runs, not on its computation.
LIBRARY_COUNTERS = frozenset({"checkpointed_runs"})


@final
@dataclass
class Restored:
    """The outcome of `Checkpoint.restore`; its methods are those of TensorFlow's status.

    For an empty `Checkpoint`, trees that are attached later take their values then, and change
    this.

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
        """Return this; values that no tree takes are not named at the next save, or at the end."""
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


@final
class _RestoreSummary(NamedTuple):
    """The summary that replica 0 makes of a checkpoint, for all ranks.

    Attributes:
      counter: How many times the checkpoint had been saved.
      missing: Variables and values that the file does not have.
      unused: Arrays and values that only the file has.
      newest_name: The name of the newest checkpoint beside it.
      shapes: The shapes in the file, of arrays whose first axis is free.
      stored_name: The name of the file or directory.
    """

    counter: int
    missing: list[str]
    unused: list[str]
    newest_name: str
    shapes: dict[str, Sequence[int]]
    stored_name: str


def restore_variables(
    lockstep: Lockstep,
    variables_by_name: Mapping[str, Variable | Cell],
    path: Path,
    optimizers: Sequence[SavedOptimizer],
    is_partial: bool,
    *,
    required_number: int | None = None,
) -> tuple[Restored, int]:
    """Restore variables from a file. Collective, in cross-replica code.

    Args:
      lockstep: The lockstep of all ranks.
      variables_by_name: The variables.
      path: The file.
      optimizers: Those whose state is among the variables, for messages.
      is_partial: Skip names that only the file or only the program has.
      required_number: How many times it has to have been saved, else nothing is restored; None for
        any.

    Returns:
      The outcome, and how many times the checkpoint had been saved.

    Raises:
      OSError: The file cannot be read; on every rank, as all of these.
      CheckpointError: It is damaged, or not a checkpoint.
      DataError: It is of another format.
      StructureError: It does not fit the variables.
    """
    specs = describe_variables(variables_by_name)
    call = f"Checkpoint.restore({str(path)!r}, partial={is_partial}) of {specs}"
    targets = {**variables_by_name, **make_partial_targets(variables_by_name)}
    make_comparison = functools.partial(
        _EntryComparison, variables_by_name, targets, optimizers, is_partial
    )
    summary, encoded_manifest, arrays = _read_summary(lockstep, call, path, make_comparison)
    with explaining_read_errors(path):
        manifest = sharded.parse_manifest(encoded_manifest) if encoded_manifest else None
    path = path.with_name(summary.stored_name)
    if required_number not in (None, summary.counter):
        if manifest is not None:  # it may be the manifest of another checkpoint
            read_directory(lockstep, call, path, manifest, {})
        return Restored(None), summary.counter
    free_names = [name for name, target in targets.items() if _has_free_first_axis(target)]
    skipped_names = {*summary.missing, *free_names} - summary.shapes.keys()
    targets = {name: target for name, target in targets.items() if name not in skipped_names}
    record_known_paths([path, path.with_name(summary.newest_name)])
    write_node_storages: Callable[[], None] | None = None
    if manifest is not None:
        arrays, write_node_storages = read_directory(lockstep, call, path, manifest, targets)
    else:
        arrays = _broadcast_arrays(lockstep, call, targets, summary.shapes, arrays)
    _assign_arrays(lockstep, call, variables_by_name, arrays, write_node_storages)
    return _make_status(path, summary, variables_by_name), summary.counter


def _read_summary(
    lockstep: Lockstep, call: str, path: Path, make_comparison: Callable[[Path], _EntryComparison]
) -> tuple[_RestoreSummary, bytes, dict[str, Array]]:
    """Return the results of `_read_on_replica0`; other ranks have no arrays. Collective."""
    arrays: dict[str, Array] = {}
    encoded_summary, encoded_manifest = b"", b""
    with FailureCatcher() as caught:
        if lockstep.comm.rank == 0:
            path = files.find_stored_path(path)
            comparison = make_comparison(path)
            with announcing_operation(lockstep, f"read {path}", _count_nbytes(path)):
                summary, encoded_manifest, arrays = _read_on_replica0(comparison)
            encoded_summary = json.dumps(summary).encode()
    payload = encoded_summary + b"\n" + encoded_manifest
    payloads = lockstep.gather_payloads(call, payload, caught.failure)
    encoded_summary, _, encoded_manifest = payloads[0].partition(b"\n")
    return _RestoreSummary(*json.loads(encoded_summary)), encoded_manifest, arrays


def _make_status(
    path: Path, summary: _RestoreSummary, variables_by_name: Mapping[str, Any]
) -> Restored:
    cell = variables_by_name.get(VALUES_NAME)
    names = (*variables_by_name, *(() if cell is None else cell.program_values.values_by_name))
    matched = tuple(name for name in names if name not in summary.missing and name != VALUES_NAME)
    return Restored(os.fspath(path), tuple(summary.missing), tuple(summary.unused), matched)


@final
class _EntryComparison:
    """Compares the arrays of a file with those of the program; on replica 0.

    Args:
      variables_by_name: The variables.
      targets: The variables and their parts; a part is taken if the file has it and it fits.
      optimizers: As of `restore_variables`.
      is_partial: As of `restore_variables`.
      path: The file.

    Attributes:
      path: The file.
      is_partial: As above.
      entries: The arrays that the program takes, by name.
      missing: The variables that the file does not have.
      unused: The arrays that only the file has.
    """

    def __init__(
        self,
        variables_by_name: Mapping[str, Any],
        targets: Mapping[str, Any],
        optimizers: Sequence[SavedOptimizer],
        is_partial: bool,
        path: Path,
    ):
        """Create it; nothing is compared yet."""
        self._variables, self._optimizers = variables_by_name, optimizers
        self.path, self.is_partial = path, is_partial
        self.entries = {
            name: Entry.from_array(target._storage.array) for name, target in targets.items()
        }
        self.entries.setdefault(VALUES_NAME, Entry.from_array(ProgramValues({}).make_cell().array))
        self._target_names = targets.keys()
        free_names = (name for name, target in targets.items() if _has_free_first_axis(target))
        self._free_names = [VALUES_NAME, *free_names]
        self.missing, self.unused = list[str](), list[str]()

    def check(self, file_entries: Mapping[str, Entry]) -> None:
        """Raise StructureError unless the arrays of the file fit."""
        entries, variables = self.entries, self._variables
        for name in self._free_names:
            if name in file_entries and file_entries[name].fits(entries[name]):
                entries[name] = file_entries[name]
            elif name not in variables and name != VALUES_NAME:
                entries.pop(name)
        self.missing += [n for n in variables if n not in file_entries and n != VALUES_NAME]
        self.unused += [
            n for n in file_entries if n not in entries and not is_parts_entry(n, file_entries)
        ]
        wrong_names = [n for n, entry in entries.items() if file_entries.get(n, entry) != entry]
        texts = [f"{n!r} is {file_entries[n]} there and {entries[n]} here" for n in wrong_names]
        _raise_mismatch(
            self.path,
            texts,
            missing_names=self.missing,
            extra_names=self.unused,
            is_partial=self.is_partial,
            optimizers=self._optimizers,
        )

    def check_values(self, encoded_values: Array | None) -> None:
        """Raise StructureError unless the numbers and strings of the file fit."""
        cell = self._variables.get(VALUES_NAME)
        values = ProgramValues({}) if cell is None else cell.program_values
        with explaining_read_errors(self.path):
            missing_names, extra_names, wrong_texts = values.compare_with(encoded_values)
        _raise_mismatch(
            self.path,
            wrong_texts,
            missing_names=missing_names,
            extra_names=extra_names,
            is_partial=self.is_partial,
        )
        self.missing += missing_names
        self.unused += extra_names

    def list_shapes(self, file_entries: Mapping[str, Entry]) -> dict[str, Sequence[int]]:
        """Return the shapes in the file of arrays whose first axis is free."""
        shared_names = file_entries.keys() & self.entries.keys() & self._target_names
        return {name: file_entries[name].shape for name in self._free_names if name in shared_names}


def _read_on_replica0(
    comparison: _EntryComparison,
) -> tuple[_RestoreSummary, bytes, dict[str, Array]]:
    """Return the summary, the encoded manifest of a directory, and the arrays of a file."""
    path, encoded_manifest = comparison.path, b""
    if path.name.endswith(files.DIRECTORY_SUFFIX):
        encoded_manifest, manifest = sharded.read_manifest(path)
        comparison.check(manifest.entries)
        arrays = sharded.read_arrays(path, manifest, {VALUES_NAME}, False)
        file_entries, counter = manifest.entries, manifest.counter
    else:
        contents = format.read_archive(path, comparison.entries, comparison.check)
        file_entries, arrays, counter = contents.entries, contents.arrays, contents.counter
    comparison.check_values(arrays.get(VALUES_NAME))
    summary = _RestoreSummary(
        counter,
        comparison.missing,
        comparison.unused,
        files.find_newest_sibling(path).name,
        comparison.list_shapes(file_entries),
        path.name,
    )
    return summary, encoded_manifest, arrays


def _has_free_first_axis(target: object) -> bool:
    """Return whether the array in a file may have another first axis."""
    return getattr(target, "has_free_first_axis", False)


def _count_nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        directory = path.with_suffix("")
        if not directory.is_dir():
            raise
        text = "Is a directory (latest_checkpoint returns the newest checkpoint in it)"
        raise IsADirectoryError(errno.EISDIR, text, str(directory)) from None


def _raise_mismatch(
    path: Path,
    wrong_texts: Sequence[str],
    *,
    missing_names: Sequence[str],
    extra_names: Sequence[str],
    is_partial: bool,
    optimizers: Sequence[SavedOptimizer] = (),
) -> None:
    """Raise StructureError if something does not fit, or without `is_partial` one side has more."""
    hints = [_MISMATCH_ADVICE] * bool(wrong_texts)
    if not is_partial:
        one_sided_names = (
            (missing_names, "is not in the file"),
            (extra_names, "is only in the file"),
        )
        lines = [
            f"{n!r} {text}"
            for names, text in one_sided_names
            for n in names
            if n not in LIBRARY_COUNTERS
        ]
        hints += [_PARTIAL_ADVICE] * bool(lines)
        wrong_texts = [*wrong_texts, *lines]
    if wrong_texts:
        text = ", ".join(shorten(wrong_texts))
        option_changes = (
            "" if is_partial else describe_option_changes(optimizers, missing_names, extra_names)
        )
        hints += [f"Options of optimizers: {option_changes}."] if option_changes else []
        raise StructureError(f"{path} does not fit these variables: {text}. {' '.join(hints)}")


def _broadcast_arrays(
    lockstep: Lockstep,
    call: str,
    targets: Mapping[str, Variable | Cell],
    shapes: Mapping[str, Sequence[int]],
    arrays: Mapping[str, Array],
) -> dict[str, Array]:
    """Return the values that replica 0 has read, as views of one block. Collective."""
    with lockstep.validating_collectively(call):
        # All the memory that ranks need for it, before anything is written.
        entries = {
            name: Entry.from_array(target._storage.array) for name, target in targets.items()
        }
        entries |= {name: entries[name]._replace(shape=tuple(shapes[name])) for name in shapes}
        regions = sharded.plan_regions(entries, 0, 1)
        block = np.empty(sum(sharded.compute_file_sizes(regions)), np.uint8)
    if lockstep.comm.rank == 0:
        for region in regions:
            flat = np.ascontiguousarray(arrays[region.name]).reshape(-1).view(np.uint8)
            block[region.offset : region.offset + region.nbytes] = flat
    lockstep.handshake(f"{call}, values")
    lockstep.comm.bcast(block, 0)
    return {region.name: form_array(region.entry, block[region.offset :]) for region in regions}


def _assign_arrays(
    lockstep: Lockstep,
    call: str,
    variables_by_name: Mapping[str, Any],
    arrays: Mapping[str, Array],
    write_node_storages: Callable[[], None] | None,
) -> None:
    """Assign values that all ranks have; a sum gets this replica's part. Collective.

    Cells come first, because a write to one can fail, and then nothing is restored.
    """
    cell_names = dict.fromkeys(
        name for name in arrays if isinstance(variables_by_name.get(name), Cell)
    )
    with lockstep.validating_collectively(call):
        for name in cell_names:
            variables_by_name[name]._store("assign", arrays[name], None)
    if cell_names:
        lockstep.handshake(f"{call}, what is not a variable")
    if write_node_storages is not None:
        write_node_storages()
    for name, array in arrays.items():
        if name in variables_by_name and name not in cell_names:
            partials = (
                arrays.get(name + PARTS_SUFFIX)
                if name + PARTS_SUFFIX not in variables_by_name
                else None
            )
            own_value = on_read.make_restored_copy(
                lockstep, variables_by_name[name], array, partials
            )
            variables_by_name[name]._store("assign", own_value, None)
