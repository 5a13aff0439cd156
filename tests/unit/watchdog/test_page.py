"""Slots: what is written is read, and what is half written is noticed."""

import mmap
import os
import subprocess
import sys
import time

import pytest

from mpistrat.watchdog.status_board import (
    BETWEEN_CALLS,
    IN_CALL,
    LEFT,
    NodeBoard,
    get_call_number,
    node_board_nbytes,
)


def new(size):
    return NodeBoard(memoryview(bytearray(node_board_nbytes(size))), size)


def state(node_board, index=0):
    entry = node_board.read(index)
    return get_call_number(entry.key), entry.state


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_writes_its_own_slot(size):
    node_board = new(size)
    for index in range(size):
        slot = node_board.slot(index)
        slot.open(10 + index, 1000 + index, 77, 59)
        slot.enter(index + 5, f"call of {index}")
        slot.write_texts(f"file{index}.py:3")
    for index in range(size):
        entry = node_board.read(index)
        assert (entry.rank, entry.pid, entry.start_ticks, entry.stack_signal) == (
            10 + index,
            1000 + index,
            77,
            59,
        )
        assert (get_call_number(entry.key), entry.state) == (index + 5, IN_CALL)
        assert (entry.position, entry.call_text) == (f"file{index}.py:3", f"call of {index}")


def test_a_call_is_entered_resumed_and_left():
    node_board = new(1)
    slot = node_board.slot(0)
    slot.enter(3, "a")
    first = node_board.read(0).key
    slot.leave()
    assert state(node_board) == (3, BETWEEN_CALLS)
    assert node_board.read(0).key == first
    slot.leave()
    assert state(node_board) == (3, BETWEEN_CALLS)
    slot.resume()
    assert state(node_board) == (3, IN_CALL)
    assert node_board.read(0).key > first
    slot.leave()
    slot.enter(4, "b")
    assert node_board.read(0).key > first + 1
    slot.close()
    assert state(node_board) == (4, LEFT)


@pytest.mark.parametrize("number", [0, 1, 2**24, 2**31, 2**39])
def test_long_programs_count_far(number):
    node_board = new(1)
    node_board.slot(0).enter(number, "")
    assert state(node_board) == (number, IN_CALL)


def test_the_time_of_the_last_change_is_that_of_the_clock():
    node_board = new(1)
    times = iter([5, 9])
    slot = node_board.slot(0, lambda: next(times))
    slot.enter(1, "")
    assert node_board.read(0).changed_ns == 5
    slot.leave()
    assert node_board.read(0).changed_ns == 9


def test_a_text_is_shown_with_its_own_call_only():
    node_board = new(1)
    slot = node_board.slot(0)
    slot.enter(1, "the first")
    slot.write_texts("a.py:1")
    assert node_board.read(0).call_text == "the first"
    slot.leave()
    assert node_board.read(0).call_text == "the first"
    slot.enter(2, "the second")
    assert node_board.read(0).call_text == ""
    slot.write_texts("a.py:1")
    assert node_board.read(0).call_text == "the second"


def test_long_and_foreign_texts_are_cut_at_characters():
    node_board = new(1)
    slot = node_board.slot(0)
    slot.enter(1, "\N{GREEK SMALL LETTER ALPHA}" * 1000)
    slot.write_texts("x" * 1000)
    entry = node_board.read(0)
    assert entry.call_text == "\N{GREEK SMALL LETTER ALPHA}" * 256
    assert entry.position == "x" * 112


def test_a_long_operation_restarts_the_clock():
    node_board = new(1)
    times = iter([5, 9])
    slot = node_board.slot(0, lambda: next(times))
    slot.enter(1, "")
    slot.declare_operation("save", 1000)
    entry = node_board.read(0)
    assert (entry.deadline, entry.changed_ns) == (1000, 9)


def test_asking_is_seen_once():
    node_board = new(3)
    node_board.request_stacks(1)
    assert [node_board.take_stack_request(i) for i in (0, 1, 2, 1)] == [False, True, False, False]


def test_a_half_written_slot_is_not_read():
    memory = bytearray(node_board_nbytes(1))
    node_board = NodeBoard(memoryview(memory), 1)
    slot = node_board.slot(0)
    slot.enter(1, "a")
    slot.write_texts("a.py:1")
    words = memoryview(memory).cast("Q")
    words[0] += 1
    assert node_board.read(0) is None
    words[0] += 1
    words[32] += 1
    entry = node_board.read(0)
    assert (get_call_number(entry.key), entry.call_text, entry.position) == (1, "", "")


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
    path.write_bytes(bytes(node_board_nbytes(1)))
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        fd = os.open(path, os.O_RDWR)
        node_board = NodeBoard(memoryview(mmap.mmap(fd, 0)), 1)
        os.close(fd)
        seen = set()
        start = time.monotonic()
        # For half a second, or until it has seen some: both may have to share a core.
        while (spent := time.monotonic() - start) < 0.5 or (len(seen) <= 10 and spent < 60):
            entry = node_board.read(0)
            if entry is not None and entry.state:
                assert entry.key == entry.changed_ns == entry.deadline
                seen.add(entry.key)
        writer.kill()
    assert len(seen) > 10


def test_what_handshakes_take_beyond_the_shortest_one_is_waiting():
    times = iter([0, 10, 20, 24, 30, 40, 47, 50, 60, 70])
    slot = new(1).slot(0, lambda: next(times))
    slot.enter(1, "")
    slot.leave()  # 10: nothing shorter is known
    assert slot.read_times_spent() == (0, 10)
    slot.enter(2, "")
    slot.leave()  # 4
    assert slot.read_times_spent() == (0, 14)
    slot.enter(3, "")
    slot.leave()  # 10, of which 4 is what it takes
    assert slot.read_times_spent() == (6, 18)
    slot.resume()
    slot.leave()  # a part of 3: data move
    assert slot.read_times_spent() == (6, 21)
    slot.leave()  # and no call is left twice
    assert slot.read_times_spent() == (6, 21)
