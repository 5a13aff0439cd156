"""What a process writes about itself."""

import sys
import threading
from types import SimpleNamespace

import pytest

from mpistrat.comm.callsite import call_site_of, is_library_file, is_numba_on_stack, ranks_text
from mpistrat.watchdog.status_board import NodeBoard, Reporter, get_frame, node_board_nbytes

SECOND = 10**9


@pytest.fixture
def node_board():
    return NodeBoard(memoryview(bytearray(node_board_nbytes(1))), 1)


def frame(filename="user.py", line=3, name="__main__", back=None):
    code = SimpleNamespace(co_filename=filename)
    return SimpleNamespace(f_code=code, f_lineno=line, f_back=back, f_globals={"__name__": name})


def test_it_writes_where_the_thread_is(node_board):
    slot = node_board.slot(0)
    position = [frame(line=3)]
    reporter = Reporter(slot, 0, 1, lambda thread: position[0])
    slot.enter(1, "the call")
    reporter.report(5, False)
    entry = node_board.read(0)
    assert (entry.position, entry.call_text, entry.heartbeat_ns) == ("user.py:3", "the call", 5)
    position[0] = frame(line=4)
    reporter.report(6, False)
    assert (node_board.read(0).position, node_board.read(0).heartbeat_ns) == ("user.py:4", 6)


def test_a_thread_that_has_ended_is_nowhere(node_board):
    Reporter(node_board.slot(0), 0, 1, lambda thread: None).report(5, False)
    assert node_board.read(0).position == ""


def test_stacks_are_dumped_when_asked(node_board):
    dumped = []
    reporter = Reporter(node_board.slot(0), 7, 1, lambda thread: None, dumped.append)
    reporter.report(5, False)
    assert dumped == []
    reporter.report(6, True)
    assert dumped == [7]


def test_calls_on_other_communicators_are_told_with_their_time(node_board):
    slot, other_calls = node_board.slot(0), [(0, "", 0)]
    reporter = Reporter(slot, 0, 1, lambda thread: None, other_calls=lambda: other_calls[0])
    slot.enter(4, "reduce")
    slot.leave()
    reporter.report(5, False)
    assert (node_board.read(0).other_call_ns, node_board.read(0).is_away) == (0, False)
    other_calls[0] = (1, "all_reduce of the trial", 0)
    reporter.report(6, False)
    entry = node_board.read(0)
    assert (entry.other_call_ns, entry.is_away, entry.call_text) == (
        6,
        True,
        "all_reduce of the trial",
    )
    reporter.report(7, False)
    assert node_board.read(0).other_call_ns == 6  # nothing new
    other_calls[0] = (1, "", 0)
    reporter.report(8, False)
    assert (node_board.read(0).other_call_ns, node_board.read(0).is_away) == (8, False)
    other_calls[0] = (1, "", 11)  # a long operation is declared there
    for now in (9, 10, 11, 12):
        reporter.report(now, False)
    assert node_board.read(0).other_call_ns == 10


def test_compiling_is_noticed_where_a_rank_stays(node_board):
    slot = node_board.slot(0)
    inner = frame("numba/core/x.py", 1, "numba.core.compiler", frame())
    now = [frame("deep.py", back=inner)]
    reporter = Reporter(slot, 0, 1, lambda thread: now[0])
    slot.enter(1, "")
    slot.leave()
    looks = {}
    for tenth in range(0, 30, 5):
        reporter.report(tenth * SECOND // 10 + 1, False)
        looks[tenth] = node_board.read(0).compiling_until_ns
    assert looks[0] == looks[5] == 0
    assert looks[25] > 25 * SECOND // 10
    reporter.report(3601 * SECOND, False)
    assert node_board.read(0).compiling_until_ns > 3601 * SECOND
    reporter.report(3603 * SECOND, False)
    assert node_board.read(0).compiling_until_ns == 0  # nothing compiles for more than an hour
    now[0] = frame()
    reporter.report(3604 * SECOND, False)
    assert node_board.read(0).compiling_until_ns == 0


def test_the_place_is_outside_mpistrat():
    from mpistrat.watchdog import status_board as inside

    caller = frame("train.py", 88)
    assert is_library_file(inside.__file__)
    assert call_site_of(frame(inside.__file__, 3, back=caller)) == "train.py:88"
    assert call_site_of(sys._getframe()).startswith("test_reporter.py:")
    assert call_site_of(None) == ""
    assert not is_numba_on_stack(caller)


def test_a_stack_that_ends_in_no_frame_has_no_place():
    from mpistrat.watchdog import status_board as inside

    broken = frame(inside.__file__, back=frame)
    assert call_site_of(broken) == ""
    assert not is_numba_on_stack(broken)


def test_imports_and_loads_of_numba_count_as_compiling():
    for name in ("numba", "numba.core.types", "numba.core.caching"):
        assert is_numba_on_stack(frame("deep.py", back=frame("x.py", 1, name, frame())))
    assert not is_numba_on_stack(frame("deep.py", back=frame("x.py", 1, "numbastic.core", frame())))


def test_the_frame_of_another_thread_is_found():
    go, here = threading.Event(), threading.Event()

    def body():
        here.set()
        go.wait(240)

    thread = threading.Thread(target=body)
    thread.start()
    here.wait(240)
    found, names = get_frame(thread.ident), set()
    while found is not None:
        names.add(found.f_code.co_name)
        found = found.f_back
    go.set()
    thread.join()
    assert "body" in names
    assert get_frame(-1) is None


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([2], "rank 2"), ([0, 1], "ranks 0, 1"), ([3, 0, 1, 2, 7], "ranks 0-3, 7")],
)
def test_ranks_in_words(ranks, text):
    assert ranks_text(ranks) == text
