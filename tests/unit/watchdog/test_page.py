"""Slots: what is written is read, and what is half written is noticed."""

import mmap
import os
import subprocess
import sys
import time

import pytest

from mpistrat.watchdog.status_board import (
    BETWEEN,
    INSIDE,
    LEFT,
    Page,
    number_of,
    page_bytes,
)


def new(size):
    return Page(memoryview(bytearray(page_bytes(size))), size)


def state(page, index=0):
    entry = page.read(index)
    return number_of(entry.key), entry.state


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_writes_its_own_slot(size):
    page = new(size)
    for index in range(size):
        slot = page.slot(index)
        slot.open(10 + index, 1000 + index, 77, 59)
        slot.enter(index + 5, f"call of {index}")
        slot.describe(f"file{index}.py:3")
    for index in range(size):
        entry = page.read(index)
        assert (entry.rank, entry.pid, entry.born, entry.signal) == (
            10 + index,
            1000 + index,
            77,
            59,
        )
        assert (number_of(entry.key), entry.state) == (index + 5, INSIDE)
        assert (entry.place, entry.text) == (f"file{index}.py:3", f"call of {index}")


def test_a_call_is_entered_resumed_and_left():
    page = new(1)
    slot = page.slot(0)
    slot.enter(3, "a")
    first = page.read(0).key
    slot.leave()
    assert state(page) == (3, BETWEEN)
    assert page.read(0).key == first
    slot.leave()
    assert state(page) == (3, BETWEEN)
    slot.resume()
    assert state(page) == (3, INSIDE)
    assert page.read(0).key > first
    slot.leave()
    slot.enter(4, "b")
    assert page.read(0).key > first + 1
    slot.close()
    assert state(page) == (4, LEFT)


@pytest.mark.parametrize("number", [0, 1, 2**24, 2**31, 2**39])
def test_long_programs_count_far(number):
    page = new(1)
    page.slot(0).enter(number, "")
    assert state(page) == (number, INSIDE)


def test_the_time_of_the_last_change_is_that_of_the_clock():
    page = new(1)
    times = iter([5, 9])
    slot = page.slot(0, lambda: next(times))
    slot.enter(1, "")
    assert page.read(0).changed == 5
    slot.leave()
    assert page.read(0).changed == 9


def test_a_text_is_shown_with_its_own_call_only():
    page = new(1)
    slot = page.slot(0)
    slot.enter(1, "the first")
    slot.describe("a.py:1")
    assert page.read(0).text == "the first"
    slot.leave()
    assert page.read(0).text == "the first"
    slot.enter(2, "the second")
    assert page.read(0).text == ""
    slot.describe("a.py:1")
    assert page.read(0).text == "the second"


def test_long_and_foreign_texts_are_cut_at_characters():
    page = new(1)
    slot = page.slot(0)
    slot.enter(1, "\N{GREEK SMALL LETTER ALPHA}" * 1000)
    slot.describe("x" * 1000)
    entry = page.read(0)
    assert entry.text == "\N{GREEK SMALL LETTER ALPHA}" * 256
    assert entry.place == "x" * 112


def test_a_long_operation_restarts_the_clock():
    page = new(1)
    times = iter([5, 9])
    slot = page.slot(0, lambda: next(times))
    slot.enter(1, "")
    slot.declare("save", 1000)
    entry = page.read(0)
    assert (entry.deadline, entry.changed) == (1000, 9)


def test_asking_is_seen_once():
    page = new(3)
    page.ask(1)
    assert [page.asked(i) for i in (0, 1, 2, 1)] == [False, True, False, False]


def test_a_half_written_slot_is_not_read():
    memory = bytearray(page_bytes(1))
    page = Page(memoryview(memory), 1)
    slot = page.slot(0)
    slot.enter(1, "a")
    slot.describe("a.py:1")
    words = memoryview(memory).cast("Q")
    words[0] += 1
    assert page.read(0) is None
    words[0] += 1
    words[32] += 1
    entry = page.read(0)
    assert (number_of(entry.key), entry.text, entry.place) == (1, "", "")


WRITER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
words = memoryview(mmap.mmap(fd, 0)).cast("Q")
print("ready", flush=True)
number = 0
while True:
    number += 1
    words[0] = 2 * number - 1
    words[1] = number << 4 | 2
    words[2] = number
    words[3] = number
    words[0] = 2 * number
    for _ in range(20): pass
"""


@pytest.mark.job  # both want a core
def test_a_reader_beside_a_busy_writer_sees_whole_states(tmp_path):
    path = tmp_path / "page"
    path.write_bytes(bytes(page_bytes(1)))
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        fd = os.open(path, os.O_RDWR)
        page = Page(memoryview(mmap.mmap(fd, 0)), 1)
        os.close(fd)
        seen = set()
        start = time.monotonic()
        # For half a second, or until it has seen some: both may have to share a core.
        while (spent := time.monotonic() - start) < 0.5 or (len(seen) <= 10 and spent < 60):
            entry = page.read(0)
            if entry is not None and entry.state:
                assert entry.key == entry.changed == entry.deadline
                seen.add(entry.key)
        writer.kill()
    assert len(seen) > 10


def test_what_handshakes_take_beyond_the_shortest_one_is_waiting():
    times = iter([0, 10, 20, 24, 30, 40, 47, 50, 60, 70])
    slot = new(1).slot(0, lambda: next(times))
    slot.enter(1, "")
    slot.leave()  # 10: nothing shorter is known
    assert slot.spent() == (0, 10)
    slot.enter(2, "")
    slot.leave()  # 4
    assert slot.spent() == (0, 14)
    slot.enter(3, "")
    slot.leave()  # 10, of which 4 is what it takes
    assert slot.spent() == (6, 18)
    slot.resume()
    slot.leave()  # a part of 3: data move
    assert slot.spent() == (6, 21)
    slot.leave()  # and no call is left twice
    assert slot.spent() == (6, 21)
