"""The watchdog of a process, and `WatchedBoard`, the interface of this room.

`Watchdog` is a thread in every process. It keeps the slot of its own rank up to date; on the first
process of a node that still runs Python it also watches all slots of the node.

`Departure` is the wait of a rank that leaves before the others. MPI libraries poll while they wait,
and MPICH lets no rank leave before the last one has come. A rank that is done an hour before the
others, such as one of a finished trial of a sweep, would burn a core for that hour. So it sleeps,
looks at the board now and then, and enters MPI only when all ranks have come to leave, or when one
is inside of a call of the same communicator and must hear that this rank leaves.

`WatchedBoard` is a status board that a watchdog reads: sessions of several ranks have one.
"""

from __future__ import annotations

import atexit
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.mpi import MPIComm, abort
from mpistrat.comm.session import StatusBoard
from mpistrat.shm.nodes import Nodes, find_nodes
from mpistrat.shm.segments import shared_memory
from mpistrat.watchdog.exchange import (
    Mailbox,
    StatusExchange,
    begin_barrier,
    call_before_finalize,
    has_thread_multiple,
)
from mpistrat.watchdog.observer import HUNG, Limits, Observer
from mpistrat.watchdog.processes import ComputeTracker, LauncherProcesses, ReadProcess, read_process
from mpistrat.watchdog.status_board import (
    BETWEEN_CALLS,
    IN_CALL,
    IN_OTHER_CALL,
    LEAVING,
    LEFT,
    NOT_RUNNING_PYTHON,
    SECOND_NS,
    TROUBLES,
    NodeBoard,
    OtherCalls,
    Reporter,
    Slot,
    SlotEntry,
    make_call_key,
    node_board_nbytes,
    register_dump_signal,
    report_no_other_calls,
    say,
)
from mpistrat.watchdog.statuses import NodeLayout, StatusTable, map_activities

ORPHANED = 76  # the launcher is gone

_IS_STAYING = map_activities("".join((IN_OTHER_CALL, *TROUBLES)))
_NEWS_INTERVALS = 2  # intervals between messages in which all nodes hear of a decision
_CLOSING_SECONDS = 0.01  # seconds between two looks while the last messages are exchanged


