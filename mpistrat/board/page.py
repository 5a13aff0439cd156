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
    32  sequence        33  word 1 that the texts belong to
    34  place, call, name of the long operation (UTF-8, padded with zeros), to byte 1024

After the slots there is a word per rank that the watching rank sets to ask for its stacks.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple, final

__all__ = ["BETWEEN", "INSIDE", "LEFT", "PART", "Entry", "Page", "Slot", "number_of", "page_bytes"]

BETWEEN: Final = 1
INSIDE: Final = 2
LEFT: Final = 3

PART: Final = 1 << 4  # one part of a call in word 1
_CALL: Final = 24  # bits below the call number in word 1
_WORDS: Final = 128
_BYTES: Final = 8 * _WORDS
_HOT = struct.Struct("=QQQQ")
_WHO = struct.Struct("=QQQQ")
_TEXTS = struct.Struct("=112s512s128s")
_AT_HOT, _AT_WHO, _AT_TEXTS = 8 * 1, 8 * 8, 8 * 34
_TRIES = 50


class Entry(NamedTuple):
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
    place: str
    text: str
    operation: str


def number_of(key: int) -> int:
    """Return the call number in a key.

    Example:
      >>> number_of(412 << 20 | 3)
      412
    """
    return key >> (_CALL - 4)


def page_bytes(size: int) -> int:
    """Return how many bytes a page for `size` ranks takes."""
    return size * (_BYTES + 8)


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
        "_bytes",
        "_clock",
        "_sequence",
        "_text_sequence",
        "_word",
        "_words",
        "operation",
        "text",
    )

    def __init__(self, words: memoryview, clock: Callable[[], int] = time.monotonic_ns):
        """Take the slot over as it is."""
        self._words = words
        self._clock = clock
        self._bytes = words.cast("B")
        self._sequence = 0
        self._text_sequence = 0
        self._word = BETWEEN
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
        self._word = word = number << _CALL | INSIDE
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = self._clock()
        self._sequence = words[0] = sequence + 2

    def resume(self) -> None:
        """Say that this rank enters the next part of the same call, such as its payload."""
        self._put((self._word & ~15) + PART + INSIDE)

    def leave(self) -> None:
        """Say that this rank is done with the call, or with this part of it."""
        words = self._words
        self._word = word = self._word & ~15 | BETWEEN
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = self._clock()
        self._sequence = words[0] = sequence + 2

    def close(self) -> None:
        """Say that this rank has left the program and will make no call any more."""
        self._put(self._word & ~15 | LEFT)

    def _put(self, word: int) -> None:
        words = self._words
        self._word = word
        sequence = self._sequence
        words[0] = sequence + 1
        words[1] = word
        words[2] = self._clock()
        self._sequence = words[0] = sequence + 2

    def declare(self, operation: str, deadline: int) -> None:
        """Say that a long operation may last until `deadline` (0: none); restarts the clock."""
        self.operation = operation
        self._words[3] = deadline
        self._put(self._word)

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

    @property
    def word(self) -> int:
        """Call, part and state as one number, which changes whenever the rank goes on."""
        return self._word

    def beat(self, now: int, compiling: int) -> None:
        """Say that Python runs in this process, and until when it is known to compile."""
        self._words[17] = compiling
        self._words[16] = now

    def describe(self, place: str) -> bool:
        """Copy the texts to the page: where this rank is, its call, its long operation.

        Returns:
          Whether they were copied; not if the main thread went on meanwhile.
        """
        word = self._word
        texts = (place.encode(), self.text.encode(errors="replace"), self.operation.encode())
        if word != self._word:
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
        """Look at memory as a page."""
        self.size = size
        self._bytes = memory[: page_bytes(size)]
        self._words = self._bytes.cast("Q")

    def slot(self, index: int, clock: Callable[[], int] = time.monotonic_ns) -> Slot:
        """Return the slot of the rank that is number `index` on this node, to write it."""
        return Slot(self._words[index * _WORDS : (index + 1) * _WORDS], clock)

    def heartbeat(self, index: int) -> int:
        """Return when Python last ran the watchdog of that rank, ns."""
        return self._words[index * _WORDS + 16]

    def ask(self, index: int) -> None:
        """Ask the rank for its stacks."""
        self._words[self.size * _WORDS + index] = 1

    def asked(self, index: int) -> bool:
        """Tell whether this rank is asked for its stacks, once."""
        at = self.size * _WORDS + index
        asked = bool(self._words[at])
        if asked:
            self._words[at] = 0
        return asked

    def read(self, index: int) -> Entry | None:
        """Return what a slot says, or None if it changes all the time or stays half written."""
        base = index * _BYTES
        hot = self._steady(index * _WORDS, base + _AT_HOT, _HOT.size)
        if hot is None:
            return None
        word, changed, deadline, patience = _HOT.unpack(hot)
        start = index * _WORDS
        who = _WHO.unpack_from(self._bytes, base + _AT_WHO)
        heartbeat, compiling = self._words[start + 16], self._words[start + 17]
        place = operation = text = ""
        # 8 bytes earlier than the texts: the word that they belong to.
        texts = self._steady(start + 32, base + _AT_TEXTS - 8, _TEXTS.size + 8)
        if texts is not None:
            place, text, operation = map(_text, _TEXTS.unpack_from(texts, 8))
            if int.from_bytes(texts[:8], sys.byteorder) >> 4 != word >> 4:
                text = ""
        moving = (word >> 4, word & 15, changed, deadline, patience)
        return Entry._make((*moving, *who, heartbeat, compiling, place, text, operation))

    def _steady(self, sequence: int, start: int, length: int) -> bytes | None:
        """Return bytes that did not change while they were copied."""
        for attempt in range(_TRIES):
            before = self._words[sequence]
            copy = bytes(self._bytes[start : start + length])
            if before % 2 == 0 and self._words[sequence] == before:
                return copy
            if attempt > _TRIES // 2:
                time.sleep(0)
        return None
