"""Nodes of ranks and their watchdogs in simulated time: nothing here waits."""

import itertools
import random
from types import SimpleNamespace

import pytest

from mpistrat.watchdog import status_board
from mpistrat.watchdog.exchange import StatusExchange
from mpistrat.watchdog.observer import HUNG, Limits, Observer
from mpistrat.watchdog.processes import LauncherProcesses, Process
from mpistrat.watchdog.status_board import (
    NodeBoard,
    Reporter,
    make_call_key,
    node_board_nbytes,
)
from mpistrat.watchdog.statuses import NodeLayout
from mpistrat.watchdog.watchdog import ORPHANED, Watchdog

SECOND = 10**9
LIMITS = Limits(60.0, 1800.0)
SHORT = Limits(60.0, 300.0)  # where every rank of every shape has its turn


class Ended(Exception):
    pass


class Rank:
    """A simulated process."""

    def __init__(self, world, rank, node_board, index, node_index, link):
        self.world, self.rank = world, rank
        self.slot = node_board.slot(index, world.clock)
        self.pid = 1000 + rank
        world.table[self.pid] = Process("S", 7, rank, "python3")
        self.slot.open(rank, self.pid, rank, 59)
        self.node_board, self.index, self.node_index, self.link = (
            node_board,
            index,
            node_index,
            link,
        )
        self.runs = True  # Python runs; not while stopped, dead or in a C call with the GIL
        self.ended = None

    def open(self, limits):
        world = self.world
        writes = Reporter(self.slot, self.rank, 0, lambda thread: None, world.dumped.append)
        observer = Observer(
            self.node_board, world.size, f"n{self.node_index}", limits,
            world.say, world.end,
            world.rouse, world.table.get,
            lambda pid, number: (pid, number) not in world.deaf,
        )  # fmt: skip
        launcher = LauncherProcesses(self.pid, lambda: 7, world.table.get)
        self.watchdog = Watchdog(
            self.index, writes, observer, self.link, launcher, world.clock,
            self.leave, lambda pid, number: world.killed.append(pid),
        )  # fmt: skip

    def leave(self, code):
        self.ended = code
        self.runs = False

    def do(self, letter):
        self.world.table[self.pid] = self.world.table[self.pid]._replace(state=letter)
        self.runs = letter in "RSD"


class World:
    """Ranks on nodes, a clock, and what was said."""

    def __init__(self, post, *nodes, limits=LIMITS):
        self.now = 10**15
        self.size = sum(nodes)
        self.deaf = set()
        self.said, self.dumped, self.roused, self.killed = [], [], [], []
        self.on_rouse = lambda rank: None
        self.table = {7: Process("S", 3, 1, "mpiexec.hydra"), 3: Process("S", 0, 1, "bash")}
        rank = 0
        starts = [sum(nodes[:h]) for h in range(len(nodes))]
        known = NodeLayout(
            [(f"n{h}", range(start, start + nodes[h])) for h, start in enumerate(starts)]
        )
        self.ranks = []
        for node_index, count in enumerate(nodes):
            node_board = NodeBoard(memoryview(bytearray(node_board_nbytes(count))), count)
            for index in range(count):
                link = None
                if index == 0 and len(nodes) > 1:
                    channel = post.channel(node_index, len(nodes))
                    link = StatusExchange(channel, known, limits.interval, 5.0, self.now / 1e9)
                self.ranks.append(Rank(self, rank, node_board, index, node_index, link))
                rank += 1
        for each in self.ranks:
            each.open(limits)

    def clock(self):
        return self.now

    def say(self, text):
        self.said.append(text)

    def end(self, code):
        raise Ended(code)

    def rouse(self, pid, number):
        self.roused.append((pid, number))
        self.on_rouse(self.ranks[pid - 1000])

    def pass_time(self, seconds, step=0.25):
        for _ in range(int(seconds / step)):
            self.now += int(step * SECOND)
            for rank in self.ranks:
                if rank.runs:
                    rank.watchdog.tick()

    def call(self, number, *missing):
        """Let all but some ranks come to a call, or through it if none is missing."""
        for rank in self.ranks:
            if rank.rank not in missing:
                rank.slot.enter(number, f"call no. {number}")
        if not missing:
            for rank in self.ranks:
                rank.slot.leave()