@final
@dataclass(eq=False)
class Watchdog:
    """Reports the state of this rank, and watches the others, from a thread that mostly sleeps.

    Attributes:
      index: The number of this rank on its node.
      reporter: Writes this rank's slot.
      observer: Reads all slots of the node. Every process has one, and the first process of the
        node that runs Python uses it.
      exchange: Exchanges statuses with the other nodes; None where there are none, and on a process
        that is not the first of its node.
      launcher: The launchers of this process, or None if it may live on without them.
      clock: Returns the time in ns, monotonic.
      exit_process: Ends this process at once with an exit code.
      send_signal: Sends a signal to a process.
    """

    index: int
    reporter: Reporter
    observer: Observer
    exchange: StatusExchange | None = None
    launcher: LauncherProcesses | None = None
    clock: Callable[[], int] = time.monotonic_ns
    exit_process: Callable[[int], None] = os._exit
    send_signal: Callable[[int, int], None] = os.kill

    def __post_init__(self) -> None:
        """Create the state of a watchdog that does not run yet."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_look_ns = self._last_tick_ns = self.clock()
        self._resumed_ns = self._last_progress_ns = 0
        self._statuses = StatusTable.create(self.observer.layout)
        self._end_ns = math.inf  # when the job ends, once that is announced
        self._has_failed = False

    def start(self) -> None:
        """Watch from now on."""
        self._thread = threading.Thread(target=self._run, name="mpistrat watchdog", daemon=True)
        self._thread.start()

    def stop(self, patience: float) -> bool:
        """Stop watching. The thread is then outside MPI and will not enter it again.

        Args:
          patience: Seconds to wait for the last messages of other nodes.

        Returns:
          Whether the thread has ended; if not, MPI must not be finalized.
        """
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(self.observer.limits.tick):
            try:
                self.tick()
            except Exception as error:
                # The program continues; a watchdog that dies silently would be worse than none.
                if not self._has_failed:
                    self._has_failed = True
                    say(f"mpistrat: the watchdog failed (reported once): {error!r}")
                    traceback.print_exception(error, file=sys.__stderr__)
        if self._end_ns < math.inf:
            self.observer.end_job(HUNG)
        while self.exchange is not None and not self.exchange.is_finished:
            self.exchange.exchange_statuses(
                self.clock() / SECOND_NS, self._statuses, is_closing=True
            )
            time.sleep(_CLOSING_SECONDS)

    def tick(self) -> None:
        """Report the state of this rank, and watch the others if that is due."""
        now_ns = self.clock()
        if self.launcher is not None and self.launcher.is_any_gone():
            self._end_orphans(now_ns)
            return
        if now_ns >= self._end_ns:
            self.observer.end_job(HUNG)
        if now_ns - self._last_tick_ns > self.observer.limits.stale * SECOND_NS:
            # This process stood still, so perhaps all did (SLURM suspends jobs): wait again.
            self._resumed_ns = now_ns
        self._last_tick_ns = now_ns
        node_board = self.observer.node_board
        self.reporter.report(now_ns, node_board.take_stack_request(self.index))
        if self.exchange is not None:
            self._exchange_statuses(self.exchange, now_ns / SECOND_NS)
        seconds = (now_ns - self._last_look_ns) / SECOND_NS
        is_due = self._end_ns == math.inf and seconds >= self.observer.limits.interval
        if is_due and self._is_acting_process(now_ns):
            self._last_look_ns = now_ns
            self._watch(now_ns)

    def _is_acting_process(self, now_ns: int) -> bool:
        """Tell whether no process before this one on its node runs Python."""
        oldest = now_ns - self.observer.limits.stale * SECOND_NS
        node_board = self.observer.node_board
        return all(node_board.read_heartbeat(index) < oldest for index in range(self.index))

    def _exchange_statuses(self, exchange: StatusExchange, seconds: float) -> None:
        exchange.exchange_statuses(seconds, self._statuses, is_closing=False)
        if not exchange.is_leading and not exchange.is_cut_off(seconds):
            self.observer.follow(exchange.verdict, self._statuses.rows)

    def _watch(self, now_ns: int) -> None:
        self._statuses = table = self.observer.read_statuses(now_ns)
        exchange, seconds = self.exchange, now_ns / SECOND_NS
        if exchange is None:
            self._limit_ages(now_ns, table.rows)
            if self.observer.react(table, slice(None)).is_ending:
                self._end_ns = now_ns
            return
        if exchange.is_leading or exchange.is_cut_off(seconds):
            table = exchange.merge_statuses(seconds, table)
            summaries = table.summarize_other_nodes()
            self._limit_ages(now_ns, table.rows)
            verdict = self.observer.react(table, exchange.own_rows)
            if verdict.is_ending:
                self._end_ns = now_ns
            if exchange.is_leading:
                exchange.record_decisions(verdict, summaries)
                self._await_stacks(table.rows["activity"][verdict.is_named])
        self._record_other_nodes(now_ns, *exchange.read_other_nodes(seconds))

    def _await_stacks(self, named_activities: Array) -> None:
        """Put off the end until another node has heard of it, and made a rank print its stacks.

        That rank may wake and go on; the job ends all the same.
        """
        if (named_activities == ord(NOT_RUNNING_PYTHON)).any():
            self._end_ns += _NEWS_INTERVALS * self.observer.limits.interval * SECOND_NS

    def _limit_ages(self, now_ns: int, rows: Array) -> None:
        """Count waits on other communicators from the last progress, and all from a suspension."""
        state, activity, age = rows["state"], rows["activity"], rows["age"]
        if self._resumed_ns:
            np.minimum(age, (now_ns - self._resumed_ns) / SECOND_NS, out=age)
        is_between = state == BETWEEN_CALLS
        min_age = max(0.0, age[is_between & ~_IS_STAYING[activity]].min(initial=np.inf))
        if min_age < np.inf:
            progress_ns = now_ns - int(min_age * SECOND_NS)
            self._last_progress_ns = max(self._last_progress_ns, progress_ns)
        if not (state == IN_CALL).any():
            # Nobody waits for a call of those that go on, such as a trial: only for their end.
            np.minimum(age, rows["stack_age"], out=age, where=is_between)
        max_age = (now_ns - self._last_progress_ns) / SECOND_NS
        np.minimum(age, max_age, out=age, where=activity == ord(IN_OTHER_CALL))

    def _record_other_nodes(self, now_ns: int, inside_key: int, *ages: float) -> None:
        """Write down, for ranks of this node that wait to leave, what the other nodes do."""
        # When one of them moved, went on in its Python code, and computed; 0 for never.
        moved_ns, stack_changed_ns, computed_ns = [
            0 if age == np.inf else max(0, now_ns - int(age * SECOND_NS)) for age in ages
        ]
        self.observer.node_board.write_other_nodes(inside_key, moved_ns)
        self.observer.node_board.write_life_signs(stack_changed_ns, computed_ns)

    def _end_orphans(self, now_ns: int) -> None:
        """End this process, and those of the node that are stopped and cannot do it themselves."""
        say("mpistrat: the launcher of this job is gone; this rank exits.")
        for pid in self.observer.find_stuck_pids(now_ns):
            with suppress(OSError):
                self.send_signal(pid, signal.SIGKILL)
        self.exit_process(ORPHANED)


_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 0.0002, 0.02  # seconds between two looks


@final
class Departure:
    """The wait of a rank that has come to leave for the others.

    Args:
      node_board: The status board of its node.
      size: How many ranks there are on all nodes.
      start_waiting: Begins to wait for the other nodes, once all ranks of this one have come to
        leave, and returns a function that says whether they have; None where another rank of the
        node does that, or where there are no other nodes.
      read_process: Returns the state of a process.
      clock: Returns the time in ns, monotonic.
    """

    def __init__(
        self,
        node_board: NodeBoard,
        size: int,
        start_waiting: Callable[[], Callable[[], bool]] | None = None,
        read_process: ReadProcess = read_process,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        """Create the wait of a rank of `node_board`."""
        self._compute_tracker, self._clock = ComputeTracker(read_process), clock
        self._node_board, self._start_waiting = node_board, start_waiting
        self._is_only_node = node_board.size == size
        self._has_arrived: Callable[[], bool] | None = None

    def is_complete(self) -> bool:
        """Tell whether all ranks of the communicator have come to leave."""
        node_board = self._node_board
        if node_board.is_departure_complete:
            return True
        states = [node_board.read_key_and_state(index)[1] for index in range(node_board.size)]
        if any(state not in (LEAVING, LEFT) for state in states):
            return False
        if self._start_waiting is not None:
            self._has_arrived = self._has_arrived or self._start_waiting()
            if not self._has_arrived():
                return False
        elif not self._is_only_node:
            return False
        node_board.is_departure_complete = True
        return True

    def is_call_entered(self, key: int) -> bool:
        """Tell whether a rank is inside of the call `key`, or a later one."""
        node_board = self._node_board
        keys_and_states = (node_board.read_key_and_state(index) for index in range(node_board.size))
        return node_board.read_other_nodes()[0] >= key or any(
            state == IN_CALL and other_key >= key for other_key, state in keys_and_states
        )

    def wait(self, key: int, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Sleep until all ranks have come to leave, or one makes the call `key`.

        Returns:
          Whether all have come.
        """
        seconds = _MIN_SLEEP_SECONDS
        while not (is_departure_complete := self.is_complete()) and not self.is_call_entered(key):
            sleep(seconds)
            seconds = min(2 * seconds, _MAX_SLEEP_SECONDS)
        return is_departure_complete

    def last_move(self) -> int:
        """Return the last sign of life of the ranks that have not come to leave, monotonic ns.

        That is the latest of their last calls on any communicator, and of the ends of operations
        that they have declared. 0 if all have come.
        """
        times = [self._node_board.read_other_nodes()[1]]
        for entry in self._read_entries():
            if entry.state not in (LEAVING, LEFT):
                times += (
                    entry.changed_ns,
                    entry.other_call_ns,
                    entry.deadline,
                    entry.compiling_until_ns,
                )
        return max(times)

    def signs(self) -> tuple[int, int]:
        """Return signs of life of those ranks beside their calls, as `StatusBoard.signs`."""
        now_ns, life_signs = self._clock(), self._node_board.read_life_signs()
        stack_changed_ns, last_computing_ns = life_signs
        for entry in self._read_entries():
            if entry.state not in (LEAVING, LEFT):
                stack_changed_ns = max(stack_changed_ns, entry.stack_changed_ns)
                last_computing_ns = max(
                    last_computing_ns,
                    self._compute_tracker.find_last_computing(entry.pid, entry.start_ticks, now_ns),
                )
        return stack_changed_ns, last_computing_ns

    def has_groups(self) -> bool:
        """Tell whether a rank of this node has made calls on another communicator."""
        return any(entry.other_call_ns for entry in self._read_entries())

    def _read_entries(self) -> list[SlotEntry]:
        entries = map(self._node_board.read, range(self._node_board.size))
        return [entry for entry in entries if entry is not None]


