"""Once a second, the watchdogs of the nodes exchange the contents of their pages.

The first node collects: every other one sends it its rows, and gets those of all nodes as the
answer. A node sends again only after it was answered, so there is at most one message in transit
between two nodes, it always finds a receive that waits for it, and nothing is left over at the end:
the last message of a pair says that it is the last one. Nobody blocks; whoever does not answer is
known by the age of what it said last.

The MPI messages of the watchdogs: non-blocking, and how they end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from mpistrat.comm.mpi import library
from mpistrat.watchdog.status_board import SILENT, Status, decode, encode

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


_MORE_FOLLOWS, _LAST = b"\0", b"\1"


@final
class Link:
    """One node's end.

    Args:
      channel: How messages travel.
      rows: What is known of every node before it has said anything, node by node.
      interval: Seconds between two messages.
      silent: Seconds after which a node that has said nothing counts as silent.
      now_seconds: The time.
    """

    def __init__(
        self,
        channel: Mailbox,
        rows: Sequence[Sequence[Status]],
        interval: float,
        silent: float,
        now_seconds: float,
    ):
        """Create it, with a receive posted for each of the others."""
        self._channel = channel
        self._interval, self._silent = interval, silent
        self.leads = channel.rank == 0
        self._peers = set(range(1, channel.size)) if self.leads else {0}
        # Of the first node: what each other one said. Of the others: what the first one answered.
        self._heard: dict[int, tuple[float, Sequence[Status]]] = {
            peer: (
                now_seconds,
                rows[peer] if self.leads else [row for part in rows for row in part],
            )
            for peer in self._peers
        }
        self._due = now_seconds
        self._owed: set[int] = set()  # leading: nodes that wait for an answer
        self._waits = False  # not leading: an answer is in transit
        for peer in self._peers if self.leads else ():
            channel.expect(peer)

    @property
    def done(self) -> bool:
        """Nothing will be sent or received any more."""
        return not self._peers

    def cut_off(self, now_seconds: float) -> bool:
        """Tell whether the first node, which speaks for all, is silent."""
        return (
            not self.leads and 0 in self._peers and now_seconds - self._heard[0][0] > self._silent
        )

    def step(
        self, now_seconds: float, get_local_rows: Callable[[], Sequence[Status]], closing: bool
    ) -> None:
        """Send and receive what can be.

        Args:
          now_seconds: The time.
          get_local_rows: Returns the rows of this node.
          closing: This node is leaving: say so to the others, and send nothing after that.
        """
        if self.leads:
            self._collect(now_seconds, get_local_rows, closing)
        elif self._peers:
            self._report(now_seconds, get_local_rows, closing)

    def _collect(
        self, now_seconds: float, get_local_rows: Callable[[], Sequence[Status]], closing: bool
    ) -> None:
        for peer in self._peers - self._owed:
            data = self._channel.arrived(peer)
            if data is not None:
                self._heard[peer] = (now_seconds, decode(data[1:]))
                if data[:1] == _LAST:
                    self._peers.discard(peer)
                else:
                    self._owed.add(peer)
        ready_peers = [peer for peer in self._owed if self._channel.sent(peer)]
        if ready_peers:
            answer = (_LAST if closing else _MORE_FOLLOWS) + encode(
                self.everybody(now_seconds, get_local_rows()), self._channel.limit - 1
            )
            for peer in ready_peers:
                self._owed.discard(peer)
                if closing:
                    self._peers.discard(peer)
                else:
                    self._channel.expect(peer)
                self._channel.send(peer, answer)

    def _report(
        self, now_seconds: float, get_local_rows: Callable[[], Sequence[Status]], closing: bool
    ) -> None:
        if self._waits:
            data = self._channel.arrived(0)
            if data is None:
                return
            self._waits = False
            self._heard[0] = (now_seconds, decode(data[1:]))
            if data[:1] == _LAST:
                self._peers.discard(0)
                return
        if (now_seconds >= self._due or closing) and self._channel.sent(0):
            if closing:
                self._peers.discard(0)
            else:
                self._channel.expect(0)
                self._waits = True
                self._due = now_seconds + self._interval
            self._channel.send(
                0,
                (_LAST if closing else _MORE_FOLLOWS)
                + encode(get_local_rows(), self._channel.limit - 1),
            )

    def everybody(self, now_seconds: float, local_rows: Sequence[Status]) -> list[Status]:
        """Return the rows of all nodes, as far as they are known.

        The rows of this node are `local_rows`. Rows of other nodes keep the age that they had when
        they were sent: a rank may have continued since. Only rows of a silent node grow older.
        """
        rows = list(local_rows)
        local_ranks = {rank for row in local_rows for rank in row.ranks}
        for peer, (heard_seconds, peer_rows) in self._heard.items():
            elapsed_seconds = now_seconds - heard_seconds
            for row in peer_rows:
                ranks = tuple(rank for rank in row.ranks if rank not in local_ranks)
                # The first node says what others said; only its own ranks are silent when it is.
                silent = peer in self._peers and row.home == peer and elapsed_seconds > self._silent
                if ranks:
                    doing = SILENT if silent else row.doing
                    age = row.age + elapsed_seconds if silent else row.age
                    is_overdue = row.overdue or (silent and bool(row.busy) and age > 0)
                    rows.append(row._replace(ranks=ranks, age=age, doing=doing, overdue=is_overdue))
        return rows
