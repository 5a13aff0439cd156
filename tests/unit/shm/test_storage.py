"""Memory that a node has in common holds what the memory of each rank would."""

from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest

from mpistrat.comm.loopback import LoopbackComm
from mpistrat.shm import storage as module
from mpistrat.shm.arena import SharedMemory
from mpistrat.shm.storage import NodeStorage, PrivateStorage
from mpistrat.testing import run_ranks

LARGE = (130, 70)  # of float64, a little more than one page in each direction from 64 KiB


def add(array, values, rows):
    if rows is None:
        array += values
    else:
        np.add.at(array, rows, values)


def start(shape=LARGE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def made(comm, value, per_node=0, shared=True):
    arena = SharedMemory(comm, per_node)
    return arena.copies.make(value, shared)


@pytest.mark.parametrize("per_node", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_contents_are_those_of_the_first_rank(size, per_node):
    def rank(comm):
        copy = made(comm, start(seed=comm.rank), per_node)
        several = size > 1 and per_node != 1
        assert isinstance(copy, NodeStorage if several else PrivateStorage)
        assert not copy.view.flags.writeable and copy.view.view().base is copy.base
        return copy.array.tobytes()

    assert run_ranks(rank, size) == [start(seed=0).tobytes()] * size


@pytest.mark.parametrize(
    ("value", "shared", "kind"),
    [
        (np.zeros(module.MIN_SHARED_NBYTES, np.uint8), True, NodeStorage),
        (np.zeros(module.MIN_SHARED_NBYTES - 1, np.uint8), True, PrivateStorage),
        (np.zeros(module.MIN_SHARED_NBYTES, np.uint8), False, PrivateStorage),
        (np.zeros((0, 3)), True, PrivateStorage),
    ],
)
def test_what_is_common(value, shared, kind):
    assert run_ranks(lambda c: type(made(c, value.copy(), 0, shared)), 2) == [kind] * 2


@pytest.mark.parametrize("rows", [None, np.array([0, 129, 0, 64, 65, 64])])
@pytest.mark.parametrize("per_node", [0, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_all_agree_on_is_written_once(size, per_node, rows):
    values = start(seed=1) if rows is None else start((len(rows), LARGE[1]), 1)
    want = start()
    for _ in range(3):
        add(want, values, rows)

    def rank(comm):
        copy = made(comm, start(), per_node)
        view = copy.array.view()
        for _ in range(3):
            copy.write(add, values, rows)
        return copy.array.tobytes(), view.tobytes()

    assert run_ranks(rank, size) == [(want.tobytes(),) * 2] * size


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_a_snapshot_puts_back_what_all_have_written_since(size, shared):
    def rank(comm):
        storage = made(comm, start(), 0, shared)
        storage.write(add, start(seed=1))
        want = storage.array.copy()
        restore = storage.snapshot()
        comm.barrier()  # as the handshake before each write is one
        storage.write(add, start(seed=2))
        storage.write(add, start((2, LARGE[1]), 3), np.array([0, 129]))
        restore()
        np.testing.assert_array_equal(storage.array, want)
        comm.barrier()
        storage.write(add, start(seed=4))
        restore()  # once
        np.testing.assert_array_equal(storage.array, want + start(seed=4))

    run_ranks(rank, size)


def test_to_put_back_what_nobody_wrote_takes_no_other_rank():
    def rank(comm):
        restore = made(comm, start()).snapshot()
        if comm.rank == 0:
            restore()
        return True

    assert run_ranks(rank, 2) == [True] * 2


def test_what_is_not_large_lies_together_and_each_on_pages_of_its_own():
    def rank(comm):
        arena = SharedMemory(comm)
        held = [arena.copies.make(np.zeros(70_000 + 999 * i, np.uint8), True) for i in range(130)]
        large = arena.copies.make(np.zeros(5_000_000, np.uint8), True)
        places = [(id(c._pages), c._start, c._start + c.array.nbytes) for c in [*held, large]]
        assert all(begin % mmap.PAGESIZE == 0 and end > begin for _, begin, end in places)
        for (pages, _, end), (other, begin, _) in itertools.pairwise(places):
            assert pages != other or begin >= end
        return len({pages for pages, _, _ in places}), places[-1][1]

    assert run_ranks(rank, 2) == [(4, 0)] * 2


@pytest.mark.parametrize(
    "shape", [(module.MIN_SHARED_NBYTES // 8,), (1, module.MIN_SHARED_NBYTES), (2**16, 1, 1)]
)
def test_own_copies_and_common_ones_do_the_same(shape):
    rows = np.zeros(2, np.int64)

    def rank(comm):
        found = []
        for shared in (True, False):
            copy = made(comm, start(shape), 0, shared)
            copy.write(add, start(shape, 1), None)
            copy.write(add, start((2, *shape[1:]), 2), rows)
            found.append(copy.array.tobytes())
        return found[0] == found[1]

    assert run_ranks(rank, 3) == [True] * 3


def test_without_memory_each_rank_has_its_own(monkeypatch):
    monkeypatch.setattr(
        LoopbackComm, "pages", lambda self, nbytes: self._exchange("no", None) and None
    )

    def rank(comm):
        arena = SharedMemory(comm)
        kinds = [type(arena.copies.make(start(seed=comm.rank), True)) for _ in range(3)]
        return kinds, arena.copies.is_refused

    assert run_ranks(rank, 2) == [([PrivateStorage] * 3, True)] * 2


@pytest.mark.parametrize("count", [LARGE[0], 70 * LARGE[0]])
def test_pages_that_one_rank_cannot_take_nobody_gets(count, monkeypatch):
    monkeypatch.setattr(NodeStorage, "populate", lambda self: self.node.rank != 1)

    def rank(comm):
        arena = SharedMemory(comm)
        value = start((count, LARGE[1]), seed=comm.rank)
        copy = arena.copies.make(value, may_share=True)
        wanted = start((count, LARGE[1]), seed=0)
        return (
            isinstance(copy, PrivateStorage),
            arena.copies.is_refused,
            (copy.array == wanted).all(),
        )

    assert run_ranks(rank, 3) == [(True, True, True)] * 3


def test_each_rank_takes_the_pages_of_its_slice(monkeypatch):
    taken = []
    monkeypatch.setattr(module, "populate", lambda memory, parts: taken.extend(parts) or True)
    run_ranks(lambda comm: type(made(comm, start())), 4)
    ends = [low for low, _ in sorted(taken)], [high for _, high in sorted(taken)]
    assert ends[0][1:] == ends[1][:-1]
    assert ends[1][-1] - ends[0][0] == start().nbytes
