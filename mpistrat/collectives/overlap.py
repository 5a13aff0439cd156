"""All-reduces that go on between the nodes while the program computes.

The ranks of a node fold what they share when the call begins, in the program's thread. Then a
thread talks to the other nodes, on communicators of its own, and gives the node the results. It
does so in the order in which the calls began, whatever the program waits for first, and needs of
the other ranks no more than that they have begun the same call; so no order of waiting can block.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arena.nodes import Nodes, find_nodes
from mpistrat.arrays import Array
from mpistrat.collectives.folding import Folding
from mpistrat.collectives.lanes import fold_between
from mpistrat.collectives.node import NodeFolds
from mpistrat.collectives.packs import LIMIT, Pack, fill
from mpistrat.collectives.results import results_for
from mpistrat.collectives.spans import Placed, Range, Scales, slice_of, spans_of
from mpistrat.comm.base import Comm
from mpistrat.comm.mpi import MPIComm, needs_yielding
from mpistrat.comm.nodes import before_finalize, threads_allowed
from mpistrat.environment import YIELD, yields
from mpistrat.kernels.fold import spread_rows
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import power_for
from mpistrat.kernels.threads import deaf
from mpistrat.lockstep.abort import lost
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.lockstep import Lockstep

__all__ = ["Begun", "Overlap"]

# Rooms that nobody uses; a program has few kinds of calls that overlap at once.
_ROOMS = 8
_NO_THREADS, _NO_YIELDING, _ABLE = range(3)
_REASONS = {
    _NO_THREADS: "MPI was started without THREAD_MULTIPLE",
    _NO_YIELDING: "Open MPI takes the time of the computation while it waits, unless it is started "
    f"with {YIELD}=1, as `mpistrat run` does",
}

# What is left to do after the proof: given scales, and the number of the first transfer that some
# rank has not waited for; returns what waits and gives the results, or None for lack of memory.
Begun = Callable[[Scales, int], Callable[[], list[Array]] | None]


class _Job(NamedTuple):
    """A matrix with a row for each rank of the node, and what is done to its columns."""

    rows: Array
    ranges: list[Range]


@final
class _Transfer:
    """What the thread does for one call."""

    def __init__(self, number: int, work: Callable[[], None]):
        self.number, self.work = number, work
        self.ended = threading.Event()
        self.error: Exception | None = None


@final
class Overlap:
    """The transfers of one session that go on beside the program.

    The thread lives as long as there is one.

    Args:
      lockstep: Whose calls they are.
      node: The shared memory of the ranks.
    """

    def __init__(self, lockstep: Lockstep, node: NodeFolds):
        """Begin nothing yet."""
        self._lockstep, self._node, self._pid = lockstep, node, os.getpid()
        self._able: bool | None = None
        self._own: Nodes | None = None
        self._inside: Comm | None = None
        self._lane: Comm | None = None
        self._count = 0
        self._open: dict[int, _Transfer] = {}
        self._rooms: dict[tuple[Pack, ...], list[tuple[int, list[Array]]]] = {}
        self._todo: list[_Transfer] = []
        self._lock = threading.Lock()
        self._running = False
        self._closes: Callable[[], None] | None = None

    def able(self, call: str) -> bool:
        """Tell whether calls may overlap; if not, it is said why, where something can be done.

        Collective the first time; equal on all ranks.
        """
        if self._able is None:
            self._lockstep.prove(f"{call}, the first that may overlap")
            self._able = self._node.arena.nodes().nodes > 1 and self._asked()
            if self._able:
                self._start()
        return self._able

    def _asked(self) -> bool:
        on_mpi = isinstance(self._lockstep.session.comm, MPIComm)
        mine = _ABLE
        if on_mpi and not threads_allowed():
            mine = _NO_THREADS
        elif on_mpi and needs_yielding() and not yields():
            mine = _NO_YIELDING
        told = np.empty(1, np.int64)
        self._lockstep.comm.allreduce(np.array([mine]), told, "MIN")
        reason = _REASONS.get(int(told[0]))
        if reason is not None:
            text = f"all_reduce_start: all is done at once, for {reason}. The results are the same."
            warn(self._lockstep, "all_reduce_start", text, RuntimeWarning, stacklevel=3)
        return reason is None

    def _start(self) -> None:
        # The board is told of what the program's thread does, not of this one's.
        comm = self._lockstep.unwatched
        own = self._own = find_nodes(comm, self._lockstep.options.ranks_per_node)
        self._inside, self._lane = _patient(own.node), own.lane and _patient(own.lane)
        if isinstance(self._lockstep.session.comm, MPIComm):
            atexit.register(self.drain)
            self._closes = before_finalize(self.drain)

    @property
    def oldest(self) -> int:
        """The number of the first transfer that this rank has not waited for."""
        return min(self._open, default=self._count + 1)

    def placed(self, op: ReduceOp, placed: Placed, leaves: list[Array]) -> Begun:
        """Return what begins to fold arrays of the arena where they lie. Not collective."""

        def begin(scales: Scales, oldest: int) -> Callable[[], list[Array]]:
            jobs = []
            for (block, matrix), spans in zip(placed.rows, placed.spans, strict=True):
                held = block()
                assert held is not None  # its arrays are in the caller's hands
                ranges = [Range(start, stop, *scales.of(leaf)) for start, stop, leaf in spans]
                jobs.append(_Job(held.matrices[matrix], ranges))
            transfer = self._begin(op, jobs, spread=True)
            return lambda: self._wait(transfer, lambda: leaves)

        return begin

    def packed(
        self, what: Folding, values: Sequence[Array], outs: Sequence[Array] | None
    ) -> Begun:
        """Return what copies values, and begins to fold the copies. Not collective."""
        if what.most > LIMIT // 2:  # it may be cut into pieces, which are taken from one run
            values = [v if v.flags.c_contiguous else v.copy() for v in values]
        results = results_for(what, values, outs, self._lockstep.session.pool)

        def begin(scales: Scales, oldest: int) -> Callable[[], list[Array]] | None:
            rooms = self._room(what.packs, oldest)
            if rooms is None:
                return None
            node = self._node.arena.nodes().node
            for pack, rows in zip(what.packs, rooms, strict=True):
                fill(pack, values, rows[node.rank])
            if node.size > 1:
                node.barrier()
            jobs = [_Job(r, spans_of(p, scales)) for p, r in zip(what.packs, rooms, strict=True)]
            transfer = self._begin(what.op, jobs, spread=False)

            def take() -> list[Array]:
                for number, rows in enumerate(rooms):
                    results.take(number, rows[0])
                return results.arrays

            return lambda: self._wait(transfer, take)

        return begin

    def _room(self, packs: tuple[Pack, ...], oldest: int) -> list[Array] | None:
        """Return rows for these packs that no rank reads any more. Collective."""
        rooms = self._rooms.pop(packs, [])
        number = self._count + 1
        free = next((i for i, (user, _) in enumerate(rooms) if user < oldest), None)
        if free is not None:
            found: list[Array] | None = rooms.pop(free)[1]
        else:
            found = self._node.arena.rows([(pack.dtype, pack.columns) for pack in packs])
        if found is not None:
            rooms.append((number, found))
        if rooms:
            self._rooms[packs] = rooms  # the last: those of others go first
        idle = [key for key, known in self._rooms.items() if all(u < oldest for u, _ in known)]
        for key in idle[:-_ROOMS]:
            del self._rooms[key]
        return found

    def _begin(self, op: ReduceOp, jobs: list[_Job], spread: bool) -> _Transfer:
        with self._node.moving():
            for rows, ranges in jobs:
                self._node.fold_inside(op, rows, rows, rows.shape[1], ranges)
        self._count += 1
        transfer = _Transfer(self._count, functools.partial(self._move, op, jobs, spread))
        self._open[self._count] = transfer
        with self._lock:
            self._todo.append(transfer)
            begins, self._running = not self._running, True
        if begins:
            thread = threading.Thread(target=self._beside, name="mpistrat overlap", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started any more: the results are the same
                self._run()
        return transfer

    def _beside(self) -> None:
        deaf()
        self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._running = False
                    return
                transfer = self._todo.pop(0)
            try:
                with np.errstate(all="ignore"):
                    transfer.work()
            except Exception as error:
                transfer.error = error
                self._failed(error)
            finally:
                transfer.ended.set()

    def _failed(self, error: Exception) -> None:
        try:
            lost(self._lockstep, "all_reduce_start, between its start and its wait", error)
        except Exception:  # threads of one process: those that wait for this one are told
            for comm in (self._inside, self._lane):
                if comm is not None:
                    comm.free()

    def _move(self, op: ReduceOp, jobs: list[_Job], spread: bool) -> None:
        """Fold what the nodes have between them, and let all of the node see it. In the thread."""
        own, inside = self._own, self._inside
        assert own is not None
        assert inside is not None
        shared = inside.size > 1
        if shared:
            inside.barrier()
        if self._lane is not None:
            for rows, ranges in jobs:
                mine = slice_of(inside.rank, own.lanes, rows.shape[1], rows.dtype)
                power = power_for(self._lockstep.comm.size)
                fold_between(self._lane, op, rows, rows[0], mine, ranges, power)
        if not shared:
            return
        inside.barrier()
        if not spread:
            return
        for rows, ranges in jobs:
            low, high = slice_of(inside.rank, inside.size, rows.shape[1], rows.dtype)
            for span in ranges:
                spread_rows(rows, 0, max(low, span.start), min(high, span.stop))
        inside.barrier()

    def _wait(self, transfer: _Transfer, take: Callable[[], list[Array]]) -> list[Array]:
        transfer.ended.wait()
        if transfer.error is not None:
            raise transfer.error
        found = take()
        self._open.pop(transfer.number, None)
        return found

    def drain(self) -> None:
        """Return when nothing moves any more: memory may go then, and MPI be finalized."""
        if os.getpid() == self._pid:
            for transfer in list(self._open.values()):
                transfer.ended.wait()

    def free(self) -> None:
        """Give the communicators back, when nothing moves any more. Collective."""
        self.drain()
        atexit.unregister(self.drain)
        if self._closes is not None:
            self._closes()
        if self._own is not None:
            self._own.free()
        self._own = self._inside = self._lane = None


def _patient(comm: Comm) -> Comm:
    return comm.patient() if isinstance(comm, MPIComm) else comm
