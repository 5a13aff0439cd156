"""A private mapping of shared memory, in which a process can write for itself alone.

A private mapping of a file shows the present contents of the file, page by page, until the process
writes to a page: then it has a copy of that page (copy on write), until it discards the copy. So a
rank can try a write that the others have not agreed to, at the cost of the pages that it touches,
and views of the memory stay where they are.

On Linux a page shows later changes until it is written to; POSIX leaves it open (mmap(2),
MAP_PRIVATE). So `PrivateMapping.is_coherent` tests it when the memory is made.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array

_READ, _WRITE = 1, 2  # PROT_READ and PROT_WRITE, on all systems
_NAMES = ("MAP_PRIVATE", "PROT_READ", "MADV_DONTNEED")
# Bits of /proc/self/pagemap: present or swapped; of a file or shared.
_PRESENT, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)


def can_detect_writes() -> bool:
    """Return whether `PrivateMapping.find_written_pages` works on this system."""
    try:
        _read_page_table(np.zeros(1).ctypes.data // mmap.PAGESIZE, 1)
    except OSError:
        return False
    return True


def _read_page_table(first_page: int, count: int) -> Array:
    table = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        entries = np.frombuffer(os.pread(table, 8 * count, 8 * first_page), np.uint64)
    finally:
        os.close(table)
    if len(entries) != count:
        raise OSError(errno.EIO, "/proc/self/pagemap ends too early")
    return entries


@final
class _MappedMemory:
    """Memory of a private mapping; NumPy keeps it for the arrays that view it."""

    def __init__(self, private_mapping: PrivateMapping, address: int, nbytes: int):
        self._private_mapping = private_mapping
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@final
class PrivateMapping:
    """A private mapping of a file, read-only except for the pages that `map_private` opens.

    Args:
      fd: The file; not needed afterwards.
      size: How many bytes.
      mmap_options: Further arguments of ``mmap.mmap``.

    Raises:
      OSError: The system cannot map it, or has no such mappings.
    """

    def __init__(self, fd: int, size: int, mmap_options: dict[str, Any]):
        """Create the mapping."""
        if not all(hasattr(mmap, name) for name in _NAMES):
            raise OSError("this system has no private mappings that can be given back")
        flags, prot = mmap.MAP_PRIVATE, mmap.PROT_READ
        self._map = mmap.mmap(fd, size, flags=flags, prot=prot, **mmap_options)
        if hasattr(mmap, "MADV_DONTDUMP"):
            self._map.madvise(mmap.MADV_DONTDUMP)  # the shared mapping is in a dump already
        self._address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        library = ctypes.CDLL(None, use_errno=True)
        self._protect: Any = library.mprotect
        self._protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._unlock: Any = library.munlock
        self._unlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def view_bytes(self, start: int, stop: int) -> memoryview:
        """Return these bytes as this process sees them, as memory that cannot be written to."""
        return memoryview(self._map)[start:stop]

    def map_private(self, start: int, stop: int) -> Array:
        """Let this process write to these pages, for itself, from now on; return the bytes.

        Later writes of others show in pages that it has not written to. References to the array
        keep the mapping.

        Args:
          start: The first byte, which begins a page.
          stop: The byte after the last.

        Raises:
          OSError: The system refuses.
        """
        self._allow(start, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE, _READ | _WRITE)
        return np.asarray(_MappedMemory(self, self._address + start, stop - start))

    def find_written_pages(self, start: int, stop: int) -> Array:
        """Return a mask of the pages of these bytes that this process has written to.

        Args:
          start: The first byte, which begins a page.
          stop: The byte after the last.

        Raises:
          OSError: The system does not allow to read that.
        """
        first, count = (self._address + start) // mmap.PAGESIZE, -(-(stop - start) // mmap.PAGESIZE)
        entries = _read_page_table(first, count)
        copied_pages: Array = ((entries & _PRESENT) != 0) & ((entries & _OF_FILE) == 0)
        return copied_pages

    def discard_private(self, start: int, stop: int) -> None:
        """Discard the private writes of this process: the pages show the file again."""
        size = -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE - start
        try:
            self._map.madvise(mmap.MADV_DONTNEED, start, size)
        except OSError:  # what the program has locked (mlock) is not given back
            self._unlock(self._address + start, size)
            self._map.madvise(mmap.MADV_DONTNEED, start, size)

    def close(self, start: int, stop: int) -> None:
        """Discard the private writes, and let this process write to the pages no more."""
        self.discard_private(start, stop)
        self._allow(start, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE, _READ)

    def _allow(self, start: int, stop: int, protection: int) -> None:
        if self._protect(self._address + start, stop - start, protection):
            code = ctypes.get_errno()
            raise OSError(
                code,
                f"{os.strerror(code)}: there is no memory for {stop - start} bytes that this rank "
                "writes before the others have agreed to it",
            )

    def is_coherent(self, memory: memoryview, at: int) -> bool:
        """Return whether the first page shows later changes, and keeps private writes private.

        Args:
          memory: The shared mapping of the same file.
          at: A byte of the first page that nobody else writes to. It is 0, and becomes so again.
        """
        page, observed_values = mmap.PAGESIZE, []
        first_page = self.view_bytes(0, page)
        try:
            observed_values.append(first_page[at])  # the page is mapped before it changes
            memory[at] = 1
            observed_values.append(first_page[at])
            self.map_private(0, page)[at] = 2
            observed_values += [first_page[at], memory[at]]
            self.close(0, page)
            observed_values.append(first_page[at])
        except OSError:
            return False
        finally:
            memory[at] = 0
        return observed_values == [0, 1, 2, 1, 1] and first_page[at] == 0
