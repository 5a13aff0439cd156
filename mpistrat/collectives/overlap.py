"""All-reduces that continue between the nodes while the program computes.

The ranks of a node reduce what they share when the call begins, in the program's thread. Then a
thread talks to the other nodes, on communicators of its own, and gives the node the results. It
does so in the order in which the calls began, whatever the program waits for first, and needs of
the other ranks no more than that they have begun the same call; so no order of waiting can block.

A thread that does one thing after the other while the program continues.
"""

from __future__ import annotations

import atexit
import functools
import operator
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import final
from weakref import WeakValueDictionary

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.inter_node import Lane
from mpistrat.collectives.layout import Bucket, Part, Placed, fill, placed, segments_of
from mpistrat.collectives.node import NodeReducer, reduce_outside
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import put, results_for
from mpistrat.collectives.weights import Scales
from mpistrat.comm.base import Comm, OrderedComm
from mpistrat.comm.mpi import MPIComm, needs_yielding
from mpistrat.config import YIELD_VARIABLE, is_yielding
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.threads import block_signals
from mpistrat.lockstep.ending import abort
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.shm.nodes import Nodes, find_nodes
from mpistrat.shm.segments import ResultPool
from mpistrat.watchdog.exchange import before_finalize, threads_allowed


@final
class Transfer:
    """What the thread does for one call.

    Attributes:
      number: How many were begun before, and one.
      work: What it does.
      end_event: Is set when that is over.
      error: What it has raised, if it has.
    """

    def __init__(self, number: int, work: Callable[[], None]):
        """Do nothing yet."""
        self.number, self.work = number, work
        self.end_event = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        """Wait until it is over, and raise what it has raised."""
        self.end_event.wait()
        if self.error is not None:
            raise self.error


@final
class Transfers:
    """The queue of a thread that lives as long as there is something in it.

    So none is left at rest: a program that forks between its calls, or ends, has no thread to think
    of but one that is at work.

    Args:
      failed: Is called in the thread with what a transfer has raised.
    """

    name = "mpistrat overlap"

    def __init__(self, failed: Callable[[Exception], None]):
        """Begin nothing yet."""
        self._failed, self._pid = failed, os.getpid()
        self.count = 0  # of those that have begun
        # What nobody can wait for any more, and is over, goes by itself.
        self._open: WeakValueDictionary[int, Transfer] = WeakValueDictionary()
        self._todo: list[Transfer] = []
        self._lock = threading.Lock()
        self._running = False

    @property
    def oldest(self) -> int:
        """The number of the first that some part of the program may still want; else the next."""
        return min((transfer.number for transfer in self._living()), default=self.count + 1)

    def _living(self) -> list[Transfer]:
        # A copy is taken first: in the thread another one may go at any time.
        return [transfer for ref in self._open.valuerefs() if (transfer := ref()) is not None]

    def begin(self, work: Callable[[], None]) -> Transfer:
        """Queue this for the thread, behind all that came before."""
        self.count += 1
        self._open[self.count] = transfer = Transfer(self.count, work)
        with self._lock:
            self._todo.append(transfer)
            begins, self._running = not self._running, True
        if begins:
            try:
                threading.Thread(target=self._run_in_thread, name=self.name, daemon=True).start()
            except RuntimeError:  # no thread can be started any more: the results are the same
                self._run()
        return transfer

    def done(self, transfer: Transfer) -> None:
        """Note that the program has what it wanted of a transfer."""
        self._open.pop(transfer.number, None)

    def drain(self) -> None:
        """Return when nothing moves any more: memory may go then, and MPI be finalized."""
        if os.getpid() == self._pid:  # a child has none of its parent's threads
            for transfer in self._living():
                transfer.end_event.wait()

    def _run_in_thread(self) -> None:
        block_signals()
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
                transfer.end_event.set()


# Unused buffers; a program has few kinds of calls that overlap at once.
_ROOMS = 8
_NO_THREADS, _NO_YIELDING, _ABLE = range(3)
_REASONS = {
    _NO_THREADS: "MPI was started without THREAD_MULTIPLE",
    _NO_YIELDING: "Open MPI takes the time of the computation while it waits, unless it is started "
    f"with {YIELD_VARIABLE}=1, as `mpistrat run` does",
}

# What waits for a transfer, and gives the results.
Wait = Callable[[], list[Array]]
# Given scales, and the number of the first transfer that some rank has not waited for: begins one,
# or returns None for lack of memory.
Begin = Callable[[Scales, int], Wait | None]


