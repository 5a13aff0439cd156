"""Algorithms for one message, chosen by name.

Each reduces flat arrays of equal dtype and size, after the handshake, and leaves the same bits on
every rank. What they are for is choice; `mpistrat.collectives.allreduce` chooses by itself.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arena.nodes import Nodes, find_nodes
from mpistrat.arrays import Array, as_array
from mpistrat.collectives.buckets import Bucket, buckets
from mpistrat.collectives.by_mpi import reduce_by_mpi
from mpistrat.comm.base import Buffer, Comm
from mpistrat.errors import StructureError
from mpistrat.kernels.ops import UFUNCS, ReduceOp
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import Caught

_ADDS = (ReduceOp.SUM, ReduceOp.MEAN)


class Packing(NamedTuple):
    """How leaves are made into messages.

    Attributes:
      nbytes: A message is closed once it is larger than so many bytes; 0 for no limit.
      parts: Without a limit: all leaves of one dtype are cut into so many messages; 0 for a
        message per leaf.
      alone: A leaf of so many bytes is a message of its own, sent without a copy.
    """

    nbytes: int = 0
    parts: int = 1
    alone: int | None = None

    def __str__(self) -> str:
        """Return what the handshake says of it."""
        return f"{self.nbytes} bytes per pack" if self.nbytes else f"{self.parts} packs"

    def buckets(self, specs: Sequence[tuple[np.dtype[Any], int]]) -> tuple[Bucket, ...]:
        """Return which leaves of these ``(dtype, number of elements)`` travel as one message.

        Example:
          >>> f4 = np.dtype(np.float32)
          >>> [b.columns for b in Packing(nbytes=8).buckets([(f4, 2), (f4, 2), (f4, 1)])]
          [3, 2]
          >>> [b.columns for b in Packing(parts=2).buckets([(f4, 2), (f4, 2), (f4, 1)])]
          [5]
        """
        each = not (self.nbytes or self.parts)
        return buckets(tuple(specs), self.nbytes, False, 0 if each else self.alone)


class Route(abc.ABC):
    """A way that messages take.

    Attributes:
      name: What the handshake says of it; ranks that take the same way have the same name.
      whole: It wants every leaf as a message of its own, in its own shape.
    """

    name: str
    whole = False

    @abc.abstractmethod
    def reduce(self, call: str, lockstep: Lockstep, send: Array, recv: Array, op: ReduceOp) -> None:
        """Reduce every rank's `send` into `recv`, on every rank. Collective; checked before.

        Args:
          call: The text of the call.
          lockstep: The ranks.
          send: A contiguous array of a dtype that MPI knows.
          recv: The same shape and dtype; other memory.
          op: The reduction; MEAN adds.
        """

    def gather(self, comm: Comm, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's bytes into `recv`, on every rank. Collective; checked before."""
        comm.allgatherv(send, recv, counts)


def _at_root(comm: Comm, send: Array, root: int) -> list[Array]:
    """Return every rank's `send` in rank order, on the root; nothing on the others."""
    here = comm.rank == root
    rows = np.empty((comm.size, *send.shape), send.dtype) if here else None
    given = send.reshape(-1).view(np.uint8)
    room = None if rows is None else rows.reshape(-1).view(np.uint8)
    comm.gatherv(given, room, [send.nbytes] * comm.size, root)
    return [] if rows is None else list(rows)


def _reduced(values: Sequence[Array], out: Array, op: ReduceOp) -> None:
    out[...] = values[0]
    with np.errstate(all="ignore"):
        for value in values[1:]:
            UFUNCS[op](out, value, out=out)


@final
class Native(Route):
    """The MPI library's own algorithm: one MPI_Allreduce per message."""

    name = "native"

    def reduce(self, call: str, lockstep: Lockstep, send: Array, recv: Array, op: ReduceOp) -> None:
        """Reduce by one MPI_Allreduce."""
        reduce_by_mpi(lockstep.comm, send, recv, op)


