"""The wait of a rank that has come to leave, with the clock and the others simulated."""

import pytest

from mpistrat.watchdog.processes import Process
from mpistrat.watchdog.status_board import NodeBoard, make_call_key, node_board_nbytes
from mpistrat.watchdog.watchdog import Departure

NUMBER = 7
KEY = make_call_key(NUMBER)


class Node:
    """A page, and what its ranks do while one of them sleeps."""

    def __init__(self, size):
        self.node_board = NodeBoard(memoryview(bytearray(node_board_nbytes(size))), size)
        self.now = 100
        self.slots = [self.node_board.slot(index, lambda: self.now) for index in range(size)]
        for rank, slot in enumerate(self.slots):
            slot.open(rank, 1000 + rank, 1, 0)
        self.slept = []

    def wait(self, departure, *events):
        """Wait, and let one event happen in each sleep; more sleeps than events never end."""
        queue = list(events)

        def sleep(seconds):
            self.slept.append(seconds)
            queue.pop(0)()

        return departure.wait(KEY, sleep)

    def arrive(self, *ranks):
        for rank in ranks:
            self.slots[rank].record_arrival(NUMBER, "leave the program")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_come_one_after_the_other(size):
    node = Node(size)
    node.arrive(0)
    later = [lambda rank=rank: node.arrive(rank) for rank in range(1, size)]
    assert node.wait(Departure(node.node_board, node.node_board.size), *later) is True
    assert len(node.slept) == size - 1


def test_who_has_gone_on_to_the_last_proof_keeps_nobody():
    node = Node(2)
    node.arrive(0, 1)
    assert Departure(node.node_board, node.node_board.size).is_complete()
    node.slots[1].enter(NUMBER, "leave the program")
    assert node.wait(Departure(node.node_board, node.node_board.size)) is True


def test_a_call_of_the_same_communicator_must_be_joined():
    node = Node(3)
    node.arrive(0, 1)
    assert (
        node.wait(
            Departure(node.node_board, node.node_board.size),
            lambda: node.slots[2].enter(NUMBER, "run"),
        )
        is False
    )


def test_who_is_still_coming_out_of_the_call_before_needs_nobody():
    node = Node(2)
    node.slots[1].enter(NUMBER - 1, "run")
    node.arrive(0)
    later = (node.slots[1].leave, lambda: node.arrive(1))
    assert node.wait(Departure(node.node_board, node.node_board.size), *later) is True


def test_the_first_rank_of_a_node_asks_the_other_nodes_once_its_own_have_come():
    node, asked, have_come = Node(2), [], []

    def begin():
        asked.append(1)
        return lambda: bool(have_come)

    first, second = Departure(node.node_board, 4, begin), Departure(node.node_board, 4)
    node.arrive(0)
    assert not first.is_complete()
    assert not asked
    node.arrive(1)
    assert not first.is_complete()
    assert not second.is_complete()
    have_come.append(1)
    assert first.is_complete()
    assert second.is_complete()  # the first has told it
    assert asked == [1]


def test_a_call_on_another_node_must_be_joined_too():
    node = Node(1)
    node.arrive(0)
    departure = Departure(node.node_board, 2, lambda: lambda: False)
    events = (
        lambda: node.node_board.write_other_nodes(make_call_key(NUMBER - 1), 50),
        lambda: node.node_board.write_other_nodes(KEY, 60),
    )
    assert node.wait(departure, *events) is False


def test_sleeps_grow_to_a_limit():
    node = Node(2)
    node.arrive(0)
    events = [lambda: None] * 20 + [lambda: node.arrive(1)]
    node.wait(Departure(node.node_board, node.node_board.size), *events)
    assert node.slept[0] < 0.001
    assert node.slept == sorted(node.slept)
    assert node.slept[-1] == 0.02


def test_the_last_move_is_that_of_ranks_that_have_not_come():
    node = Node(3)
    departure = Departure(node.node_board, node.node_board.size)
    node.now = 500
    node.arrive(0)
    node.now = 300
    node.slots[1].enter(3, "run")
    assert departure.last_move() == 300
    node.slots[2].record_other_call(400, True)  # a call on another communicator
    assert departure.last_move() == 400
    node.slots[2].declare_operation("evaluate", 9000)  # a long operation
    assert departure.last_move() == 9000
    node.arrive(1, 2)
    assert departure.last_move() == 0
    node.node_board.write_other_nodes(0, 450)
    assert departure.last_move() == 450


SECOND = 1_000_000_000


def test_signs_of_life_are_those_of_ranks_that_have_not_come():
    node = Node(3)
    spent = {1000: 0.0, 1001: 0.0, 1002: 0.0}
    look = lambda pid: Process("R", 1, 1, "python", spent[pid])  # noqa: E731
    departure = Departure(node.node_board, 3, read_process=look, clock=lambda: node.now)

    def signs(now, *seconds):
        node.now = now * SECOND
        spent.update(zip((1000, 1001, 1002), seconds, strict=True))
        return tuple(sign / SECOND for sign in departure.signs())

    assert signs(100, 7.0, 7.0, 7.0) == (0, 0)  # the first look
    assert signs(101, 7.0, 7.001, 7.0) == (0, 0)  # a watchdog takes that much
    assert signs(102, 7.0, 7.5, 7.0) == (0, 102)
    node.slots[2].record_stack_change(99 * SECOND)
    assert signs(110, 7.0, 7.5, 7.0) == (99, 102)
    node.arrive(1)
    assert signs(120, 7.0, 9.5, 7.0) == (99, 0)
    node.arrive(2)
    assert signs(130, 7.0, 9.5, 7.0) == (0, 0)
    node.node_board.write_life_signs(121 * SECOND, 122 * SECOND)  # on other nodes
    assert signs(140, 7.0, 9.5, 7.0) == (121, 122)


def test_a_process_that_has_ended_computes_no_more():
    node = Node(1)
    found = {"process": Process("R", 1, 1, "python", 0.0)}
    departure = Departure(
        node.node_board, 2, read_process=lambda pid: found["process"], clock=lambda: node.now
    )
    for now, spent in ((1, 0.0), (2, 1.0)):
        node.now = now * SECOND
        found["process"] = Process("R", 1, 1, "python", spent)
        departure.signs()
    assert departure.signs() == (0, 2 * SECOND)
    for gone in (None, Process("R", 1, 2, "other", 9.0), Process("Z", 1, 1, "python", 1.0)):
        found["process"] = gone
        assert departure.signs() == (0, 0)


def test_groups_are_known_by_calls_on_other_communicators():
    node = Node(2)
    departure = Departure(node.node_board, 2)
    assert not departure.has_groups()
    node.slots[1].record_other_call(5, False)
    assert departure.has_groups()