@final
class Overlap:
    """The transfers of one session that continue beside the program.

    Args:
      lockstep: Whose calls they are.
    """

    def __init__(self, lockstep: Lockstep):
        """Begin nothing yet."""
        self._lockstep = lockstep
        self._can_overlap: bool | None = None
        self._own_nodes: Nodes | None = None
        self._node_comm: Comm | None = None
        self._lane: Comm | None = None
        self._transfers = Transfers(self._failed)
        self._rooms: dict[tuple[Bucket, ...], list[tuple[int, list[Array]]]] = {}
        self._closes: Callable[[], None] | None = None

    @staticmethod
    def lookup_overlap(reducer: Reducer) -> Overlap:
        """Return the transfers of the session, in the order of these ranks."""
        lockstep = reducer.lockstep
        return lockstep.shared("overlap", lambda: Overlap(lockstep))

    def start(self, reducer: Reducer, plan: ReductionPlan, inputs: ReductionInputs) -> Wait | None:
        """Begin an all-reduce, and return what waits for it. Collective.

        Args:
          reducer: The ranks; of this session, and this order.
          plan: The plan; equal on all ranks.
          inputs: The leaves, their weights, and where the results go.

        Returns:
          None, on all ranks, if it cannot overlap; then nothing has been done.
        """
        lockstep, node = reducer.lockstep, reducer.node
        rides = lockstep.fits(8 + plan.nbytes)
        if rides or not node.possible or not self._able(lockstep, node, plan.text):
            return None
        values, weights, outs, _, alarm = inputs
        reducer.pool.turn()
        with np.errstate(all="ignore"):
            try:
                node.arena.check_not_moving(plan.text, [*values, *(outs or ())])
                suffix, begin = self._prepared(node, plan, values, weights, outs)
                oldest = self._transfers.oldest
            except Exception as error:
                lockstep.refuse(plan.text, error)
            payload = plan.pack_weights(weights) + struct.pack("<Q", oldest)
            text = plan.text + suffix + reducer.said
            scales, rows = reducer.handshake(plan, text, payload, alarm=alarm)
            oldest_of_all = int(rows[:, -8:].copy().view(np.uint64).min())
            try:
                wait = begin(scales, oldest_of_all)
            except BaseException as error:
                abort(lockstep, plan.text, error)
        if wait is None:  # on all ranks
            self._can_overlap = False
            node.warn("all_reduce_start", "all is done at once")
            return None
        return functools.partial(self._put, wait, outs)

    def _put(self, wait: Wait, outs: Sequence[Array] | None) -> list[Array]:
        with np.errstate(all="ignore"):
            results = put(wait(), outs)
        moved = self._lockstep.hooks.on_moved
        if moved is not None:
            moved(results)
        return results

    def _able(self, lockstep: Lockstep, node: NodeReducer, call: str) -> bool:
        """Tell whether calls may overlap; if not, it is said why, where something can be done.

        Collective the first time; equal on all ranks.
        """
        if self._can_overlap is None:
            lockstep.handshake(f"{call}, the first that may overlap")
            self._can_overlap = node.arena.nodes().node_count > 1 and self._agree_on_ability()
            if self._can_overlap:
                self._open_communicators()
        return self._can_overlap

    def _agree_on_ability(self) -> bool:
        on_mpi = isinstance(self._lockstep.session.comm, MPIComm)
        ability = _ABLE
        if on_mpi and not threads_allowed():
            ability = _NO_THREADS
        elif on_mpi and needs_yielding() and not is_yielding():
            ability = _NO_YIELDING
        reason = _REASONS.get(self._lockstep.comm.reduce_integer(ability, "MIN"))
        if reason is not None:
            text = f"all_reduce_start: all is done at once. {reason}. The results are the same."
            warn(self._lockstep, "all_reduce_start", text, RuntimeWarning, stacklevel=3)
        return reason is None

    def _open_communicators(self) -> None:
        # The board is told of what the program's thread does, not of this one's.
        session, order = self._lockstep.session, self._lockstep.order
        comm = session.comm if order is None else OrderedComm(session.comm, order)
        nodes = self._own_nodes = find_nodes(comm, self._lockstep.options.ranks_per_node)
        self._node_comm, self._lane = _patient(nodes.node), nodes.peers and _patient(nodes.peers)
        if isinstance(session.comm, MPIComm):
            atexit.register(self._transfers.drain)
            self._closes = before_finalize(self._transfers.drain)

    def _prepared(
        self,
        node: NodeReducer,
        plan: ReductionPlan,
        values: Sequence[Array],
        weights: Sequence[float],
        outs: Sequence[Array] | None,
    ) -> tuple[str, Begin]:
        """Do what can fail; return what the text says more, and what begins. Not collective."""
        same = outs is not None and all(map(operator.is_, values, outs))
        homes = node.homes(plan, values) if same and plan.is_worth_a_place else None
        node.compile(plan, inside=homes is not None)
        if homes is not None:
            where = placed(homes)
            return where.suffix, self._placed(node, plan.op, where, list(values))
        return "", self._packed(node, plan, plan.leaves_to_copy(values, weights), outs)

    def _placed(
        self, node: NodeReducer, op: ReduceOp, placed: Placed, leaves: list[Array]
    ) -> Begin:
        """Return what begins to reduce arrays of the arena where they lie."""

        def begin(scales: Scales, oldest: int) -> Wait:
            transfer = self._begin(node, op, placed.parts(scales), spread=True)
            return lambda: self._wait(transfer, lambda: leaves)

        return begin

    def _packed(
        self,
        node: NodeReducer,
        plan: ReductionPlan,
        values: Sequence[Array],
        outs: Sequence[Array] | None,
    ) -> Begin:
        """Return a function that copies values, and begins to reduce the copies."""
        results = results_for(plan, values, outs, self._lockstep.session.get_instance(ResultPool))

        def begin(scales: Scales, oldest: int) -> Wait | None:
            rooms = self._room(node, plan.buckets, oldest)
            if rooms is None:
                return None
            node_comm = node.arena.nodes().node
            for bucket, rows in zip(plan.buckets, rooms, strict=True):
                fill(bucket, values, rows[node_comm.rank])
            if node_comm.size > 1:
                node_comm.barrier()
            pairs = zip(plan.buckets, rooms, strict=True)
            parts = [(rows, segments_of(bucket, scales)) for bucket, rows in pairs]
            transfer = self._begin(node, plan.op, parts, spread=False)

            def take() -> list[Array]:
                for number, rows in enumerate(rooms):
                    results.take(number, rows[0])
                return results.arrays

            return lambda: self._wait(transfer, take)

        return begin

    def _room(
        self, node: NodeReducer, buckets: tuple[Bucket, ...], oldest: int
    ) -> list[Array] | None:
        """Return rows for these packs that no rank reads any more. Collective."""
        rooms = self._rooms.pop(buckets, [])
        number = self._transfers.count + 1
        free = next((i for i, (user, _) in enumerate(rooms) if user < oldest), None)
        if free is not None:
            free_rows: list[Array] | None = rooms.pop(free)[1]
        else:
            free_rows = node.arena.rows([(bucket.dtype, bucket.columns) for bucket in buckets])
        if free_rows is not None:
            rooms.append((number, free_rows))
        if rooms:
            self._rooms[buckets] = rooms  # the last: those of others go first
        idle = [
            key
            for key, other_rooms in self._rooms.items()
            if all(u < oldest for u, _ in other_rooms)
        ]
        for key in idle[:-_ROOMS]:
            del self._rooms[key]
        return free_rows

    def _begin(self, node: NodeReducer, op: ReduceOp, parts: list[Part], spread: bool) -> Transfer:
        with node.moving():
            for rows, ranges in parts:
                node.reduce_inside(op, rows, rows[:1], rows.shape[1], ranges)
        lane = None if self._lane is None else node.create_lane(self._lane)
        return self._transfers.begin(functools.partial(self._move, op, parts, spread, lane))

    def _failed(self, error: Exception) -> None:
        try:
            abort(self._lockstep, "all_reduce_start, between its start and its wait", error)
        except Exception:  # threads of one process: those that wait for this one are told
            for comm in (self._node_comm, self._lane):
                if comm is not None:
                    comm.free()

    def _move(self, op: ReduceOp, parts: list[Part], spread: bool, lane: Lane | None) -> None:
        """Reduce what the nodes have, and let all of the node see it. In the thread."""
        nodes, node_comm = self._own_nodes, self._node_comm
        assert nodes is not None
        assert node_comm is not None
        all_rows = [(rows, rows[: None if spread else 1], rows.shape[1], r) for rows, r in parts]
        reduce_outside(nodes._replace(node=node_comm), lane, op, all_rows)
        if node_comm.size > 1:
            node_comm.barrier()

    def _wait(self, transfer: Transfer, take: Wait) -> list[Array]:
        transfer.wait()
        results = take()
        self._transfers.done(transfer)
        return results

    def free(self) -> None:
        """Free the communicators, when nothing moves any more. Collective."""
        self._transfers.drain()
        atexit.unregister(self._transfers.drain)
        if self._closes is not None:
            self._closes()
        if self._own_nodes is not None:
            self._own_nodes.free()
        self._own_nodes = self._node_comm = self._lane = None


def _patient(comm: Comm) -> Comm:
    return comm.make_interruptible() if isinstance(comm, MPIComm) else comm
