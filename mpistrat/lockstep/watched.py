"""A communicator whose calls the board knows of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mpistrat.comm.base import Buffer, Comm
from mpistrat.comm.session import Session
from mpistrat.sharedmem.shared import Pages

__all__ = ["Watched"]


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
        self._session = session
        self._comm = comm or session.comm
        self.rank, self.size, self.name = self._comm.rank, self._comm.size, self._comm.name

    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put every rank's `send` into `recv`, in rank order."""
        board = self._session.board
        board.resume()
        try:
            self._comm.allgather(send, recv)
        finally:
            board.leave()

    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's bytes into `recv`, in rank order."""
        board = self._session.board
        board.resume()
        try:
            self._comm.allgatherv(send, recv, counts)
        finally:
            board.leave()

    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Fold every rank's `send` elementwise into `recv`."""
        board = self._session.board
        board.resume()
        try:
            self._comm.allreduce(send, recv, op)
        finally:
            board.leave()

    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy `buffer` of rank `root` into `buffer` of every rank."""
        board = self._session.board
        board.resume()
        try:
            self._comm.bcast(buffer, root)
        finally:
            board.leave()

    def gatherv(self, send: Buffer, recv: Buffer | None, counts: Sequence[int], root: int) -> None:
        """Put every rank's bytes into `recv` of `root`, in rank order."""
        board = self._session.board
        board.resume()
        try:
            self._comm.gatherv(send, recv, counts, root)
        finally:
            board.leave()

    def reduce(self, send: Buffer, recv: Buffer | None, op: str, root: int) -> None:
        """Fold every rank's `send` into `recv` of `root`."""
        board = self._session.board
        board.resume()
        try:
            self._comm.reduce(send, recv, op, root)
        finally:
            board.leave()

    def sendrecv(self, send: Buffer, dest: int, recv: Buffer, source: int) -> None:
        """Give `send` to `dest`, and get `recv` from `source`."""
        board = self._session.board
        board.resume()
        try:
            self._comm.sendrecv(send, dest, recv, source)
        finally:
            board.leave()

    def barrier(self) -> None:
        """Wait for every rank."""
        board = self._session.board
        board.resume()
        try:
            self._comm.barrier()
        finally:
            board.leave()

    def split(self, color: int, key: int | None = None) -> Watched:
        """Return the ranks that give the same `color`, watched too."""
        board = self._session.board
        board.resume()
        try:
            return Watched(self._session, self._comm.split(color, key))
        finally:
            board.leave()

    def by_node(self) -> Watched:
        """Return the ranks that share memory with this one, watched too."""
        board = self._session.board
        board.resume()
        try:
            found = self._comm.by_node()
            return self if found is self._comm else Watched(self._session, found)
        finally:
            board.leave()

    def shared(self, nbytes: int) -> memoryview | None:
        """Return bytes that all ranks see, or None on all of them."""
        board = self._session.board
        board.resume()
        try:
            return self._comm.shared(nbytes)
        finally:
            board.leave()

    def pages(self, nbytes: int) -> Pages | None:
        """Return memory that all ranks see, with an overlay, or None on all of them."""
        board = self._session.board
        board.resume()
        try:
            return self._comm.pages(nbytes)
        finally:
            board.leave()

    def free(self) -> None:
        """Give the group back. Collective."""
        self._comm.free()
