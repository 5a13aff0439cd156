"""Ranks that keep others waiting: the diagnosis, its messages, and the end of a job that hangs.

`diagnose` finds the missing ranks in the statuses of all ranks; `format_warning` and
`format_ending` put that into words. `Observer` belongs to the watching process of a node: it reads
the statuses of its ranks from the status board. That of the first node judges the statuses of all
ranks: it warns after ``MPISTRAT_WARN`` seconds, and ends the job after ``MPISTRAT_TIMEOUT``
seconds. Each asks the missing ranks of its node for their stacks. `Limits` has these times, and
those that follow from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.callsite import ranks_text, shorten
from mpistrat.watchdog.processes import (
    ComputeTracker,
    ReadProcess,
    has_signal_handler,
    is_process_finished,
    read_process,
)
from mpistrat.watchdog.status_board import (
    COMPUTING,
    DEAD,
    IN_CALL,
    IN_OTHER_CALL,
    LEAVING,
    LEFT,
    NOT_RUNNING_PYTHON,
    REPLACED,
    SECOND_NS,
    SILENT,
    STOPPED,
    TROUBLES,
    NodeBoard,
    SlotEntry,
    get_call_number,
)
from mpistrat.watchdog.status_board import HUNG as HUNG
from mpistrat.watchdog.statuses import (
    IS_TROUBLE,
    STATUS_DTYPE,
    DecodedTexts,
    NodeLayout,
    Status,
    StatusTable,
    StatusTexts,
    encode_texts,
    texts_nbytes,
)

_ACTIVITY_TEXTS = {
    "R": "computing",
    "S": "sleeping, or waiting for something",
    "D": "waiting for a disk or a device",
    "T": "stopped by a signal",
    "W": "waiting in a call on another communicator",
    "X": "its process is gone",
    "H": "its Python does not run: a C call holds the GIL, or the machine is overloaded",
    "E": "another program runs in its process: it has called os.exec",
    "Q": "its node does not answer: suspended, overloaded, or down",
}


class Diagnosis(NamedTuple):
    """The ranks that wait, and those that they wait for.

    Attributes:
      table: The statuses of all ranks, as far as they are known.
      key: The call that they wait in, and the part of it.
      seconds: For how long nothing has moved.
      missing: The rows of the ranks that they wait for. Empty: all have come to the call, and none
        comes out of it.
      waiting: The rows of the ranks that wait.
      unknown_count: The number of ranks of the job of which nothing is known here.
      patience: Seconds that the call may take, if it says so itself; else 0.
    """

    table: StatusTable
    key: int
    seconds: float
    missing: Array
    waiting: Array
    unknown_count: int = 0
    patience: float = 0.0


def diagnose(table: StatusTable, size: int = 0) -> Diagnosis | None:
    """Return which ranks wait for which, or None if none waits or the reason is declared.

    Seconds count from the later of two moments: the first rank began to wait in that call; the
    missing rank last did something that the status board shows.

    Cost: a few passes of NumPy over the rows.

    Args:
      table: The statuses of all ranks, as far as they are known.
      size: How many ranks there are; 0 for as many as are known.
    """
    rows = table.rows
    key, state, age = rows["key"], rows["state"], rows["age"]
    is_trouble, is_known = IS_TROUBLE[rows["activity"]], state != 0
    is_in_call = ((state == IN_CALL) | (state == LEAVING)) & ~is_trouble
    if not is_in_call.any():
        return None
    newest_key = int(key[is_in_call].max())
    is_waiting = is_in_call & (key == newest_key)
    waiting = np.flatnonzero(is_waiting)
    patiences = rows["patience"][waiting]
    patience = float(patiences[patiences > 0].min()) if patiences.any() else 0.0
    unknown_count = max(0, size - int(np.count_nonzero(is_known)))
    is_behind = key < newest_key
    is_missing = ~is_waiting & is_known & (is_behind | (state == LEFT) | is_trouble)
    # Ranks of a silent node count if they had not come as far, or if no other rank is missing.
    is_surely_missing = is_missing & (is_behind | (rows["activity"] != ord(SILENT)))
    if is_surely_missing.any():
        is_missing = is_surely_missing
    missing = np.flatnonzero(is_missing & (~rows["is_declared"] | rows["is_overdue"]))
    if missing.size:
        seconds = float(min(age[waiting].max(), age[missing].max()))
    elif is_missing.any():
        return None
    else:
        # The last rank that came out counts too: others may have, and it is not known yet.
        seconds = float(age[is_known].min())
    return Diagnosis(table, newest_key, seconds, missing, waiting, unknown_count, patience)


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _describe_activity(status: Status) -> str:
    """Return in words what the ranks of a status do."""
    activity_text = _ACTIVITY_TEXTS.get(status.activity, status.activity)
    if len(status.ranks) > 1:
        activity_text = activity_text.replace("its process is", "their processes are").replace(
            "its ", "their "
        )
    if status.is_overdue:
        activity_text += f"; over the time declared for {status.operation!r}"
    return activity_text


def _describe_position(status: Status, key: int) -> str:
    is_plural = len(status.ranks) > 1
    is_last_seen = status.activity in TROUBLES and status.activity != "T"
    pronoun = "They" if is_plural else "It"
    verb = "are in" if is_plural else "is in"
    if is_last_seen:
        verb = ("were" if is_plural else "was") + " last seen in"
    call_text = ""
    if status.state == IN_CALL and get_call_number(status.key) != get_call_number(key):
        call_text = f" of call {get_call_number(status.key)}" + (
            f", {status.call_text}" if status.call_text else ""
        )
    elif status.activity == IN_OTHER_CALL and status.call_text:
        call_text = f", {status.call_text}"
    if not status.position:
        return f"Its position is not known ({_describe_activity(status)})."
    return f"{pronoun} {verb} {status.position}{call_text} ({_describe_activity(status)})."


def _describe_missing(status: Status, key: int, seconds: float) -> str:
    """Return which ranks are missing, where they are, and for how long."""
    is_plural = len(status.ranks) > 1
    node = f" ({status.node})" if status.node else ""
    subject = f"{ranks_text(status.ranks)}{node}"
    number = get_call_number(key)
    if status.state == LEFT:
        predicate = f"{'have' if is_plural else 'has'} left the program or finalized MPI"
        return f"{subject} {predicate} before call {number}."
    if get_call_number(status.key) < number:
        predicate = f"{'have' if is_plural else 'has'} not reached call {number}"
    else:
        predicate = f"{'have' if is_plural else 'has'} made no progress in call {number}"
    return (
        f"{subject} {predicate} for {_format_seconds(seconds)}. {_describe_position(status, key)}"
    )


def _describe_waiting(diagnosis: Diagnosis, texts: DecodedTexts) -> str:
    statuses, hidden_count = diagnosis.table.join(diagnosis.waiting, texts, is_by_place=True)
    waiting_texts = []
    for status in statuses:
        position_text = " ".join(filter(None, (status.position, status.call_text)))
        verb = "wait in" if len(status.ranks) > 1 else "waits in"
        position_text = position_text or f"call {get_call_number(diagnosis.key)}"
        waiting_texts.append(f"{ranks_text(status.ranks)} {verb} {position_text}")
    return "; ".join(shorten(waiting_texts, hidden_count=hidden_count))


def _describe_ranks(diagnosis: Diagnosis, min_seconds: float) -> tuple[str, str]:
    """Return two texts: the ranks that are missing, and those that wait."""
    table, missing = diagnosis.table, diagnosis.missing
    texts = table.decode_texts()
    waiting_text = _describe_waiting(diagnosis, texts)
    if not missing.size:
        ranks = table.layout.ranks[diagnosis.waiting].tolist()
        arrival_text = f"{ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'} come to call"
        missing_text = (
            f"{arrival_text} {get_call_number(diagnosis.key)} and not out of it for "
            f"{_format_seconds(diagnosis.seconds)}."
        )
        if diagnosis.unknown_count:
            missing_text += f" Nothing is known here about the other {diagnosis.unknown_count}."
        return missing_text, waiting_text
    rows = table.rows[missing]
    is_late = (rows["age"] >= min_seconds) | (rows["activity"] == ord(DEAD))
    late_statuses, hidden_count = table.join(missing[is_late], texts)
    lines = [
        _describe_missing(status, diagnosis.key, min(diagnosis.seconds, status.age))
        for status in late_statuses
    ]
    return "\n  ".join(shorten(lines, hidden_count=hidden_count)), waiting_text


def format_warning(diagnosis: Diagnosis, warn: float, timeout: float) -> str:
    """Return the warning about ranks that have been missing for `warn` seconds.

    Example:
      >>> table = StatusTable.create(NodeLayout([("node12", range(8))]))
      >>> table.rows["key"], table.rows["state"], table.rows["age"] = 412 << 20, IN_CALL, 60.0
      >>> table.rows["activity"] = ord("S")
      >>> table.rows[5] = (411 << 20, 1, ord("T"), False, False, 80.0, 0.0, 0.0, 0.0)
      >>> texts = [StatusTexts("train.py:88", "all_reduce(SUM, float32[1024] 'grads')")] * 8
      >>> texts[5] = StatusTexts("data.py:31")
      >>> table.texts[0] = encode_texts(texts, 4096)
      >>> print(format_warning(diagnose(table), 60, 1800))
      mpistrat: rank 5 (node12) has not reached call 412 for 60 s. It is in data.py:31 (stopped by
        a signal).
        ranks 0-4, 6, 7 wait in train.py:88 all_reduce(SUM, float32[1024] 'grads'). The job ends
        after 1800 s of this; MPISTRAT_TIMEOUT changes that.
    """
    missing, waiting = _describe_ranks(diagnosis, warn)
    return (
        f"mpistrat: {missing}\n  {waiting}. The job ends after {timeout:g} s of this; "
        f"{'timeout_seconds says so' if diagnosis.patience else 'MPISTRAT_TIMEOUT changes that'}."
    )


def format_ending(diagnosis: Diagnosis, timeout: float, code: int) -> str:
    """Return the message of a job that is ended after `timeout` seconds."""
    missing, waiting = _describe_ranks(diagnosis, timeout)
    return (
        f"mpistrat: the job ends with exit code {code}: nothing moved for {timeout:g} s.\n"
        f"  {missing}\n  {waiting}. All ranks have to make the same calls, those of MPI itself too."
    )


_STUCK_ACTIVITIES = (STOPPED, NOT_RUNNING_PYTHON, REPLACED)
_STATES = {"t": STOPPED, "I": "S", "Z": DEAD, "x": DEAD}


class Limits(NamedTuple):
    """The times after which a watchdog acts.

    Attributes:
      warn: Seconds after which a missing rank is named.
      timeout: Seconds after which the job is ended.
    """

    warn: float = 60.0
    timeout: float = 1800.0

    @property
    def tick(self) -> float:
        """Seconds between two reports of a process about itself."""
        return min(0.25, self.warn / 8)

    @property
    def interval(self) -> float:
        """Seconds between two looks at all ranks, and between two messages to other nodes."""
        return min(1.0, self.warn / 4)

    @property
    def stale(self) -> float:
        """Seconds without a heartbeat after which a process counts as not running Python."""
        return min(5.0, max(1.0, self.warn / 2))


class Verdict(NamedTuple):
    """The decision about ranks that keep others waiting.

    Attributes:
      key: The call that others wait in, and the part of it.
      is_ending: The end of the job is announced: it ends whatever moves from now on.
      is_named: For each rank whether its stacks are wanted.
    """

    key: int
    is_ending: bool
    is_named: Array


@final
@dataclass(eq=False)
class Observer:
    """Reads all slots of a node, and reports ranks that keep others waiting.

    Attributes:
      node_board: The status board of the node.
      size: The number of ranks of the job.
      node_name: The name of the node.
      limits: The times after which it acts.
      read_process: Returns the state of a process.
      print_report: Prints a report.
      end_job: Ends the job with an exit code.
      send_signal: Makes a process print its stacks although it does not run Python: (pid, signal).
      has_signal_handler: Tells whether a process has a handler of that signal: (pid, signal).
    """

    node_board: NodeBoard
    size: int
    node_name: str
    limits: Limits
    print_report: Callable[[str], None]
    end_job: Callable[[int], None]
    send_signal: Callable[[int, int], None]
    read_process: ReadProcess = read_process
    has_signal_handler: Callable[[int, int], bool] = has_signal_handler

    def __post_init__(self) -> None:
        """Read the board, on which all ranks have opened their slots."""
        slot_indices = range(self.node_board.size)
        self.layout = NodeLayout(
            [(self.node_name, [self.node_board.read_rank(i) for i in slot_indices])]
        )
        self._entries: list[SlotEntry | None] = [self.node_board.read(i) for i in slot_indices]
        # In another pid namespace a number means nothing, or another process.
        self._are_visible = [e is not None and not self._is_finished(e) for e in self._entries]
        self._last_warning: tuple[object, ...] = ()
        self._stack_requests: set[tuple[int, int]] = set()
        self._signalled_indices: set[int] = set()
        self._compute_tracker = ComputeTracker(self.read_process)

    def _is_finished(self, entry: SlotEntry) -> bool:
        return is_process_finished(self.read_process(entry.pid), entry.start_ticks)

    def read_statuses(self, now_ns: int) -> StatusTable:
        """Return the statuses of the ranks of this node."""
        size = self.node_board.size
        rows, texts = np.zeros(size, STATUS_DTYPE), [StatusTexts()] * size
        for index in range(size):
            entry = self.node_board.read(index) or self._entries[index]
            self._entries[index] = entry
            if entry is not None:
                rows[index], texts[index] = self._read_status(index, entry, now_ns)
        return StatusTable(self.layout, rows, [encode_texts(texts, texts_nbytes(size))])

    def _read_status(
        self, index: int, entry: SlotEntry, now_ns: int
    ) -> tuple[tuple[object, ...], StatusTexts]:
        """Return the row of a rank, and its texts."""
        # The operating system is asked about ranks only that have not moved for a while.
        changed_ns = max(entry.changed_ns, entry.other_call_ns)
        is_moving = (now_ns - changed_ns) / SECOND_NS < self.limits.interval
        activity = COMPUTING if is_moving else self._determine_activity(index, entry, now_ns)
        deadline_ns, operation = entry.deadline, entry.operation or "a long operation"
        if activity in (DEAD, STOPPED):
            if activity == STOPPED and max(deadline_ns, entry.compiling_until_ns) > 0:
                changed_ns = max(changed_ns, entry.heartbeat_ns)  # it has not worked on it since
            deadline_ns = 0
        elif entry.compiling_until_ns > now_ns:
            deadline_ns, operation = entry.compiling_until_ns, "compiling"
        is_waiting = entry.state in (IN_CALL, LEAVING)
        computed_ns = now_ns
        if not is_moving:
            computed_ns = self._compute_tracker.find_last_computing(
                entry.pid, entry.start_ticks, now_ns
            )
        row = (
            entry.key,
            entry.state,
            ord(activity),
            deadline_ns > 0,
            0 < deadline_ns < now_ns,
            (now_ns - max(changed_ns, deadline_ns)) / SECOND_NS,
            entry.patience / SECOND_NS if is_waiting else 0.0,
            (now_ns - (entry.stack_changed_ns if entry.other_call_ns else 0)) / SECOND_NS,
            (now_ns - computed_ns) / SECOND_NS,
        )
        has_call = is_waiting or activity == IN_OTHER_CALL
        return row, StatusTexts(
            entry.position,
            entry.call_text if has_call else "",
            operation if deadline_ns else "",
        )

    def _determine_activity(self, index: int, entry: SlotEntry, now_ns: int) -> str:
        """Return the activity of a rank that has not moved since the last look."""
        if entry.state == LEFT:
            return COMPUTING
        is_stale = (now_ns - entry.heartbeat_ns) / SECOND_NS > self.limits.stale
        if not self._are_visible[index]:
            return NOT_RUNNING_PYTHON if is_stale else COMPUTING
        process = self.read_process(entry.pid)
        if process is None or is_process_finished(process, entry.start_ticks):
            return DEAD
        state = _STATES.get(process.state, process.state)
        if is_stale and state != STOPPED:
            return (
                NOT_RUNNING_PYTHON
                if not entry.stack_signal or self.has_signal_handler(entry.pid, entry.stack_signal)
                else REPLACED
            )
        return IN_OTHER_CALL if entry.is_away and state != STOPPED else state

    def react(self, table: StatusTable, own_rows: slice) -> Verdict:
        """Warn of missing ranks, ask those of this node for their stacks, or announce the end.

        Args:
          table: The statuses of all ranks of the job, as far as they are known here.
          own_rows: The ranks of this node.

        Returns:
          The verdict on all ranks of the table. The caller ends the job if it is announced.
        """
        diagnosis = diagnose(table, self.size)
        warn, timeout = self.limits
        is_named = np.zeros(len(table.rows), np.bool_)
        if diagnosis is not None and diagnosis.patience:
            timeout = diagnosis.patience
            warn = min(warn, timeout / 2)  # a rank is named before the job ends because of it
        if diagnosis is None or diagnosis.seconds < min(warn, timeout):
            if diagnosis is None:
                self._last_warning = ()
            return Verdict(0, False, is_named)
        # Warn again when another rank is missing or gets into trouble; not for each new line.
        rows = table.rows[diagnosis.missing]
        is_late = rows["age"] >= warn
        troubles = np.where(IS_TROUBLE[rows["activity"]], rows["activity"], 0)[is_late]
        warning = (diagnosis.key, diagnosis.missing[is_late].tobytes(), troubles.tobytes())
        if self._last_warning != warning:
            self._last_warning = warning
            self.print_report(format_warning(diagnosis, warn, timeout))
        # A rank of which nothing is known here may have declared why it is late.
        can_end = bool(diagnosis.missing.size) or not diagnosis.unknown_count
        is_ending = can_end and diagnosis.seconds >= timeout
        is_named[diagnosis.missing if diagnosis.missing.size else diagnosis.waiting] = True
        if is_ending:
            self.print_report(format_ending(diagnosis, timeout, HUNG))
        verdict = Verdict(diagnosis.key, is_ending, is_named)
        self.follow(verdict._replace(is_named=is_named[own_rows]), table.rows[own_rows])
        return verdict

    def follow(self, verdict: Verdict, own_rows: Array) -> None:
        """Ask ranks of this node for their stacks.

        Args:
          verdict: The decision about the ranks of this node.
          own_rows: The numbers of their statuses.
        """
        for index in np.flatnonzero(verdict.is_named).tolist():
            entry = self._entries[index]
            if entry is None:
                continue
            if (entry.rank, verdict.key) not in self._stack_requests and entry.state != LEFT:
                self._stack_requests.add((entry.rank, verdict.key))
                self.node_board.request_stacks(index)
            is_unresponsive = own_rows["activity"][index] == ord(NOT_RUNNING_PYTHON)
            if is_unresponsive and verdict.is_ending:
                self._signal_unresponsive(index, entry)

    def _signal_unresponsive(self, index: int, entry: SlotEntry) -> None:
        """Make a process that does not answer print its stacks, now that the job ends anyway."""
        is_alive = self._are_visible[index] and not self._is_finished(entry)
        if entry.stack_signal and is_alive and index not in self._signalled_indices:
            self._signalled_indices.add(index)
            self.print_report(f"mpistrat: the stacks of rank {entry.rank}:")
            self.send_signal(entry.pid, entry.stack_signal)

    def find_stuck_pids(self, now_ns: int) -> list[int]:
        """Return the pids of this node that cannot see by themselves that the launcher is gone."""
        return [
            entry.pid
            for index, entry in enumerate(self._entries)
            if entry is not None
            and self._are_visible[index]
            and not self._is_finished(entry)
            and self._determine_activity(index, entry, now_ns) in _STUCK_ACTIVITIES
        ]
