"""The MPI messages by which the watchdogs of the nodes exchange the statuses of their ranks.

`Mailbox` sends and receives single messages without blocking. `StatusExchange` uses it about once a
second. The first node collects and judges: every other node sends it the statuses of its ranks, and
gets an answer, which has the verdict on its ranks, a summary of the other nodes, and the statuses
of the first node. The answer does not grow with the number of nodes. The statuses are the rows of
a table, which are copied to their place in the table of all ranks without a look at any of them.
A node sends again only after it was answered. So there is at most one message in transit between
two nodes, a posted receive always waits for it, and no message is left over at the end: the last
message of a pair says that it is the last one. Nobody blocks. A node that does not answer is
recognized by the age of its last message.

`begin_barrier` and `call_before_finalize` serve the end of a program, where no rank may block and
MPI must not be finalized while a thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.mpi import library
from mpistrat.watchdog.observer import Verdict
from mpistrat.watchdog.status_board import SILENT
from mpistrat.watchdog.statuses import (
    OTHER_NODES_DTYPE,
    STATUS_DTYPE,
    NodeLayout,
    StatusTable,
    texts_nbytes,
)

_TAG = 75


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

    def __init__(self, comm: Any):
        """Create a mailbox without a posted receive."""
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._receives: dict[int, tuple[Any, bytearray]] = {}
        self._sends: dict[int, tuple[Any, bytes]] = {}

    def post_receive(self, peer: int, max_nbytes: int) -> None:
        """Post the receive of one message of `peer`, of at most `max_nbytes` bytes."""
        buffer = bytearray(max_nbytes)
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
_VERDICT_DTYPE = np.dtype([("key", np.int64), ("is_ending", np.bool_)])


@final
class StatusExchange:
    """The part of one node in the exchange of statuses between nodes.

    Args:
      channel: Sends and receives messages.
      layout: The ranks of every node.
      interval: Seconds between two messages.
      silence_seconds: Seconds without a message after which a node counts as silent.
      now_seconds: The time.

    Attributes:
      is_leading: This is the first node.
      own_rows: The rows of this node.
      verdict: The verdict on the ranks of this node; on the first node, on all ranks.
    """

    def __init__(
        self,
        channel: Mailbox,
        layout: NodeLayout,
        interval: float,
        silence_seconds: float,
        now_seconds: float,
    ):
        """Create it, with a posted receive for each node that sends to this one."""
        self._channel, self._node_index = channel, channel.rank
        self._interval_seconds, self._silence_seconds = interval, silence_seconds
        self.is_leading = channel.rank == 0
        self._peers = set(range(1, channel.size)) if self.is_leading else {0}
        self.own_rows = layout.rows_of(channel.rank)
        # The last statuses of the first node and of this one; on the first node, of all.
        self._table = StatusTable.create(layout)
        self._table.assume_started(slice(None) if self.is_leading else layout.rows_of(0))
        self._heard_seconds = np.full(channel.size, now_seconds)  # by node; the last message
        judged_rows = slice(None) if self.is_leading else self.own_rows
        self.verdict = Verdict(0, False, np.zeros(len(layout.ranks), np.bool_)[judged_rows])
        self._summaries = np.zeros(channel.size, OTHER_NODES_DTYPE)
        self._next_send_seconds = now_seconds
        self._unanswered_peers: set[int] = set()  # leading: nodes that wait for an answer
        self._is_awaiting_answer = False  # not leading: an answer is in transit
        for peer in self._peers if self.is_leading else ():
            self._post_receive(peer)

    @property
    def is_finished(self) -> bool:
        """Whether no message will be sent or received any more."""
        return not self._peers

    def is_cut_off(self, now_seconds: float) -> bool:
        """Tell whether the first node, which speaks for all, is silent."""
        return not self.is_leading and 0 in self._find_silent_peers(now_seconds)

    def _find_silent_peers(self, now_seconds: float) -> set[int]:
        is_silent = now_seconds - self._heard_seconds > self._silence_seconds
        return self._peers.intersection(np.flatnonzero(is_silent).tolist())

    def record_decisions(self, verdict: Verdict, summaries: Array) -> None:
        """Keep decisions of the first node for its next answers.

        Args:
          verdict: The verdict on all ranks.
          summaries: As of `StatusTable.summarize_other_nodes`.
        """
        self.verdict, self._summaries = verdict, summaries

    def read_other_nodes(self, now_seconds: float) -> tuple[int, float, float, float]:
        """Return the summary of the other nodes, as of `StatusTable.summarize_other_nodes`.

        Its ages are those of the last answer: a rank may have continued since. They grow only if
        the first node is silent.
        """
        inside_key, *ages = self._summaries[self._node_index].tolist()
        if self.is_cut_off(now_seconds):
            ages = [age + now_seconds - float(self._heard_seconds[0]) for age in ages]
        return inside_key, *ages

    def exchange_statuses(
        self, now_seconds: float, local_statuses: StatusTable, is_closing: bool
    ) -> None:
        """Send and receive the messages that are due, without waiting.

        Args:
          now_seconds: The time.
          local_statuses: The statuses of this node.
          is_closing: This node is leaving: say so to the others, and send nothing after that.
        """
        if self.is_leading:
            self._answer_peers(now_seconds, local_statuses, is_closing)
        elif self._peers:
            self._report_to_leader(now_seconds, local_statuses, is_closing)

    def _answer_peers(
        self, now_seconds: float, local_statuses: StatusTable, is_closing: bool
    ) -> None:
        for peer in self._peers - self._unanswered_peers:
            message = self._channel.take_message(peer)
            if message is not None:
                self._heard_seconds[peer] = now_seconds
                self._store_statuses(peer, message, 1)
                if message[:1] == _LAST:
                    self._peers.discard(peer)
                else:
                    self._unanswered_peers.add(peer)
        ready_peers = [peer for peer in self._unanswered_peers if self._channel.is_sent(peer)]
        if not ready_peers:
            return
        verdict = self.verdict
        encoded_verdict = np.array(verdict[:2], _VERDICT_DTYPE).tobytes()
        head = (_LAST if is_closing else _MORE_FOLLOWS) + encoded_verdict
        tail = local_statuses.rows.tobytes() + local_statuses.texts[0]
        for peer in ready_peers:
            self._unanswered_peers.discard(peer)
            if is_closing:
                self._peers.discard(peer)
            else:
                self._post_receive(peer)
            is_named = verdict.is_named[self._table.layout.rows_of(peer)]
            answer = (head, self._summaries[peer].tobytes(), is_named.tobytes(), tail)
            self._channel.send_message(peer, b"".join(answer))

    def _report_to_leader(
        self, now_seconds: float, local_statuses: StatusTable, is_closing: bool
    ) -> None:
        if self._is_awaiting_answer:
            message = self._channel.take_message(0)
            if message is None:
                return
            self._is_awaiting_answer = False
            self._heard_seconds[0] = now_seconds
            self._store_answer(message)
            if message[:1] == _LAST:
                self._peers.discard(0)
                return
        if (now_seconds >= self._next_send_seconds or is_closing) and self._channel.is_sent(0):
            if is_closing:
                self._peers.discard(0)
            else:
                self._post_receive(0)
                self._is_awaiting_answer = True
                self._next_send_seconds = now_seconds + self._interval_seconds
            report = (
                _LAST if is_closing else _MORE_FOLLOWS,
                local_statuses.rows.tobytes(),
                local_statuses.texts[0],
            )
            self._channel.send_message(0, b"".join(report))

    def _post_receive(self, peer: int) -> None:
        """Post the receive of a message of a node, with room for the statuses of all its ranks."""
        size = self._table.layout.sizes[peer]
        max_nbytes = 1 + size * STATUS_DTYPE.itemsize + texts_nbytes(size)
        if not self.is_leading:
            own_size = self._table.layout.sizes[self._node_index]
            max_nbytes += _VERDICT_DTYPE.itemsize + OTHER_NODES_DTYPE.itemsize + own_size
        self._channel.post_receive(peer, max_nbytes)

    def _store_answer(self, message: bytes) -> None:
        own_size = self._table.layout.sizes[self._node_index]
        parts: list[Array] = []
        offset = 1
        for dtype, count in (_VERDICT_DTYPE, 1), (OTHER_NODES_DTYPE, 1), (np.dtype(bool), own_size):
            parts.append(np.frombuffer(message, dtype, count, offset))
            offset += parts[-1].nbytes
        (verdict,), (summary,), is_named = parts
        self.verdict = Verdict(int(verdict["key"]), bool(verdict["is_ending"]), is_named)
        self._summaries[self._node_index] = summary
        self._store_statuses(0, message, offset)

    def _store_statuses(self, node_index: int, message: bytes, offset: int) -> None:
        """Store the statuses of a node, which begin at byte `offset` of a message."""
        rows = self._table.layout.rows_of(node_index)
        count = rows.stop - rows.start
        self._table.rows[rows] = np.frombuffer(message, STATUS_DTYPE, count, offset)
        self._table.texts[node_index] = message[offset + count * STATUS_DTYPE.itemsize :]

    def merge_statuses(self, now_seconds: float, local_statuses: StatusTable) -> StatusTable:
        """Return the statuses of all nodes, as far as they are known, in arrays of their own.

        The statuses of this node are `local_statuses`. Those of other nodes keep the age that they
        had when they were sent: a rank may have continued since. Only those of a silent node grow
        older.
        """
        table = self._table._replace(rows=self._table.rows.copy(), texts=[*self._table.texts])
        table.rows[self.own_rows] = local_statuses.rows
        table.texts[self._node_index] = local_statuses.texts[0]
        for peer in self._find_silent_peers(now_seconds):
            rows = table.rows[table.layout.rows_of(peer)]
            rows["activity"] = ord(SILENT)
            rows["age"] += now_seconds - self._heard_seconds[peer]
            rows["is_overdue"] |= rows["is_declared"] & (rows["age"] > 0)
        return table
