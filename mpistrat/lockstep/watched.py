"""A communicator whose calls the board knows of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mpistrat.comm.base import Buffer, Comm
from mpistrat.comm.session import Session
from mpistrat.sharedmem.shared import Pages


@final
class _Moving:
    """Tells the board that this rank is in the next part of its call, while the body runs."""

    __slots__ = ("_session",)

    def __init__(self, session: Session):
        self._session = session

    def __enter__(self) -> None:
        self._session.board.resume()

    def __exit__(self, *_: object) -> None:
        self._session.board.leave()


@final
class Watched(Comm):
    """The communicator of a session, for what moves after a proof.

    The board is told that this rank is in the next part of its call, so a rank that does not come
    to it is found out as one that does not come to the proof.

    Args:
      session: The session whose board this is.
      comm: The communicator, if not the session's own but a part of it.
    """

    def __init__(self, session: Session, comm: Comm | None = None):
        """Watch the communicator of `session`."""
        self._session, self._moving = session, _Moving(session)
        self._comm = comm or session.comm
        self.rank, self.size, self.name = self._comm.rank, self._comm.size, self._comm.name

    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put every rank's `send` into `recv`, in rank order."""
        with self._moving:
            self._comm.allgather(send, recv)

    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's bytes into `recv`, in rank order."""
        with self._moving:
            self._comm.allgatherv(send, recv, counts)

    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Fold every rank's `send` elementwise into `recv`."""
        with self._moving:
            self._comm.allreduce(send, recv, op)

    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy `buffer` of rank `root` into `buffer` of every rank."""
        with self._moving:
            self._comm.bcast(buffer, root)

    def gatherv(self, send: Buffer, recv: Buffer | None, counts: Sequence[int], root: int) -> None:
        """Put every rank's bytes into `recv` of `root`, in rank order."""
        with self._moving:
            self._comm.gatherv(send, recv, counts, root)

    def reduce(self, send: Buffer, recv: Buffer | None, op: str, root: int) -> None:
        """Fold every rank's `send` into `recv` of `root`."""
        with self._moving:
            self._comm.reduce(send, recv, op, root)

    def sendrecv(self, send: Buffer, dest: int, recv: Buffer, source: int) -> None:
        """Give `send` to `dest`, and get `recv` from `source`."""
        with self._moving:
            self._comm.sendrecv(send, dest, recv, source)

    def barrier(self) -> None:
        """Wait for every rank."""
        with self._moving:
            self._comm.barrier()

    def split(self, color: int, key: int | None = None) -> Watched:
        """Return the ranks that give the same `color`, watched too."""
        with self._moving:
            return Watched(self._session, self._comm.split(color, key))

    def by_node(self) -> Watched:
        """Return the ranks that share memory with this one, watched too."""
        with self._moving:
            found = self._comm.by_node()
            return self if found is self._comm else Watched(self._session, found)

    def shared(self, nbytes: int) -> memoryview | None:
        """Return bytes that all ranks see, or None on all of them."""
        with self._moving:
            return self._comm.shared(nbytes)

    def pages(self, nbytes: int) -> Pages | None:
        """Return memory that all ranks see, with an overlay, or None on all of them."""
        with self._moving:
            return self._comm.pages(nbytes)

    def free(self) -> None:
        """Give the group back. Collective."""
        self._comm.free()
