"""Memory that the ranks of a node share, without a name that could be left behind.

The first rank makes an anonymous file (``memfd_create``), the others open it through
``/proc/<pid>/fd``. Where that is forbidden, it is a file in shared memory with a random name, which
is taken away as soon as all have opened it. Where that fails too, nothing is shared.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["Share", "shared_memory"]

# Gives the bytes of every rank of the node, in order, for those of this one. Collective.
Share = Callable[[bytes], list[bytes]]


def _memfd(size: int) -> tuple[int, str]:
    fd = os.memfd_create("mpistrat-board", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def _named(size: int) -> tuple[int, str]:
    room = Path("/dev/shm")
    place = str(room) if os.access(room, os.W_OK) else tempfile.gettempdir()
    path = Path(place, f"mpistrat-board-{secrets.token_hex(16)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, size)
    return fd, str(path)


Way = Callable[[int], tuple[int, str]]


def _offer(way: Way, size: int, token: bytes) -> tuple[int, str]:
    """Make the memory with a token in it, or return an empty path."""
    with contextlib.suppress(OSError, AttributeError):
        fd, path = way(size)
        os.pwrite(fd, token, 0)
        return fd, path
    return -1, ""


def _map(path: str, size: int, token: bytes) -> mmap.mmap | None:
    """Map what the first rank offers, if it is that: in another namespace it may be something else.

    The token is how the mapping is known to be the same memory.
    """
    if not path:
        return None
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        if found[: len(token)] == token:
            return found
    return None


def shared_memory(
    share: Share, first: bool, size: int, ways: tuple[Way, ...] = (_memfd, _named)
) -> memoryview | None:
    """Return `size` zero bytes that all ranks of the node share, or None on all of them.

    Collective: over the ranks of the node.

    Args:
      share: All-gathers bytes over the node.
      first: This is the first rank of the node; it makes the memory.
      size: How many bytes.
      ways: How to make it, best first.
    """
    for way in ways:
        token = secrets.token_bytes(16)
        fd, path = _offer(way, size, token) if first else (-1, "")
        told = json.loads(share(json.dumps([path, token.hex()]).encode())[0])
        found = _map(told[0], size, bytes.fromhex(told[1]))
        everywhere = b"\0" not in share(b"\1" if found is not None else b"\0")
        if fd >= 0:
            os.close(fd)
            if way is _named:
                Path(path).unlink()
        if everywhere and found is not None:
            if first:
                found[: len(token)] = bytes(len(token))
            share(b"")  # nobody writes before the token is gone
            return memoryview(found)
    return None
