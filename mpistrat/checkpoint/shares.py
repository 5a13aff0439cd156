"""Writes a large checkpoint: all ranks write, each its share of a directory.

All ranks make the same plan. Arrays that all ranks have are written once: file by file, each by the
ranks of one node, which divide it between them. Arrays that only replica 0 knows are in the first
file. Replica 0 makes the directory with a hidden name; each rank writes its part, forces it to the
disk and gives the checksums to replica 0 in the next handshake; replica 0 writes the manifest and
renames the directory. Errors are raised at the next handshake, because reading state that is
divided among nodes is collective, and a rank must not stop in the middle of it.

In the background no thread may communicate. There the first rank of each node copies the arrays of
its file, a thread writes the file, and then leaves a report beside the data. Replica 0's thread
names the directory when it has the reports of all nodes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import atomic, claim, sharded
from mpistrat.checkpoint.background import BackgroundSaver
from mpistrat.checkpoint.files import (
    OPERATION_SECONDS,
    OPERATION_SECONDS_PER_BYTE,
    announcing_operation,
    explaining_write_errors,
)
from mpistrat.checkpoint.format import MANIFEST, NO_METRICS, Entry
from mpistrat.checkpoint.sharded import ChecksumRange, Manifest
from mpistrat.comm.callsite import group_by_key
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import FailureCatcher
from mpistrat.strategy.shared_state import find_node_groups
from mpistrat.variables.variable import Variable

_POLL_SECONDS = 0.05  # between looks for what other nodes have written


@final
class SaveRequest(NamedTuple):
    """The arguments of one save.

    Attributes:
      lockstep: The lockstep of all ranks.
      variables: The variables and cells that are saved, by name.
      call: The call that saves it, for the texts of handshakes.
      path: The path of the new checkpoint.
      counter: How many times it has been saved, this time included.
      can_replace: Whether it replaces an existing checkpoint.
      metrics: What it is saved with.
      background_saver: Writes it while the program continues; None to return when it is written.
    """

    lockstep: Lockstep
    variables: Mapping[str, Any]
    call: str
    path: Path
    counter: int
    can_replace: bool
    metrics: Mapping[str, float] = NO_METRICS
    background_saver: BackgroundSaver | None = None


def write_directory(save_request: SaveRequest) -> Callable[[], None] | None:
    """Write the share of each rank, or copy it for later. Collective.

    Returns:
      A function for the rest of this rank's work; None for nothing. Replica 0 names the directory
      in it.

    Raises:
      OSError: Some rank cannot write its share, or does not see the directory; on every rank.
      MemoryError: Some rank has no memory for the copy.
    """
    directory_save = _DirectorySave(save_request)
    try:
        with save_request.lockstep.validating_collectively(save_request.call):
            directory_save.plan_shares()
            return directory_save.write_or_copy_share()
    except BaseException:
        directory_save.close()  # after all ranks know of the failure, because they write in it
        raise


class _DirectorySave:
    """A large checkpoint that is being written."""

    def __init__(self, save_request: SaveRequest):
        self._request, self._rank = save_request, save_request.lockstep.comm.rank
        self._staged_path: atomic.StagedPath | None = None  # of replica 0
        self._descriptor = -1  # of this node's file, from the first piece on
        self._checksums: list[bytes] = []  # of the pieces that this rank has written, in order
        # Copies that are to be written later.
        self._copies: list[tuple[list[ChecksumRange], Array]] = []
        self._copy_memory: Array  # for further copies

    def plan_shares(self) -> None:
        """Make the directory in which all ranks are to write; plan who writes what. Collective."""
        lockstep, variables = self._request.lockstep, self._request.variables
        leader = find_node_groups(lockstep).ranks[0]
        payload = str(leader).encode()
        with FailureCatcher(Exception) as caught:
            if self._rank == 0:
                payload = self._make_directory()
        call = f"{self._request.call}, its directory"
        payloads = lockstep.gather_payloads(call, payload, caught.failure)
        staging_path, private_entries = json.loads(payloads[0])
        self._staging_path, self._is_leader = Path(staging_path), leader == self._rank
        entries = {
            name: Entry(dtype, tuple(shape)) for name, (dtype, shape) in private_entries.items()
        }
        self._private_count = len(entries)  # so many of the first regions only replica 0 knows
        for name, variable in variables.items():
            if name not in entries:
                entries[name] = Entry.from_array(variable._storage.array)
        leaders = [0, *map(int, payloads[1:])]
        ranks_by_leader = group_by_key(leaders, range(len(leaders)))
        self._regions = sharded.plan_regions(entries, self._private_count, len(ranks_by_leader))
        self._file_sizes = sharded.compute_file_sizes(self._regions)
        # The ranks of the node that writes each file.
        self._ranks_by_file = [ranks for _, ranks in sorted(ranks_by_leader.items())]

    def _make_directory(self) -> bytes:
        """Make the directory, and return its name and the arrays that only replica 0 knows."""
        path, variables = self._request.path, self._request.variables
        private_names = [
            name for name, variable in variables.items() if not isinstance(variable, Variable)
        ]
        with explaining_write_errors(path):
            self._staged_path = atomic.StagedPath(path, is_directory=True)
        private_entries = {
            name: Entry.from_array(variables[name]._storage.array) for name in private_names
        }
        return json.dumps([os.fspath(self._staged_path.staging_path), private_entries]).encode()

    def _assign_pieces(self) -> Iterator[tuple[ChecksumRange, int]]:
        """Yield each piece and the rank that writes it: any of the node; later, its first."""
        for region_index, region in enumerate(self._regions):
            ranks, file_nbytes = (
                self._ranks_by_file[region.file_number],
                self._file_sizes[region.file_number],
            )
            is_alone = (
                region_index < self._private_count or self._request.background_saver is not None
            )
            for piece in region.split_pieces(sharded.CHUNK_NBYTES):
                rank_index = (
                    0 if is_alone else (region.offset + piece.start) * len(ranks) // file_nbytes
                )
                yield piece, ranks[rank_index]

    def _catch_failure(self, write_function: Callable[[], object]) -> BaseException | None:
        """Return what `write_function` fails with, as users are to see it; None if it does not."""
        path = self._request.path
        operation = announcing_operation(
            self._request.lockstep, f"write {path}", sum(self._file_sizes)
        )
        with FailureCatcher() as caught, operation, explaining_write_errors(path):
            write_function()
        return caught.failure

    def write_or_copy_share(self) -> Callable[[], None] | None:
        """Write or copy this rank's share; return the rest of the work. Collective."""
        save_request, background_saver = self._request, self._request.background_saver
        own_pieces = [piece for piece, rank in self._assign_pieces() if rank == self._rank]
        pieces_by_name = group_by_key([piece.region.name for piece in own_pieces], own_pieces)
        failure = self._catch_failure(functools.partial(self._prepare_share, pieces_by_name))
        for region in self._regions:
            variable = save_request.variables[region.name]
            if isinstance(variable, Variable) or self._rank == 0:
                value = np.asarray(variable)  # collective if it is spread or ON_READ
                if region.name in pieces_by_name and failure is None:
                    failure = self._catch_failure(
                        functools.partial(
                            self._write_or_copy_pieces, pieces_by_name[region.name], value
                        )
                    )
        failure = self._catch_failure(self._sync_file) or failure
        sums_by_rank = save_request.lockstep.gather_payloads(
            f"{save_request.call}, shares", b"".join(self._checksums), failure
        )
        if background_saver is not None:
            has_work = not self._rank or self._copies
            return (
                functools.partial(self._write_copies, background_saver.cancellation)
                if has_work
                else None
            )
        if self._rank == 0:
            return functools.partial(self._commit, dict(enumerate(sums_by_rank)))
        self.close()
        return None

    def _prepare_share(self, pieces_by_name: Mapping[str, list[ChecksumRange]]) -> None:
        """Check that this rank can write its pieces, or has memory for the copies."""
        # Replica 0 has made it: where it is missing there, it was removed, and writing says so.
        if self._rank and (self._is_leader or pieces_by_name) and not self._staging_path.is_dir():
            raise OSError(
                errno.ENOENT,
                f"Node {platform.node()} (rank {self._rank}) does not see a directory that rank 0 "
                "has just made, and a large checkpoint is written by all nodes; save to a file "
                "system that all of them share",
                os.fspath(self._staging_path.parent),
            )
        if self._request.background_saver is not None:
            nbytes = sum(pieces[0].region.nbytes for pieces in pieces_by_name.values())
            self._copy_memory = self._request.background_saver.reserve_memory(nbytes)

    def _write_or_copy_pieces(self, pieces: list[ChecksumRange], value: Array) -> None:
        """Write pieces of one region, of which `value` is all; or copy it for later."""
        array_bytes = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if self._request.background_saver is None:
            self._write_pieces(pieces, array_bytes)
        else:
            copy, self._copy_memory = np.split(self._copy_memory, [array_bytes.size])
            copy[:] = array_bytes
            self._copies.append((pieces, copy))

    def _write_copies(self, cancellation: threading.Event) -> None:
        """Write the file of this node; on replica 0 wait for the others, and name the directory."""
        file_number = self._copies[0][0][0].region.file_number if self._copies else 0
        try:
            for pieces, array_bytes in self._copies:
                self._write_pieces(pieces, array_bytes)
            self._sync_file()
            sums_by_rank = {self._rank: b"".join(self._checksums)}
            if self._rank:
                self._write_report(file_number, sums=sums_by_rank[self._rank].hex())
                return
            for other_file in range(1, len(self._file_sizes)):
                sums_by_rank[self._ranks_by_file[other_file][0]] = self._await_report(
                    other_file, cancellation
                )
            self._commit(sums_by_rank)
        except Exception as error:
            if self._rank:
                with contextlib.suppress(OSError):  # the next call raises it on all ranks
                    self._write_report(
                        file_number, failed=f"rank {self._rank}, {platform.node()}: {error}"
                    )
            raise
        finally:
            self.close()

    def _write_report(self, file_number: int, **report: str) -> None:
        """Leave a report for replica 0 about the file of this node."""
        unfinished_path = self._staging_path / f"data-{file_number}.new"
        unfinished_path.write_text(json.dumps(report), encoding="utf-8")
        unfinished_path.rename(self._staging_path / f"data-{file_number}.done")

    def _await_report(self, file_number: int, cancellation: threading.Event) -> bytes:
        """Return the checksums of another node's file when they are there."""
        report_path = self._staging_path / f"data-{file_number}.done"
        deadline = (
            time.monotonic()
            + OPERATION_SECONDS
            + sum(self._file_sizes) * OPERATION_SECONDS_PER_BYTE
        )
        # Listing the directory makes a network file system ask its server again.
        while not (list(self._staging_path.iterdir()) and report_path.exists()):
            if cancellation.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                raise OSError(
                    errno.EIO,
                    f"There is no report about {sharded.make_data_file_name(file_number)}",
                )
        report = json.loads(report_path.read_text(encoding="utf-8"))
        report_path.unlink()
        if "failed" in report:
            raise OSError(errno.EIO, report["failed"])
        return bytes.fromhex(report["sums"])

    def _write_pieces(self, pieces: Sequence[ChecksumRange], array_bytes: Array) -> None:
        """Write pieces of one region, of which `array_bytes` is all."""
        if self._descriptor < 0:
            name = self._staging_path / sharded.make_data_file_name(pieces[0].region.file_number)
            self._descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        for region, start, stop, _ in pieces:
            piece_bytes = array_bytes[start:stop]
            if piece_bytes.size < stop - start:
                piece_bytes = np.concatenate(
                    [piece_bytes, np.zeros(stop - start - piece_bytes.size, np.uint8)]
                )
            self._checksums.append(sharded.compute_checksum(piece_bytes))
            unwritten_bytes, offset = piece_bytes.data, region.offset + start
            while unwritten_bytes:
                written_nbytes = os.pwrite(self._descriptor, unwritten_bytes, offset)
                unwritten_bytes, offset = unwritten_bytes[written_nbytes:], offset + written_nbytes

    def _sync_file(self) -> None:
        """Force what this rank has written to the disk."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def _commit(self, sums_by_rank: Mapping[int, bytes]) -> None:
        """Write the manifest, and give the directory its name; on replica 0.

        Args:
          sums_by_rank: For each rank the checksums of its pieces, in their order.

        Raises:
          OSError: It cannot be written, or is not whole.
        """
        assert self._staged_path is not None
        try:
            for file_number, file_nbytes in enumerate(self._file_sizes):
                name = sharded.make_data_file_name(file_number)
                actual_size = (self._staging_path / name).stat().st_size
                if actual_size != file_nbytes:
                    raise OSError(
                        errno.EIO,
                        f"{name} has {actual_size} bytes after {file_nbytes} were written",
                    )
            remaining_offsets = {
                rank: iter(range(0, len(sums), sharded.CHECKSUM_NBYTES))
                for rank, sums in sums_by_rank.items()
                if sums  # most ranks of many have no piece
            }
            checksum_places = (
                (rank, next(remaining_offsets[rank])) for _, rank in self._assign_pieces()
            )
            sums = tuple(
                sums_by_rank[rank][start : start + sharded.CHECKSUM_NBYTES]
                for rank, start in checksum_places
            )
            request = self._request
            manifest = Manifest(
                request.counter, self._regions, sums, sharded.CHUNK_NBYTES, request.metrics
            )
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(self._staging_path / MANIFEST, flags, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(sharded.encode_manifest(manifest))
                file.flush()
                os.fsync(file.fileno())
            claim.check_claim(self._request.path.parent)
            self._staged_path.commit(self._request.can_replace)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, and remove the directory if it has no name. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        atomic.close_descriptor(descriptor)
        if self._staged_path is not None:
            self._staged_path.discard()
