"""What every group of ranks can do.

The words are MPI's: rank, size, all-gather, all-reduce, broadcast. Buffers are NumPy arrays that
are C-contiguous and of native byte order; whoever calls has seen to that.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Buffer", "Comm"]

Buffer = npt.NDArray[np.generic]


class Comm(abc.ABC):
    """A group of ranks that only mpistrat talks on.

    Every method is collective: all ranks call it, in the same order, with buffers that fit.
    Nothing here checks that; `mpistrat.collectives.lockstep` does, before each of them.

    Attributes:
      rank: This rank, 0 to size - 1.
      size: The number of ranks.
      name: What to call the transport in messages, such as ``"MPI"``.
    """

    rank: int
    size: int
    name: str

    @abc.abstractmethod
    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put every rank's `send` (k bytes each) into `recv` (size x k bytes), in rank order."""

    @abc.abstractmethod
    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's uint8 `send` into uint8 `recv`, rank r giving ``counts[r]`` bytes."""

    @abc.abstractmethod
    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Fold every rank's `send` elementwise into `recv`, on every rank.

        Args:
          send: Any shape; a dtype that MPI knows.
          recv: Same shape and dtype; other memory.
          op: ``"SUM"``, ``"PROD"``, ``"MIN"``, ``"MAX"`` or, for unsigned integers, ``"BOR"``.
        """

    @abc.abstractmethod
    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy `buffer` of rank `root` into `buffer` of every rank."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for every rank. What any of them wrote to shared memory before is seen after."""

    @abc.abstractmethod
    def split(self, color: int) -> Comm:
        """Return the group of the ranks that give the same `color`, in the order of this one."""

    @abc.abstractmethod
    def by_node(self) -> Comm:
        """Return the ranks that can share memory with this one; this group itself if all can."""

    @abc.abstractmethod
    def shared(self, nbytes: int) -> memoryview | None:
        """Return zeroed bytes that all ranks of this group see, or None on all of them.

        The memory lives as long as anything refers to it, and leaves nothing behind.
        """

    @property
    def ended(self) -> bool:
        """Whether the transport has been shut down, so that nothing can be called any more."""
        return False

    @abc.abstractmethod
    def free(self) -> None:
        """Give the group back. Collective. Nothing may be called afterwards."""
