"""A communicator whose calls the board knows of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from mpistrat.comm.base import Comm
from mpistrat.comm.session import Session


def _told(name: str) -> Callable[..., Any]:
    """Return a method of `Comm` that tells the board before and after."""

    def move(self: Watched, *args: Any) -> Any:
        self.session.board.resume()
        try:
            return getattr(self.inner, name)(*args)
        finally:
            self.session.board.leave()

    move.__doc__ = getattr(Comm, name).__doc__
    return move


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
        self.session, self.inner = session, comm or session.comm
        self.rank, self.size, self.name = self.inner.rank, self.inner.size, self.inner.name

    allgather = _told("allgather")
    allgatherv = _told("allgatherv")
    allreduce = _told("allreduce")
    bcast = _told("bcast")
    gatherv = _told("gatherv")
    sendrecv = _told("sendrecv")
    barrier = _told("barrier")
    shared = _told("shared")
    pages = _told("pages")
    _split = _told("split")
    _by_node = _told("by_node")

    def split(self, color: int, key: int | None = None) -> Watched:
        """Return the ranks that give the same `color`, watched too."""
        return Watched(self.session, self._split(color, key))

    def by_node(self) -> Watched:
        """Return the ranks that share memory with this one, watched too."""
        found = self._by_node()
        return self if found is self.inner else Watched(self.session, found)

    def free(self) -> None:
        """Give the group back. Collective."""
        self.inner.free()
