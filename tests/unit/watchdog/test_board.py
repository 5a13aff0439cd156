"""The interface on one process."""

from unittest.mock import MagicMock

import pytest

from mpistrat.watchdog.status_board import BETWEEN_CALLS, IN_CALL, LEFT, get_call_number
from mpistrat.watchdog.watchdog import WatchedBoard


def entry(board):
    return board.node_board.read(0)


def test_calls_are_seen():
    board = WatchedBoard()
    board.enter(4, "barrier()")
    assert (get_call_number(entry(board).key), entry(board).state) == (4, IN_CALL)
    board.leave()
    assert entry(board).state == BETWEEN_CALLS
    board.resume()
    assert (get_call_number(entry(board).key), entry(board).state) == (4, IN_CALL)
    assert board.close() is True
    assert entry(board).state == LEFT
    assert board.close() is True


def test_calls_may_be_given_a_time():
    board = WatchedBoard()
    board.allow(2.5)
    board.enter(1, "barrier()")
    assert entry(board).patience == 2_500_000_000
    board.allow(1e30)
    assert entry(board).patience == 10**18
    board.allow(None)
    assert entry(board).patience == 0


def test_long_operations_nest():
    board = WatchedBoard()
    with board.long_operation("save", 100):
        outer = entry(board).deadline
        with board.long_operation("evaluate", 1e30):
            assert board.slot.operation == "evaluate"
            assert entry(board).deadline > outer
        assert (entry(board).deadline, board.slot.operation) == (outer, "save")
    assert (entry(board).deadline, board.slot.operation) == (0, "")


def test_a_long_operation_ends_with_an_exception_too():
    board = WatchedBoard()
    with pytest.raises(KeyError), board.long_operation("save", 1):
        raise KeyError
    assert entry(board).deadline == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_long_operation_has_an_end(seconds):
    with (
        pytest.raises(ValueError, match=r"long_operation\('save'\) wants max_seconds > 0"),
        WatchedBoard().long_operation("save", seconds),
    ):
        pass


def test_free_needs_nobody_else_on_one_process():
    board = WatchedBoard()
    board.free()
    assert entry(board).state == LEFT


def test_who_stops_watching_has_not_left():
    board, watchdog = WatchedBoard(), MagicMock()
    board._watchdog = watchdog
    board.enter(1, "leave the program")
    board.stop_watching()
    watchdog.stop.assert_called_once()
    assert entry(board).state == IN_CALL
    assert board.close() is watchdog.stop.return_value
