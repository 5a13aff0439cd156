"""N ranks as threads of one process: the whole stack without MPI.

Plain ``pytest`` and a debugger work on it. It is made to be strict, not fast: every message is
copied, buffers that MPI would not take are refused, ranks that make different calls get an error,
and so does a rank that waits for one that has left.

With a seed, one rank runs at a time: at every call the seed says who continues, so what happens
between the ranks is a function of the seed alone, and can be played again.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, final

import numpy as np

from mpistrat.comm.base import Buffer, Comm
from mpistrat.shm.segments import Pages, shared_pages

_UFUNCS: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    # As MPI_MIN and MPI_MAX on both libraries: a NaN on one side is not seen reliably.
    "MIN": np.fmin,
    "MAX": np.fmax,
    "BOR": np.bitwise_or,
}


class Event(NamedTuple):
    """One entry of the trace of a schedule.

    Attributes:
      rank: The rank.
      action: ``begins``, ``leaves``, ``ends``, ``goes on``, or the call that it has come to.
    """

    rank: int
    action: str


@final
class _Schedule:
    """The schedule of a seeded world. Only the rank that has the turn touches it."""

    def __init__(self, size: int, seed: int, patience: float):
        self.seed = seed
        self.trace: list[Event] = []
        self.waiting: dict[int, tuple[int, str]] = {}
        self._patience = patience
        self._random = random.Random(seed)
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates:
            gate.acquire()
        self._ready_ranks = list(range(size))
        self._absent = size
        self._arrival = threading.Lock()
        self._deadlocked: dict[int, str] = {}
        self._turn_rank = -1

    def begin(self, rank: int) -> None:
        # The system decides the order in which threads start, so no rank runs before all are here.
        with self._arrival:
            self._absent -= 1
            last = not self._absent
        if last:
            self._gates[self._choose_rank()].release()
        self._await_turn(rank)
        self.trace.append(Event(rank, "begins"))

    def end(self, rank: int) -> None:
        if self._turn_rank != rank:  # it has waited for its turn without success
            return
        self.trace.append(Event(rank, "ends"))
        if self._ready_ranks or self.waiting:
            self._gates[self._choose_rank()].release()

    def switch_rank(self, rank: int) -> None:
        """Give the turn away until `rank`, which waits or is ready, is chosen."""
        chosen_rank = self._choose_rank()
        if chosen_rank != rank:
            self._gates[chosen_rank].release()
            self._await_turn(rank)
        self.trace.append(Event(rank, "continues"))
        deadlock = self._deadlocked.pop(rank, "")
        if deadlock:
            raise RuntimeError(f"rank {rank}: {deadlock}")

    def make_ready(self, *ranks: int) -> None:
        for rank in ranks:
            if self.waiting.pop(rank, None) is not None:
                self._ready_ranks.append(rank)

    def _choose_rank(self) -> int:
        if not self._ready_ranks:
            text = f"deadlock in the schedule of seed {self.seed}: {self._describe_waiting()}."
            self._deadlocked = dict.fromkeys(sorted(self.waiting), text)
            self.make_ready(*self._deadlocked)
        self._turn_rank = self._ready_ranks.pop(self._random.randrange(len(self._ready_ranks)))
        return self._turn_rank

    def check(self, rank: int) -> None:
        """Raise unless it is this rank's turn."""
        if self._turn_rank != rank:
            raise RuntimeError(f"rank {rank} called out of its turn in a seeded schedule.")

    def _describe_waiting(self) -> str:
        waiting_calls = sorted(self.waiting.items())
        return "; ".join(
            f"rank {rank} waits in {kind} no. {call_number}"
            for rank, (call_number, kind) in waiting_calls
        )

    def _await_turn(self, rank: int) -> None:
        if not self._gates[rank].acquire(timeout=self._patience):
            raise TimeoutError(
                f"rank {rank} did not get its turn within {self._patience:g} s in the schedule of "
                f"seed {self.seed}: the rank whose turn it is comes to no call. "
                f"{self._describe_waiting()}."
            )


