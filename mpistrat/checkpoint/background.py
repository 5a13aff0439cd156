"""Saving while the program goes on: a thread that writes what has been copied for it.

The thread never communicates. What it has come to is agreed by the next call of the manager, on all
ranks; the interpreter waits for it at exit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import sharded
from mpistrat.checkpoint.sharded import Stretch
from mpistrat.checkpoint.shares import (
    PATIENCE,
    SLOWEST,
    DataFile,
    LargeSave,
    attempt,
    commit,
    flat,
    patient,
    unwritten,
    value_of,
)
from mpistrat.distribute.variables import Variable
from mpistrat.lockstep.lockstep import Lockstep

__all__ = ["Background", "copy"]

_LOOKS = 0.05  # seconds between looks for what other nodes have written


@final
class Background:
    """At most one save that is on its way to the disk.

    Attributes:
      pending: One has been begun, and `settle` has not been called since; equal on all ranks.
      given_up: Another rank has failed to write its part, so there is nothing to wait for.
    """

    def __init__(self) -> None:
        """Create one that has nothing to write."""
        self.pending, self.given_up = False, threading.Event()
        self._memory = np.empty(0, np.uint8)
        self._thread: threading.Thread | None = None
        self._there: list[str] = []
        self._failure: BaseException | None = None

    def room(self, nbytes: int) -> Array:
        """Return memory for a copy; the same again for the next save, so that it is at hand."""
        if self._memory.size < nbytes:
            self._memory = np.empty(0, np.uint8)  # given back before more is taken
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]

    def start(self, work: Callable[[], list[str]] | None) -> None:
        """Begin a save.

        Args:
          work: What this rank does for it, in a thread; None for nothing. Replica 0's returns the
            paths of all that are there.
        """
        self.pending, self._there, self._failure = True, [], None
        self.given_up.clear()
        if work is not None:
            # Not a daemon: the interpreter waits for it before it ends.
            self._thread = threading.Thread(
                target=self._run, args=(work,), name="mpistrat save", daemon=False
            )
            self._thread.start()

    def _run(self, work: Callable[[], list[str]]) -> None:
        try:
            self._there = work()
        except BaseException as error:
            self._failure = error
            # At once, because there may be no further call that could raise it.
            with contextlib.suppress(OSError, ValueError):
                print(f"mpistrat: saving in the background: {error}", file=sys.stderr, flush=True)

    def settle(self, lockstep: Lockstep, call: str) -> list[str]:
        """Wait for the save that is `pending`, and tell all ranks how it went. Collective.

        Args:
          lockstep: Proves it.
          call: What waits.

        Returns:
          The paths of all that are there, the oldest first.

        Raises:
          OSError: It has failed, on some rank; raised on all.
        """
        what = f"{call}, the save before it"
        with patient(lockstep, what, self._memory.nbytes):
            if lockstep.comm.rank:
                self._join()
            # Replica 0 waits for what the others leave beside the data, if they have left it.
            parts = lockstep.share(f"{what}, parts", b"failed" if self._failure else b"")
            if any(parts[1:]):
                self.given_up.set()
            self._join()
        self.pending = False
        told = json.dumps(self._there).encode()
        failure, self._failure = self._failure, None
        found: list[str] = json.loads(lockstep.share(what, told, failure)[0])
        return found

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None


def copy(
    lockstep: Lockstep,
    mine: Mapping[str, Variable],
    job: LargeSave,
    call: str,
    later: Background,
) -> Callable[[], None] | None:
    """Copy what is to be written, and return what a thread of this rank does then. Collective.

    Args:
      lockstep: Proves it.
      mine: What is saved.
      job: Where.
      call: What saves it.
      later: Has memory for the copy.

    Returns:
      What writes the file of this node, and on replica 0 names the directory; None if this rank
      writes nothing.

    Raises:
      OSError: Some node does not see the directory; on every rank.
      MemoryError: Some rank has no memory for the copy.
    """
    rows = job.mine(spread=False)
    memory, at, copies = np.empty(0, np.uint8), 0, []
    failure = attempt(job, job.check_seen)
    try:
        memory = later.room(sum(region.nbytes for region, pieces in rows if pieces))
    except MemoryError as error:
        failure = error
    for region, pieces in rows:
        value = value_of(mine[region.name], job)
        if pieces and failure is None:
            here = memory[at : at + region.nbytes]
            here[:] = flat(value)
            copies.append((pieces, here))
            at += region.nbytes
    try:
        lockstep.prove(f"{call}, copied", failure=failure)
    except BaseException:
        if job.folder is not None:
            job.folder.drop()
        raise
    if not copies and job.folder is None:
        return None
    return lambda: _write_copy(job, copies, later.given_up)


def _write_copy(
    job: LargeSave, copies: Iterable[tuple[list[Stretch], Array]], given_up: threading.Event
) -> None:
    """Write the file of this node; on replica 0 wait for the others, and name the directory."""
    file, firsts = DataFile(job), sorted(set(job.leaders))
    number = firsts.index(job.rank)
    try:
        for pieces, data in copies:
            file.put(pieces, data)
        file.close()
        if job.folder is None:
            _tell(job, number, {"sums": b"".join(file.sums).hex()})
            return
        told = [b""] * len(job.leaders)
        for one in range(1, len(sharded.sizes_of(job.regions))):
            told[firsts[one]] = _heard(job, one, given_up)
        commit(job, [b"".join(file.sums), *told[1:]], spread=False)
    except Exception as error:
        if job.folder is None:
            with contextlib.suppress(OSError):  # all ranks are told by the next call
                _tell(job, number, {"failed": f"rank {job.rank}, {platform.node()}: {error}"})
        raise unwritten(job.path, error) from error
    finally:
        if job.folder is not None:
            job.folder.drop()


def _tell(job: LargeSave, number: int, told: Mapping[str, str]) -> None:
    """Leave word for replica 0 of how the file of this node was written."""
    new = job.part / f"data-{number}.new"
    new.write_text(json.dumps(told))
    new.rename(job.part / f"data-{number}.done")


def _heard(job: LargeSave, number: int, given_up: threading.Event) -> bytes:
    """Return the checksums of another node's file when they are there."""
    word = job.part / f"data-{number}.done"
    until = time.monotonic() + PATIENCE + job.nbytes * SLOWEST
    while True:
        list(job.part.iterdir())  # asks a network's file system anew
        if word.exists():
            told = json.loads(word.read_text())
            word.unlink()
            break
        if given_up.wait(_LOOKS) or time.monotonic() > until:
            raise OSError(errno.EIO, f"Nothing is heard of {sharded.data_file(number)}")
    if "failed" in told:
        raise OSError(errno.EIO, told["failed"])
    return bytes.fromhex(told["sums"])
