"""The interface of every group of ranks, and a group in another order.

The words are MPI's: rank, size, all-gather, all-reduce, broadcast. Buffers are NumPy arrays that
are C-contiguous, aligned and of native byte order; callers have to see to that.

A `DeviceAssignment` says which rank is which replica. `OrderedComm` counts the ranks of the
session's own communicator that way, so ids, shards, gathers, roots and nodes follow, and strategies
with different orders still share one sequence of calls.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from mpistrat.shm.segments import Pages

Buffer = npt.NDArray[np.generic]


class Comm(abc.ABC):
    """A group of ranks that only mpistrat talks on.

    Every method is collective: all ranks call it, in the same order, with buffers that fit.
    Nothing here checks that; `mpistrat.lockstep.handshake` does, before each of them.

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

    def reduce_integer(self, number: int, op: str) -> int:
        """Return one integer of all ranks, reduced by `op`, as `allreduce` does. Collective."""
        reduced_value = np.empty(1, np.int64)
        self.allreduce(np.array([number], np.int64), reduced_value, op)
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
        """Wait for every rank. Earlier writes to shared memory are visible afterwards."""

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
        """Return shared memory as `shared` does, together with a private mapping of it."""

    @abc.abstractmethod
    def free(self) -> None:
        """Free the communicator. Collective. Nothing may be called afterwards."""


@final
class OrderedComm(Comm):
    """The ranks of another `Comm`, counted in another order.

    It is the same communicator: calls on it and on the one it is made of are one sequence, so
    strategies with different orders cannot wait for one another in different places.

    Args:
      comm: The group; it stays the owner.
      order: ``order[i]`` is the rank in `comm` of rank i of this group; a permutation.

    Example:
      >>> from mpistrat.testing import run_ranks
      >>> def program(comm):
      ...     comm, out = OrderedComm(comm, (2, 0, 1)), np.zeros(3, np.uint8)
      ...     comm.allgather(np.array([comm.rank], np.uint8), out)
      ...     return comm.rank, out.tolist()
      >>> run_ranks(program, 3)
      [(1, [0, 1, 2]), (2, [0, 1, 2]), (0, [0, 1, 2])]
    """

    def __init__(self, comm: Comm, order: Sequence[int]):
        """Create the communicator of the ranks of `comm` in this order."""
        self._comm = comm
        self._order = list(order)
        self.rank = self._order.index(comm.rank)
        self.size, self.name, self.is_ended = comm.size, comm.name, comm.is_ended

    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put every rank's `send` into `recv`, in this order."""
        by_rank = np.empty((self.size, send.nbytes), np.uint8)
        self._comm.allgather(send, by_rank)
        rows = recv.reshape(-1).view(np.uint8).reshape(by_rank.shape)
        np.take(by_rank, self._order, axis=0, out=rows)

    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's bytes into `recv`, in this order."""
        by_rank = np.empty(recv.nbytes, np.uint8)
        self._comm.allgatherv(send, by_rank, self._reorder_counts(counts))
        self._put_in_order(by_rank, recv, counts)

    def gatherv(self, send: Buffer, recv: Buffer | None, counts: Sequence[int], root: int) -> None:
        """Put every rank's bytes into `recv` of `root`, in this order."""
        by_rank = None if recv is None else np.empty(recv.nbytes, np.uint8)
        self._comm.gatherv(send, by_rank, self._reorder_counts(counts), self._order[root])
        if by_rank is not None and recv is not None:
            self._put_in_order(by_rank, recv, counts)

    def _reorder_counts(self, counts: Sequence[int]) -> list[int]:
        counts_by_rank = [0] * self.size
        for count, rank in zip(counts, self._order, strict=True):
            counts_by_rank[rank] = count
        return counts_by_rank

    def _put_in_order(self, by_rank: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        end_offsets = np.cumsum(self._reorder_counts(counts)).tolist()
        at = 0
        for count, rank in zip(counts, self._order, strict=True):
            recv[at : at + count] = by_rank[end_offsets[rank] - count : end_offsets[rank]]
            at += count

    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Reduce every rank's `send` into `recv`, in whatever order the group itself does."""
        self._comm.allreduce(send, recv, op)

    def sendrecv(self, send: Buffer, dest: int, recv: Buffer, source: int) -> None:
        """Give `send` to `dest`, and get `recv` from `source`."""
        self._comm.sendrecv(send, self._order[dest], recv, self._order[source])

    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy `buffer` of `root` to every rank."""
        self._comm.bcast(buffer, self._order[root])

    def barrier(self) -> None:
        """Wait for every rank."""
        self._comm.barrier()

    def split(self, color: int, key: int | None = None) -> Comm:
        """Return the ranks that give the same `color`, in this order unless keys say otherwise."""
        return self._comm.split(color, self.rank if key is None else key)

    def by_node(self) -> Comm:
        """Return the ranks that can share memory with this one, in this order."""
        return self._comm.by_node().split(0, self.rank)

    def shared(self, nbytes: int) -> memoryview | None:
        """Return bytes that all ranks see, or None on all of them."""
        return self._comm.shared(nbytes)

    def pages(self, nbytes: int) -> Pages | None:
        """Return memory that all ranks see, or None on all of them."""
        return self._comm.pages(nbytes)

    def free(self) -> None:
        """Do nothing: the group belongs to whoever made it."""
