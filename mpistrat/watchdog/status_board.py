"""The status board of a node: memory with one slot per rank, and what is written to it and read.

`Slot` writes one slot, `NodeBoard` reads all of them. `Reporter` writes what a process reports of
itself, about four times a second, from the thread of its watchdog.

A slot is written by its rank only, with single stores of 8 aligned bytes: the call counter by the
main thread, the rest by the thread of the watchdog. Contents of more than one word are between two
stores of a sequence number, odd while they change, so a reader notices that it read in the middle
of a change (a seqlock). On machines that reorder stores a reader can still see a time
next to the wrong call, for one look; the call number and the state are one word and never torn.

A slot, in words of 8 bytes::

     0  sequence         1  call << 24 | part << 4 | state      2  time of the last change, ns
     3  end of the declared long operation, ns; 0 if none
     4  time that the call may take, ns; 0 for the time that every call may take
     8  pid              9  start time of the process          10  signal that dumps its stacks
    11  rank
    16  heartbeat, ns   17  until when it is known to compile, ns
    18  time of the last call on another communicator, ns         19  1 while it is inside one
    20  time when its Python stack last changed, ns
    32  sequence        33  word 1 that the texts belong to
    34  position, call, name of the long operation (UTF-8, padded with zeros), to byte 1024

After the slots there is a word per rank that the watching rank sets to ask for its stacks, and then
the words that ranks that come to leave need to know of the other nodes::

     0  the highest call that one of their ranks is inside of, as a key
     1  time when one of their ranks that has not come to leave last did something, ns
     2  1 when all ranks of all nodes have come to leave
     3  time when the Python stack of one of them that has not come to leave last changed, ns
     4  time when such a rank was last seen to compute, ns
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final, NamedTuple, final

from mpistrat.comm.callsite import call_site_of, is_numba_on_stack, stack_fingerprint
from mpistrat.watchdog.processes import get_current_frames, reading_frames

SECOND_NS: Final = 1_000_000_000

# States of a rank.
BETWEEN_CALLS: Final = 1
IN_CALL: Final = 2
LEFT: Final = 3
LEAVING: Final = 4  # has come to leave, and waits for the others

PART: Final = 1 << 4  # one part of a call in word 1
_CALL_SHIFT: Final = 24  # bits below the call number in word 1
_PART_MASK: Final = (1 << _CALL_SHIFT) - PART
_SLOT_WORDS: Final = 128
_SLOT_NBYTES: Final = 8 * _SLOT_WORDS
_PROGRESS = struct.Struct("=QQQQ")
_IDENTITY = struct.Struct("=QQQQ")
_TEXTS = struct.Struct("=112s512s128s")
_AT_PROGRESS, _AT_IDENTITY, _AT_TEXTS = 8 * 1, 8 * 8, 8 * 34
_MAX_TRIES = 50
_OTHER_NODES_WORDS: Final = 5  # words after the ones that ask for stacks


class SlotEntry(NamedTuple):
    """The contents of a slot. Times are nanoseconds of the monotonic clock of the node.

    Attributes:
      key: Call and part of the call that the rank has come to.
      state: `BETWEEN_CALLS`, `IN_CALL`, `LEAVING` or `LEFT`.
      changed_ns: When key or state last changed.
      deadline: The end of the declared long operation; 0 without one.
      patience: The time that the call may take; 0 for the time that every call may take.
      pid: The process of the rank.
      start_ticks: When that started, as `Process`.
      stack_signal: The signal that makes it print its stacks; 0 without one.
      rank: The rank in the communicator of the board.
      heartbeat_ns: When Python last ran the watchdog of the rank.
      compiling_until_ns: Until when the rank is known to compile; 0 if it does not.
      other_call_ns: When it last made a call on another communicator; 0 for never.
      is_away: It is inside of such a call.
      position: ``file:line`` that it executes.
      call_text: The text of its call.
      operation: The name of the declared long operation.
      stack_changed_ns: When its Python stack last changed.
    """

    key: int
    state: int
    changed_ns: int
    deadline: int
    patience: int
    pid: int
    start_ticks: int
    stack_signal: int
    rank: int
    heartbeat_ns: int
    compiling_until_ns: int
    other_call_ns: int
    is_away: bool
    position: str
    call_text: str
    operation: str
    stack_changed_ns: int = 0


def get_call_number(key: int) -> int:
    """Return the call number in a key.

    Example:
      >>> get_call_number(412 << 20 | 3)
      412
    """
    return key >> (_CALL_SHIFT - 4)


def make_call_key(number: int) -> int:
    """Return the key of the first part of a call.

    Example:
      >>> get_call_number(make_call_key(412))
      412
    """
    return number << (_CALL_SHIFT - 4)


def node_board_nbytes(size: int) -> int:
    """Return the size of a status board for `size` ranks, in bytes."""
    return size * (_SLOT_NBYTES + 8) + 8 * _OTHER_NODES_WORDS


def _decode_text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")


@final
class Slot:
    """The slot of this rank. `enter`, `leave` and `resume` belong to the main thread.

    Args:
      words: The 128 words of the slot, as a memoryview of format ``Q``.
      clock: Returns the time in ns, monotonic, of the whole node.
    """

    __slots__ = (
        *("_bytes", "_changed_ns", "_clock", "_communication_ns", "_min_handshake_ns", "_sequence"),
        *("_text_sequence", "_waiting_ns", "_words", "call_text", "operation", "word"),
    )

    def __init__(self, words: memoryview, clock: Callable[[], int] = time.monotonic_ns):
        """Create the writer of a slot; its contents stay as they are."""
        self._words = words
        self._clock = clock
        self._bytes = words.cast("B")
        self._sequence = 0
        self._text_sequence = 0
        self.word = BETWEEN_CALLS  # call, part and state; changes whenever the rank continues
        self._changed_ns = self._waiting_ns = self._communication_ns = 0
        self._min_handshake_ns = sys.maxsize
        self.call_text = ""
        self.operation = ""

    def open(self, rank: int, pid: int, start_ticks: int, stack_signal: int) -> None:
        """Write the identity of this rank, before any rank reads it."""
        for word, value in zip(range(8, 12), (pid, start_ticks, stack_signal, rank), strict=True):
            self._words[word] = value
        self.record_heartbeat(self._clock(), 0)
        self._write_word(BETWEEN_CALLS)

    def enter(self, number: int, text: str) -> None:
        """Write that this rank makes call `number`, whose text is `text`.

        Cost: below a microsecond. The text is kept here; the watchdog copies it to the board.
        """
        self.call_text = text
        # The same as `_write_word`, without the cost of another call; `leave` too.
        words = self._words
        self.word = word = number << _CALL_SHIFT | IN_CALL
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = self._changed_ns = self._clock()
        self._sequence = words[0] = sequence + 2

    def resume(self) -> None:
        """Write that this rank enters the next part of the same call, such as its payload."""
        self._write_word((self.word & ~15) + PART + IN_CALL)

    def leave(self) -> None:
        """Write that this rank is done with the call, or with this part of it."""
        words = self._words
        previous_word = self.word
        self.word = word = previous_word & ~15 | BETWEEN_CALLS
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = now_ns = self._clock()
        self._sequence = words[0] = sequence + 2
        if previous_word & 15 == IN_CALL:
            duration_ns = now_ns - self._changed_ns
            if previous_word & _PART_MASK:
                self._communication_ns += duration_ns
            else:
                if duration_ns < self._min_handshake_ns:
                    self._min_handshake_ns = duration_ns
                self._waiting_ns += duration_ns - self._min_handshake_ns
                self._communication_ns += self._min_handshake_ns

    def read_times_spent(self) -> tuple[int, int]:
        """Return how long this rank waited for others, and how long it communicated; ns.

        A call begins with its handshake. The shortest one so far shows how long a handshake takes
        if no rank is late; the excess of the others was waiting. Further parts of calls are
        communication.
        """
        return self._waiting_ns, self._communication_ns

    def record_arrival(self, number: int, text: str) -> None:
        """Write that this rank has come to leave, by call `number`, and waits for the others."""
        self.call_text = text
        self._write_word(number << _CALL_SHIFT | LEAVING)

    def close(self) -> None:
        """Write that this rank has left the program and will make no further call."""
        self._write_word(self.word & ~15 | LEFT)

    def _write_word(self, word: int) -> None:
        words = self._words
        self.word = word
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = self._changed_ns = self._clock()
        self._sequence = words[0] = sequence + 2

    def declare_operation(self, operation: str, deadline: int) -> None:
        """Write that a long operation may last until `deadline` (0: none); restarts the clock."""
        self.operation = operation
        self._words[3] = deadline
        self._write_word(self.word)

    @property
    def patience(self) -> int:
        """The time that a call may take, ns; 0 for the time that every call may take."""
        return self._words[4]

    @patience.setter
    def patience(self, patience_ns: int) -> None:
        # It is set between two calls; the next `enter` makes readers read again.
        self._words[4] = patience_ns

    @property
    def deadline(self) -> int:
        """The end of the declared long operation, ns; 0 if there is none."""
        return self._words[3]

    def record_heartbeat(self, now_ns: int, compiling_until_ns: int) -> None:
        """Write that Python runs in this process, and until when it is known to compile."""
        self._words[17] = compiling_until_ns
        self._words[16] = now_ns

    def record_other_call(self, changed_ns: int, is_inside: bool) -> None:
        """Write the time of the last call on another communicator, and if it is still running."""
        self._words[18] = changed_ns
        self._words[19] = is_inside

    def record_stack_change(self, now_ns: int) -> None:
        """Write that the Python stack of this rank has changed."""
        self._words[20] = now_ns

    def write_texts(self, position: str, other_call: str = "") -> bool:
        """Copy the texts to the board: position of this rank, its call, its long operation.

        Args:
          position: ``file:line`` that it executes.
          other_call: The call on another communicator that it is inside of, if any.

        Returns:
          Whether they were copied; not if the main thread continued meanwhile.
        """
        word = self.word
        status_texts = (position, other_call or self.call_text, self.operation)
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
class NodeBoard:
    """The status board of a node: the slots of all its ranks.

    Args:
      memory: At least ``node_board_nbytes(size)`` writable bytes, zero at first.
      size: The number of ranks of the node.

    Example:
      >>> node_board = NodeBoard(memoryview(bytearray(node_board_nbytes(2))), 2)
      >>> node_board.slot(1).enter(7, "barrier()")
      >>> get_call_number(node_board.read(1).key)
      7
    """

    def __init__(self, memory: memoryview, size: int):
        """Create a board in this memory."""
        self.size = size
        self._bytes = memory[: node_board_nbytes(size)]
        self._words = self._bytes.cast("Q")
        self._other_nodes_first_word = size * (_SLOT_WORDS + 1)

    def slot(self, index: int, clock: Callable[[], int] = time.monotonic_ns) -> Slot:
        """Return the writer of the slot of rank number `index` of this node."""
        return Slot(self._words[index * _SLOT_WORDS : (index + 1) * _SLOT_WORDS], clock)

    def read_heartbeat(self, index: int) -> int:
        """Return when Python last ran the watchdog of that rank, ns."""
        return self._words[index * _SLOT_WORDS + 16]

    def read_rank(self, index: int) -> int:
        """Return the rank whose slot that is."""
        return self._words[index * _SLOT_WORDS + 11]

    def request_stacks(self, index: int) -> None:
        """Ask the rank for its stacks."""
        self._words[self.size * _SLOT_WORDS + index] = 1

    def read_key_and_state(self, index: int) -> tuple[int, int]:
        """Return the call and the state of a rank. Cost: one word, which is never torn."""
        word = self._words[index * _SLOT_WORDS + 1]
        return word >> 4, word & 15

    def write_other_nodes(self, inside_key: int, moved_ns: int) -> None:
        """Write the calls of the other nodes, for ranks of this one that wait to leave.

        Args:
          inside_key: The highest call that one of their ranks is inside of, as a key; 0 for none.
          moved_ns: When one of them that has not come to leave last did something, ns; 0 for never.
        """
        start = self._other_nodes_first_word
        self._words[start], self._words[start + 1] = inside_key, moved_ns

    def read_other_nodes(self) -> tuple[int, int]:
        """Return the two numbers that `write_other_nodes` wrote."""
        first_word = self._other_nodes_first_word
        return self._words[first_word], self._words[first_word + 1]

    def write_life_signs(self, stack_changed_ns: int, computed_ns: int) -> None:
        """Write the last signs of life on the other nodes, words 3 and 4, ns."""
        start = self._other_nodes_first_word
        self._words[start + 3], self._words[start + 4] = stack_changed_ns, computed_ns

    def read_life_signs(self) -> tuple[int, int]:
        """Return the two times that `write_life_signs` wrote."""
        start = self._other_nodes_first_word
        return self._words[start + 3], self._words[start + 4]

    @property
    def is_departure_complete(self) -> bool:
        """Whether all ranks of all nodes have come to leave."""
        return bool(self._words[self._other_nodes_first_word + 2])

    @is_departure_complete.setter
    def is_departure_complete(self, is_complete: bool) -> None:
        self._words[self._other_nodes_first_word + 2] = is_complete

    def take_stack_request(self, index: int) -> bool:
        """Tell whether this rank was asked for its stacks, and withdraw the request."""
        word_index = self.size * _SLOT_WORDS + index
        is_requested = bool(self._words[word_index])
        if is_requested:
            self._words[word_index] = 0
        return is_requested

    def read(self, index: int) -> SlotEntry | None:
        """Return the contents of a slot; None if it changes all the time or stays half written."""
        base = index * _SLOT_NBYTES
        progress_bytes = self._copy_unchanging(
            index * _SLOT_WORDS, base + _AT_PROGRESS, _PROGRESS.size
        )
        if progress_bytes is None:
            return None
        word, changed_ns, deadline, patience = _PROGRESS.unpack(progress_bytes)
        start = index * _SLOT_WORDS
        identity = _IDENTITY.unpack_from(self._bytes, base + _AT_IDENTITY)
        heartbeat_ns, compiling_until_ns, other_call_ns, is_away = self._words[
            start + 16 : start + 20
        ]
        position = operation = call_text = ""
        # 8 bytes earlier than the texts: the word that they belong to.
        texts = self._copy_unchanging(start + 32, base + _AT_TEXTS - 8, _TEXTS.size + 8)
        if texts is not None:
            position, call_text, operation = map(_decode_text, _TEXTS.unpack_from(texts, 8))
            if int.from_bytes(texts[:8], sys.byteorder) >> 4 != word >> 4:
                call_text = ""
        progress = (word >> 4, word & 15, changed_ns, deadline, patience)
        beats = (heartbeat_ns, compiling_until_ns, other_call_ns, bool(is_away))
        stack_changed_ns = self._words[start + 20]
        return SlotEntry._make(
            (*progress, *identity, *beats, position, call_text, operation, stack_changed_ns)
        )

    def _copy_unchanging(self, sequence: int, start: int, length: int) -> bytes | None:
        """Return bytes that did not change while they were copied."""
        for attempt in range(_MAX_TRIES):
            first_sequence = self._words[sequence]
            contents = bytes(self._bytes[start : start + length])
            if first_sequence % 2 == 0 and self._words[sequence] == first_sequence:
                return contents
            if attempt > _MAX_TRIES // 2:
                time.sleep(0)
        return None


# Activities of a rank: letters of proc(5), and five of our own.
COMPUTING: Final = "R"
STOPPED: Final = "T"
DEAD: Final = "X"
NOT_RUNNING_PYTHON: Final = "H"
REPLACED: Final = "E"
SILENT: Final = "Q"
IN_OTHER_CALL: Final = "W"
TROUBLES: Final = frozenset((STOPPED, DEAD, NOT_RUNNING_PYTHON, REPLACED, SILENT))

HUNG: Final = 75  # EX_TEMPFAIL of sysexits.h: it is safe to start the job again

# The search for a compiler reads the whole stack, so it begins when a rank stays for a while.
_MIN_STAY_NS = SECOND_NS
_COMPILING_NS = 10 * SECOND_NS
# No kernel takes longer to compile; after that the rank is watched again.
_MAX_COMPILING_NS = 3600 * SECOND_NS


def get_frame(thread: int) -> FrameType | None:
    """Return the frame that a thread is in; None if there is no such thread."""
    return get_current_frames().get(thread)


def say(text: str) -> None:
    """Write a line to standard error as one piece, whatever holds the lock of `sys.stderr`."""
    with suppress(OSError):  # its reader has gone
        os.write(2, f"{text}\n".encode(errors="replace"))


def dump_stacks(rank: int) -> None:
    """Print the stacks of all threads to standard error."""
    say(f"mpistrat: the stacks of rank {rank}:")
    faulthandler.dump_traceback(2, all_threads=True)


@functools.cache
def register_dump_signal() -> int:
    """Return the number of a signal that makes this process print its stacks, once registered.

    It does so also while a C call holds the GIL.

    The handler is faulthandler's, which runs in C. The signal is sent only when the job is about
    to be ended: a handler of any kind can cut a system call short. 0 if the signal is in use or
    there is none to spare.
    """
    max_number: int = getattr(signal, "SIGRTMAX", 0)
    number = max_number - 5
    if not max_number or signal.getsignal(number) is not signal.SIG_DFL:
        return 0
    faulthandler.register(number, file=2, all_threads=True, chain=False)
    return number


# Returns how many calls a process has made on other communicators, the text of the call there that
# it is inside of, and the end of the operation that it has declared there, ns.
OtherCalls = Callable[[], tuple[int, str, int]]


def report_no_other_calls() -> tuple[int, str, int]:
    """Return the report of a process that makes calls on one communicator only."""
    return 0, "", 0


@final
@dataclass(eq=False)
class Reporter:
    """Keeps the slot of this process up to date.

    Attributes:
      slot: The slot.
      rank: The rank of this process.
      thread: Identifier of the thread that makes the calls.
      get_frame: Returns the frame that a thread is in.
      dump_stacks: Prints the stacks of this process; takes the rank.
      other_calls: Returns the calls of this process on other communicators.
    """

    slot: Slot
    rank: int
    thread: int
    get_frame: Callable[[int], FrameType | None] = get_frame
    dump_stacks: Callable[[int], None] = dump_stacks
    other_calls: OtherCalls = report_no_other_calls

    def __post_init__(self) -> None:
        """Create the state before the first report."""
        self._written_texts: tuple[int, str, str, str] = (0, "", "", "")
        self._other_calls: tuple[int, str] = (0, "")
        self._word = self._word_changed_ns = 0
        self._compiling_since_ns = 0
        self._stack_motion = 0

    def report(self, now_ns: int, needs_stacks: bool) -> None:
        """Write the state of this process to its slot.

        Args:
          now_ns: The time, ns.
          needs_stacks: The stacks of this process are wanted.
        """
        slot = self.slot
        call_count, text, deadline = self.other_calls()
        is_declared = deadline > now_ns  # a long operation, on another communicator
        if (call_count, text) != self._other_calls or is_declared:
            self._other_calls = call_count, text
            slot.record_other_call(now_ns, bool(text))
        word = slot.word
        if word != self._word:
            self._word, self._word_changed_ns = word, now_ns
        with reading_frames():
            frame = self.get_frame(self.thread)
            position, motion = call_site_of(frame), stack_fingerprint(frame)
            compiling_until_ns = self._predict_compile_end(now_ns, frame)
        texts = (word, position, slot.operation, text)
        if texts != self._written_texts and slot.write_texts(position, text):
            self._written_texts = texts
        if motion != self._stack_motion:
            self._stack_motion = motion
            slot.record_stack_change(now_ns)
        slot.record_heartbeat(now_ns, compiling_until_ns)
        if needs_stacks:
            self.dump_stacks(self.rank)

    def _predict_compile_end(self, now_ns: int, frame: FrameType | None) -> int:
        """Return until when this process is known to compile, or 0."""
        if now_ns - self._word_changed_ns < _MIN_STAY_NS or not is_numba_on_stack(frame):
            self._compiling_since_ns = 0
            return 0
        self._compiling_since_ns = self._compiling_since_ns or now_ns
        return (
            now_ns + _COMPILING_NS if now_ns - self._compiling_since_ns < _MAX_COMPILING_NS else 0
        )
