"""The interface of this package: publish the state of this rank, and have it watched."""

from __future__ import annotations

import atexit
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast, final

from mpistrat.arena.nodes import Nodes, find_nodes
from mpistrat.board.departure import Departure
from mpistrat.board.link import Link
from mpistrat.board.observer import Limits, Observer
from mpistrat.board.page import BETWEEN, INSIDE, Page, Slot, key_of, page_bytes
from mpistrat.board.proc import Parents, look
from mpistrat.board.reporter import Others, Reporter, dump_signal, nothing_else, say
from mpistrat.board.status import Status
from mpistrat.board.watchdog import Watchdog
from mpistrat.comm.mpi import MPIComm, abort
from mpistrat.comm.nodes import Mailbox, arrival, before_finalize, threads_allowed
from mpistrat.comm.session import StatusBoard
from mpistrat.sharedmem.shared import shared_memory

_SECOND = 1_000_000_000
_CLOSE = 5.0  # seconds that leaving waits for other nodes
_LAST_LOOK = 0.2  # seconds that a look of the watchdog takes at most


@final
class Board(StatusBoard):
    """Where this rank is, for the other ranks to see.

    `enter`, `resume` and `leave` take less than a microsecond each.

    Args:
      page: The page of the ranks of this node; None for memory of this process, which nobody reads.
      index: The number of this rank on the page.

    Example:
      >>> board = Board()
      >>> board.enter(1, "barrier()")
      >>> board.leave()
      >>> with board.long_operation("evaluate", max_seconds=600):
      ...     pass
      >>> board.close()
      True
    """

    def __init__(self, page: Page | None = None, index: int = 0):
        """Create a board on a page."""
        super().__init__()
        self.page = page or Page(memoryview(bytearray(page_bytes(1))), 1)
        self.slot: Slot = self.page.slot(index)
        self.enter = self.slot.enter
        self.resume = self.slot.resume
        self.leave = self.slot.leave
        self._watchdog: Watchdog | None = None
        self._nodes: Nodes | None = None
        self._leaders: Any = None
        self._ended: bool | None = None
        self._departure: Departure | None = None
        self._closes: Callable[[], None] | None = None

    @staticmethod
    def on(
        comm: MPIComm,
        limits: Limits,
        per_node: int,
        launched: bool = True,
        other_calls: Others = nothing_else,
    ) -> Board:
        """Open the board of a communicator and have it watched.

        Collective: over `comm`. Cost: two splits and a few small calls; then a thread that
        sleeps, and four times a second takes about 0.1 ms.

        Args:
          comm: The ranks. Watchdogs talk on communicators that are made from it.
          limits: How patient to be.
          per_node: Take so many consecutive ranks as one node; 0 to ask MPI who shares memory.
          launched: A launcher started this process, which is to end when that one is gone.
          other_calls: Returns what this process does on other communicators.
        """
        nodes = find_nodes(comm, per_node)
        node = cast(MPIComm, nodes.node).mpi
        size, index = node.size, node.rank
        memory = None
        if size > 1:
            memory = shared_memory(node.allgather, index == 0, page_bytes(size), "board")
        shared = size == 1 or memory is not None
        if not shared:
            size, index = 1, 0
            _once(
                comm,
                "the ranks of a node cannot share memory, so the watchdog of each rank sees "
                "that rank only",
            )
        page = Page(memory or memoryview(bytearray(page_bytes(size))), size)
        board = Board(page, index)
        board._nodes = nodes
        if node.rank == 0 and nodes.lane is not None:
            board._leaders = cast(MPIComm, nodes.lane).mpi
        process = look(os.getpid())
        board.slot.open(comm.rank, os.getpid(), process.born if process else 0, dump_signal())
        # Everybody's slot is open after this, which the observer relies on.
        node_ranks = tuple(node.allgather(comm.rank))
        watched_ranks = node_ranks if shared else (comm.rank,)
        board._watch(comm, limits, index, watched_ranks, launched, other_calls)
        if shared:
            board._departure = board._departing(comm.size)
        return board

    def _watch(
        self,
        comm: MPIComm,
        limits: Limits,
        index: int,
        ranks: tuple[int, ...],
        launched: bool,
        other_calls: Others,
    ) -> None:
        host = platform.node()
        leaders, home, link = self._leaders, 0, None
        if leaders is not None:
            home = leaders.rank
            hosts_and_ranks = leaders.allgather((host, ranks))
            if threads_allowed():
                rows = [
                    [Status(theirs, name, number, 0, BETWEEN, 0.0)]
                    for number, (name, theirs) in enumerate(hosts_and_ranks)
                ]
                silent = max(3 * limits.interval, limits.stale)
                now_seconds = time.monotonic_ns() / _SECOND
                link = Link(Mailbox(leaders), rows, limits.interval, silent, now_seconds)
            else:
                _once(
                    leaders,
                    "MPI has no THREAD_MULTIPLE, so the watchdog of each node sees that node only",
                )
        observer = Observer(self.page, comm.size, host, home, limits, say, end_stuck, os.kill)
        reporter = Reporter(self.slot, comm.rank, threading.get_ident(), others=other_calls)
        launcher = Parents(os.getpid(), os.getppid) if launched else None
        self._watchdog = Watchdog(index, reporter, observer, link, launcher)
        self._watchdog.start()
        # Runs before mpi4py's own hook, which finalizes MPI.
        atexit.register(self.close)
        self._closes = before_finalize(self.close)

    def _departing(self, size: int) -> Departure | None:
        """Return how to wait for the others to leave; None if not all of them can be seen."""
        if self.page.size == size:
            return Departure(self.page, size)
        if not threads_allowed():  # the nodes tell each other nothing
            return None
        leaders = self._leaders
        return Departure(self.page, size, None if leaders is None else lambda: arrival(leaders))

    @property
    def call(self) -> str:
        """The text of the call that this rank is inside of; empty if it is in none."""
        return self.slot.text if self.slot.word & 15 == INSIDE else ""

    @property
    def deadline(self) -> int:
        """The end of the operation that this rank has declared, monotonic ns; 0 without one."""
        return self.slot.deadline

    def spent(self) -> tuple[float, float]:
        """Return seconds that this rank waited for others, and that it communicated, so far."""
        waited, communicated = self.slot.spent()
        return waited / _SECOND, communicated / _SECOND

    def await_departure(self, number: int, text: str) -> bool:
        """Sleep until all ranks have come to leave, or one makes a call; see `StatusBoard`."""
        self.slot.arrive(number, text)
        return self._departure is not None and self._departure.wait(key_of(number))

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
        deadline = time.monotonic_ns() + int(min(max_seconds, 1e9) * _SECOND)
        self.slot.declare(name, deadline)
        try:
            yield
        finally:
            self.slot.declare(*previous_declaration)

    def allow(self, seconds: float | None) -> None:
        """Set how many seconds each following call may take; None for the default."""
        self.slot.patience = 0 if seconds is None else int(min(seconds, 1e9) * _SECOND)

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
        if self._ended is None:
            self.slot.close()
            self._ended = self._watchdog is None or self._watchdog.stop(_CLOSE)
            # A reference that would keep the page of a session alive that was given up.
            atexit.unregister(self.close)
        return self._ended

    def free(self) -> None:
        """Close, and give the communicators back. Collective."""
        if self._closes is not None:
            self._closes()
            self._closes = None
        if self.close() and self._nodes is not None:
            self._nodes.free()
            self._nodes = None


def _once(comm: Any, text: str) -> None:
    if comm.rank == 0:
        say(f"mpistrat: {text}.")


def end_stuck(code: int) -> None:
    """End the job; where MPI cannot, end this process, which the launcher sees."""
    # Time for the stacks that were asked for; then MPI, which may itself be stuck.
    time.sleep(0.3)
    fallback = threading.Timer(2.0, os._exit, (code,))
    fallback.daemon = True
    try:
        fallback.start()
    except RuntimeError:  # no thread can be started any more, and MPI may be stuck
        os._exit(code)
    if threads_allowed():
        with suppress(RuntimeError):
            abort(code)
    os._exit(code)
