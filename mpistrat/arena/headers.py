"""Fast check whether arrays are unchanged: same objects, dtype, shape and memory.

NumPy lets a program give an array another shape or dtype where it is, or make it read-only. To ask
each of hundreds of arrays for all that takes longer than to reduce them. The answers stand in the
header of each array (``PyArrayObject_fields`` of NumPy's C interface), so they are read from there,
of all arrays at once, and compared with what they were. What is read the first time is held against
what the arrays say; where it is something else, this Python or NumPy is another one, and there is
no short way.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import final

import numpy as np

from mpistrat.arrays import Array

_WORD = 8
# The words of a header that are looked at: type, address of the elements, number of dimensions,
# addresses of the shape and of the strides, whose the memory is, dtype, flags. The count of
# references comes before them; behind is what changes when something refers to the array weakly.
_FIRST, _LAST = 1, 8
_ITEMS = 3  # the word of a list that tells where its items lie
_LESS = 2**32  # numbers of dimensions and flags take half a word; the other half is anything


def _usual() -> bool:
    """Tell whether objects of this Python may look like that."""
    if sys.implementation.name != "cpython" or sys.byteorder != "little":
        return False
    sizes = struct.calcsize("P"), object.__basicsize__, list.__basicsize__
    return sizes == (_WORD, 2 * _WORD, 5 * _WORD)


@final
class _Words:
    """Words in the memory of this process.

    Args:
      addresses: Where each lies. It must be there whenever it is read.
    """

    def __init__(self, addresses: Array):
        first, last = int(addresses.min()), int(addresses.max())
        room = (ctypes.c_uint64 * ((last - first) // _WORD + 1)).from_address(first)
        self._all: Array = np.frombuffer(memoryview(room), np.uint64)
        self._where = (addresses - first) // _WORD

    def read(self) -> Array:
        found: Array = self._all.take(self._where)
        return found


def _items(leaves: list[Array]) -> bytes:
    """Return which objects are in a list, as bytes."""
    at = ctypes.c_size_t.from_address(id(leaves) + _ITEMS * _WORD).value
    return ctypes.string_at(at, _WORD * len(leaves))


def _said(leaves: Sequence[Array]) -> list[tuple[int, ...]]:
    """Return what arrays say of that part of their headers that can be asked for."""
    return [
        (id(type(a)), a.__array_interface__["data"][0], a.ndim, id(a.dtype), a.flags.num)
        for a in leaves
    ]


@final
class Headers:
    """The headers of some arrays, as they are now; refers to none of the arrays.

    Args:
      leaves: The arrays; more than none.

    Attributes:
      known: They could be read; else nothing is ever `same`.
    """

    def __init__(self, leaves: Sequence[Array]):
        """Read the headers."""
        self.known = False
        if not _usual():
            return
        leaves = list(leaves)
        ids = np.array([id(leaf) for leaf in leaves])
        self._types = _Words(ids + _WORD)
        self._type = self._types.read().tobytes()
        self._heads = _Words(ids[:, None] + np.arange(_FIRST, _LAST + 1) * _WORD)
        heads = self._heads.read()
        read = [(a, b, c % _LESS, f, g % _LESS) for a, b, c, _, _, _, f, g in heads.tolist()]
        if _items(leaves) != ids.tobytes() or read != _said(leaves):
            return
        # Of a shape and of strides only the addresses are in the header.
        places = [
            at + np.arange(leaf.ndim) * _WORD
            for leaf, head in zip(leaves, heads.tolist(), strict=True)
            for at in head[3:5]
        ]
        lines = [line for leaf in leaves for line in (leaf.shape, leaf.strides)]
        self._lines = _Words(np.concatenate([ids[:1], *places]))  # one at least
        said = np.array([number for line in lines for number in line], np.int64)
        self._ids, self._head, self._line = ids.tobytes(), heads.tobytes(), said.tobytes()
        self.known = self._lines.read()[1:].tobytes() == self._line

    def same(self, leaves: list[Array]) -> bool:
        """Tell whether these are the arrays, as they were.

        Args:
          leaves: A list that nobody else can change meanwhile, of as many objects.
        """
        # In this order: what is where it was has a type, arrays have a header, and of the same
        # headers the shapes are where they were.
        return (
            self.known
            and _items(leaves) == self._ids
            and self._types.read().tobytes() == self._type
            and self._heads.read().tobytes() == self._head
            and self._lines.read()[1:].tobytes() == self._line
        )