@final
class LoopbackWorld:
    """The meeting place of `size` threads.

    Args:
      size: The number of ranks.
      patience: Seconds that a rank waits for the others before it raises TimeoutError.
      seed: Let one rank run at a time, in an order that is a function of this number and of the
        calls of the ranks. Each thread then says `begin` first and `end` last. None: all at once.
    """

    def __init__(self, size: int, patience: float = 60.0, seed: int | None = None):
        """Create a world in which no rank has arrived yet."""
        self.size = size
        self.patience = patience
        self._condition = threading.Condition()
        self._rounds: dict[int, dict[int, tuple[str, Any]]] = {}
        self._take_counts: dict[int, int] = {}
        self._left: set[int] = set()
        self._turns = None if seed is None else _Schedule(size, seed, patience)

    @property
    def is_seeded(self) -> bool:
        """Whether one rank runs at a time."""
        return self._turns is not None

    @property
    def trace(self) -> list[Event]:
        """The events so far, in order; empty without a seed."""
        return [] if self._turns is None else list(self._turns.trace)

    def begin(self, rank: int) -> None:
        """Wait until all ranks have begun, and for this one's first turn; nothing without a seed.

        Raises:
          TimeoutError: The turn did not come within `patience` seconds.
        """
        if self._turns is not None:
            self._turns.begin(rank)

    def end(self, rank: int) -> None:
        """Give the turn away for good; nothing without a seed."""
        if self._turns is not None:
            self._turns.end(rank)

    def leave(self, rank: int) -> None:
        """Note that `rank` will call nothing any more."""
        with self._condition:
            self._left.add(rank)
            self._condition.notify_all()
        if self._turns is not None:
            self._turns.trace.append(Event(rank, "leaves"))
            waiting = sorted(self._turns.waiting.items())
            stranded_ranks = [
                other
                for other, (call_number, _) in waiting
                if rank not in self._rounds[call_number]
            ]
            self._turns.make_ready(*stranded_ranks)

    def exchange(self, rank: int, number: int, kind: str, contribution: object) -> list[Any]:
        """Give `contribution`, wait for everybody's, and return all of them in rank order.

        Raises:
          RuntimeError: Another rank has left, or met for something else; with a seed, also if no
            rank can continue, on all that wait.
          TimeoutError: Another rank did not come within `patience` seconds.
        """
        gather = self._gather if self._turns is None else self._gather_in_turn
        arrived = gather(rank, number, kind, contribution)
        kinds = [arrived[r][0] for r in range(self.size)]
        if any(other != kind for other in kinds):
            raise RuntimeError(f"rank {rank} met in {kind}, but the ranks called {kinds}.")
        return [arrived[r][1] for r in range(self.size)]

    def _gather(
        self, rank: int, number: int, kind: str, contribution: object
    ) -> dict[int, tuple[str, Any]]:
        with self._condition:
            arrived = self._rounds.setdefault(number, {})
            arrived[rank] = (kind, contribution)
            if len(arrived) == self.size:  # whoever woke before would only wait again
                self._condition.notify_all()
            complete = self._condition.wait_for(
                lambda: len(arrived) == self.size or self._left - arrived.keys(), self.patience
            )
            if len(arrived) < self.size:
                reason = "have left" if complete else f"did not come within {self.patience:g} s"
                self._raise_missing(
                    rank, number, kind, reason, RuntimeError if complete else TimeoutError
                )
            self._count_take(number)
        return arrived

    def _gather_in_turn(
        self, rank: int, number: int, kind: str, contribution: object
    ) -> dict[int, tuple[str, Any]]:
        turns = self._turns
        assert turns is not None
        turns.check(rank)
        turns.trace.append(Event(rank, f"{kind} no. {number}"))
        arrived = self._rounds.setdefault(number, {})
        arrived[rank] = (kind, contribution)
        turns.waiting[rank] = (number, kind)
        if len(arrived) == self.size:
            turns.make_ready(*range(self.size))
        elif self._left - arrived.keys():
            turns.make_ready(rank)
        turns.switch_rank(rank)
        if len(arrived) < self.size:
            self._raise_missing(rank, number, kind, "have left", RuntimeError)
        self._count_take(number)
        return arrived

    def _raise_missing(
        self, rank: int, number: int, kind: str, reason: str, error_class: type[Exception]
    ) -> NoReturn:
        missing = sorted(set(range(self.size)) - self._rounds[number].keys())
        raise error_class(f"rank {rank} waits in {kind} no. {number}: ranks {missing} {reason}.")

    def _count_take(self, number: int) -> None:
        self._take_counts[number] = self._take_counts.get(number, 0) + 1
        if self._take_counts[number] == self.size:
            del self._rounds[number], self._take_counts[number]


