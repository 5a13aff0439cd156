"""Messages between two ranks, which nobody waits for here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from mpistrat.comm.base import Buffer
from mpistrat.comm.chunks import slices
from mpistrat.comm.mpi import MPIComm, largest_tag, library


@final
class Post:
    """A message on its way.

    Args:
      begin: Begins to move its pieces, one after the other, each from the rank that it is given.
      peer: The other rank; None if any may send it.

    Attributes:
      peer: The other rank; of a message that any may send, who has, once it is there.
      nbytes: How many bytes have come; 0 before all have, and of one that is sent.
      truncated: More were sent than there was room for.
    """

    def __init__(self, begin: Iterator[Any], peer: int | None):
        """Begin with the first piece; with all, if it is known whom they are for."""
        self.peer, self.nbytes, self.truncated = peer, 0, False
        self._begin = begin
        self._open: list[Any] = [next(begin)] if peer is None else list(begin)
        self._came = 0

    def test(self) -> bool:
        """Tell whether all of it has come, or its memory may be used again."""
        while self._open:
            mpi = library()
            status = mpi.Status()
            try:
                if not self._open[0].Test(status):
                    return False
            except mpi.Exception as error:
                if error.Get_error_class() != mpi.ERR_TRUNCATE:
                    raise
                self.truncated = True
                self._open[1:] = []
            del self._open[0]
            self._came += status.Get_count(mpi.BYTE)
            if self.peer is None:
                self.peer = int(status.Get_source())
                self._open = list(self._begin)
        self.nbytes = self._came
        return True

    def cancel(self) -> None:
        """Cancel what has not arrived; nothing may be sent for it any more."""
        for request in self._open:
            request.Cancel()
            request.Free()
        self._open = []


@final
class Posts:
    """Messages on a communicator of their own.

    Args:
      comm: The group; nobody else sends messages on it.
    """

    def __init__(self, comm: MPIComm):
        """Send nothing yet."""
        self.comm = comm
        self._most = largest_tag()

    def send(self, buffer: Buffer, dest: int, tag: int) -> Post:
        """Begin to send uint8 `buffer` to `dest`, by MPI_Isend, in pieces that every MPI takes."""

        def begin() -> Iterator[Any]:
            for part in self._parts(buffer):
                yield self.comm.mpi.Isend([part, part.size, byte], dest=dest, tag=self._tag(tag))

        byte = library().BYTE
        return Post(begin(), dest)

    def receive(self, buffer: Buffer, source: int | None, tag: int) -> Post:
        """Begin to receive into uint8 `buffer` from `source`, or from any rank, by MPI_Irecv."""

        def begin() -> Iterator[Any]:
            for part in self._parts(buffer):
                peer = mpi.ANY_SOURCE if post is None or post.peer is None else post.peer
                yield self.comm.mpi.Irecv(
                    [part, part.size, mpi.BYTE],
                    source=peer if source is None else source,
                    tag=self._tag(tag),
                )

        mpi = library()
        post: Post | None = None
        post = Post(begin(), source)
        return post

    def _parts(self, buffer: Buffer) -> Iterator[Buffer]:
        if not buffer.size:
            yield buffer
        for piece in slices(buffer.size, 1, self.comm.limit):
            yield np.asarray(buffer[piece])

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._most:
            raise ValueError(f"tag must be between 0 and {self._most}, got {tag}.")
        return tag

    def free(self) -> None:
        """Free the communicator. Collective."""
        self.comm.free()