_SECOND_NS = 1_000_000_000
_MAX_CLOSE_SECONDS = 5.0  # seconds that leaving waits for other nodes
_LAST_LOOK = 0.2  # seconds that a look of the watchdog takes at most


@final
class WatchedBoard(StatusBoard):
    """The state of this rank, written where the watchdogs of all ranks see it.

    `enter`, `resume` and `leave` take less than a microsecond each.

    Args:
      node_board: The board of the ranks of this node; None for memory of this process, which nobody
        reads.
      index: The number of this rank on that board.

    Example:
      >>> board = WatchedBoard()
      >>> board.enter(1, "barrier()")
      >>> board.leave()
      >>> with board.long_operation("evaluate", max_seconds=600):
      ...     pass
      >>> board.close()
      True
    """

    def __init__(self, node_board: NodeBoard | None = None, index: int = 0):
        """Create the board of one rank of a node."""
        super().__init__()
        self.node_board = node_board or NodeBoard(memoryview(bytearray(node_board_nbytes(1))), 1)
        self.slot: Slot = self.node_board.slot(index)
        self.enter = self.slot.enter
        self.resume = self.slot.resume
        self.leave = self.slot.leave
        self._watchdog: Watchdog | None = None
        self._nodes: Nodes | None = None
        self._leader_comm: Any = None
        self._can_finalize: bool | None = None
        self._departure: Departure | None = None
        self._close_early: Callable[[], None] | None = None

    @staticmethod
    def open(
        comm: MPIComm,
        limits: Limits,
        per_node: int,
        is_launched: bool = True,
        other_calls: OtherCalls = report_no_other_calls,
    ) -> WatchedBoard:
        """Open the board of a communicator and have it watched.

        Collective: over `comm`. Cost: two splits and a few small calls; then a thread that
        sleeps, and four times a second takes about 0.1 ms.

        Args:
          comm: The ranks. Watchdogs talk on communicators that are made from it.
          limits: How patient to be.
          per_node: Take so many consecutive ranks as one node; 0 to ask MPI who shares memory.
          is_launched: A launcher started this process, which is to end when that one is gone.
          other_calls: Returns what this process does on other communicators.
        """
        nodes = find_nodes(comm, per_node)
        node = cast(MPIComm, nodes.node).mpi
        size, index = node.size, node.rank
        memory = None
        if size > 1:
            memory = shared_memory(node.allgather, index == 0, node_board_nbytes(size), "board")
        is_shared = size == 1 or memory is not None
        if not is_shared:
            size, index = 1, 0
            _print_on_rank0(
                comm,
                "the ranks of a node cannot share memory, so the watchdog of each rank sees "
                "that rank only",
            )
        node_board = NodeBoard(memory or memoryview(bytearray(node_board_nbytes(size))), size)
        board = WatchedBoard(node_board, index)
        board._nodes = nodes
        if node.rank == 0 and nodes.peers is not None:
            board._leader_comm = cast(MPIComm, nodes.peers).mpi
        process = read_process(os.getpid())
        start_ticks = process.start_ticks if process else 0
        board.slot.open(comm.rank, os.getpid(), start_ticks, register_dump_signal())
        # Everybody's slot is open after this, which the observer relies on.
        node_ranks = tuple(node.allgather(comm.rank))
        watched_ranks = node_ranks if is_shared else (comm.rank,)
        board._start_watchdog(
            comm, limits, index, watched_ranks, other_calls, is_launched=is_launched
        )
        if is_shared:
            board._departure = board._create_departure(comm.size)
        return board

    def _start_watchdog(
        self,
        comm: MPIComm,
        limits: Limits,
        index: int,
        ranks: tuple[int, ...],
        other_calls: OtherCalls,
        *,
        is_launched: bool,
    ) -> None:
        host = platform.node()
        leader_comm, exchange = self._leader_comm, None
        if leader_comm is not None:
            layout = NodeLayout(leader_comm.allgather((host, ranks)))
            if has_thread_multiple():
                silence_seconds = max(3 * limits.interval, limits.stale)
                now_seconds = time.monotonic_ns() / SECOND_NS
                exchange = StatusExchange(
                    Mailbox(leader_comm), layout, limits.interval, silence_seconds, now_seconds
                )
            else:
                _print_on_rank0(
                    leader_comm,
                    "MPI has no THREAD_MULTIPLE, so the watchdog of each node sees that node only",
                )
        observer = Observer(self.node_board, comm.size, host, limits, say, end_stuck_job, os.kill)
        reporter = Reporter(self.slot, comm.rank, threading.get_ident(), other_calls=other_calls)
        launcher = LauncherProcesses(os.getpid(), os.getppid) if is_launched else None
        self._watchdog = Watchdog(index, reporter, observer, exchange, launcher)
        self._watchdog.start()
        # Runs before mpi4py's own hook, which finalizes MPI.
        atexit.register(self.close)
        self._close_early = call_before_finalize(self.close)

    def _create_departure(self, size: int) -> Departure | None:
        """Return the wait for the others to leave; None if not all of them can be seen."""
        if self.node_board.size == size:
            return Departure(self.node_board, size)
        if not has_thread_multiple():  # the nodes tell each other nothing
            return None
        leader_comm = self._leader_comm
        return Departure(
            self.node_board,
            size,
            None if leader_comm is None else lambda: begin_barrier(leader_comm),
        )

    @property
    def call(self) -> str:
        """The text of the call that this rank is inside of; empty if it is in none."""
        return self.slot.call_text if self.slot.word & 15 == IN_CALL else ""

    @property
    def deadline(self) -> int:
        """The end of the operation that this rank has declared, monotonic ns; 0 without one."""
        return self.slot.deadline

    def spent(self) -> tuple[float, float]:
        """Return seconds that this rank waited for others, and that it communicated, so far."""
        waited, communicated = self.slot.read_times_spent()
        return waited / SECOND_NS, communicated / SECOND_NS

    def await_departure(self, number: int, text: str) -> bool:
        """Sleep until all ranks have come to leave, or one makes a call; see `StatusBoard`."""
        self.slot.record_arrival(number, text)
        return self._departure is not None and self._departure.wait(make_call_key(number))

    def last_move(self) -> int:
        """Return when a rank that has not come to leave last did something; see `StatusBoard`."""
        return 0 if self._departure is None else self._departure.last_move()

    def signs(self) -> tuple[int, int]:
        """Return when their stacks last changed, and they computed; see `StatusBoard`."""
        return (0, 0) if self._departure is None else self._departure.signs()

    def has_groups(self) -> bool:
        """Tell whether ranks make calls on other communicators; see `StatusBoard`."""
        return self._departure is not None and self._departure.has_groups()

    @contextmanager
    def long_operation(self, name: str, max_seconds: float) -> Iterator[None]:
        """Declare that the body may keep other ranks waiting for up to `max_seconds`."""
        super().long_operation(name, max_seconds)
        previous_declaration = (self.slot.operation, self.slot.deadline)
        deadline = time.monotonic_ns() + int(min(max_seconds, 1e9) * SECOND_NS)
        self.slot.declare_operation(name, deadline)
        try:
            yield
        finally:
            self.slot.declare_operation(*previous_declaration)

    def allow(self, seconds: float | None) -> None:
        """Set how many seconds each following call may take; None for the default."""
        self.slot.patience = 0 if seconds is None else int(min(seconds, 1e9) * SECOND_NS)

    def stop_watching(self) -> None:
        """Never end the job from now on; see `StatusBoard`. The other ranks see no difference."""
        if self._watchdog is not None:
            self._watchdog.stop(_LAST_LOOK)

    def close(self) -> bool:
        """Say that this rank has left, and stop the watchdog; call it before MPI is finalized.

        It waits up to 5 s for the watchdogs of other nodes if they are not leaving too.

        Returns:
          Whether MPI may be finalized: no thread is or will be inside it.
        """
        if self._can_finalize is None:
            self.slot.close()
            self._can_finalize = self._watchdog is None or self._watchdog.stop(_MAX_CLOSE_SECONDS)
            # The reference would keep alive the board of a session that was given up.
            atexit.unregister(self.close)
        return self._can_finalize

    def free(self) -> None:
        """Close, and give the communicators back. Collective."""
        if self._close_early is not None:
            self._close_early()
            self._close_early = None
        if self.close() and self._nodes is not None:
            self._nodes.free()
            self._nodes = None


def _print_on_rank0(comm: Any, text: str) -> None:
    if comm.rank == 0:
        say(f"mpistrat: {text}.")


def end_stuck_job(code: int) -> None:
    """End the job; where MPI cannot, end this process, which the launcher sees."""
    # Time for the stacks that were asked for; then MPI, which may itself be stuck.
    time.sleep(0.3)
    fallback = threading.Timer(2.0, os._exit, (code,))
    fallback.daemon = True
    try:
        fallback.start()
    except RuntimeError:  # no thread can be started any more, and MPI may be stuck
        os._exit(code)
    if has_thread_multiple():
        with suppress(RuntimeError):
            abort(code)
    os._exit(code)