@pytest.fixture
def cluster(new_post):
    return lambda *nodes, **more: World(new_post(), *nodes, **more)


def test_ranks_that_leave_know_of_the_calls_of_other_nodes(cluster):
    world = cluster(1, 1)
    world.ranks[0].slot.record_arrival(2, "leave the program")
    world.pass_time(5)
    node_board = world.ranks[0].node_board
    assert node_board.read_other_nodes()[0] == 0
    before = world.now
    world.ranks[1].slot.enter(2, "run")
    world.pass_time(5)
    inside, moved = node_board.read_other_nodes()
    assert inside == make_call_key(2)
    assert abs(moved - before) < 3 * SECOND
    world.ranks[1].slot.record_arrival(2, "leave the program")
    world.pass_time(5)
    assert node_board.read_other_nodes() == (0, 0)


SHAPES = [(2,), (3,), (4,), (1, 1), (2, 1), (1, 2), (2, 2, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_missing_rank_is_named_once_and_the_job_ends(shape, cluster):
    for culprit in range(sum(shape)):
        world = cluster(*shape, limits=SHORT)
        world.pass_time(5)
        world.call(1)
        world.call(2, culprit)
        world.pass_time(55)
        assert world.said == []
        world.pass_time(10)
        assert len(world.said) == 1
        assert f"rank {culprit} (n" in world.said[0]
        assert "has not reached call 2" in world.said[0]
        assert world.dumped == [culprit]
        with pytest.raises(Ended, match=str(HUNG)):
            world.pass_time(300, 1.0)
        assert len(world.said) == 2
        assert 300 < (world.now - 10**15) / SECOND < 5 + 300 + 10


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warn", [4.0, 8.0, 60.0])
def test_a_call_with_a_time_of_its_own_names_who_is_missing_before_it_ends(shape, warn, cluster):
    for culprit in range(sum(shape)):
        world = cluster(*shape, limits=Limits(warn, 1800.0))
        for rank in world.ranks:
            rank.slot.patience = 10 * SECOND
        world.pass_time(5)
        world.call(1)
        world.call(2, culprit)
        with pytest.raises(Ended, match=str(HUNG)):
            world.pass_time(20)
        warned, ended = world.said
        first, second = warned.splitlines()
        assert first.startswith(f"mpistrat: rank {culprit} (n")
        assert "has not reached call 2" in first
        assert second.endswith("of this; timeout_seconds says so.")
        assert f"\n  rank {culprit} (n" in ended
        assert world.dumped == [culprit]


TROUBLES = {"T": "stopped by a signal", "Z": "its process is gone"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("letter", TROUBLES)
def test_a_rank_in_trouble_is_named_whichever_it_is(shape, letter, cluster):
    for culprit in range(sum(shape)):
        world = cluster(*shape, limits=SHORT)
        world.call(1)
        world.call(2, culprit)
        world.pass_time(5)
        world.ranks[culprit].do(letter)
        world.pass_time(60)
        alone = shape[world.ranks[culprit].node_index] == 1
        what = "its node does not answer" if alone else TROUBLES[letter]
        assert any(f"rank {culprit} (n" in text and what in text for text in world.said), world.said
        with pytest.raises(Ended, match=str(HUNG)):
            world.pass_time(300, 1.0)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_another_program_took_over_gets_no_signal_that_would_end_it(culprit, cluster):
    world = cluster(3)
    world.call(1)
    world.call(2, culprit)
    world.pass_time(5)
    world.ranks[culprit].runs = False
    world.deaf.add((1000 + culprit, 59))
    world.pass_time(65)
    assert "another program runs in its process" in world.said[-1]
    with pytest.raises(Ended, match=str(HUNG)):
        world.pass_time(1800, 1.0)
    assert world.roused == []


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_held_gil_is_named_and_its_stacks_come_at_the_end(culprit, cluster):
    world = cluster(3)
    world.call(1)
    world.call(2, culprit)
    world.pass_time(5)
    world.ranks[culprit].runs = False
    world.pass_time(65)
    assert "holds the GIL" in world.said[-1]
    assert world.roused == []
    with pytest.raises(Ended):
        world.pass_time(1800, 1.0)
    assert world.roused == [(1000 + culprit, 59)]


@pytest.mark.parametrize("phase", [0.0, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2, 2)])
def test_a_held_gil_on_another_node_shows_its_stacks_before_the_end(shape, phase, cluster):
    world = cluster(*shape, limits=SHORT)
    culprit = world.size - 1
    world.call(1)
    world.pass_time(phase)
    world.call(2, culprit)
    world.pass_time(5)
    world.ranks[culprit].runs = False
    world.pass_time(290)
    assert world.roused == []
    with pytest.raises(Ended):
        world.pass_time(10)
    assert (1000 + culprit, 59) in world.roused


@pytest.mark.parametrize("phase", [0.0, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_a_rank_that_the_signal_wakes_does_not_keep_the_job(culprit, phase, cluster):
    def go_on(rank):
        assert "the job ends with exit code 75" in world.said[-2]  # before "the stacks of rank"
        rank.runs = True
        rank.slot.enter(2, "call no. 2")
        for each in world.ranks:
            each.slot.leave()

    world = cluster(2, 2, limits=SHORT)
    world.on_rouse = go_on
    world.call(1)
    world.pass_time(phase)
    world.call(2, culprit)
    world.pass_time(5)
    world.ranks[culprit].runs = False
    with pytest.raises(Ended, match=str(HUNG)):
        world.pass_time(305)
    assert world.roused == [(1000 + culprit, 59)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_declared_operation_is_waited_for(shape, cluster):
    for culprit in range(sum(shape)):
        world = cluster(*shape, limits=SHORT)
        world.call(1)
        world.call(2, culprit)
        rank = world.ranks[culprit]
        rank.slot.declare_operation("evaluate", world.now + 500 * SECOND)
        world.pass_time(490, 1.0)
        assert world.said == []
        rank.slot.declare_operation("", 0)
        world.pass_time(290, 1.0)
        assert len(world.said) == 1
        rank.slot.enter(2, "call no. 2")
        for each in world.ranks:
            each.slot.leave()
        world.pass_time(100, 1.0)
        assert len(world.said) == 1


def test_a_dead_rank_is_not_excused_by_what_it_declared(cluster):
    world = cluster(3)
    world.call(1)
    world.call(2, 1)
    world.ranks[1].slot.declare_operation("evaluate", world.now + 3000 * SECOND)
    world.ranks[1].do("Z")
    world.pass_time(70)
    assert "its process is gone" in world.said[0]


def test_a_rank_that_is_stopped_while_it_does_what_it_declared_is_named(cluster):
    world = cluster(3)
    world.ranks[1].slot.declare_operation("write a checkpoint", world.now + 3000 * SECOND)
    world.call(4, 1)
    world.pass_time(1000)
    world.ranks[1].do("T")
    world.pass_time(50)
    assert not world.said
    world.pass_time(20)
    assert "rank 1 (n0) has not reached call 4 for 6" in world.said[0]  # 60 s and a few
    assert "stopped by a signal" in world.said[0]
    world.ranks[1].do("S")
    world.pass_time(1000)  # it continues, and may take what is left of the time
    world.ranks[1].do("T")
    with pytest.raises(Ended):
        world.pass_time(LIMITS.timeout + 10)
    assert f"has not reached call 4 for {LIMITS.timeout:.0f} s" in world.said[-1]


def test_a_suspended_job_gets_its_patience_anew(cluster):
    world = cluster(2, 1)
    world.call(1)
    world.call(2, 1)
    world.pass_time(50)
    world.now += 10000 * SECOND
    world.pass_time(50)
    assert world.said == []
    with pytest.raises(Ended):
        world.pass_time(1800, 1.0)


def test_a_lost_launcher_ends_every_rank_within_a_second(cluster):
    world = cluster(2, 1)
    world.pass_time(5)
    world.ranks[1].do("T")
    world.pass_time(10)
    del world.table[7]
    world.pass_time(0.5)
    assert [rank.ended for rank in world.ranks] == [ORPHANED, None, ORPHANED]
    assert world.killed == [1001]


def test_ranks_that_have_left_wait_for_nobody(cluster):
    world = cluster(3)
    world.call(1)
    for rank in world.ranks:
        rank.slot.close()
    world.pass_time(3000, 1.0)
    assert world.said == []


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 20))]
)
def test_pauses_up_to_four_fifths_of_the_limit_end_nothing(seed, cluster):
    """50 runs per seed of 12 calls, in simulated time, on several shapes of cluster."""
    rng = random.Random(seed)
    limits = Limits(1.0, 2.0)
    for _ in range(50):
        world = cluster(*rng.choice(SHAPES), limits=limits)
        for number in range(1, 13):
            arrive = sorted((rng.random() * 0.8 * limits.timeout, r) for r in range(world.size))
            last = 0.0
            for when, r in arrive:
                world.pass_time(when - last, 0.125)
                last = when
                world.ranks[r].slot.enter(number, "")
            for rank in world.ranks:
                rank.slot.leave()
        assert not any("exit code" in text for text in world.said)


def test_a_slot_in_another_namespace_is_judged_by_its_heartbeat(cluster):
    world = cluster(2)
    world.table[1001] = Process("T", 7, 4711, "another")
    for rank in world.ranks:
        rank.open(LIMITS)
    world.call(1)
    world.call(2, 1)
    world.pass_time(70)
    assert "its process is gone" not in world.said[0]
    assert "(computing)" in world.said[0]


@pytest.mark.parametrize("warn", [0.1, 1, 60, 600])
def test_looks_are_often_enough_for_the_limits(warn):
    limits = Limits(warn, 10 * warn)
    assert limits.tick <= 0.25
    assert limits.tick < limits.interval <= min(1, warn / 4)
    assert limits.stale >= 4 * limits.tick


@pytest.mark.parametrize("nodes", [(4,), (2, 2), (1, 1, 1, 1)])
def test_what_is_declared_on_another_communicator_counts_for_who_waits_there(nodes, cluster):
    world = cluster(*nodes, limits=SHORT)
    evaluates, waits = (world.ranks[rank].watchdog.reporter for rank in (1, 3))
    evaluates.other_calls = lambda: (1, "", world.now + SECOND)
    waits.other_calls = lambda: (1, "reduce of the trial", 0)
    world.call(2, 1, 3)
    world.pass_time(900)
    assert not world.said
    world.ranks[1].slot.enter(2, "call no. 2")  # it is done; the other one is soon
    evaluates.other_calls = lambda: (1, "", 0)
    world.pass_time(50)
    assert not world.said
    world.pass_time(200)
    assert "rank 3" in world.said[0]
    with pytest.raises(Ended):
        world.pass_time(100)


@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
@pytest.mark.parametrize("of_group", [True, False])
@pytest.mark.parametrize("waits", ["to leave", "in a call"])
def test_a_group_whose_python_code_goes_on_is_no_hang_for_those_that_leave(
    nodes, of_group, waits, cluster, monkeypatch
):
    world, motions = cluster(*nodes, limits=SHORT), itertools.count()
    monkeypatch.setattr(status_board, "stack_fingerprint", lambda frame: frame and next(motions))
    other = world.ranks[1].watchdog.reporter
    other.get_frame = lambda thread: SimpleNamespace(
        f_code=SimpleNamespace(co_filename="a.py"), f_lineno=1, f_back=None, f_globals={}
    )
    other.other_calls = lambda: (int(of_group), "", 0)
    if waits == "to leave":
        world.ranks[0].slot.record_arrival(2, "leave the program")
    else:
        world.ranks[0].slot.enter(2, "reduce")
    if of_group and waits == "to leave":
        world.pass_time(1000)
        assert not world.said
        other.get_frame = lambda thread: None
    with pytest.raises(Ended):
        world.pass_time(310)


@pytest.mark.parametrize("late", [0, 2])
def test_a_node_that_falls_silent_in_what_it_has_declared_is_waited_for_until_then(late, cluster):
    world = cluster(1, 1, 1, limits=SHORT)
    world.ranks[late].slot.declare_operation("evaluate", world.now + 500 * SECOND)
    world.call(2, late)
    world.pass_time(50)
    world.ranks[late].do("T")
    world.pass_time(500)
    assert not world.said
    with pytest.raises(Ended):
        world.pass_time(310)
    assert f"rank {late}" in world.said[0]
    assert "over the time declared for 'evaluate'" in world.said[0]
