"""Memory of large results, used again once nobody can see it.

To give memory back to the system and to take it again costs as much as to fill it. So what has held
a result is kept for the next one of its size. A result is a view of a `_Lease`, which everything
that looks at its memory keeps alive: views, memoryviews, DLPack consumers, `ctypes` pointers. When
that is gone, so are they.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array

# What is smaller comes from memory that the C library keeps for itself.
MIN_NBYTES = 1 << 20
# What no result has needed for so many calls is given back.
_TURNS = 16
# Where room begins: other libraries, such as JAX, take memory as it is only if it lies so.
_LINE = 64


@final
class _Lease:
    """Memory that somebody may look at; goes back to its pool with the last who does."""

    __slots__ = ("__weakref__", "_returned_rooms", "_room")

    def __init__(self, room: Array, returned_rooms: deque[Array]):
        self._room, self._returned_rooms = room, returned_rooms

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._room.__array_interface__

    def __del__(self) -> None:
        self._returned_rooms.append(self._room)  # in any thread, in the middle of anything


@final
class Pool:
    """Memory for the large results of one session.

    The thread of the session calls it; whoever drops a result only leaves a note.

    Attributes:
      waiting_nbytes: How many bytes wait to be used again.
    """

    def __init__(self) -> None:
        """Create an empty pool."""
        self._waiting: list[tuple[int, Array]] = []  # the oldest first, and since which turn
        self._returned_rooms: deque[Array] = deque()  # what has just come back
        self._turn = self._out = self._peak_nbytes = self.waiting_nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a writable array of any contents, as ``np.empty`` does; large: on a line."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < MIN_NBYTES:
            return np.empty(shape, dtype)
        self._gather()
        fits = [i for i, (_, room) in enumerate(self._waiting) if room.nbytes == nbytes]
        room = self._drop(fits[-1]) if fits else None
        self._out += nbytes
        self._peak_nbytes = max(self._peak_nbytes, self._out)
        while self._waiting and self._out + self.waiting_nbytes > self._peak_nbytes:
            self._drop(0)
        if room is None:
            padded_room = np.empty(nbytes + _LINE, np.uint8)
            room = padded_room[(start := -padded_room.ctypes.data % _LINE) : start + nbytes]
        return np.asarray(_Lease(room, self._returned_rooms)).view(dtype).reshape(shape)

    def turn(self) -> None:
        """Begin a call that reduces; give back to the system what none has needed for long."""
        self._turn += 1
        if self._returned_rooms or self._waiting:
            self._gather()
            while self._waiting and self._waiting[0][0] < self._turn - _TURNS:
                self._drop(0)

    def _gather(self) -> None:
        while self._returned_rooms:
            room = self._returned_rooms.popleft()
            self._waiting.append((self._turn, room))
            self._out -= room.nbytes
            self.waiting_nbytes += room.nbytes

    def _drop(self, index: int) -> Array:
        _, room = self._waiting.pop(index)
        self.waiting_nbytes -= room.nbytes
        return room
