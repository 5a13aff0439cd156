"""N ranks as threads of one process: the whole stack without MPI.

Plain ``pytest`` and a debugger work on it. It is made to be strict, not fast: every message is
copied, ranks that call different things are told so, and a rank that waits for one that has left
gets an error instead of waiting for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from mpistrat.comm.base import Buffer, Comm

__all__ = ["LoopbackComm", "LoopbackWorld"]

_FOLDS: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    # As MPI_MIN and MPI_MAX on both libraries: a NaN on one side is not seen reliably.
    "MIN": np.fmin,
    "MAX": np.fmax,
    "BOR": np.bitwise_or,
}


@final
class LoopbackWorld:
    """The meeting place of `size` threads.

    Args:
      size: The number of ranks.
      patience: Seconds that a rank waits for the others before it raises TimeoutError.
    """

    def __init__(self, size: int, patience: float = 60.0):
        """Make a world in which no rank has arrived yet."""
        self.size = size
        self.patience = patience
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, tuple[str, Any]]] = {}
        self._taken: dict[int, int] = {}
        self._left: set[int] = set()

    def leave(self, rank: int) -> None:
        """Note that `rank` will call nothing any more."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def meet(self, rank: int, number: int, kind: str, item: Any) -> list[Any]:
        """Give `item`, wait for everybody's, and return all of them in rank order.

        Raises:
          RuntimeError: Another rank has left, or met for something else.
          TimeoutError: Another rank did not come within `patience` seconds.
        """
        with self._changed:
            arrived = self._rounds.setdefault(number, {})
            arrived[rank] = (kind, item)
            self._changed.notify_all()
            complete = self._changed.wait_for(
                lambda: len(arrived) == self.size or self._left - arrived.keys(), self.patience
            )
            if len(arrived) < self.size:
                missing = sorted(set(range(self.size)) - arrived.keys())
                why = "have left" if complete else f"did not come within {self.patience:g} s"
                error = RuntimeError if complete else TimeoutError
                raise error(f"rank {rank} waits in {kind} no. {number}: ranks {missing} {why}.")
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self.size:
                del self._rounds[number], self._taken[number]
        kinds = [arrived[r][0] for r in range(self.size)]
        if any(other != kind for other in kinds):
            raise RuntimeError(f"rank {rank} met in {kind}, but the ranks called {kinds}.")
        return [arrived[r][1] for r in range(self.size)]


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
        """Be rank `rank` of `world`."""
        self.world = world
        self.rank = rank
        self.size = world.size
        self._number = 0

    def _meet(self, kind: str, item: Any) -> list[Any]:
        self._number += 1
        return self.world.meet(self.rank, self._number, kind, item)

    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put every rank's `send` into `recv`, in rank order."""
        parts = self._meet(f"allgather of {send.nbytes} bytes", send.tobytes())
        recv.reshape(-1).view(np.uint8)[:] = np.frombuffer(b"".join(parts), np.uint8)

    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's bytes into `recv`, in rank order."""
        parts = self._meet(f"allgatherv of {list(counts)} bytes", send.tobytes())
        recv[:] = np.frombuffer(b"".join(parts), np.uint8)

    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Fold every rank's `send` into `recv`, in rank order."""
        kind = f"allreduce {op} of {send.dtype} {send.shape}"
        parts = self._meet(kind, send.copy())
        total = parts[0].copy()
        with np.errstate(all="ignore"):
            for part in parts[1:]:
                _FOLDS[op](total, part, out=total)
        recv[...] = total

    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy `buffer` of rank `root` to every rank."""
        mine = buffer.copy() if self.rank == root else None
        parts = self._meet(f"bcast of {buffer.nbytes} bytes from {root}", mine)
        buffer[...] = parts[root]

    def free(self) -> None:
        """Leave the world."""
        self.world.leave(self.rank)
