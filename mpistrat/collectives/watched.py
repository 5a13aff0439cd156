"""A communicator whose calls the board knows of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mpistrat.comm.base import Buffer, Comm
from mpistrat.comm.session import Session

__all__ = ["Watched"]


@final
class Watched(Comm):
    """The communicator of a session, for what moves after a proof.

    The board is told that this rank is in the next part of its call, so a rank that does not come
    to it is found out as one that does not come to the proof.

    Args:
      session: The session whose communicator and board these are.
    """

    def __init__(self, session: Session):
        """Watch the communicator of `session`."""
        self._session = session
        self._comm = session.comm
        self.rank, self.size, self.name = session.comm.rank, session.comm.size, session.comm.name

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

    def free(self) -> None:
        """Give the group back. Collective."""
        self._comm.free()
