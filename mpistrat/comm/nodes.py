"""The MPI messages of the watchdogs: non-blocking, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from mpistrat.comm.mpi import library

_TAG = 75
_LIMIT = 4096


def threads_allowed() -> bool:
    """Tell whether any thread may call MPI at any time."""
    mpi = library()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def arrival(comm: Any) -> Callable[[], bool]:
    """Begin a barrier, and return what tells whether all ranks have come to it, without waiting.

    Collective over `comm`: MPI_Ibarrier.
    """
    request = comm.Ibarrier()
    return lambda: bool(request.Test())


def before_finalize(call: Callable[[], object]) -> Callable[[], None]:
    """Call `call` when the program itself finalizes MPI, before anything is torn down.

    MPI empties the attributes of COMM_SELF first of all (MPI 4.1, section 11.2.4).

    Returns:
      What makes it be called now instead, and never again.
    """
    mpi = library()
    key = mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: call())
    mpi.COMM_SELF.Set_attr(key, call)

    def call_now() -> None:
        if not mpi.Is_finalized():
            mpi.COMM_SELF.Delete_attr(key)
            mpi.Comm.Free_keyval(key)

    return call_now


@final
class Mailbox:
    """Messages between ranks of a communicator that nobody else uses; nothing waits.

    Args:
      comm: An mpi4py communicator.
    """

    limit = _LIMIT

    def __init__(self, comm: Any):
        """Create a mailbox without a posted receive."""
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._receives: dict[int, tuple[Any, bytearray]] = {}
        self._sends: dict[int, tuple[Any, bytes]] = {}

    def expect(self, peer: int) -> None:
        """Post the receive of one message of `peer`, of at most `limit` bytes."""
        room = bytearray(_LIMIT)
        request = self._comm.Irecv([room, library().BYTE], source=peer, tag=_TAG)
        self._receives[peer] = (request, room)

    def arrived(self, peer: int) -> bytes | None:
        """Return the message that was expected, once, or None."""
        request, room = self._receives[peer]
        status = library().Status()
        if not request.Test(status):
            return None
        del self._receives[peer]
        return bytes(room[: status.Get_count(library().BYTE)])

    def send(self, peer: int, data: bytes) -> None:
        """Send a message, once the last one is `sent`; its bytes are kept until they have left."""
        request = self._comm.Isend([data, library().BYTE], dest=peer, tag=_TAG)
        self._sends[peer] = (request, data)

    def sent(self, peer: int) -> bool:
        """Tell whether the last message to `peer` has left."""
        if peer not in self._sends:
            return True
        done = bool(self._sends[peer][0].Test())
        if done:
            del self._sends[peer]
        return done
