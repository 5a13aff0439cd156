"""Memory that the ranks of a node share without a name, and memory of results that is used again.

The first rank makes an anonymous file (``memfd_create``), the others open it through
``/proc/<pid>/fd``. Where that is forbidden, it is a file in shared memory with a random name, which
is removed as soon as all have opened it, so nothing is left behind. Where that fails too, nothing
is shared.

A page is on the NUMA node of the core that touches it first. So large memory is only given its
length by the first rank; then each rank allocates the pages of its slice (`populate`), as huge
pages where the system allows them.

`ResultPool` has the memory of large results. To give memory back to the system and to take it again
costs as much as to fill it, so the memory of a result is kept for the next one of its size. A
result is a view of a `_Lease`, which everything that views its memory keeps alive: arrays,
memoryviews, DLPack consumers, `ctypes` pointers. The pool keeps at most as much as was in use at
one time; memory that 16 calls have not needed is returned to the system.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import mmap
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.config import SHM_DIRECTORY
from mpistrat.shm.private_mapping import PrivateMapping

# From here on larger pages are asked for; they save time when memory is first touched.
_HUGE_NBYTES = 2 * 1024 * 1024
# Before Python 3.13 a mapping keeps a duplicate of its descriptor open.
_NO_DESCRIPTOR: dict[str, bool] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of madvise(2), Linux 5.14; Python has no name for it
# The purposes for which ranks `populate` their slices of the memory: it is large.
_SLICED = ("arena", "copies")
# Gives the bytes of every rank of the node, in order, for those of this one. Collective.
Share = Callable[[bytes], list[bytes]]
T = TypeVar("T")


def _create_memfd(size: int, purpose: str) -> tuple[int, str]:
    fd = os.memfd_create(f"mpistrat-{purpose}", os.MFD_CLOEXEC)
    _reserve_memory(fd, size, purpose)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def _create_named_file(size: int, purpose: str) -> tuple[int, str]:
    if os.access(SHM_DIRECTORY, os.W_OK):
        directory = str(SHM_DIRECTORY)
    else:
        import tempfile  # and all that it imports, which Linux has no use for

        directory = tempfile.gettempdir()
    path = Path(directory, f"mpistrat-{purpose}-{secrets.token_hex(16)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _reserve_memory(fd, size, purpose)
    except OSError:
        path.unlink()
        raise
    return fd, str(path)


def _reserve_memory(fd: int, size: int, purpose: str) -> None:
    # Only to set the length would end the process with SIGBUS when the memory turns out too small;
    # so the pages are taken here, or by `populate`.
    try:
        if size > _available_nbytes():
            raise OSError(
                errno.ENOMEM, f"{size} bytes of memory are needed, which is more than are free"
            )
        os.ftruncate(fd, size)
        if purpose not in _SLICED or not _can_populate():
            getattr(os, "posix_fallocate", lambda fd, at, size: None)(fd, 0, size)
    except (OSError, OverflowError):
        os.close(fd)
        raise


def _available_nbytes() -> float:
    """Return how many bytes this node, and this group of processes on it, can still take.

    Memory without a file system's limit is given until the system ends a process to get some back.
    """
    free_nbytes = float("inf")
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free_nbytes = next(1024 * int(text.split()[1]) for text in lines if "MemAvailable" in text)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        group_limit = int((group / "memory.max").read_text(encoding="utf-8"))
        free_nbytes = min(
            free_nbytes, group_limit - int((group / "memory.current").read_text(encoding="utf-8"))
        )
    return free_nbytes


@functools.cache
def _can_populate() -> bool:
    """Return whether this system can allocate the pages of a mapping on request."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page, contextlib.suppress(OSError):
        page.madvise(_POPULATE_WRITE)
        return True
    return False


