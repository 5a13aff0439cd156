"""The watching process of a node: it reads the page, warns, and ends the job.

Which ranks others wait for, and the messages about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from mpistrat.comm.callsite import ranks_text, shorten
from mpistrat.watchdog.processes import Activity, Look, catches, ended, look
from mpistrat.watchdog.status_board import (
    AWAY,
    COMPUTING,
    DEAD,
    HELD,
    INSIDE,
    LEAVING,
    LEFT,
    REPLACED,
    SILENT,
    STOPPED,
    TROUBLES,
    Page,
    SlotEntry,
    Status,
    grouped,
    number_of,
)

_DOING = {
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
    """Ranks wait, and this is why.

    Attributes:
      key: The call that they wait in, and the part of it.
      seconds: How long nothing has moved.
      missing: The ranks that they wait for, longest first. Empty: all have come to the call, and
        none comes out of it.
      waiting: The ranks that wait.
      unknown: How many ranks of the job nothing is known of here.
      patience: Seconds that the call may take, if it says so itself; else 0.
    """

    key: int
    seconds: float
    missing: tuple[Status, ...]
    waiting: tuple[Status, ...]
    unknown: int = 0
    patience: float = 0.0


def diagnose(rows: Sequence[Status], size: int = 0) -> Diagnosis | None:
    """Return who keeps whom waiting, or None if nobody waits or the wait has a declared reason.

    Seconds count from the later of two moments: the first rank began to wait in that call; the
    missing rank did something that the board sees.

    Args:
      rows: What all ranks do, as far as it is known.
      size: How many ranks there are; 0 for as many as `rows` know.
    """
    unknown = max(0, size - sum(len(row.ranks) for row in rows))
    waits = (INSIDE, LEAVING)
    rows_in_calls = [row for row in rows if row.state in waits and row.doing not in TROUBLES]
    if not rows_in_calls:
        return None
    key = max(row.key for row in rows_in_calls)
    waiting = tuple(row for row in rows_in_calls if row.key == key)
    patience = min((row.patience for row in waiting if row.patience), default=0.0)
    missing = [
        row
        for row in rows
        if row not in waiting and (row.key < key or row.state == LEFT or row.doing in TROUBLES)
    ]
    # Of a silent node only those count that had not come as far, unless nobody else is missing.
    missing = [row for row in missing if row.doing != SILENT or row.key < key] or missing
    if not missing:
        # Also since the last one came out: of the others it may only not be known yet.
        return Diagnosis(key, min(row.age for row in rows), (), waiting, unknown, patience)
    undeclared = [row for row in missing if not row.busy or row.overdue]
    if not undeclared:
        return None
    waited = max(row.age for row in waiting)
    undeclared.sort(key=lambda row: -row.age)
    seconds = min(waited, undeclared[0].age)
    return Diagnosis(key, seconds, tuple(undeclared), waiting, unknown, patience)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _what(row: Status) -> str:
    """Return what the ranks of a row do, in words."""
    activity = _DOING.get(row.doing, row.doing)
    if len(row.ranks) > 1:
        activity = activity.replace("its process is", "their processes are").replace(
            "its ", "their "
        )
    if row.overdue:
        activity += f"; over the time declared for {row.busy!r}"
    return activity


def _whereabouts(row: Status, key: int) -> str:
    is_plural = len(row.ranks) > 1
    is_last_seen = row.doing in TROUBLES and row.doing != "T"
    pronoun = "They" if is_plural else "It"
    verb = "are in" if is_plural else "is in"
    if is_last_seen:
        verb = ("were" if is_plural else "was") + " last seen in"
    call = ""
    if row.state == INSIDE and number_of(row.key) != number_of(key):
        call = f" of call {number_of(row.key)}" + (f", {row.text}" if row.text else "")
    elif row.doing == AWAY and row.text:
        call = f", {row.text}"
    if not row.place:
        return f"Its position is not known ({_what(row)})."
    return f"{pronoun} {verb} {row.place}{call} ({_what(row)})."


def _missing(row: Status, key: int, seconds: float) -> str:
    """Return who is missing where for how long."""
    is_plural = len(row.ranks) > 1
    node = f" ({row.node})" if row.node else ""
    subject = f"{ranks_text(row.ranks)}{node}"
    number = number_of(key)
    if row.state == LEFT:
        predicate = f"{'have' if is_plural else 'has'} left the program or finalized MPI"
        return f"{subject} {predicate} before call {number}."
    if number_of(row.key) < number:
        predicate = f"{'have' if is_plural else 'has'} not reached call {number}"
    else:
        predicate = f"{'have' if is_plural else 'has'} made no progress in call {number}"
    return f"{subject} {predicate} for {_seconds(seconds)}. {_whereabouts(row, key)}"


def _waiting(diagnosis: Diagnosis) -> str:
    places: dict[tuple[str, str], list[int]] = {}
    for row in diagnosis.waiting:
        places.setdefault((row.place, row.text), []).extend(row.ranks)
    parts = []
    for (place, text), ranks in places.items():
        whereabouts = " ".join(part for part in (place, text) if part)
        verb = "wait in" if len(ranks) > 1 else "waits in"
        parts.append(
            f"{ranks_text(ranks)} {verb} {whereabouts or f'call {number_of(diagnosis.key)}'}"
        )
    return "; ".join(shorten(parts))


def _body(diagnosis: Diagnosis, min_seconds: float) -> tuple[str, str]:
    """Return who is missing, and who waits."""
    late_rows = [row for row in diagnosis.missing if row.age >= min_seconds or row.doing == DEAD]
    if not diagnosis.missing:
        ranks = [rank for row in diagnosis.waiting for rank in row.ranks]
        arrival_text = f"{ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'} come to call"
        missing_text = (
            f"{arrival_text} {number_of(diagnosis.key)} and not out of it for "
            f"{_seconds(diagnosis.seconds)}."
        )
        if diagnosis.unknown:
            missing_text += f" Nothing is known here about the other {diagnosis.unknown}."
        return missing_text, _waiting(diagnosis)
    lines = [_missing(row, diagnosis.key, min(diagnosis.seconds, row.age)) for row in late_rows]
    return "\n  ".join(shorten(lines)), _waiting(diagnosis)


def warning(diagnosis: Diagnosis, warn: float, timeout: float) -> str:
    """Return what to say after `warn` seconds.

    Example:
      >>> from mpistrat.watchdog.status_board import BETWEEN
      >>> rows = [
      ...     Status((5,), "node12", 0, 411 << 20, BETWEEN, 80.0, "T", "data.py:31"),
      ...     Status((0, 1, 2, 3, 4, 6, 7), "node12", 0, 412 << 20, INSIDE, 60.0, "S",
      ...         "train.py:88", "all_reduce(SUM, float32[1024] 'grads')"),
      ... ]
      >>> print(warning(diagnose(rows), 60, 1800))
      mpistrat: rank 5 (node12) has not reached call 412 for 60 s. It is in data.py:31 (stopped by
        a signal).
        ranks 0-4, 6, 7 wait in train.py:88 all_reduce(SUM, float32[1024] 'grads'). The job ends
        after 1800 s of this; MPISTRAT_TIMEOUT changes that.
    """
    missing, waiting = _body(diagnosis, warn)
    return (
        f"mpistrat: {missing}\n  {waiting}. The job ends after {timeout:g} s of this; "
        f"{'timeout_seconds says so' if diagnosis.patience else 'MPISTRAT_TIMEOUT changes that'}."
    )


def ending(diagnosis: Diagnosis, timeout: float, code: int) -> str:
    """Return what to say when the job is ended after `timeout` seconds."""
    missing, waiting = _body(diagnosis, timeout)
    return (
        f"mpistrat: the job ends with exit code {code}: nothing moved for {timeout:g} s.\n"
        f"  {missing}\n  {waiting}."
    )


HUNG = 75  # EX_TEMPFAIL of sysexits.h: it is safe to start the job again

_SECOND = 1e9
_STATES = {"t": STOPPED, "I": "S", "Z": DEAD, "x": DEAD}


class Limits(NamedTuple):
    """How patient a watchdog is.

    Attributes:
      warn: Seconds after which a missing rank is named.
      timeout: Seconds after which the job is ended.
    """

    warn: float = 60.0
    timeout: float = 1800.0

    @property
    def tick(self) -> float:
        """Seconds between two looks of a process at itself."""
        return min(0.25, self.warn / 8)

    @property
    def interval(self) -> float:
        """Seconds between two looks at everybody, and between two messages to other nodes."""
        return min(1.0, self.warn / 4)

    @property
    def grace(self) -> float:
        """Seconds that a node leaves the first one to end the job."""
        return max(1.0, 2 * self.interval)

    @property
    def stale(self) -> float:
        """Seconds without a heartbeat after which a process counts as not running Python."""
        return min(5.0, max(1.0, self.warn / 2))


@final
@dataclass(eq=False)
class Observer:
    """Looks at all slots of a node and says what is wrong.

    Attributes:
      page: The page of the node.
      size: The number of ranks of the job.
      node: The name of the node.
      home: The number of the node.
      limits: How patient to be.
      look: Looks at a process.
      say: Prints a report.
      end: Ends the job with an exit code.
      rouse: Makes a process print its stacks although it does not run Python: (pid, signal).
      hears: Tells whether a process has a handler of that signal: (pid, signal).
    """

    page: Page
    size: int
    node: str
    home: int
    limits: Limits
    say: Callable[[str], None]
    end: Callable[[int], None]
    rouse: Callable[[int, int], None]
    look: Look = look
    hears: Callable[[int, int], bool] = catches

    def __post_init__(self) -> None:
        """Look at the page, on which all ranks have opened their slots."""
        slot_indices = range(self.page.size)
        self._entries: list[SlotEntry | None] = [self.page.read(i) for i in slot_indices]
        # In another pid namespace a number means nothing, or another process.
        self._visible = [e is not None and not self._ended(e) for e in self._entries]
        self._warned: tuple[object, ...] = ()
        self._asked: set[tuple[int, int]] = set()
        self._roused: set[int] = set()
        self._activity = Activity(self.look)

    def _ended(self, entry: SlotEntry) -> bool:
        return ended(self.look(entry.pid), entry.born)

    def rows(self, now_ns: int) -> list[Status]:
        """Return what the ranks of this node do."""
        statuses = []
        for index in range(self.page.size):
            entry = self.page.read(index) or self._entries[index]
            self._entries[index] = entry
            if entry is not None:
                statuses.append(self._row(index, entry, now_ns))
        return grouped(statuses)

    def _row(self, index: int, entry: SlotEntry, now_ns: int) -> Status:
        # The operating system is asked about ranks only that have not moved for a while.
        changed_ns = max(entry.changed, entry.elsewhere)
        moves = (now_ns - changed_ns) / _SECOND < self.limits.interval
        doing = COMPUTING if moves else self._doing(index, entry, now_ns)
        deadline_ns, busy = entry.deadline, entry.operation or "a long operation"
        if doing in (DEAD, STOPPED):
            if doing == STOPPED and max(deadline_ns, entry.compiling) > 0:
                changed_ns = max(changed_ns, entry.heartbeat)  # it has not worked on it since
            deadline_ns = 0
        elif entry.compiling > now_ns:
            deadline_ns, busy = entry.compiling, "compiling"
        age = (now_ns - max(changed_ns, deadline_ns)) / _SECOND
        waits = entry.state in (INSIDE, LEAVING)
        return Status(
            (entry.rank,),
            self.node,
            self.home,
            entry.key,
            entry.state,
            age,
            doing,
            entry.place,
            entry.text if waits or doing == AWAY else "",
            busy if deadline_ns else "",
            0 < deadline_ns < now_ns,
            entry.patience / _SECOND if waits else 0.0,
            (now_ns - (entry.stirred if entry.elsewhere else 0)) / _SECOND,
            0.0
            if moves
            else (now_ns - self._activity.computed(entry.pid, entry.born, now_ns)) / _SECOND,
        )

    def _doing(self, index: int, entry: SlotEntry, now_ns: int) -> str:
        """Return what a rank does that has not moved since the last look."""
        if entry.state == LEFT:
            return COMPUTING
        stale = (now_ns - entry.heartbeat) / _SECOND > self.limits.stale
        if not self._visible[index]:
            return HELD if stale else COMPUTING
        process = self.look(entry.pid)
        if process is None or ended(process, entry.born):
            return DEAD
        state = _STATES.get(process.state, process.state)
        if stale and state != STOPPED:
            return HELD if not entry.signal or self.hears(entry.pid, entry.signal) else REPLACED
        return AWAY if entry.away and state != STOPPED else state

    def act(self, rows: Sequence[Status], speaks: bool = True) -> None:
        """Warn, ask for stacks, or end the job.

        Args:
          rows: What all ranks of the job do, as far as it is known here.
          speaks: Nobody else says the same. Otherwise only the ranks of this node are asked for
            their stacks, and the job is ended a little later, should the other fail to.
        """
        diagnosis = diagnose(rows, self.size)
        warn, timeout = self.limits
        if diagnosis is not None and diagnosis.patience:
            timeout = diagnosis.patience
            warn = min(warn, timeout / 2)  # who is named when the job ends has been named before
        if diagnosis is None or diagnosis.seconds < min(warn, timeout):
            if diagnosis is None:
                self._warned = ()
            return
        # Again when another rank is missing or gets into trouble; not for each line it computes in.
        signs = frozenset(
            (rank, row.doing if row.doing in TROUBLES else "")
            for row in diagnosis.missing
            if row.age >= warn
            for rank in row.ranks
        )
        if self._warned != (diagnosis.key, signs):
            self._warned = (diagnosis.key, signs)
            if speaks:
                self.say(warning(diagnosis, warn, timeout))
            self._ask(diagnosis)
        # A rank of which nothing is known here may have declared why it is late.
        if diagnosis.seconds < timeout or (diagnosis.unknown and not diagnosis.missing):
            return
        self._rouse_all(diagnosis)
        if diagnosis.seconds >= timeout + (0.0 if speaks else self.limits.grace):
            self.say(ending(diagnosis, timeout, HUNG))
            self.end(HUNG)

    def _here(self, diagnosis: Diagnosis) -> list[tuple[int, SlotEntry, Status]]:
        """Return the missing ranks of this node, or all of it if none is missing anywhere."""
        rows = diagnosis.missing or diagnosis.waiting
        return [
            (index, entry, row)
            for index, entry in enumerate(self._entries)
            if entry is not None
            for row in rows
            if entry.rank in row.ranks
        ]

    def _ask(self, diagnosis: Diagnosis) -> None:
        for index, entry, _ in self._here(diagnosis):
            if (entry.rank, diagnosis.key) not in self._asked and entry.state != LEFT:
                self._asked.add((entry.rank, diagnosis.key))
                self.page.ask(index)

    def _rouse_all(self, diagnosis: Diagnosis) -> None:
        """Make processes that do not answer print their stacks, now that nothing can be spoilt."""
        for index, entry, row in self._here(diagnosis):
            is_alive = self._visible[index] and not self._ended(entry)
            if row.doing == HELD and entry.signal and is_alive and index not in self._roused:
                self._roused.add(index)
                self.say(f"mpistrat: the stacks of rank {entry.rank}:")
                self.rouse(entry.pid, entry.signal)

    def stuck(self, now_ns: int) -> list[int]:
        """Return the pids of this node that cannot see by themselves that the launcher is gone."""
        return [
            entry.pid
            for index, entry in enumerate(self._entries)
            if entry is not None and self._visible[index] and not self._ended(entry)
            and self._doing(index, entry, now_ns) in (STOPPED, HELD, REPLACED)
        ]  # fmt: skip
