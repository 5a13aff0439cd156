"""A page of memory with one slot per rank of a node.

A slot is written by its rank only, with single stores of 8 aligned bytes: the call counter by the
main thread, the rest by the thread of the watchdog. Whatever consists of more than one word is
between two stores of a sequence number, odd while it changes, so a reader notices that it read in
the middle of a change (a seqlock). On machines that reorder stores a reader can still see a time
next to the wrong call, for one look; the call number and the state are one word and never torn.

A slot, in words of 8 bytes::

     0  sequence         1  call << 24 | part << 4 | state      2  time of the last change, ns
     3  end of the declared long operation, ns; 0 if none
     4  how long the call may take, ns; 0 for what is allowed to every call
     8  pid              9  start time of the process          10  signal that dumps its stacks
    11  rank
    16  heartbeat, ns   17  end of what is known to compile, ns
    18  time of the last call on another communicator, ns         19  1 while it is inside one
    20  time when its Python stack last changed, ns
    32  sequence        33  word 1 that the texts belong to
    34  place, call, name of the long operation (UTF-8, padded with zeros), to byte 1024

After the slots there is a word per rank that the watching rank sets to ask for its stacks, and then
what ranks that come to leave want to know of the other nodes::

     0  the highest call that one of their ranks is inside of, as a key
     1  time when one of their ranks that has not come to leave last did something, ns
     2  1 when all ranks of all nodes have come to leave
     3  time when the Python stack of one of them that has not come to leave last changed, ns
     4  time when such a rank was last seen to compute, ns

Ranks in the same state as one row, and a compact encoding of rows for other nodes.

What a process writes about itself, about four times a second, from its own thread.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final, NamedTuple, final

from mpistrat.comm.callsite import call_site_of, is_numba_on_stack, rank_runs, stack_fingerprint
from mpistrat.watchdog.processes import current_frames, reading_frames

BETWEEN: Final = 1
INSIDE: Final = 2
LEFT: Final = 3
LEAVING: Final = 4  # has come to leave, and waits for the others

PART: Final = 1 << 4  # one part of a call in word 1
_CALL: Final = 24  # bits below the call number in word 1
_PARTS: Final = (1 << _CALL) - PART
_WORDS: Final = 128
_BYTES: Final = 8 * _WORDS
_HOT = struct.Struct("=QQQQ")
_IDENTITY = struct.Struct("=QQQQ")
_TEXTS = struct.Struct("=112s512s128s")
_AT_HOT, _AT_IDENTITY, _AT_TEXTS = 8 * 1, 8 * 8, 8 * 34
_TRIES = 50
_ELSEWHERE_WORDS: Final = 5  # words after the ones that ask for stacks


class SlotEntry(NamedTuple):
    """What a slot says. Times are nanoseconds of the monotonic clock of the node."""

    key: int
    state: int
    changed: int
    deadline: int
    patience: int
    pid: int
    born: int
    signal: int
    rank: int
    heartbeat: int
    compiling: int
    elsewhere: int
    away: bool
    place: str
    text: str
    operation: str
    stirred: int = 0


def number_of(key: int) -> int:
    """Return the call number in a key.

    Example:
      >>> number_of(412 << 20 | 3)
      412
    """
    return key >> (_CALL - 4)


def key_of(number: int) -> int:
    """Return the key of the first part of a call.

    Example:
      >>> number_of(key_of(412))
      412
    """
    return number << (_CALL - 4)


def page_bytes(size: int) -> int:
    """Return how many bytes a page for `size` ranks takes."""
    return size * (_BYTES + 8) + 8 * _ELSEWHERE_WORDS


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")


@final
class Slot:
    """The slot of this rank. `enter`, `leave` and `resume` belong to the main thread.

    Args:
      words: The 128 words of the slot, as a memoryview of format ``Q``.
      clock: Returns the time in ns, monotonic, of the whole node.
    """

    __slots__ = (
        *("_bytes", "_clock", "_communicated", "_least", "_sequence", "_since", "_text_sequence"),
        *("_waited", "_words", "operation", "text", "word"),
    )

    def __init__(self, words: memoryview, clock: Callable[[], int] = time.monotonic_ns):
        """Create the writer of a slot; its contents stay as they are."""
        self._words = words
        self._clock = clock
        self._bytes = words.cast("B")
        self._sequence = 0
        self._text_sequence = 0
        self.word = BETWEEN  # call, part and state; changes whenever the rank continues
        self._since = self._waited = self._communicated = 0
        self._least = sys.maxsize
        self.text = ""
        self.operation = ""

    def open(self, rank: int, pid: int, born: int, signal: int) -> None:
        """Say who this is, before anybody looks."""
        for word, value in zip(range(8, 12), (pid, born, signal, rank), strict=True):
            self._words[word] = value
        self.beat(self._clock(), 0)
        self._put(BETWEEN)

    def enter(self, number: int, text: str) -> None:
        """Say that this rank makes call `number`, whose text is `text`.

        Cost: below a microsecond. The text is kept here; the watchdog copies it to the page.
        """
        self.text = text
        # As `_put`, without the price of another call; so is `leave`.
        words = self._words
        self.word = word = number << _CALL | INSIDE
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = self._since = self._clock()
        self._sequence = words[0] = sequence + 2

    def resume(self) -> None:
        """Say that this rank enters the next part of the same call, such as its payload."""
        self._put((self.word & ~15) + PART + INSIDE)

    def leave(self) -> None:
        """Say that this rank is done with the call, or with this part of it."""
        words = self._words
        previous_word = self.word
        self.word = word = previous_word & ~15 | BETWEEN
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = now_ns = self._clock()
        self._sequence = words[0] = sequence + 2
        if previous_word & 15 == INSIDE:
            duration_ns = now_ns - self._since
            if previous_word & _PARTS:
                self._communicated += duration_ns
            else:
                if duration_ns < self._least:
                    self._least = duration_ns
                self._waited += duration_ns - self._least
                self._communicated += self._least

    def spent(self) -> tuple[int, int]:
        """Return how long this rank waited for others, and how long it communicated; ns.

        Of the calls themselves, which are handshakes, the shortest one so far tells what one takes
        where nobody is late; what others took more was waiting. Parts of calls are communication.
        """
        return self._waited, self._communicated

    def arrive(self, number: int, text: str) -> None:
        """Say that this rank has come to leave, by call `number`, and waits for the others."""
        self.text = text
        self._put(number << _CALL | LEAVING)

    def close(self) -> None:
        """Say that this rank has left the program and will make no call any more."""
        self._put(self.word & ~15 | LEFT)

    def _put(self, word: int) -> None:
        words = self._words
        self.word = word
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = self._since = self._clock()
        self._sequence = words[0] = sequence + 2

    def declare(self, operation: str, deadline: int) -> None:
        """Say that a long operation may last until `deadline` (0: none); restarts the clock."""
        self.operation = operation
        self._words[3] = deadline
        self._put(self.word)

    @property
    def patience(self) -> int:
        """How long a call may take, ns; 0 for what is allowed to every call."""
        return self._words[4]

    @patience.setter
    def patience(self, value: int) -> None:
        # Between two calls; the next `enter` makes readers look again.
        self._words[4] = value

    @property
    def deadline(self) -> int:
        """The end of the declared long operation, ns; 0 if there is none."""
        return self._words[3]

    def beat(self, now_ns: int, compiling: int) -> None:
        """Say that Python runs in this process, and until when it is known to compile."""
        self._words[17] = compiling
        self._words[16] = now_ns

    def elsewhere(self, changed_ns: int, is_inside: bool) -> None:
        """Say when this rank last made a call on another communicator, and if it is inside one."""
        self._words[18] = changed_ns
        self._words[19] = is_inside

    def stir(self, now_ns: int) -> None:
        """Say that the Python stack of this rank has changed."""
        self._words[20] = now_ns

    def describe(self, place: str, other: str = "") -> bool:
        """Copy the texts to the page: where this rank is, its call, its long operation.

        Args:
          place: Where it is.
          other: The call that it is inside of on another communicator, if it is.

        Returns:
          Whether they were copied; not if the main thread continued meanwhile.
        """
        word = self.word
        status_texts = (place, other or self.text, self.operation)
        texts = [text.encode(errors="replace") for text in status_texts]
        if word != self.word:
            return False
        sequence = self._text_sequence
        self._words[32] = sequence + 1
        self._words[33] = word
        _TEXTS.pack_into(self._bytes, _AT_TEXTS, *texts)
        self._text_sequence = self._words[32] = sequence + 2
        return True


@final
class Page:
    """All slots of a node.

    Args:
      memory: At least ``page_bytes(size)`` writable bytes, zero at first.
      size: The number of ranks of the node.

    Example:
      >>> page = Page(memoryview(bytearray(page_bytes(2))), 2)
      >>> page.slot(1).enter(7, "barrier()")
      >>> number_of(page.read(1).key)
      7
    """

    def __init__(self, memory: memoryview, size: int):
        """Create a page in this memory."""
        self.size = size
        self._bytes = memory[: page_bytes(size)]
        self._words = self._bytes.cast("Q")
        self._elsewhere = size * (_WORDS + 1)

    def slot(self, index: int, clock: Callable[[], int] = time.monotonic_ns) -> Slot:
        """Return the slot of the rank that is number `index` on this node, to write it."""
        return Slot(self._words[index * _WORDS : (index + 1) * _WORDS], clock)

    def heartbeat(self, index: int) -> int:
        """Return when Python last ran the watchdog of that rank, ns."""
        return self._words[index * _WORDS + 16]

    def ask(self, index: int) -> None:
        """Ask the rank for its stacks."""
        self._words[self.size * _WORDS + index] = 1

    def key(self, index: int) -> tuple[int, int]:
        """Return the call and the state of a rank. Cost: one word, which is never torn."""
        word = self._words[index * _WORDS + 1]
        return word >> 4, word & 15

    def tell_elsewhere(self, inside_key: int, moved: int) -> None:
        """Write down what is known of the other nodes.

        Args:
          inside_key: The highest call that one of their ranks is inside of, as a key; 0 for none.
          moved: When one of them that has not come to leave last did something, ns; 0 for never.
        """
        start = self._elsewhere
        self._words[start], self._words[start + 1] = inside_key, moved

    def elsewhere(self) -> tuple[int, int]:
        """Return what `tell_elsewhere` wrote down."""
        start = self._elsewhere
        return self._words[start], self._words[start + 1]

    def tell_signs(self, stirred: int, computed: int) -> None:
        """Write down the last signs of life on the other nodes, as words 3 and 4 have them, ns."""
        start = self._elsewhere
        self._words[start + 3], self._words[start + 4] = stirred, computed

    def signs(self) -> tuple[int, int]:
        """Return what `tell_signs` wrote down."""
        start = self._elsewhere
        return self._words[start + 3], self._words[start + 4]

    @property
    def all_leave(self) -> bool:
        """Whether all ranks of all nodes have come to leave."""
        return bool(self._words[self._elsewhere + 2])

    @all_leave.setter
    def all_leave(self, value: bool) -> None:
        self._words[self._elsewhere + 2] = value

    def asked(self, index: int) -> bool:
        """Tell whether this rank is asked for its stacks, once."""
        at = self.size * _WORDS + index
        is_requested = bool(self._words[at])
        if is_requested:
            self._words[at] = 0
        return is_requested

    def read(self, index: int) -> SlotEntry | None:
        """Return what a slot says, or None if it changes all the time or stays half written."""
        base = index * _BYTES
        hot = self._steady(index * _WORDS, base + _AT_HOT, _HOT.size)
        if hot is None:
            return None
        word, changed_ns, deadline, patience = _HOT.unpack(hot)
        start = index * _WORDS
        identity = _IDENTITY.unpack_from(self._bytes, base + _AT_IDENTITY)
        heartbeat, compiling, elsewhere_ns, is_away = self._words[start + 16 : start + 20]
        place = operation = text = ""
        # 8 bytes earlier than the texts: the word that they belong to.
        texts = self._steady(start + 32, base + _AT_TEXTS - 8, _TEXTS.size + 8)
        if texts is not None:
            place, text, operation = map(_text, _TEXTS.unpack_from(texts, 8))
            if int.from_bytes(texts[:8], sys.byteorder) >> 4 != word >> 4:
                text = ""
        moving = (word >> 4, word & 15, changed_ns, deadline, patience)
        activity = (heartbeat, compiling, elsewhere_ns, bool(is_away))
        stirred = self._words[start + 20]
        return SlotEntry._make((*moving, *identity, *activity, place, text, operation, stirred))

    def _steady(self, sequence: int, start: int, length: int) -> bytes | None:
        """Return bytes that did not change while they were copied."""
        for attempt in range(_TRIES):
            first_sequence = self._words[sequence]
            copy = bytes(self._bytes[start : start + length])
            if first_sequence % 2 == 0 and self._words[sequence] == first_sequence:
                return copy
            if attempt > _TRIES // 2:
                time.sleep(0)
        return None


# What a rank does. Letters of proc(5), and five of our own.
COMPUTING: Final = "R"
STOPPED: Final = "T"
DEAD: Final = "X"
HELD: Final = "H"
REPLACED: Final = "E"
SILENT: Final = "Q"
AWAY: Final = "W"
TROUBLES: Final = frozenset((STOPPED, DEAD, HELD, REPLACED, SILENT))
_RUNS = 32  # pairs of first and last rank per row, where not all fit


class Status(NamedTuple):
    """Ranks that are in the same place.

    Attributes:
      ranks: Which ranks.
      node: The name of their node; empty if they are on several.
      home: The number of the node whose watchdog said so.
      key: Call and part of the call that they have come to.
      state: `BETWEEN`, `INSIDE`, `LEAVING` or `LEFT`.
      age: Seconds since the last of them continued, or since its long operation is over time; less
        than 0 while that may still last.
      doing: A letter: `COMPUTING`, ``"S"`` sleeping, ``"D"`` waiting for a device, or a trouble.
      place: ``file:line``; empty if not known.
      text: Text of the call; if `AWAY`, of the one on the other communicator.
      busy: Name of the long operation that they have declared, or an empty string.
      overdue: It has lasted longer than declared.
      patience: Seconds that the call may take, if it says so itself; else 0.
      still: Seconds since the Python stack of the last of them changed, if they make calls on other
        communicators, as ranks of groups do; else since the machine started.
      idle: Seconds since the last of them was seen to compute.
    """

    ranks: tuple[int, ...]
    node: str
    home: int
    key: int
    state: int
    age: float
    doing: str = COMPUTING
    place: str = ""
    text: str = ""
    busy: str = ""
    overdue: bool = False
    patience: float = 0.0
    still: float = 0.0
    idle: float = 0.0


def grouped(rows: Iterable[Status]) -> list[Status]:
    """Put rows that differ in ranks and age only together; the group is as young as its youngest.

    Example:
      >>> rows = [Status((0,), "a", 0, 7, 2, 1.0), Status((1,), "a", 0, 7, 2, 2.0)]
      >>> [row.ranks for row in grouped(rows)]
      [(0, 1)]
    """
    groups: dict[Status, list[Status]] = {}
    for row in rows:
        kind = row._replace(ranks=(), age=0.0, still=0.0, idle=0.0)
        groups.setdefault(kind, []).append(row)
    return [
        kind._replace(
            ranks=tuple(sorted(rank for row in members for rank in row.ranks)),
            age=min(row.age for row in members),
            still=min(row.still for row in members),
            idle=min(row.idle for row in members),
        )
        for kind, members in groups.items()
    ]


# From the longest to the shortest.
_FORMS: tuple[Callable[[Status], Status], ...] = (
    lambda row: row,
    lambda row: row._replace(text=row.text[:60], place=row.place[-40:]),
    lambda row: row._replace(text="", place="", node=""),
    lambda row: row._replace(text="", place="", node="", home=-1, busy=row.busy[:20]),
)


def _few(row: Status) -> Status:
    """Keep the first ranks only, so that a single row is never too long."""
    runs = rank_runs(row.ranks)[:_RUNS]
    return row._replace(ranks=tuple(r for first, last in runs for r in range(first, last + 1)))


def encode(rows: Sequence[Status], limit: int) -> bytes:
    """Return rows as at most `limit` bytes.

    If they are too many, texts are cut, then left out; at last ranks are, and rows in the middle
    of the sequence of calls: whoever waits is at its end, whoever is missing at its beginning.
    """
    grouped_rows: list[Status] = []
    for shorten in _FORMS:
        grouped_rows = grouped(map(shorten, rows))
        data = _dump(grouped_rows)
        if len(data) <= limit:
            return data
    grouped_rows = sorted((_few(row) for row in grouped_rows), key=lambda row: row.key)
    while len(data := _dump(grouped_rows)) > limit:
        grouped_rows.pop(len(grouped_rows) // 2)
    return data


def _dump(rows: Iterable[Status]) -> bytes:
    plain_rows = [
        [
            rank_runs(row.ranks),
            *row[1:5],
            round(row.age, 3),
            *row[6:-2],
            *(round(x, 3) for x in row[-2:]),
        ]
        for row in rows
    ]
    return json.dumps(plain_rows, separators=(",", ":")).encode()


def decode(data: bytes) -> list[Status]:
    """Return the rows that `encode` took.

    Example:
      >>> decode(encode([Status((0, 1, 4), "a", 0, 7, 2, 1.5)], 4096))[0].ranks
      (0, 1, 4)
    """
    return [
        Status(tuple(rank for first, last in runs for rank in range(first, last + 1)), *rest)
        for runs, *rest in json.loads(data)
    ]


_SECOND = 1_000_000_000
# Looking for the compiler walks the whole stack, so only where a rank stays for a while.
_MIN_STAY_NS = _SECOND
_COMPILES = 10 * _SECOND
# No compilation of one kernel takes longer; whatever does is watched again.
_COMPILES_AT_MOST = 3600 * _SECOND


def frame_of(thread: int) -> FrameType | None:
    """Return where a thread is now."""
    return current_frames().get(thread)


def say(text: str) -> None:
    """Write a line to standard error as one piece, whatever holds the lock of `sys.stderr`."""
    with suppress(OSError):  # nobody reads it any more
        os.write(2, f"{text}\n".encode(errors="replace"))


def dump_stacks(rank: int) -> None:
    """Print the stacks of all threads to standard error."""
    say(f"mpistrat: the stacks of rank {rank}:")
    faulthandler.dump_traceback(2, all_threads=True)


@functools.cache
def dump_signal() -> int:
    """Return a signal that makes this process print its stacks, also while a C call holds the GIL.

    The handler is faulthandler's, which runs in C. The signal is sent only when the job is about
    to be ended: a handler of any kind can cut a system call short. 0 if the signal is in use or
    there is none to spare.
    """
    last: int = getattr(signal, "SIGRTMAX", 0)
    number = last - 5
    if not last or signal.getsignal(number) is not signal.SIG_DFL:
        return 0
    faulthandler.register(number, file=2, all_threads=True, chain=False)
    return number


# How many calls a process has made on other communicators, the text of the one that it is inside
# of, and the end of the operation that it has declared there, ns.
Others = Callable[[], tuple[int, str, int]]


def nothing_else() -> tuple[int, str, int]:
    """Return the calls of a process that communicates on one communicator only: none elsewhere."""
    return 0, "", 0


@final
@dataclass(eq=False)
class Reporter:
    """Keeps the slot of this process up to date.

    Attributes:
      slot: The slot.
      rank: Whose it is.
      thread: Identifier of the thread that makes the calls.
      frame: Returns the frame that a thread is in.
      dump: Prints the stacks of this process; gets the rank.
      others: Returns what this process does on other communicators.
    """

    slot: Slot
    rank: int
    thread: int
    frame: Callable[[int], FrameType | None] = frame_of
    dump: Callable[[int], None] = dump_stacks
    others: Others = nothing_else

    def __post_init__(self) -> None:
        """Know nothing of the thread yet."""
        self._last: tuple[int, str, str, str] = (0, "", "", "")
        self._calls: tuple[int, str] = (0, "")
        self._word = self._since = 0
        self._compiles_since = 0
        self._motion = 0

    def look(self, now_ns: int, needs_stacks: bool) -> None:
        """Write down where the thread is.

        Args:
          now_ns: The time, ns.
          needs_stacks: Somebody wants to see the stacks.
        """
        slot = self.slot
        calls, text, deadline = self.others()
        if (calls, text) != self._calls or deadline > now_ns:  # what is declared there continues
            self._calls = calls, text
            slot.elsewhere(now_ns, bool(text))
        word = slot.word
        if word != self._word:
            self._word, self._since = word, now_ns
        with reading_frames():
            frame = self.frame(self.thread)
            place, motion = call_site_of(frame), stack_fingerprint(frame)
            compiling = self._compiling(now_ns, frame)
        entry = (word, place, slot.operation, text)
        if entry != self._last and slot.describe(place, text):
            self._last = entry
        if motion != self._motion:
            self._motion = motion
            slot.stir(now_ns)
        slot.beat(now_ns, compiling)
        if needs_stacks:
            self.dump(self.rank)

    def _compiling(self, now_ns: int, frame: FrameType | None) -> int:
        """Return until when this process is known to compile, or 0."""
        if now_ns - self._since < _MIN_STAY_NS or not is_numba_on_stack(frame):
            self._compiles_since = 0
            return 0
        self._compiles_since = self._compiles_since or now_ns
        return now_ns + _COMPILES if now_ns - self._compiles_since < _COMPILES_AT_MOST else 0