def populate(memory: memoryview, byte_ranges: Iterable[tuple[int, int]]) -> bool:
    """Allocate the pages of some bytes near this rank, unless others have them.

    Each rank does it with its own slice, and together with all bytes; before anybody writes. A page
    with bytes of two ranks is whose it first is.

    Args:
      memory: All of what `shared_memory` has returned, or other memory, to which nothing is done.
      byte_ranges: First bytes, and those after the last.

    Returns:
      Whether there was memory. Where the system has no call for it (Linux has since 5.14), the
      first rank has taken all pages already.
    """
    mapping = memory.obj
    if isinstance(mapping, mmap.mmap) and _can_populate():
        for start, stop in byte_ranges:
            if start == stop:
                continue
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                mapping.madvise(_POPULATE_WRITE, first, stop - first)
            except OSError:
                return False
    return True


FileCreator = Callable[[int, str], tuple[int, str]]


class Pages(NamedTuple):
    """Shared memory, seen twice.

    Attributes:
      memory: The shared mapping: all ranks see the writes of each.
      private_mapping: The mapping through which a rank reads, and can write for itself alone.
    """

    memory: memoryview
    private_mapping: PrivateMapping


def _offer_file(create_file: FileCreator, size: int, purpose: str, token: bytes) -> tuple[int, str]:
    """Make the memory with a token in it, or return an empty path."""
    with contextlib.suppress(OSError, AttributeError, OverflowError, ValueError):
        fd, path = create_file(size, purpose)
        os.pwrite(fd, token, 0)
        return fd, path
    return -1, ""


def _map_file(path: str, size: int, purpose: str, token: bytes) -> mmap.mmap | None:
    """Map the file that the first rank offers.

    None if that fails, or if it is another file: the path may be of another namespace.

    The token is how the mapping is known to be the same memory.
    """
    mapping = _use_file(path, os.O_RDWR, lambda fd: mmap.mmap(fd, size, **_NO_DESCRIPTOR))
    if mapping is None:
        return None
    _advise_system(mapping, purpose)
    return mapping if mapping[: len(token)] == token else None