@final
class LoopbackComm(Comm):
    """One rank of a `LoopbackWorld`; used by one thread.

    Example:
      >>> alone = LoopbackComm(LoopbackWorld(1), 0)
      >>> out = np.zeros(2)
      >>> alone.allreduce(np.ones(2), out, "SUM")
      >>> out
      array([1., 1.])
    """

    name = "loopback"

    def __init__(self, world: LoopbackWorld, rank: int):
        """Create the communicator of rank `rank` of `world`."""
        self.world = world
        self.rank = rank
        self.size = world.size
        self._number = 0

    def _exchange(self, kind: str, contribution: object, *buffers: Buffer | None) -> list[Any]:
        for b in buffers:
            if b is not None and not (
                b.flags.c_contiguous and b.flags.aligned and b.dtype.isnative
            ):
                raise ValueError(f"rank {self.rank}, {kind}: MPI does not take such a buffer.")
        self._number += 1
        return self.world.exchange(self.rank, self._number, kind, contribution)

    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put every rank's `send` into `recv`, in rank order."""
        contributions = self._exchange(
            f"allgather of {send.nbytes} bytes", send.tobytes(), send, recv
        )
        recv.reshape(-1).view(np.uint8)[:] = np.frombuffer(b"".join(contributions), np.uint8)

    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's bytes into `recv`, in rank order."""
        contributions = self._exchange(
            f"allgatherv of {list(counts)} bytes", send.tobytes(), send, recv
        )
        recv[:] = np.frombuffer(b"".join(contributions), np.uint8)

    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Reduce every rank's `send` into `recv`, in rank order."""
        kind = f"allreduce {op} of {send.dtype} {send.shape}"
        contributions = self._exchange(kind, send.copy(), send, recv)
        recv[...] = contributions[0]
        with np.errstate(all="ignore"):
            for contribution in contributions[1:]:
                _UFUNCS[op](recv, contribution, out=recv)

    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy `buffer` of rank `root` to every rank."""
        root_copy = buffer.copy() if self.rank == root else None
        contributions = self._exchange(
            f"bcast of {buffer.nbytes} bytes from {root}", root_copy, buffer
        )
        buffer[...] = contributions[root]

    def gatherv(self, send: Buffer, recv: Buffer | None, counts: Sequence[int], root: int) -> None:
        """Put every rank's bytes into `recv` of `root`, in rank order."""
        contributions = self._exchange(
            f"gatherv of {list(counts)} bytes to {root}", send.tobytes(), send, recv
        )
        if recv is not None:
            recv[:] = np.frombuffer(b"".join(contributions), np.uint8)

    def sendrecv(self, send: Buffer, dest: int, recv: Buffer, source: int) -> None:
        """Give `send` to `dest`, and get `recv` from `source`."""
        destination, received_bytes = self._exchange(
            "sendrecv", (dest, send.tobytes()), send, recv
        )[source]
        if destination != self.rank:
            raise RuntimeError(
                f"rank {self.rank} waits for {source}, which sends to {destination}."
            )
        recv.reshape(-1).view(np.uint8)[:] = np.frombuffer(received_bytes, np.uint8)

    def barrier(self) -> None:
        """Wait for every rank."""
        self._exchange("barrier", None)

    def split(self, color: int, key: int | None = None) -> LoopbackComm:
        """Return the ranks that give the same `color`, by `key`, in a world of their own."""
        if self.world.is_seeded:
            raise NotImplementedError("a seeded schedule has one group of ranks; it cannot split.")
        colors_and_keys = self._exchange("split", (color, self.rank if key is None else key))
        ranks = [rank for rank, (other, _) in enumerate(colors_and_keys) if other == color]
        ranks.sort(key=lambda rank: colors_and_keys[rank][1])
        world = LoopbackWorld(len(ranks), self.world.patience)
        worlds = self._exchange("worlds of a split", world)
        return LoopbackComm(worlds[ranks[0]], ranks.index(self.rank))

    def by_node(self) -> LoopbackComm:
        """Return all ranks: they are threads of one process."""
        return self

    def shared(self, nbytes: int) -> memoryview | None:
        """Return zeroed bytes that all ranks see."""
        own_memory = bytearray(nbytes) if self.rank == 0 else None
        return memoryview(self._exchange(f"shared memory of {nbytes} bytes", own_memory)[0])

    def pages(self, nbytes: int) -> Pages | None:
        """Return zeroed memory that all ranks see; each thread has a private mapping."""
        share = functools.partial(self._exchange, f"pages of {nbytes} bytes")
        return shared_pages(share, self.rank == 0, nbytes)

    def free(self) -> None:
        """Leave the world."""
        self.world.leave(self.rank)