@final
class OneRoot(Route):
    """One rank gathers all values, reduces them in rank order, and gives the result to all.

    Args:
      root: That rank.
      accumulation_fn: Reduces a list of arrays, in rank order, into one of the same shape and
        dtype; takes the place of addition. None for addition.
    """

    def __init__(self, root: int = 0, accumulation_fn: Callable[[list[Array]], Any] | None = None):
        """Meet at `root`."""
        self._root, self._add = root, accumulation_fn
        self.whole = accumulation_fn is not None
        how = "" if accumulation_fn is None else f", {accumulation_fn.__qualname__}"
        self.name = f"root {root}{how}"

    def reduce(self, call: str, lockstep: Lockstep, send: Array, recv: Array, op: ReduceOp) -> None:
        """Gather at the root, reduce there, broadcast; with a function, prove that it succeeded."""
        values = _at_root(lockstep.comm, send, self._root)
        if self._add is not None and op in _ADDS:
            with Caught(Exception) as caught:
                if values:
                    recv[...] = _checked(self._add(values), send)
            lockstep.handshake(f"{call}, accumulated", failure=caught.failure)
        elif values:
            _reduced(values, recv, op)
        lockstep.comm.bcast(recv, self._root)

    def gather(self, comm: Comm, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Gather at the root, then broadcast."""
        room = recv if comm.rank == self._root else None
        comm.gatherv(send, room, counts, self._root)
        comm.bcast(recv, self._root)


def _checked(value: Any, like: Array) -> Array:
    total = as_array(value, "the result of accumulation_fn")
    if total.shape != like.shape or total.dtype != like.dtype:
        raise StructureError(
            f"accumulation_fn returned {total.dtype}{list(total.shape)} for arrays of "
            f"{like.dtype}{list(like.shape)}; expected the same dtype and shape."
        )
    return total


@final
class Hierarchical(Route):
    """Within each node to its first rank, among these between the nodes, and down again.

    Args:
      per_node: Take so many consecutive ranks as one node; 0 to ask MPI who shares memory.
    """

    def __init__(self, per_node: int = 0):
        """Find the nodes at the first call."""
        self._per_node = per_node
        self.name = "nodes" if not per_node else f"nodes of {per_node}"

    def _nodes(self, lockstep: Lockstep) -> Nodes:
        # Of the session, so that strategies that take this way have it at hand on the same ranks.
        each = self._per_node
        return lockstep.shared("nodes", lambda: find_nodes(lockstep.comm, each), each)

    def reduce(self, call: str, lockstep: Lockstep, send: Array, recv: Array, op: ReduceOp) -> None:
        """Reduce by an MPI_Allreduce in the node, another among first ranks, and MPI_Bcast."""
        nodes = self._nodes(lockstep)
        reduce_by_mpi(nodes.node, send, recv, op)
        if nodes.nodes > 1:
            if nodes.node.rank == 0 and nodes.lane is not None:
                reduce_by_mpi(nodes.lane, recv.copy(), recv, op)
            nodes.node.bcast(recv, 0)


@final
class Ring(Route):
    """Around the ring of ranks twice: each rank reduces one part of the message, then all parts go.

    Each rank sends ``2 * (n - 1) / n`` of the message, whatever their number (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009).
    """

    name = "ring"

    def reduce(self, call: str, lockstep: Lockstep, send: Array, recv: Array, op: ReduceOp) -> None:
        """Reduce by ``2 * (n - 1)`` exchanges with the two neighbours."""
        comm = lockstep.comm
        rank, size = comm.rank, comm.size
        recv[...] = send
        parts = np.array_split(recv.reshape(-1), size)
        room = np.empty(max(part.size for part in parts), send.dtype)
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            given, mine = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            came = room[: mine.size]
            comm.sendrecv(given, ahead, came, behind)
            with np.errstate(all="ignore"):
                UFUNCS[op](came, mine, out=mine)
        for step in range(size - 1):
            given, mine = parts[(rank - step + 1) % size], parts[(rank - step) % size]
            comm.sendrecv(given, ahead, mine, behind)
