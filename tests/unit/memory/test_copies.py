"""Copies that a node has in common hold what copies of each rank would."""

from __future__ import annotations

import itertools
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from mpistrat.comm.loopback import LoopbackComm
from mpistrat.memory import copies as module
from mpistrat.memory.arena import Arena
from mpistrat.memory.copies import Common, Own, settle
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
    arena = Arena(comm, per_node)
    return arena.copies.make(value, shared)


@pytest.mark.parametrize("per_node", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_contents_are_those_of_the_first_rank(size, per_node):
    def rank(comm):
        copy = made(comm, start(seed=comm.rank), per_node)
        several = size > 1 and per_node != 1
        assert isinstance(copy, Common if several else Own)
        assert not copy.seen.flags.writeable and copy.seen.view().base is copy.base
        return copy.array.tobytes()

    assert run_ranks(rank, size) == [start(seed=0).tobytes()] * size


@pytest.mark.parametrize(
    ("value", "shared", "kind"),
    [
        (np.zeros(module.LEAST, np.uint8), True, Common),
        (np.zeros(module.LEAST - 1, np.uint8), True, Own),
        (np.zeros(module.LEAST, np.uint8), False, Own),
        (np.zeros((0, 3)), True, Own),
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
            copy.write(add, values, rows, alone=False)
        return copy.array.tobytes(), view.tobytes()

    assert run_ranks(rank, size) == [(want.tobytes(),) * 2] * size


@pytest.mark.parametrize("end", ["settled", "undone"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_a_rank_writes_alone_nobody_else_sees_until_it_is_settled(size, end):
    other = start((90, 100), 5)
    want = start()
    for _ in range(2):
        add(want, start(seed=1), None)

    def rank(comm):
        arena = Arena(comm)
        copy, neighbour = (arena.copies.make(v, True) for v in (start(), other.copy()))
        view = copy.array[3:]
        undo = copy.undo()
        for turn in range(size):
            comm.barrier()
            if turn == comm.rank:
                copy.write(add, start(seed=1), None, alone=True)
                add(copy._opened(None), start(seed=1), None)
            comm.barrier()
            mine = want if turn >= comm.rank else start()
            np.testing.assert_array_equal(copy.array, mine)
            np.testing.assert_array_equal(view, mine[3:])
        # What lies beside it is written to meanwhile, by all.
        neighbour.write(add, other, None, alone=False)
        if end == "settled":
            settle([copy, neighbour, copy])
        else:
            undo()
            undo()
            comm.barrier()
        assert not copy.open
        np.testing.assert_array_equal(neighbour.array, 2 * other)
        return copy.array.tobytes(), view.tobytes()

    final = want if end == "settled" else start()
    assert run_ranks(rank, size) == [(final.tobytes(), final[3:].tobytes())] * size


def test_what_is_not_large_lies_together_and_each_on_pages_of_its_own():
    def rank(comm):
        arena = Arena(comm)
        held = [arena.copies.make(np.zeros(70_000 + 999 * i, np.uint8), True) for i in range(130)]
        large = arena.copies.make(np.zeros(5_000_000, np.uint8), True)
        places = [(id(c._pages), c._start, c._stop) for c in [*held, large]]
        assert all(begin % mmap.PAGESIZE == 0 and end > begin for _, begin, end in places)
        for (pages, _, end), (other, begin, _) in itertools.pairwise(places):
            assert pages != other or begin >= end
        return len({pages for pages, _, _ in places}), places[-1][1]

    assert run_ranks(rank, 2) == [(4, 0)] * 2


@pytest.mark.parametrize("shape", [(module.LEAST // 8,), (1, module.LEAST), (2**16, 1, 1)])
def test_own_copies_and_common_ones_do_the_same(shape):
    rows = np.zeros(2, np.int64)

    def rank(comm):
        found = []
        for shared in (True, False):
            copy = made(comm, start(shape), 0, shared)
            copy.write(add, start(shape, 1), None, alone=False)
            copy.write(add, start((2, *shape[1:]), 2), rows, alone=False)
            copy.undo(rows)
            copy.write(add, start((2, *shape[1:]), 3), rows, alone=True)
            settle([copy])
            undo = copy.undo()
            copy.write(add, start(shape, 4), None, alone=True)
            undo()
            found.append(copy.array.tobytes())
        return found[0] == found[1]

    assert run_ranks(rank, 3) == [True] * 3


def test_without_memory_each_rank_has_its_own(monkeypatch):
    monkeypatch.setattr(LoopbackComm, "pages", lambda self, nbytes: self._meet("no", None) and None)

    def rank(comm):
        arena = Arena(comm)
        kinds = [type(arena.copies.make(start(seed=comm.rank), True)) for _ in range(3)]
        return kinds, arena.copies.refused

    assert run_ranks(rank, 2) == [([Own] * 3, True)] * 2


PAGE = mmap.PAGESIZE


def mapped(copy):
    """How many pages of the copy this rank may write to, and how many it has of its own."""
    low = copy.base.ctypes.data
    high = low + -(-copy.base.nbytes // PAGE) * PAGE
    writable = own = 0
    head, *entries = re.split(
        r"^([0-9a-f]+)-([0-9a-f]+) (\S+) .*\n",
        Path("/proc/self/smaps").read_text(),
        flags=re.MULTILINE,
    )
    assert not head
    for start, stop, rights, body in zip(*(entries[i::4] for i in range(4)), strict=True):
        inside = min(int(stop, 16), high) - max(int(start, 16), low)
        if inside > 0:
            writable += (inside // PAGE) * ("w" in rights)
            own += 1024 * int(re.search(r"^Anonymous: +(\d+) kB", body, re.MULTILINE)[1]) // PAGE
    return writable, own


def lying_on(shape, *several):
    """The number of pages that these rows of float64 lie on, number by number."""
    row = 8 * int(np.prod(shape[1:]))
    rows = {int(number) for rows in several for number in rows}
    return len({byte // PAGE for n in rows for byte in range(n * row, (n + 1) * row, 8)})


FAR = np.array([0, 1, 2, 500, 999, 998, 500, 500, 0])  # both ends, neighbours, and one three times
ROWS = {
    "one": ([3], [999]),
    "ends and duplicates": (FAR, FAR[::-1]),
    "overlapping": (np.arange(20, 90), np.arange(60, 130, 3)),
    "none, then some": ([], [7, 700]),
    "some, then none": ([7, 700], []),
    "none": ([], []),
    "all, last first": (np.arange(1000)[::-1], [5]),
}
# Rows of less than a page, of parts of several, and of whole pages.
SHAPES = [(1000, 70), (1000, PAGE // 8 * 5 // 4), (1000, PAGE // 8), (1000 * PAGE // 64,)]


@pytest.mark.parametrize("end", ["settled", "undone"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_only_the_pages_of_the_rows_are_opened_written_and_given_back(shape, rows, end):
    rows = [np.array(some, np.int64) for some in rows]
    values = [start((len(some), *shape[1:]), 3) + 10 for some in rows]
    want = start(shape)
    for some, value in zip(rows, values, strict=True):
        add(want, value, some)

    def rank(comm):
        copy = made(comm, start(shape))
        comm.barrier()
        undos, found = [], [mapped(copy)]
        for some, value in zip(rows, values, strict=True):
            undos.append(copy.undo(some))
            found.append(mapped(copy))
            copy.write(add, value, some, alone=True)
            found.append(mapped(copy))
        np.testing.assert_array_equal(copy.array, want)
        comm.barrier()
        if end == "settled":
            settle([copy, copy])
        else:
            for undo in reversed(undos):
                undo()
            comm.barrier()
        assert not copy.open
        return *found, mapped(copy), copy.array.tobytes()

    one, both = lying_on(shape, rows[0]), lying_on(shape, *rows)
    counts = [(0, 0), (one, 0), (one, one), (both, one), (both, both), (0, 0)]
    final = want if end == "settled" else start(shape)
    for *found, contents in run_ranks(rank, 3):
        assert found == counts
        assert contents == final.tobytes()


def test_many_scattered_rows_open_few_mappings_and_only_their_pages_are_copied():
    shape = (4000, PAGE // 8)
    rows = np.arange(0, 4000, 5)[::-1]
    values = start((len(rows), shape[1]), 3)
    want = start(shape)
    add(want, values, rows)

    def rank(comm):
        copy = made(comm, start(shape))
        undo = copy.undo(rows)
        copy.write(add, values, rows, alone=True)
        low, high = copy.base.ctypes.data, copy.base.ctypes.data + copy.base.nbytes
        maps = re.findall(r"^([0-9a-f]+)-", Path("/proc/self/maps").read_text(), re.MULTILINE)
        assert sum(low <= int(at, 16) < high for at in maps) <= 130
        writable, own = mapped(copy)
        assert own == len(rows) <= writable
        comm.barrier()
        settle([copy])
        assert mapped(copy) == (0, 0)
        undo()  # too late
        np.testing.assert_array_equal(copy.array, want)

    run_ranks(rank, 2)


def test_rows_and_then_all_and_rows_again_are_undone_in_order():
    shape, some = (1000, 70), np.array([900, 3, 3])

    def rank(comm):
        copy = made(comm, start(shape))
        undos, seen = [], []
        for rows in (some, None, some[::-1], some[:0]):
            seen.append(copy.array.copy())
            undos.append(copy.undo(rows))
            count = shape[0] if rows is None else len(rows)
            copy.write(add, start((count, 70), 2), rows, alone=True)
        for undo, before in zip(reversed(undos), reversed(seen), strict=True):
            undo()
            np.testing.assert_array_equal(copy.array, before)
        comm.barrier()
        return mapped(copy), copy.open

    assert run_ranks(rank, 2) == [((0, 0), False)] * 2


def test_what_the_system_refuses_to_open_leaves_nothing_open(monkeypatch):
    rows, asked = np.array([1, 300, 700]), []

    def rank(comm):
        copy = made(comm, start((1000, 70)))
        if comm.rank:
            return None
        allow = copy._pages.overlay._protect

        def protect(*given):
            asked.append(given)
            return -1 if len(asked) == 2 else allow(*given)

        monkeypatch.setattr(copy._pages.overlay, "_protect", protect)
        with pytest.raises(OSError, match="before the others have agreed"):
            copy.undo(rows)
        return copy.open, mapped(copy)

    assert run_ranks(rank, 2)[0] == (False, (0, 0))
