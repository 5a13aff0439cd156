"""A large checkpoint, written by all ranks, each its share.

What all ranks have is written once: file by file, each by the ranks of one node, which have cut it
between them; what only replica 0 knows is in the first file. Replica 0 gathers the checksums,
writes the manifest, and gives the directory its name. In the background the first rank of each node
copies what its file takes, and a thread writes that; the threads leave word of it beside the data,
for replica 0's thread, which names the directory when it has heard from all.
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
from mpistrat.checkpoint.background import Background
from mpistrat.checkpoint.files import PATIENCE, SLOWEST, patient, unwritten
from mpistrat.checkpoint.format import MANIFEST, Entry
from mpistrat.checkpoint.sharded import ChecksumRange, Manifest
from mpistrat.comm.callsite import group_by_key
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import Caught
from mpistrat.strategy.shared_state import nodes_of
from mpistrat.variables.variable import Variable

_LOOK_SECONDS = 0.05  # between looks for what other nodes have written


@final
class Save(NamedTuple):
    """One save.

    Attributes:
      lockstep: Proves it.
      variables: What is saved.
      call: What saves it, in the texts of handshakes.
      path: Where it will be.
      counter: How many times it has been saved, this time included.
      replace: It takes the place of what is there.
      background: Writes it while the program continues; None to return when it is written.
    """

    lockstep: Lockstep
    variables: Mapping[str, Any]
    call: str
    path: Path
    counter: int
    replace: bool
    background: Background | None = None


def write_large(save_request: Save) -> Callable[[], None] | None:
    """Write the share of each rank, or copy it for later. Collective.

    Returns:
      What is left to do on this rank; None for nothing. Replica 0 names the directory then.

    Raises:
      OSError: Some rank cannot write its share, or does not see the directory; on every rank.
      MemoryError: Some rank has no memory for the copy.
    """
    job = _LargeSave(save_request)
    try:
        with save_request.lockstep.preparing(save_request.call):
            job.plan()
            return job.begin()
    except BaseException:
        job.drop()  # after all ranks know of the failure, because they write in it
        raise


class _LargeSave:
    """A large checkpoint that is being written."""

    def __init__(self, save_request: Save):
        self._request, self._rank = save_request, save_request.lockstep.comm.rank
        self._folder: atomic.Part | None = None  # of replica 0
        self._descriptor = -1  # of this node's file, from the first piece on
        self._sums: list[bytes] = []  # of what this rank has written, in order
        # What it has copied to write later.
        self._copies: list[tuple[list[ChecksumRange], Array]] = []
        self._room: Array  # for further copies

    def plan(self) -> None:
        """Make the directory in which all ranks are to write; plan who writes what. Collective."""
        save_request, variables = self._request, self._request.variables
        leader = nodes_of(save_request.lockstep).ranks[0]
        message = str(leader).encode()
        with Caught(Exception) as caught:
            if self._rank == 0:
                private_names = [
                    name
                    for name, variable in variables.items()
                    if not isinstance(variable, Variable)
                ]
                with unwritten(save_request.path):
                    self._folder = atomic.Part(save_request.path, folder=True)
                first = {
                    name: Entry.from_array(variables[name].storage.array) for name in private_names
                }
                message = json.dumps([os.fspath(self._folder.name), first]).encode()
        payloads = save_request.lockstep.gather_payloads(
            f"{save_request.call}, its directory", message, caught.failure
        )
        part, first = json.loads(payloads[0])
        entries = {name: Entry(dtype, tuple(shape)) for name, (dtype, shape) in first.items()}
        shared_entries = {
            name: Entry.from_array(v.storage.array)
            for name, v in variables.items()
            if name not in entries
        }
        leaders = [0, *map(int, payloads[1:])]
        firsts = sorted(set(leaders))
        self._part, self._is_leader = Path(part), leader == self._rank
        self._private_count = len(entries)  # so many of the first regions only replica 0 knows
        self._regions = sharded.plan(
            {**entries, **shared_entries}, self._private_count, len(firsts)
        )
        self._sizes = sharded.sizes_of(self._regions)
        # The ranks of the node that writes each file.
        self._ranks = [
            [r for r, rank_leader in enumerate(leaders) if rank_leader == file_leader]
            for file_leader in firsts
        ]

    def _owners(self) -> Iterator[tuple[ChecksumRange, int]]:
        """Yield each piece and the rank that writes it: any of the node; later, its first."""
        for number, region in enumerate(self._regions):
            ranks, size = self._ranks[region.file], self._sizes[region.file]
            is_alone = number < self._private_count or self._request.background is not None
            for piece in region.pieces(sharded.CHUNK):
                share = 0 if is_alone else (region.offset + piece.start) * len(ranks) // size
                yield piece, ranks[share]

    def _catch_failure(self, act: Callable[[], object]) -> BaseException | None:
        """Return what `act` fails with, as users are to see it; None if it does not."""
        path = self._request.path
        operation = patient(self._request.lockstep, f"write {path}", sum(self._sizes))
        with Caught() as caught, operation, unwritten(path):
            act()
        return caught.failure

    def begin(self) -> Callable[[], None] | None:
        """Write what is this rank's, or copy it; return what is left to do. Collective."""
        save_request, background = self._request, self._request.background
        own_pieces = [piece for piece, rank in self._owners() if rank == self._rank]
        pieces_by_name = group_by_key([piece.region.name for piece in own_pieces], own_pieces)
        failure = self._catch_failure(functools.partial(self._prepare, pieces_by_name))
        for region in self._regions:
            variable = save_request.variables[region.name]
            if isinstance(variable, Variable) or self._rank == 0:
                value = np.asarray(variable)  # collective if it is spread or ON_READ
                if region.name in pieces_by_name and failure is None:
                    failure = self._catch_failure(
                        functools.partial(self._take, pieces_by_name[region.name], value)
                    )
        failure = self._catch_failure(self._sync) or failure
        sums_by_rank = save_request.lockstep.gather_payloads(
            f"{save_request.call}, shares", b"".join(self._sums), failure
        )
        if background is not None:
            has_work = not self._rank or self._copies
            return (
                functools.partial(self._write_copy, background.cancellation) if has_work else None
            )
        if self._rank == 0:
            return functools.partial(self._commit, dict(enumerate(sums_by_rank)))
        self.drop()
        return None

    def _prepare(self, pieces_by_name: Mapping[str, list[ChecksumRange]]) -> None:
        """See that all is there that this rank needs to write or copy its pieces."""
        # Replica 0 has made it: where it is missing there, it was removed, and writing says so.
        if self._rank and (self._is_leader or pieces_by_name) and not self._part.is_dir():
            raise OSError(
                errno.ENOENT,
                f"Node {platform.node()} (rank {self._rank}) does not see a directory that rank 0 "
                "has just made, and a large checkpoint is written by all nodes; save to a file "
                "system that all of them share",
                os.fspath(self._part.parent),
            )
        if self._request.background is not None:
            nbytes = sum(pieces[0].region.nbytes for pieces in pieces_by_name.values())
            self._room = self._request.background.reserve_memory(nbytes)

    def _take(self, pieces: list[ChecksumRange], value: Array) -> None:
        """Write pieces of one region, of which `value` is all; or copy it for later."""
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if self._request.background is None:
            self._put(pieces, data)
        else:
            copy, self._room = np.split(self._room, [data.size])
            copy[:] = data
            self._copies.append((pieces, copy))

    def _write_copy(self, cancellation: threading.Event) -> None:
        """Write the file of this node; on replica 0 wait for the others, and name the directory."""
        number = self._copies[0][0][0].region.file if self._copies else 0
        try:
            for pieces, data in self._copies:
                self._put(pieces, data)
            self._sync()
            sums_by_rank = {self._rank: b"".join(self._sums)}
            if self._rank:
                self._write_report(number, sums=sums_by_rank[self._rank].hex())
                return
            for other in range(1, len(self._sizes)):
                sums_by_rank[self._ranks[other][0]] = self._await_report(other, cancellation)
            self._commit(sums_by_rank)
        except Exception as error:
            if self._rank:
                with contextlib.suppress(OSError):  # all ranks are told by the next call
                    self._write_report(
                        number, failed=f"rank {self._rank}, {platform.node()}: {error}"
                    )
            raise
        finally:
            self.drop()

    def _write_report(self, number: int, **report: str) -> None:
        """Leave word for replica 0 of how the file of this node was written."""
        new = self._part / f"data-{number}.new"
        new.write_text(json.dumps(report), encoding="utf-8")
        new.rename(self._part / f"data-{number}.done")

    def _await_report(self, number: int, cancellation: threading.Event) -> bytes:
        """Return the checksums of another node's file when they are there."""
        report_path = self._part / f"data-{number}.done"
        deadline = time.monotonic() + PATIENCE + sum(self._sizes) * SLOWEST
        # Listing the directory makes a network file system ask its server again.
        while not (list(self._part.iterdir()) and report_path.exists()):
            if cancellation.wait(_LOOK_SECONDS) or time.monotonic() > deadline:
                raise OSError(errno.EIO, f"There is no report about {sharded.data_file(number)}")
        report = json.loads(report_path.read_text(encoding="utf-8"))
        report_path.unlink()
        if "failed" in report:
            raise OSError(errno.EIO, report["failed"])
        return bytes.fromhex(report["sums"])

    def _put(self, pieces: Sequence[ChecksumRange], data: Array) -> None:
        """Write pieces of one region, of which `data` is all."""
        if self._descriptor < 0:
            name = self._part / sharded.data_file(pieces[0].region.file)
            self._descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        for region, start, stop, _ in pieces:
            part = data[start:stop]
            if part.size < stop - start:
                part = np.concatenate([part, np.zeros(stop - start - part.size, np.uint8)])
            self._sums.append(sharded.checksum(part))
            view, at = part.data, region.offset + start
            while view:
                written_nbytes = os.pwrite(self._descriptor, view, at)
                view, at = view[written_nbytes:], at + written_nbytes

    def _sync(self) -> None:
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
        assert self._folder is not None
        try:
            for number, size in enumerate(self._sizes):
                name = sharded.data_file(number)
                actual_size = (self._part / name).stat().st_size
                if actual_size != size:
                    raise OSError(
                        errno.EIO, f"{name} has {actual_size} bytes after {size} were written"
                    )
            remaining_offsets = {
                rank: iter(range(0, len(sums), sharded.SUM)) for rank, sums in sums_by_rank.items()
            }
            places = ((rank, next(remaining_offsets[rank])) for _, rank in self._owners())
            sums = tuple(sums_by_rank[rank][at : at + sharded.SUM] for rank, at in places)
            manifest = Manifest(self._request.counter, self._regions, sums, sharded.CHUNK)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(self._part / MANIFEST, flags, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(sharded.text_of(manifest))
                file.flush()
                os.fsync(file.fileno())
            claim.check(self._request.path.parent)
            self._folder.commit(self._request.replace)
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the file, and remove the directory if it has no name. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        atomic.close(descriptor)
        if self._folder is not None:
            self._folder.drop()
