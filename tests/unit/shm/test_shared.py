"""The ranks of a node, here threads, get the same memory or all get none."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpistrat.shm import segments
from mpistrat.shm.segments import shared_memory

SIZE = 4096
WHAT = f"test{os.getpid()}"  # others on this machine have files there too


def together(size, program):
    """Run ``program(share, rank)`` on `size` threads."""
    told = [b""] * size
    barrier = threading.Barrier(size)

    def rank(number):
        def share(data):
            told[number] = data
            barrier.wait()
            found = list(told)
            barrier.wait()
            return found

        return program(share, number)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def names():
    return {path.name for path in Path("/dev/shm").glob(f"mpistrat-{WHAT}-*")}


def forbidden(size, what):
    raise OSError("forbidden")


def elsewhere(size, what):
    """As in another pid namespace: the path is something else for the others."""
    fd, _ = segments._create_memfd(size, what)
    other = os.open("/dev/zero", os.O_RDWR)
    return fd, f"/proc/{os.getpid()}/fd/{other}"


WAYS = {
    "memfd": (segments._create_memfd,),
    "named": (segments._create_named_file,),
    "fallback": (forbidden, segments._create_named_file),
    "other namespace": (elsewhere, segments._create_memfd),
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_one_writes_all_read(ways, size):
    memories = together(size, lambda share, rank: shared_memory(share, rank == 0, SIZE, WHAT, ways))
    assert all(len(memory) == SIZE and not any(memory) for memory in memories)
    for rank, memory in enumerate(memories):
        memory[rank] = 7
    assert all(bytes(memory[: size + 1]) == b"\7" * size + b"\0" for memory in memories)
    assert not names()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_where_it_is_forbidden_nobody_gets_any(size):
    ways = (forbidden, forbidden)
    assert together(size, lambda s, r: shared_memory(s, r == 0, SIZE, WHAT, ways)) == [None] * size


@pytest.mark.parametrize("way", [segments._create_memfd, segments._create_named_file])
def test_if_one_rank_cannot_nobody_does(way, monkeypatch):
    real = segments._map_file
    blind = []

    def one_is_blind(path, size, what, token):
        if threading.current_thread() in blind:
            return None
        return real(path, size, what, token)

    def program(share, rank):
        if rank == 1:
            blind.append(threading.current_thread())
        return shared_memory(share, rank == 0, SIZE, WHAT, (way,))

    monkeypatch.setattr(segments, "_map_file", one_is_blind)
    assert together(3, program) == [None] * 3
    assert not names()


def test_no_file_descriptor_is_left():
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = together(2, lambda share, rank: shared_memory(share, rank == 0, SIZE, "test"))
    # A mapping keeps a duplicate of its descriptor (mmap of CPython), and nothing else is open.
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    del kept
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
