"""All-reduces that continue between the nodes while the program computes.

An all-reduce has two parts. The program's thread makes the handshake, and reduces the values of its
node into the first row of a matrix: a block of `Strategy.buffers`, or rows that only this call
uses. It uses the buckets of the blocking call, so the bits are the same. A second thread does the
rest, on separate communicators: a barrier of the node, the exchange between nodes, a barrier, and,
in place, a copy of each rank's slice to all rows. The wait function waits for this rank's thread
and copies the result out.

The thread transfers in the order in which the calls began, whatever the program waits for first,
and it only needs the other ranks to have begun the same call. So handles may be waited for in any
order, and a transfer whose call was checked completes even if the program fails.

An error in the thread ends the job, as after any handshake; between threads of one process the wait
function raises it. At exit, and before MPI is finalized or a communicator is freed, running
transfers are waited for.

Each handshake carries the number of the oldest call that a rank has not waited for. Rows of calls
before the smallest of these numbers are reused; if there are none, the ranks make more,
collectively.

The thread tests a request, and sleeps between two tests. A thread that waits
inside MPI would poll, and take half of the computation's time where all cores are in use (16.8 MB
over 1 Gbit/s, 148 ms: 25 ms of a core with sleeping and MPICH, 42 and more with polling; 28 and 109
with Open MPI). Non-blocking all-reduces gave the bits of blocking ones in all cases that were
tried, except with Open MPI on more than two ranks; there the thread uses blocking calls, and that
is why Open MPI has to yield.

The call is complete when it returns, and there is no transfer: on one node; with one rank; for
values that are sent with the handshake; for `IndexedSlices`; with a time limit, or a class of the
program that reduces; without shared memory; and where MPI has no threads, or Open MPI does not
yield. The ranks agree on the last at the first call, and there is one warning.
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
from mpistrat.collectives.inter_node import InterNodeGroup
from mpistrat.collectives.layout import (
    Bucket,
    InPlaceColumns,
    MatrixColumns,
    fill_bucket,
    find_in_place_columns,
    make_segments,
)
from mpistrat.collectives.node import NodeReducer, reduce_between_nodes
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import allocate_results, write_outs
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
from mpistrat.watchdog.exchange import call_before_finalize, has_thread_multiple


@final
class Transfer:
    """One call's part that the thread does.

    Attributes:
      number: The number of the transfer, from 1.
      run_transfer: The function that the thread calls.
      end_event: Is set when the function has ended.
      error: The exception that the function has raised, or None.
    """

    def __init__(self, number: int, run_transfer: Callable[[], None]):
        """Create a transfer that has not run yet."""
        self.number, self.run_transfer = number, run_transfer
        self.end_event = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        """Wait until the transfer has ended, and raise its exception if it has failed."""
        self.end_event.wait()
        if self.error is not None:
            raise self.error


@final
class Transfers:
    """The queue of a thread that lives as long as the queue has transfers.

    So there is no thread when a program forks or ends between calls. The thread blocks all signals.

    Args:
      handle_failure: Is called in the thread with the exception of a transfer.
    """

    name = "mpistrat overlap"

    def __init__(self, handle_failure: Callable[[Exception], None]):
        """Create an empty queue."""
        self._handle_failure, self._pid = handle_failure, os.getpid()
        self.count = 0  # of those that have begun
        # A transfer that has ended, and that the program has dropped, vanishes from here.
        self._open_transfers: WeakValueDictionary[int, Transfer] = WeakValueDictionary()
        self._queued_transfers: list[Transfer] = []
        self._lock = threading.Lock()
        self._is_running = False

    @property
    def oldest_number(self) -> int:
        """The smallest number of a transfer that is still wanted, or the next number."""
        return min((transfer.number for transfer in self._list_living()), default=self.count + 1)

    def _list_living(self) -> list[Transfer]:
        # `valuerefs` copies: another transfer may vanish at any time, in the thread.
        return [
            transfer for ref in self._open_transfers.valuerefs() if (transfer := ref()) is not None
        ]

    def begin_transfer(self, run_transfer: Callable[[], None]) -> Transfer:
        """Queue a transfer for the thread, behind all earlier ones, and return it."""
        self.count += 1
        self._open_transfers[self.count] = transfer = Transfer(self.count, run_transfer)
        with self._lock:
            self._queued_transfers.append(transfer)
            needs_thread, self._is_running = not self._is_running, True
        if needs_thread:
            try:
                threading.Thread(target=self._run_in_thread, name=self.name, daemon=True).start()
            except RuntimeError:  # no thread can be started any more: the results are the same
                self._run_queue()
        return transfer

    def forget_transfer(self, transfer: Transfer) -> None:
        """Forget a transfer whose results the program has."""
        self._open_transfers.pop(transfer.number, None)

    def drain(self) -> None:
        """Wait for all transfers: then memory may be freed, and MPI be finalized."""
        if os.getpid() == self._pid:  # a child has none of its parent's threads
            for transfer in self._list_living():
                transfer.end_event.wait()

    def _run_in_thread(self) -> None:
        block_signals()
        self._run_queue()

    def _run_queue(self) -> None:
        while True:
            with self._lock:
                if not self._queued_transfers:
                    self._is_running = False
                    return
                transfer = self._queued_transfers.pop(0)
            try:
                with np.errstate(all="ignore"):
                    transfer.run_transfer()
            except Exception as error:
                transfer.error = error
                self._handle_failure(error)
            finally:
                transfer.end_event.set()


# Unused buffers; a program has few kinds of calls that overlap at once.
_MAX_IDLE_BUFFERS = 8
_NO_THREADS, _NO_YIELDING, _ABLE = range(3)
_REASONS = {
    _NO_THREADS: "MPI was started without THREAD_MULTIPLE",
    _NO_YIELDING: "Open MPI takes the time of the computation while it waits, unless it is started "
    f"with {YIELD_VARIABLE}=1, as `mpistrat run` does",
}

# Waits for a transfer, and returns its results.
Wait = Callable[[], list[Array]]
# Begins a transfer, given the scales and the smallest number of a transfer that some rank has not
# waited for; returns its `Wait`, or None for lack of memory.
Begin = Callable[[Scales, int], Wait | None]


@final
class Overlap:
    """The transfers of one session that continue beside the program.

    Args:
      lockstep: The ranks, and their handshake.
    """

    def __init__(self, lockstep: Lockstep):
        """Create it without transfers."""
        self._lockstep = lockstep
        self._can_overlap: bool | None = None
        self._own_nodes: Nodes | None = None
        self._node_comm: Comm | None = None
        self._peer_comm: Comm | None = None
        self._transfers = Transfers(self._abort_on_failure)
        self._row_buffers: dict[tuple[Bucket, ...], list[tuple[int, list[Array]]]] = {}
        self._unregister_drain: Callable[[], None] | None = None

    @staticmethod
    def lookup_overlap(reducer: Reducer) -> Overlap:
        """Return the transfers of the session, in the order of these ranks."""
        lockstep = reducer.lockstep
        return lockstep.get_shared("overlap", lambda: Overlap(lockstep))

    def start(self, reducer: Reducer, plan: ReductionPlan, inputs: ReductionInputs) -> Wait | None:
        """Begin an all-reduce. Collective.

        Args:
          reducer: The ranks; of this session, and this order.
          plan: The plan; equal on all ranks.
          inputs: The leaves, their weights, and the arrays for the results.

        Returns:
          A function that waits for the all-reduce and returns its results. None, on all ranks, if
          the call cannot overlap; then nothing has been done.
        """
        lockstep, node = reducer.lockstep, reducer.node
        is_sent_with_handshake = lockstep.can_carry(8 + plan.nbytes)
        if (
            is_sent_with_handshake
            or not node.can_share_memory
            or not self._check_ability(lockstep, node, plan.text)
        ):
            return None
        values, weights, outs, _, alarm = inputs
        reducer.pool.turn()
        with np.errstate(all="ignore"):
            try:
                node.arena.check_not_moving(plan.text, [*values, *(outs or ())])
                suffix, begin = self._prepare_transfer(node, plan, values, weights, outs)
                oldest_number = self._transfers.oldest_number
            except Exception as error:
                lockstep.fail_collectively(plan.text, error)
            payload = plan.pack_weights(weights) + struct.pack("<Q", oldest_number)
            text = plan.text + suffix + reducer.options_text
            scales, rows = reducer.handshake(plan, text, payload, alarm=alarm)
            smallest_oldest_number = int(rows[:, -8:].copy().view(np.uint64).min())
            try:
                wait = begin(scales, smallest_oldest_number)
            except BaseException as error:
                abort(lockstep, plan.text, error)
        if wait is None:  # on all ranks
            self._can_overlap = False
            node.warn_of_private_memory("all_reduce_start", "all is done at once")
            return None
        return functools.partial(self._write_results, wait, outs)

    def _write_results(self, wait: Wait, outs: Sequence[Array] | None) -> list[Array]:
        with np.errstate(all="ignore"):
            results = write_outs(wait(), outs)
        on_moved = self._lockstep.hooks.on_moved
        if on_moved is not None:
            on_moved(results)
        return results

    def _check_ability(self, lockstep: Lockstep, node: NodeReducer, call: str) -> bool:
        """Return whether calls may overlap; warn if not, and if the user can do something about it.

        Collective the first time; equal on all ranks.
        """
        if self._can_overlap is None:
            lockstep.handshake(f"{call}, the first that may overlap")
            self._can_overlap = node.arena.nodes().node_count > 1 and self._agree_on_ability()
            if self._can_overlap:
                self._open_communicators()
        return self._can_overlap

    def _agree_on_ability(self) -> bool:
        is_on_mpi = isinstance(self._lockstep.session.comm, MPIComm)
        ability = _ABLE
        if is_on_mpi and not has_thread_multiple():
            ability = _NO_THREADS
        elif is_on_mpi and needs_yielding() and not is_yielding():
            ability = _NO_YIELDING
        reason = _REASONS.get(self._lockstep.comm.reduce_integer(ability, "MIN"))
        if reason is not None:
            text = f"all_reduce_start: all is done at once. {reason}. The results are the same."
            warn(self._lockstep, "all_reduce_start", text, RuntimeWarning)
        return reason is None

    def _open_communicators(self) -> None:
        # The status board shows the program's thread, so these communicators do not write to it.
        session, order = self._lockstep.session, self._lockstep.order
        comm = session.comm if order is None else OrderedComm(session.comm, order)
        nodes = self._own_nodes = find_nodes(comm, self._lockstep.options.ranks_per_node)
        self._node_comm, self._peer_comm = (
            _make_patient(nodes.node),
            nodes.peers and _make_patient(nodes.peers),
        )
        if isinstance(session.comm, MPIComm):
            atexit.register(self._transfers.drain)
            self._unregister_drain = call_before_finalize(self._transfers.drain)

    def _prepare_transfer(
        self,
        node: NodeReducer,
        plan: ReductionPlan,
        values: Sequence[Array],
        weights: Sequence[float],
        outs: Sequence[Array] | None,
    ) -> tuple[str, Begin]:
        """Return the end of the call's text and the function that begins the transfer.

        Not collective; everything that can fail is done here.
        """
        is_in_place = outs is not None and all(map(operator.is_, values, outs))
        addresses = (
            node.lookup_addresses(plan, values)
            if is_in_place and plan.can_reduce_in_place
            else None
        )
        node.compile_loops(plan, is_in_place=addresses is not None)
        if addresses is not None:
            columns = find_in_place_columns(addresses)
            return columns.suffix, self._prepare_in_place(node, plan.op, columns, list(values))
        return "", self._prepare_copies(
            node, plan, plan.prepare_leaves_to_copy(values, weights), outs
        )

    def _prepare_in_place(
        self, node: NodeReducer, op: ReduceOp, columns: InPlaceColumns, leaves: list[Array]
    ) -> Begin:
        """Return a function that begins to reduce arrays of the arena in place."""

        def begin(scales: Scales, oldest_number: int) -> Wait:
            transfer = self._begin_transfer(
                node, op, columns.list_matrices(scales), should_spread=True
            )
            return lambda: self._wait_for_transfer(transfer, lambda: leaves)

        return begin

    def _prepare_copies(
        self,
        node: NodeReducer,
        plan: ReductionPlan,
        values: Sequence[Array],
        outs: Sequence[Array] | None,
    ) -> Begin:
        """Return a function that copies values, and begins to reduce the copies."""
        results = allocate_results(
            plan, values, outs, self._lockstep.session.get_instance(ResultPool)
        )

        def begin(scales: Scales, oldest_number: int) -> Wait | None:
            bucket_rows = self._reserve_rows(node, plan.buckets, oldest_number)
            if bucket_rows is None:
                return None
            node_comm = node.arena.nodes().node
            for bucket, rows in zip(plan.buckets, bucket_rows, strict=True):
                fill_bucket(bucket, values, rows[node_comm.rank])
            if node_comm.size > 1:
                node_comm.barrier()
            pairs = zip(plan.buckets, bucket_rows, strict=True)
            matrices = [(rows, make_segments(bucket, scales)) for bucket, rows in pairs]
            transfer = self._begin_transfer(node, plan.op, matrices, should_spread=False)

            def take_results() -> list[Array]:
                for number, rows in enumerate(bucket_rows):
                    results.copy_out(number, rows[0])
                return results.arrays

            return lambda: self._wait_for_transfer(transfer, take_results)

        return begin

    def _reserve_rows(
        self, node: NodeReducer, buckets: tuple[Bucket, ...], oldest_number: int
    ) -> list[Array] | None:
        """Return rows for these buckets that no rank reads any more, or None. Collective."""
        row_buffers = self._row_buffers.pop(buckets, [])
        number = self._transfers.count + 1
        free_index = next(
            (i for i, (user_number, _) in enumerate(row_buffers) if user_number < oldest_number),
            None,
        )
        if free_index is not None:
            free_rows: list[Array] | None = row_buffers.pop(free_index)[1]
        else:
            free_rows = node.arena.rows([(bucket.dtype, bucket.columns) for bucket in buckets])
        if free_rows is not None:
            row_buffers.append((number, free_rows))
        if row_buffers:
            self._row_buffers[buckets] = row_buffers  # the last: older ones are deleted first
        idle_keys = [
            key
            for key, other_buffers in self._row_buffers.items()
            if all(user_number < oldest_number for user_number, _ in other_buffers)
        ]
        for key in idle_keys[:-_MAX_IDLE_BUFFERS]:
            del self._row_buffers[key]
        return free_rows

    def _begin_transfer(
        self, node: NodeReducer, op: ReduceOp, matrices: list[MatrixColumns], should_spread: bool
    ) -> Transfer:
        with node.begin_data_movement():
            for rows, ranges in matrices:
                node.reduce_within_node(op, rows, rows[:1], rows.shape[1], ranges)
        peers = None if self._peer_comm is None else node.create_inter_node_group(self._peer_comm)
        return self._transfers.begin_transfer(
            functools.partial(self._move_between_nodes, op, matrices, should_spread, peers)
        )

    def _abort_on_failure(self, error: Exception) -> None:
        try:
            abort(self._lockstep, "all_reduce_start, between its start and its wait", error)
        except Exception:  # ranks are threads of one process: wake those that wait for this one
            for comm in (self._node_comm, self._peer_comm):
                if comm is not None:
                    comm.free()

    def _move_between_nodes(
        self,
        op: ReduceOp,
        matrices: list[MatrixColumns],
        should_spread: bool,
        peers: InterNodeGroup | None,
    ) -> None:
        """Reduce the nodes' sums, and write the results for the whole node. In the thread."""
        nodes, node_comm = self._own_nodes, self._node_comm
        assert nodes is not None
        assert node_comm is not None
        all_rows = [
            (rows, rows[: None if should_spread else 1], rows.shape[1], r) for rows, r in matrices
        ]
        reduce_between_nodes(nodes._replace(node=node_comm), peers, op, all_rows)
        if node_comm.size > 1:
            node_comm.barrier()

    def _wait_for_transfer(self, transfer: Transfer, take_results: Wait) -> list[Array]:
        transfer.wait()
        results = take_results()
        self._transfers.forget_transfer(transfer)
        return results

    def free(self) -> None:
        """Free the communicators, after all transfers have ended. Collective."""
        self._transfers.drain()
        atexit.unregister(self._transfers.drain)
        if self._unregister_drain is not None:
            self._unregister_drain()
        if self._own_nodes is not None:
            self._own_nodes.free()
        self._own_nodes = self._node_comm = self._peer_comm = None


def _make_patient(comm: Comm) -> Comm:
    return comm.make_interruptible() if isinstance(comm, MPIComm) else comm
