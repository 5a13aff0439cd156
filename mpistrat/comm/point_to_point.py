"""Non-blocking messages between two ranks."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpistrat.comm.base import Buffer
from mpistrat.comm.mpi import MPIComm, cut_into_slices, largest_tag, library

# The header of each message: its size, the tag of the bytes that follow, and a text.
_HEADER = struct.Struct("=qq48s")
_MAX_INLINE_NBYTES = (
    1 << 14
)  # bytes that come with the header; to copy them takes less than a message of their own


@final
class PendingMessage:
    """A message in transit.

    Args:
      requests: The requests of MPI that were made for it, in their order.
      peer: The other rank; None if any may send it.
      receive_rest: Called once the first request is complete; returns further ones. Only for
        messages that are received.

    Attributes:
      peer: The other rank; of a message that any may send, who has, once it is there.
      nbytes: How many bytes were sent; 0 before that is known, and of one that is sent.
      description: The text of a message that is received; empty before that is known.
    """

    def __init__(
        self,
        requests: list[Any],
        peer: int | None,
        receive_rest: Callable[[PendingMessage], list[Any]] | None = None,
    ):
        """Wait for nothing yet."""
        self.peer, self.nbytes, self.description = peer, 0, ""
        self._requests, self._receive_rest = requests, receive_rest

    def test(self) -> bool:
        """Tell whether all of it has come, or its memory may be used again."""
        while self._requests:
            status = library().Status()
            if not self._requests[0].Test(status):
                return False
            del self._requests[0]
            receive_rest, self._receive_rest = self._receive_rest, None
            if receive_rest is not None:
                self.peer = int(status.Get_source())
                self._requests = receive_rest(self)
        return True

    def cancel(self) -> None:
        """Cancel what has not arrived; nothing may be sent for it any more."""
        for request in self._requests:
            request.Cancel()
            request.Free()
        self._requests = []


@final
class MessageChannel:
    """Messages on a communicator of their own.

    A message begins with a header, and small ones end there. The bytes of others follow by a tag
    that no other message has, so each gets its own, in whatever order ranks test them.

    Args:
      comm: The group; nobody else sends messages on it.
    """

    def __init__(self, comm: MPIComm):
        """Send nothing yet."""
        self.comm = comm
        self._max_tag = largest_tag() // 2
        self._max_inline_nbytes = min(_MAX_INLINE_NBYTES, comm.limit)
        self._sent = itertools.count()

    def send(self, buffer: Buffer, dest: int, tag: int, description: str = "") -> PendingMessage:
        """Begin to send uint8 `buffer` to `dest`, with a `description` of up to 48 letters."""
        is_inline = buffer.size <= self._max_inline_nbytes
        content_tag = 1 + self._max_tag + next(self._sent) % self._max_tag
        head = np.empty(_HEADER.size + (buffer.size if is_inline else 0), np.uint8)
        header = _HEADER.pack(buffer.size, content_tag, description.encode()[:48])
        head[: _HEADER.size] = np.frombuffer(header, np.uint8)
        if is_inline:
            head[_HEADER.size :] = buffer
        byte, isend = library().BYTE, self.comm.mpi.Isend
        first = isend([head, head.size, byte], dest=dest, tag=self._tag(tag))
        parts = [] if is_inline else self._parts(buffer)
        rest = [isend([part, part.size, byte], dest=dest, tag=content_tag) for part in parts]
        return PendingMessage([first, *rest], dest)

    def receive(self, buffer: Buffer, source: int | None, tag: int) -> PendingMessage:
        """Begin to receive into uint8 `buffer` from `source`, or from any rank.

        A message of another size is received all the same, so its sender continues, and dropped.
        """
        byte, irecv = library().BYTE, self.comm.mpi.Irecv
        head = np.empty(_HEADER.size + self._max_inline_nbytes, np.uint8)

        def receive_rest(post: PendingMessage) -> list[Any]:
            post.nbytes, content_tag, description = _HEADER.unpack(head[: _HEADER.size].tobytes())
            post.description = description.rstrip(b"\0").decode(errors="replace")
            target = buffer if post.nbytes == buffer.size else np.empty(post.nbytes, np.uint8)
            if post.nbytes <= self._max_inline_nbytes:
                target[...] = head[_HEADER.size : _HEADER.size + post.nbytes]
                return []
            parts = self._parts(target)
            return [irecv([p, p.size, byte], source=post.peer, tag=content_tag) for p in parts]

        peer = library().ANY_SOURCE if source is None else source
        first = irecv([head, head.size, byte], source=peer, tag=self._tag(tag))
        return PendingMessage([first], source, receive_rest)

    def _parts(self, buffer: Buffer) -> list[Buffer]:
        """Return a buffer in pieces that every MPI takes."""
        return [
            np.asarray(buffer[part]) for part in cut_into_slices(buffer.size, 1, self.comm.limit)
        ]

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._max_tag:
            raise ValueError(f"tag must be between 0 and {self._max_tag}, got {tag}.")
        return tag

    def free(self) -> None:
        """Free the communicator. Collective."""
        self.comm.free()
