"""The MPI messages by which the watchdogs of the nodes exchange the statuses of their ranks.

`Mailbox` sends and receives single messages without blocking. `StatusExchange` uses it about once a
second. The first node collects: every other node sends it its statuses, and gets those of all nodes
as the answer. A node sends again only after it was answered. So there is at most one message in
transit between two nodes, a posted receive always waits for it, and no message is left over at the
end: the last message of a pair says that it is the last one. Nobody blocks. A node that does not
answer is recognized by the age of its last message.

`begin_barrier` and `call_before_finalize` serve the end of a program, where no rank may block and
MPI must not be finalized while a thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from mpistrat.comm.mpi import library
from mpistrat.watchdog.status_board import SILENT, Status, decode_statuses, encode_statuses

_TAG = 75
_MAX_NBYTES = 4096


def has_thread_multiple() -> bool:
    """Tell whether any thread may call MPI at any time."""
    mpi = library()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def begin_barrier(comm: Any) -> Callable[[], bool]:
    """Begin a barrier, and return a function that tells whether all ranks have come to it.

    Neither waits.

    Collective over `comm`: MPI_Ibarrier.
    """
    request = comm.Ibarrier()
    return lambda: bool(request.Test())


def call_before_finalize(function: Callable[..., Any]) -> Callable[[], None]:
    """Call a function when the program itself finalizes MPI, before anything is torn down.

    MPI empties the attributes of COMM_SELF first of all (MPI 4.1, section 11.2.4).

    Returns:
      A function that calls it now instead, and never again.
    """
    mpi = library()
    key = mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: function())
    mpi.COMM_SELF.Set_attr(key, function)

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

    max_nbytes = _MAX_NBYTES

    def __init__(self, comm: Any):
        """Create a mailbox without a posted receive."""
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._receives: dict[int, tuple[Any, bytearray]] = {}
        self._sends: dict[int, tuple[Any, bytes]] = {}

    def post_receive(self, peer: int) -> None:
        """Post the receive of one message of `peer`, of at most `max_nbytes` bytes."""
        buffer = bytearray(_MAX_NBYTES)
        request = self._comm.Irecv([buffer, library().BYTE], source=peer, tag=_TAG)
        self._receives[peer] = (request, buffer)

    def take_message(self, peer: int) -> bytes | None:
        """Return the expected message, once; None if it has not arrived."""
        request, buffer = self._receives[peer]
        status = library().Status()
        if not request.Test(status):
            return None
        del self._receives[peer]
        return bytes(buffer[: status.Get_count(library().BYTE)])

    def send_message(self, peer: int, message: bytes) -> None:
        """Send a message, which is kept until it has left; the one before must have (`is_sent`)."""
        request = self._comm.Isend([message, library().BYTE], dest=peer, tag=_TAG)
        self._sends[peer] = (request, message)

    def is_sent(self, peer: int) -> bool:
        """Tell whether the last message to `peer` has left."""
        if peer not in self._sends:
            return True
        has_left = bool(self._sends[peer][0].Test())
        if has_left:
            del self._sends[peer]
        return has_left


_MORE_FOLLOWS, _LAST = b"\0", b"\1"


@final
class StatusExchange:
    """The part of one node in the exchange of statuses between nodes.

    Args:
      channel: Sends and receives messages.
      initial_statuses: The statuses of every node before its first message, node by node.
      interval: Seconds between two messages.
      silence_seconds: Seconds without a message after which a node counts as silent.
      now_seconds: The time.
    """

    def __init__(
        self,
        channel: Mailbox,
        initial_statuses: Sequence[Sequence[Status]],
        interval: float,
        silence_seconds: float,
        now_seconds: float,
    ):
        """Create it, with a posted receive for each node that sends to this one."""
        self._channel = channel
        self._interval_seconds, self._silence_seconds = interval, silence_seconds
        self.is_leading = channel.rank == 0
        self._peers = set(range(1, channel.size)) if self.is_leading else {0}
        # On the first node: the last statuses of each other node; elsewhere, its last answer.
        self._last_messages: dict[int, tuple[float, Sequence[Status]]] = {
            peer: (
                now_seconds,
                initial_statuses[peer]
                if self.is_leading
                else [status for node_statuses in initial_statuses for status in node_statuses],
            )
            for peer in self._peers
        }
        self._next_send_seconds = now_seconds
        self._unanswered_peers: set[int] = set()  # leading: nodes that wait for an answer
        self._is_awaiting_answer = False  # not leading: an answer is in transit
        for peer in self._peers if self.is_leading else ():
            channel.post_receive(peer)

    @property
    def is_finished(self) -> bool:
        """Whether no message will be sent or received any more."""
        return not self._peers

    def is_cut_off(self, now_seconds: float) -> bool:
        """Tell whether the first node, which speaks for all, is silent."""
        return (
            not self.is_leading
            and 0 in self._peers
            and now_seconds - self._last_messages[0][0] > self._silence_seconds
        )

    def exchange_statuses(
        self,
        now_seconds: float,
        get_local_statuses: Callable[[], Sequence[Status]],
        is_closing: bool,
    ) -> None:
        """Send and receive the messages that are due, without waiting.

        Args:
          now_seconds: The time.
          get_local_statuses: Returns the statuses of this node.
          is_closing: This node is leaving: say so to the others, and send nothing after that.
        """
        if self.is_leading:
            self._answer_peers(now_seconds, get_local_statuses, is_closing)
        elif self._peers:
            self._report_to_leader(now_seconds, get_local_statuses, is_closing)

    def _answer_peers(
        self,
        now_seconds: float,
        get_local_statuses: Callable[[], Sequence[Status]],
        is_closing: bool,
    ) -> None:
        for peer in self._peers - self._unanswered_peers:
            message = self._channel.take_message(peer)
            if message is not None:
                self._last_messages[peer] = (now_seconds, decode_statuses(message[1:]))
                if message[:1] == _LAST:
                    self._peers.discard(peer)
                else:
                    self._unanswered_peers.add(peer)
        ready_peers = [peer for peer in self._unanswered_peers if self._channel.is_sent(peer)]
        if ready_peers:
            answer = (_LAST if is_closing else _MORE_FOLLOWS) + encode_statuses(
                self.merge_statuses(now_seconds, get_local_statuses()), self._channel.max_nbytes - 1
            )
            for peer in ready_peers:
                self._unanswered_peers.discard(peer)
                if is_closing:
                    self._peers.discard(peer)
                else:
                    self._channel.post_receive(peer)
                self._channel.send_message(peer, answer)

    def _report_to_leader(
        self,
        now_seconds: float,
        get_local_statuses: Callable[[], Sequence[Status]],
        is_closing: bool,
    ) -> None:
        if self._is_awaiting_answer:
            message = self._channel.take_message(0)
            if message is None:
                return
            self._is_awaiting_answer = False
            self._last_messages[0] = (now_seconds, decode_statuses(message[1:]))
            if message[:1] == _LAST:
                self._peers.discard(0)
                return
        if (now_seconds >= self._next_send_seconds or is_closing) and self._channel.is_sent(0):
            if is_closing:
                self._peers.discard(0)
            else:
                self._channel.post_receive(0)
                self._is_awaiting_answer = True
                self._next_send_seconds = now_seconds + self._interval_seconds
            self._channel.send_message(
                0,
                (_LAST if is_closing else _MORE_FOLLOWS)
                + encode_statuses(get_local_statuses(), self._channel.max_nbytes - 1),
            )

    def merge_statuses(self, now_seconds: float, local_statuses: Sequence[Status]) -> list[Status]:
        """Return the statuses of all nodes, as far as they are known.

        The statuses of this node are `local_statuses`. Those of other nodes keep the age that they
        had when they were sent: a rank may have continued since. Only those of a silent node grow
        older.
        """
        statuses = list(local_statuses)
        local_ranks = {rank for status in local_statuses for rank in status.ranks}
        for peer, (heard_seconds, peer_statuses) in self._last_messages.items():
            elapsed_seconds = now_seconds - heard_seconds
            for status in peer_statuses:
                ranks = tuple(rank for rank in status.ranks if rank not in local_ranks)
                # The first node passes on statuses; when it is silent, only its own ranks are.
                is_silent = (
                    peer in self._peers
                    and status.node_index == peer
                    and elapsed_seconds > self._silence_seconds
                )
                if ranks:
                    activity = SILENT if is_silent else status.activity
                    age = status.age + elapsed_seconds if is_silent else status.age
                    is_overdue = status.is_overdue or (
                        is_silent and bool(status.operation) and age > 0
                    )
                    statuses.append(
                        status._replace(
                            ranks=ranks, age=age, activity=activity, is_overdue=is_overdue
                        )
                    )
        return statuses