def _use_file(path: str, flags: int, use: Callable[[int], T]) -> T | None:
    """Return the result of `use` for the file of the first rank; None if it cannot be opened."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        fd = os.open(path, flags | os.O_CLOEXEC)
        try:
            return use(fd)
        finally:
            os.close(fd)
    return None


def _advise_system(mapping: mmap.mmap, purpose: str) -> None:
    advices = ["MADV_HUGEPAGE"] if len(mapping) >= _HUGE_NBYTES else []
    if purpose in _SLICED:
        # All ranks would see the writes of a forked child, so a child does not have the memory.
        advices.append("MADV_DONTFORK")
    for advice in advices:
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):
                mapping.madvise(getattr(mmap, advice))


def shared_memory(
    share: Share,
    is_first: bool,
    size: int,
    purpose: str,
    file_creators: tuple[FileCreator, ...] = (_create_memfd, _create_named_file),
) -> memoryview | None:
    """Return `size` zero bytes that all ranks of the node share, or None on all of them.

    Collective: over the ranks of the node.

    For reductions, or for copies of variables, no memory is taken yet: each rank has to `populate`
    its slice first.

    Args:
      share: All-gathers bytes over the node.
      is_first: This is the first rank of the node; it makes the memory.
      size: How many bytes.
      purpose: A word for its use; part of a name that shows in lists of mappings.
      file_creators: How to make it, best first.
    """
    mappings = _create_mapping(
        share, is_first, size, purpose=purpose, file_creators=file_creators, is_overlaid=False
    )
    return None if mappings is None else mappings[0]


def shared_pages(share: Share, is_first: bool, size: int) -> Pages | None:
    """Return memory as `shared_memory` does, with a private mapping; None on all ranks if not."""
    mappings = _create_mapping(
        share,
        is_first,
        size,
        purpose="copies",
        file_creators=(_create_memfd, _create_named_file),
        is_overlaid=True,
    )
    if mappings is None:
        return None
    memory, private_mapping = mappings
    assert private_mapping is not None
    own_token = secrets.token_bytes(16)
    at = share(own_token).index(own_token)
    works = at < mmap.PAGESIZE and private_mapping.is_coherent(memory, at)
    return Pages(memory, private_mapping) if b"\0" not in share(b"\1" if works else b"\0") else None


def _create_mapping(
    share: Share,
    is_first: bool,
    size: int,
    *,
    purpose: str,
    file_creators: tuple[FileCreator, ...],
    is_overlaid: bool,
) -> tuple[memoryview, PrivateMapping | None] | None:
    for create_file in file_creators:
        token = secrets.token_bytes(16)
        fd, path = _offer_file(create_file, size, purpose, token) if is_first else (-1, "")
        try:
            offered_file = json.loads(share(json.dumps([path, token.hex()]).encode())[0])
            mapping = _map_file(offered_file[0], size, purpose, bytes.fromhex(offered_file[1]))
            private_mapping = None
            if is_overlaid and mapping is not None:
                private_mapping = _use_file(
                    offered_file[0],
                    os.O_RDONLY,
                    lambda fd: PrivateMapping(fd, size, _NO_DESCRIPTOR),
                )
            is_mapped = mapping is not None and (private_mapping is not None or not is_overlaid)
            is_mapped_everywhere = b"\0" not in share(b"\1" if is_mapped else b"\0")
        finally:
            if fd >= 0:
                os.close(fd)
                if create_file is _create_named_file:
                    Path(path).unlink()
        if is_mapped_everywhere and mapping is not None:
            if is_first:
                mapping[: len(token)] = bytes(len(token))
            share(b"")  # nobody writes before the token is gone
            return memoryview(mapping), private_mapping
    return None


# Smaller results come from memory that the C library keeps for itself.
MIN_POOLED_NBYTES = 1 << 20
# Memory that no result has needed for so many calls is given back.
_MAX_IDLE_TURNS = 16
# The alignment of results: other libraries, such as JAX, take memory without a copy only if it is
# aligned so.
_LINE_NBYTES = 64


@final
class _Lease:
    """Memory that arrays may view; it goes back to its pool with the last of them."""

    __slots__ = ("__weakref__", "_memory", "_returned_memory")

    def __init__(self, memory: Array, returned_memory: deque[Array]):
        self._memory, self._returned_memory = memory, returned_memory

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._returned_memory.append(self._memory)  # in any thread, in the middle of anything


@final
class ResultPool:
    """Memory for the large results of one session.

    The thread of the session calls it; other threads that drop a result only leave a note.

    Attributes:
      waiting_nbytes: How many bytes wait to be used again.
    """

    def __init__(self) -> None:
        """Create an empty pool."""
        self._waiting: list[tuple[int, Array]] = []  # the oldest first, and since which turn
        self._returned_memory: deque[Array] = deque()  # what has just come back
        self._turn = self._lent_nbytes = self._peak_nbytes = self.waiting_nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a writable array of any contents, as ``np.empty`` does; large: on a line."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < MIN_POOLED_NBYTES:
            return np.empty(shape, dtype)
        self._collect_returned()
        fitting_indices = [
            i for i, (_, memory) in enumerate(self._waiting) if memory.nbytes == nbytes
        ]
        memory = self._pop_waiting(fitting_indices[-1]) if fitting_indices else None
        self._lent_nbytes += nbytes
        self._peak_nbytes = max(self._peak_nbytes, self._lent_nbytes)
        while self._waiting and self._lent_nbytes + self.waiting_nbytes > self._peak_nbytes:
            self._pop_waiting(0)
        if memory is None:
            padded_memory = np.empty(nbytes + _LINE_NBYTES, np.uint8)
            memory = padded_memory[
                (start := -padded_memory.ctypes.data % _LINE_NBYTES) : start + nbytes
            ]
        return np.asarray(_Lease(memory, self._returned_memory)).view(dtype).reshape(shape)

    def turn(self) -> None:
        """Begin a call that reduces; give memory back that no call has needed for long."""
        self._turn += 1
        if self._returned_memory or self._waiting:
            self._collect_returned()
            while self._waiting and self._waiting[0][0] < self._turn - _MAX_IDLE_TURNS:
                self._pop_waiting(0)

    def _collect_returned(self) -> None:
        while self._returned_memory:
            memory = self._returned_memory.popleft()
            self._waiting.append((self._turn, memory))
            self._lent_nbytes -= memory.nbytes
            self.waiting_nbytes += memory.nbytes

    def _pop_waiting(self, index: int) -> Array:
        _, memory = self._waiting.pop(index)
        self.waiting_nbytes -= memory.nbytes
        return memory
