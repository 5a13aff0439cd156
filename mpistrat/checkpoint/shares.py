"""A large checkpoint, written by all ranks, each its share.

What all ranks have is written once: file by file, each by the ranks of one node, which have cut it
between them; what only replica 0 knows is in the first file. Replica 0 gathers the checksums,
writes the manifest, and gives the directory its name. In the background the first rank of each node
copies what its file takes, and a thread writes that; the threads leave word of it beside the data,
for replica 0's thread, which names the directory when it has heard from all.
"""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arena.nodes import Nodes, find_nodes
from mpistrat.arrays import Array
from mpistrat.checkpoint import claim, sharded
from mpistrat.checkpoint.files import forget_other
from mpistrat.checkpoint.folders import Folder
from mpistrat.checkpoint.format import Entry
from mpistrat.checkpoint.sharded import Manifest, Region, Stretch
from mpistrat.distribute.variables import Variable
from mpistrat.lockstep.lockstep import Lockstep

__all__ = [
    "PATIENCE",
    "SLOWEST",
    "DataFile",
    "LargeSave",
    "attempt",
    "commit",
    "flat",
    "nodes_of",
    "open_job",
    "patient",
    "unwritten",
    "value_of",
    "write",
]

# Reading and writing may keep the other ranks waiting: seconds, and seconds for each byte.
PATIENCE, SLOWEST = 600.0, 1e-7
_ADVICE = "Mend that, or save elsewhere, and save again"
_OTHER = "Another job saves here; give each a directory of its own"


def patient(lockstep: Lockstep, what: str, nbytes: int) -> Any:
    """Return a context manager in which this rank reads or writes, while the others wait."""
    return lockstep.session.board.long_operation(what, PATIENCE + nbytes * SLOWEST)


def unwritten(path: Path, error: BaseException) -> BaseException:
    """Return an error of writing a checkpoint as users are to see it."""
    if not isinstance(error, OSError) or error.errno is None:
        return error
    why = f"{error.strerror}: {path} was not written; checkpoints before it are as they were. "
    why += _OTHER if isinstance(error, FileExistsError) else _ADVICE
    found = OSError(error.errno, why)
    found.__cause__ = error
    return found


def nodes_of(lockstep: Lockstep) -> Nodes:
    """Return which ranks share a node. Collective the first time."""
    # Of the session, as `collectives.routes` keeps them.
    each = lockstep.options.ranks_per_node
    groups, key = lockstep.session.groups, ("nodes", lockstep.order, each)
    if key not in groups:
        groups[key] = find_nodes(lockstep.comm, each)
    found: Nodes = groups[key]
    return found


class LargeSave(NamedTuple):
    """A large checkpoint that is being written; equal on all ranks, but for `folder` and `rank`.

    Attributes:
      path: Where it will be.
      part: Where it is until then.
      counter: How many times the checkpoint has been saved.
      regions: Where the arrays lie.
      leaders: For each rank the first one of its node.
      together: How many of the first regions only replica 0 knows.
      replace: It takes the place of what is there.
      rank: This rank.
      folder: The directory; of replica 0 only.
    """

    path: Path
    part: Path
    counter: int
    regions: tuple[Region, ...]
    leaders: tuple[int, ...]
    together: int
    replace: bool
    rank: int
    folder: Folder | None

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(sharded.sizes_of(self.regions))

    def owners(self, spread: bool = True) -> Iterator[tuple[Stretch, int]]:
        """Yield each piece, and the rank that writes it.

        Args:
          spread: The ranks of a node cut its file between them; else its first rank has all of it.
        """
        sizes, firsts = sharded.sizes_of(self.regions), sorted(set(self.leaders))
        ranks = [[r for r, one in enumerate(self.leaders) if one == first] for first in firsts]
        for number, region in enumerate(self.regions):
            mine, size = ranks[region.file], sizes[region.file]
            alone = number < self.together or not spread
            for piece in region.pieces(sharded.CHUNK):
                share = 0 if alone else (region.offset + piece.start) * len(mine) // size
                yield piece, mine[share]

    def mine(self, spread: bool = True) -> list[tuple[Region, list[Stretch]]]:
        """Return each region, and the pieces of it that this rank writes."""
        found: list[tuple[Region, list[Stretch]]] = [(region, []) for region in self.regions]
        at = {region.name: pieces for region, pieces in found}
        for piece, rank in self.owners(spread):
            if rank == self.rank:
                at[piece.region.name].append(piece)
        return found

    def check_seen(self) -> None:
        """Raise OSError if this rank, the first of its node, does not see the directory."""
        if self.leaders[self.rank] == self.rank and not self.part.is_dir():
            raise OSError(
                errno.ENOENT,
                f"Node {platform.node()} (rank {self.rank}) does not see a directory that rank 0 "
                "has just made, and a large checkpoint is written by all nodes; save to a file "
                "system that all of them share",
                os.fspath(self.path.parent),
            )


