"""The watching process of a node: it reads the page, warns, and ends the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from mpistrat.board.diagnosis import Diagnosis, diagnose, ending, warning
from mpistrat.board.page import INSIDE, LEAVING, LEFT, Page, SlotEntry
from mpistrat.board.proc import Activity, Look, catches, ended, look
from mpistrat.board.status import (
    AWAY,
    COMPUTING,
    DEAD,
    HELD,
    REPLACED,
    STOPPED,
    TROUBLES,
    Status,
    grouped,
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
