"""What every group of ranks can do.

The words are MPI's: rank, size, all-gather, all-reduce, broadcast. Buffers are NumPy arrays that
are C-contiguous, aligned and of native byte order; whoever calls has seen to that.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mpistrat.sharedmem.shared import Pages

Buffer = npt.NDArray[np.generic]


class Comm(abc.ABC):
    """A group of ranks that only mpistrat talks on.

    Every method is collective: all ranks call it, in the same order, with buffers that fit.
    Nothing here checks that; `mpistrat.lockstep.lockstep` does, before each of them.

    Attributes:
      rank: This rank, 0 to size - 1.
      size: The number of ranks.
      name: What to call the transport in messages, such as ``"MPI"``.
      is_ended: Returns whether it has been shut down, so that nothing can be called any more.
      is_interruptible: A call may raise while it waits for the others, and is then not complete.
    """

    rank: int
    size: int
    name: str
    is_ended: Callable[[], bool] = staticmethod(lambda: False)
    is_interruptible = False

    @abc.abstractmethod
    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put every rank's `send` (k bytes each) into `recv` (size x k bytes), in rank order."""

    @abc.abstractmethod
    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's uint8 `send` into uint8 `recv`, rank r giving ``counts[r]`` bytes."""

    @abc.abstractmethod
    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Reduce every rank's `send` elementwise into `recv`, on every rank.

        Args:
          send: Any shape; a dtype that MPI knows.
          recv: Same shape and dtype; other memory.
          op: ``"SUM"``, ``"PROD"``, ``"MIN"``, ``"MAX"`` or, for unsigned integers, ``"BOR"``.
        """

    def reduced(self, value: int, op: str) -> int:
        """Return one integer of all ranks, reduced by `op`, as `allreduce` does. Collective."""
        reduced_value = np.empty(1, np.int64)
        self.allreduce(np.array([value], np.int64), reduced_value, op)
        return int(reduced_value[0])

    @abc.abstractmethod
    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy `buffer` of rank `root` into `buffer` of every rank."""

    @abc.abstractmethod
    def gatherv(self, send: Buffer, recv: Buffer | None, counts: Sequence[int], root: int) -> None:
        """Put every rank's uint8 `send` into uint8 `recv` of `root`, the only rank that has one."""

    @abc.abstractmethod
    def sendrecv(self, send: Buffer, dest: int, recv: Buffer, source: int) -> None:
        """Give `send` to rank `dest` while `source` gives `recv`; all ranks do so at once."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for every rank. What any of them wrote to shared memory before is seen after."""

    @abc.abstractmethod
    def split(self, color: int, key: int | None = None) -> Comm:
        """Return the group of the ranks that give the same `color`.

        They are in the order of the keys that they give; of this group where keys are equal, or
        None.
        """

    @abc.abstractmethod
    def by_node(self) -> Comm:
        """Return the ranks that can share memory with this one; this group itself if all can."""

    @abc.abstractmethod
    def shared(self, nbytes: int) -> memoryview | None:
        """Return zeroed bytes that all ranks of this group see, or None on all of them.

        The memory lives as long as anything refers to it, and leaves nothing behind.
        """

    @abc.abstractmethod
    def pages(self, nbytes: int) -> Pages | None:
        """Return zeroed memory that all ranks of this group see, with an overlay; else `shared`."""

    @abc.abstractmethod
    def free(self) -> None:
        """Free the communicator. Collective. Nothing may be called afterwards."""
