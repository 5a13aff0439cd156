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
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple, final

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
