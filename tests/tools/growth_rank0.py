"""Work of rank 0 that could grow with the number of ranks, done for any number without MPI.

``python tests/tools/growth_rank0.py`` prints milliseconds of processor time, for 64 to 100,000
ranks.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mpistrat.checkpoint.shares import SaveRequest, _DirectorySave
from mpistrat.watchdog.exchange import StatusExchange
from mpistrat.watchdog.observer import Limits, Observer
from mpistrat.watchdog.processes import Process
from mpistrat.watchdog.status_board import (
    BETWEEN_CALLS,
    IN_CALL,
    STOPPED,
    NodeBoard,
    Reporter,
    make_call_key,
    node_board_nbytes,
)
from mpistrat.watchdog.statuses import (
    STATUS_DTYPE,
    NodeLayout,
    StatusTexts,
    encode_texts,
    texts_nbytes,
)
from mpistrat.watchdog.watchdog import Watchdog

RANKS_PER_NODE = 64
ARRAY_COUNT, WEIGHT_COUNT = 161, 25_000_000


class Planned(_DirectorySave):
    """A large checkpoint that rank 0 of many has planned; it makes no directory."""

    def __init__(self, leaders):
        """Plan it; `leaders` has the first rank of each rank's node."""
        weights = np.broadcast_to(np.float32(0), WEIGHT_COUNT // ARRAY_COUNT)
        variables = {
            f"w{i}": SimpleNamespace(_storage=SimpleNamespace(array=weights))
            for i in range(ARRAY_COUNT)
        }
        nodes = SimpleNamespace(ranks=[0])
        self._payloads = [b'["staging", {}]', *(str(leader).encode() for leader in leaders[1:])]
        lockstep = SimpleNamespace(
            comm=SimpleNamespace(rank=0, size=len(leaders)),
            options=SimpleNamespace(ranks_per_node=0),
            get_shared=lambda *_: nodes,
            gather_payloads=lambda *_: self._payloads,
        )
        super().__init__(SaveRequest(lockstep, variables, "save", Path("c"), 1, False))

    def _make_directory(self):
        return self._payloads[0]

    def plan(self):
        """Return the pieces of rank 0, as the save finds them."""
        self.plan_shares()
        return [piece for piece, rank in self._assign_pieces() if rank == 0]


def measure_plan(rank_count):
    """Return the milliseconds that rank 0 takes to plan a save of 25 M weights in 161 arrays."""
    leaders = np.arange(rank_count) // RANKS_PER_NODE * RANKS_PER_NODE
    return _measure(Planned(leaders.tolist()).plan)


class _Channel:
    """The messages of all other nodes, which are always there; answers are counted."""

    rank = 0

    def __init__(self, reports):
        self.reports, self.size, self.answer_count = reports, len(reports) + 1, 0

    def post_receive(self, peer, max_nbytes):
        assert len(self.reports[peer - 1]) <= max_nbytes

    def take_message(self, peer):
        return self.reports[peer - 1]

    def send_message(self, peer, message):
        self.answer_count += 1

    def is_sent(self, peer):
        return True


class SimulatedJob:
    """The watchdog of rank 0 of many ranks.

    Args:
      rank_count: How many.
      case: ``"nobody"`` waits for long; all wait for one ``"stopped"`` rank; half of the ranks of
        other nodes are stopped, and all are in places ``"apart"``.
      ranks_per_node: How many of them share a node.
      text_length: Letters of the text of each call.
    """

    def __init__(self, rank_count, case, ranks_per_node=RANKS_PER_NODE, text_length=50):
        """Let all ranks of other nodes be in their places, and those of the first one wait."""
        starts = range(0, rank_count, ranks_per_node)
        nodes = [range(start, min(start + ranks_per_node, rank_count)) for start in starts]
        self.culprits = {
            "nobody": range(0),
            "stopped": range(rank_count - 1, rank_count),
            "apart": range(len(nodes[0]) + 1, rank_count, 2),
        }[case]
        self._age, self._is_apart, self._text_length = 60.0, case == "apart", text_length
        self._age -= 59.5 * (case == "nobody")
        self.reports, self._now_ns = [], 10**15
        layout = NodeLayout([(f"node{number}", ranks) for number, ranks in enumerate(nodes)])
        self.channel = _Channel([self._make_report(ranks) for ranks in nodes[1:]])
        limits, seconds = Limits(), self._now_ns / 1e9
        self._exchange = StatusExchange(self.channel, layout, 1.0, 1e9, seconds)
        node_board = self._open_board(nodes[0])
        observer = Observer(
            *(node_board, rank_count, "node0", limits, self.reports.append, None, None),
            lambda pid: Process("S", 1, 1, "python"),
        )
        reporter = Reporter(node_board.slot(0), 0, 0)
        self._watchdog = Watchdog(0, reporter, observer, self._exchange, clock=lambda: self._now_ns)
        self.exchange()

    def _texts_of(self, rank):
        place = rank if self._is_apart else 88
        return StatusTexts(
            f"train.py:{place}", f"all_reduce {place} ".ljust(self._text_length, "x")
        )

    def _make_report(self, ranks):
        rows = np.zeros(len(ranks), STATUS_DTYPE)
        for row, rank in zip(rows, ranks, strict=True):
            row["key"], row["state"], row["age"] = make_call_key(5), IN_CALL, self._age
            row["activity"] = ord("S")
            if rank in self.culprits:
                row["key"], row["state"], row["activity"] = 4 << 20, BETWEEN_CALLS, ord(STOPPED)
        texts = encode_texts([self._texts_of(rank) for rank in ranks], texts_nbytes(len(ranks)))
        return b"\0" + rows.tobytes() + texts

    def _open_board(self, ranks):
        size, past_ns = len(ranks), self._now_ns - int(self._age * 1e9)
        node_board = NodeBoard(memoryview(bytearray(node_board_nbytes(size))), size)
        for index, rank in enumerate(ranks):
            slot = node_board.slot(index, lambda: past_ns)
            slot.open(rank, 1000 + rank, 1, 0)
            texts = self._texts_of(rank)
            slot.enter(5, texts.call_text)
            slot.write_texts(texts.position)
            slot.record_heartbeat(self._now_ns, 0)
        return node_board

    def look(self):
        """Look at all ranks once, as rank 0 does each second."""
        self._watchdog._watch(self._now_ns)

    def exchange(self):
        """Receive a message of each node, and answer it."""
        seconds = self._now_ns / 1e9
        self._exchange.exchange_statuses(seconds, self._watchdog._statuses, is_closing=False)

    def table(self):
        """Return the statuses of all ranks."""
        return self._exchange.merge_statuses(self._now_ns / 1e9, self._watchdog._statuses)


def measure_watchdog(rank_count, case):
    """Return the milliseconds of rank 0's first look, of each further one, and of the messages."""
    job = SimulatedJob(rank_count, case)
    first = _measure(job.look, 1)
    return first, _measure(job.look), _measure(job.exchange)


def _measure(function, repeats=9):
    """Return the milliseconds of processor time of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


if __name__ == "__main__":
    for rank_count in (64, 1024, 4096, 20_000, 100_000):
        print(f"{rank_count:8} ranks: plan of a save {measure_plan(rank_count):8.2f} ms")
        for case in ("nobody", "stopped", "apart"):
            first, later, messages = measure_watchdog(rank_count, case)
            print(
                f"    watchdog, {case:8} first look {first:8.2f} ms, later {later:6.2f} ms, "
                f"messages {messages:6.2f} ms"
            )