def open_job(
    lockstep: Lockstep,
    mine: Mapping[str, Variable],
    call: str,
    path: Path,
    counter: int,
    replace: bool,
) -> LargeSave:
    """Make the directory in which all ranks are to write, and plan who writes what. Collective.

    Args:
      lockstep: Proves it.
      mine: What is saved.
      call: What saves it.
      path: Where it will be.
      counter: How many times it has been saved.
      replace: It takes the place of what is there.

    Raises:
      OSError: The directory cannot be made; on every rank.
    """
    nodes = nodes_of(lockstep)
    told, failure, folder = str(nodes.ranks[0]).encode(), None, None
    if lockstep.comm.rank == 0:
        try:
            alone = [name for name, one in mine.items() if not isinstance(one, Variable)]
            entries = {name: Entry.of(mine[name].storage.array) for name in alone}
            folder = Folder(path)
            told = json.dumps([os.fspath(folder.part), entries]).encode()
        except Exception as error:
            failure = unwritten(path, error)
    try:
        smalls = lockstep.share(f"{call}, its directory", told, failure)
        part, first = json.loads(smalls[0])
        entries = {name: Entry(dtype, tuple(shape)) for name, (dtype, shape) in first.items()}
        rest = {name: Entry.of(v.storage.array) for name, v in mine.items() if name not in entries}
        leaders = (0, *map(int, smalls[1:]))
        regions = sharded.plan({**entries, **rest}, len(entries), len(set(leaders)))
        rank = lockstep.comm.rank
        return LargeSave(
            path, Path(part), counter, regions, leaders, len(entries), replace, rank, folder
        )
    except BaseException:
        if folder is not None:
            folder.drop()
        raise


def write(
    lockstep: Lockstep, mine: Mapping[str, Variable], job: LargeSave, call: str
) -> BaseException | None:
    """Write a large checkpoint, each rank its share. Collective.

    Args:
      lockstep: Proves it.
      mine: What is saved.
      job: Where, and who writes what.
      call: What saves it.

    Returns:
      On replica 0, what naming the directory failed with, which all ranks have to know.

    Raises:
      OSError: Some rank cannot write its share, or does not see the directory; on every rank.
    """
    file, failure = DataFile(job), attempt(job, job.check_seen)
    try:
        for region, pieces in job.mine():
            value = value_of(mine[region.name], job)
            if pieces and failure is None:
                with patient(lockstep, f"write {job.path}", job.nbytes):
                    failure = attempt(job, lambda: file.put(pieces, value))  # noqa: B023 at once
        with patient(lockstep, f"write {job.path}", job.nbytes):
            failure = attempt(job, file.close) or failure
        told = lockstep.share(f"{call}, shares", b"".join(file.sums), failure)
        if job.folder is None:
            return None
        with patient(lockstep, f"write {job.path}", job.nbytes):
            return attempt(job, lambda: commit(job, told))
    finally:
        if job.folder is not None:
            job.folder.drop()


def commit(job: LargeSave, told: Sequence[bytes], spread: bool = True) -> None:
    """Write the manifest, and give the directory its name; on replica 0.

    Args:
      job: Where.
      told: For each rank the checksums of its pieces, in their order.
      spread: As of `LargeSave.owners`.

    Raises:
      OSError: It cannot be written, or is not whole.
    """
    assert job.folder is not None
    for number, size in enumerate(sharded.sizes_of(job.regions)):
        found = (job.part / sharded.data_file(number)).stat().st_size
        if found != size:
            name = sharded.data_file(number)
            raise OSError(errno.EIO, f"{name} has {found} bytes after {size} were written")
    places = [0] * len(told)
    sums = []
    for _, rank in job.owners(spread):
        sums.append(told[rank][places[rank] : places[rank] + sharded.SUM])
        places[rank] += sharded.SUM
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(job.part / sharded.MANIFEST, flags, 0o666), "wb") as file:
        manifest = Manifest(job.counter, job.regions, tuple(sums), sharded.CHUNK)
        file.write(sharded.text_of(manifest))
        file.flush()
        os.fsync(file.fileno())
    claim.check(job.path.parent)
    job.folder.commit(job.replace)
    if job.replace:
        forget_other(job.path)


def attempt(job: LargeSave, act: Callable[[], None]) -> BaseException | None:
    """Return what `act` fails with, as users are to see it; None if it does not."""
    try:
        act()
    except BaseException as error:
        return unwritten(job.path, error)
    return None


def value_of(variable: Any, job: LargeSave) -> Array:
    """Return a value that this rank may have to write. Collective if it is spread or ON_READ."""
    if job.rank and not isinstance(variable, Variable):
        return np.empty(0, np.uint8)  # only replica 0's is saved
    return np.asarray(variable)


def flat(value: Array) -> Array:
    """Return the bytes of an array, in C order."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


@final
class DataFile:
    """The file of this node, as this rank writes its part of it.

    Attributes:
      sums: The checksums of what was written, in order.
    """

    def __init__(self, job: LargeSave):
        """Open it with the first piece."""
        self._job, self._descriptor = job, -1
        self.sums: list[bytes] = []

    def put(self, pieces: Sequence[Stretch], value: Array) -> None:
        """Write pieces of one region.

        Args:
          pieces: Which.
          value: All of the region's value.
        """
        data = flat(value)
        if self._descriptor < 0:
            name = self._job.part / sharded.data_file(pieces[0].region.file)
            self._descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        for region, start, stop, _ in pieces:
            part = data[start:stop]
            if part.size < stop - start:
                part = np.concatenate([part, np.zeros(stop - start - part.size, np.uint8)])
            self.sums.append(sharded.checksum(part))
            view, at = part.data, region.offset + start
            while view:
                done = os.pwrite(self._descriptor, view, at)
                view, at = view[done:], at + done

    def close(self) -> None:
        """Force what was written to the disk."""
        if self._descriptor >= 0:
            try:
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
                self._descriptor = -1
