"""Threads of kernels: who does what, what becomes of errors, and the same bits with any number."""

from __future__ import annotations

import mmap
import signal
import threading
import time

import numpy as np
import pytest
from every import every
from forked import code, fork

import mpistrat as ms
from mpistrat.comm.loopback import LoopbackComm, LoopbackWorld
from mpistrat.kernels import local_sums
from mpistrat.kernels import rows as rows_module
from mpistrat.kernels.rows import reduce_rows, spread_rows
from mpistrat.kernels.threads import Team, cut_range
from mpistrat.testing import run_ranks

COUNTS = [1, 2, 3, 5]


def team_of(count):
    return Team(count) if count > 1 else None


@pytest.fixture
def team():
    made = Team(3)
    yield made
    made.free()


def helpers():
    """The threads of this team, and of those that earlier tests have left, which may end."""
    return {t for t in threading.enumerate() if t.name.startswith("mpistrat kernels")}


@every("step", [1, 7, 16])
@every("parts", COUNTS)
@every(("start", "stop"), [(0, 0), (0, 1), (3, 50), (16, 32), (5, 1000)])
def test_cuts_cover_a_range_once_and_meet_at_steps(start, stop, parts, step):
    found = cut_range(start, stop, parts, step)
    assert [i for low, high in found for i in range(low, high)] == list(range(start, stop))
    assert len(found) <= parts
    assert all(low % step == 0 for low, _ in found[1:])
    sizes = [high - low for low, high in found]
    assert not sizes or max(sizes) <= -(-(stop - start) // parts) + 2 * step


def test_parts_are_done_at_once_by_threads_of_which_the_caller_is_one(team):
    meeting, seen = threading.Barrier(3, timeout=240), []

    def work(low, high):
        meeting.wait()  # passes only if all three are in here
        seen.append((low, high, threading.current_thread() is threading.main_thread()))

    team.run(work, 0, 30, 100)
    assert sorted(seen) == [(0, 10, True), (10, 20, False), (20, 30, False)]


def test_work_that_is_worth_one_part_starts_no_thread(team):
    before, seen = helpers(), []
    team.run(lambda low, high: seen.append((low, high)), 2, 9, 1)
    team.run(lambda low, high: seen.append((low, high)), 4, 4, 3)
    assert helpers() <= before
    assert seen == [(2, 9), (4, 4)]


@pytest.mark.parametrize("where", [0, 10, 20])
def test_an_error_is_raised_when_all_parts_have_ended(team, where):
    ended = []

    def work(low, high):
        if low == where:
            raise ValueError(f"part {low}")
        time.sleep(0.05)
        ended.append(low)

    with pytest.raises(ValueError, match=f"part {where}"):
        team.run(work, 0, 30, 3)
    assert sorted(ended) == sorted({0, 10, 20} - {where})
    ended.clear()
    team.run(lambda low, high: ended.append(low), 0, 30, 3)
    assert sorted(ended) == [0, 10, 20]


def test_signals_are_left_to_the_main_thread(team):
    masks = []
    team.run(lambda low, high: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])), 0, 3, 3)
    deaf = [signal.SIGINT in mask for mask in masks]
    assert sorted(deaf) == [False, True, True]
    assert not any(signal.SIGSEGV in mask for mask in masks)


def test_threads_end_with_free_and_come_again(team):
    before = helpers()
    team.run(lambda low, high: None, 0, 3, 3)
    assert helpers() - before
    team.free()
    assert helpers() <= before
    team.free()
    seen = []
    team.run(lambda low, high: seen.append(low), 0, 3, 3)
    assert sorted(seen) == [0, 1, 2]


def test_a_forked_child_has_threads_of_its_own(team):
    team.run(lambda low, high: None, 0, 3, 3)

    def program():
        seen = []
        team.run(lambda low, high: seen.append(low), 0, 3, 3)
        assert sorted(seen) == [0, 1, 2]

    assert code(fork(program)) == 0  # it is late if it waits for threads of its parent


def matrix(rows, columns, dtype):
    rng = np.random.default_rng(rows)
    values = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-40, 40, (rows, columns))
    values[:, :4] = [np.nan, np.inf, -np.inf, -0.0]
    many = rng.random((rows, columns))
    values[many < 0.2] = np.nan  # of which two meet, with different signs
    values[many < 0.1] = -np.nan
    if np.dtype(dtype).kind in "iu":
        values = rng.integers(0, 100, (rows, columns))
    return values.astype(dtype)


# `i4` and `u4` are what the jobs of `tests/mpi` fold, too: there both ranks would wait for it.
@every("dtype", ["f4", "f8", "i4", "u4", "i1", "c8"])
@every("fold", [np.add, np.multiply, np.minimum, np.maximum])
@every("scaled", [False, True])
def test_folds_have_the_same_bits_with_any_number_of_threads(dtype, fold, scaled, monkeypatch):
    same_bits(dtype, fold, scaled, monkeypatch)


@pytest.mark.nightly  # each compiles for seconds
@every("dtype", ["i8", "u8"])
def test_folds_of_other_integers_have_the_same_bits(dtype, monkeypatch):
    same_bits(dtype, np.add, False, monkeypatch)


def same_bits(dtype, fold, scaled, monkeypatch):
    if np.dtype(dtype).kind == "c" and fold in (np.minimum, np.maximum):
        pytest.skip("complex numbers have no order")
    if np.dtype(dtype).kind in "iu" and scaled:
        pytest.skip("integers are not scaled")
    monkeypatch.setattr(rows_module, "_MIN_COMPILED_COLUMNS", 1)
    monkeypatch.setattr(rows_module, "_MIN_PART_COLUMNS", 200)
    given = matrix(3, 5000, dtype)
    rest = (np.array([2.0, 0.5, 3.0]), 7.0) if scaled else (None, 1.0)
    found = []
    for count in COUNTS:
        rows, team = given.copy(), team_of(count)
        reduce_rows(fold, rows, rows, 17, 4321, scales=rest[0], divisor=rest[1], team=team)
        assert rows[:, :17].tobytes() == given[:, :17].tobytes()
        assert rows[:, 4321:].tobytes() == given[:, 4321:].tobytes()
        found.append(rows.tobytes())
        if team is not None:
            team.free()
    assert found[1:] == found[:1] * 3
    assert found[0] != given.tobytes()


def test_spreading_has_the_same_bits_with_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(rows_module, "_MIN_PART_COLUMNS", 200)
    given = matrix(3, 5000, "f8")
    want = given[1, 17:4321]
    for count in COUNTS:
        rows, team = given.copy(), team_of(count)
        spread_rows(rows, 1, 17, 4321, team)
        np.testing.assert_array_equal(rows[:, 17:4321], np.tile(want, (3, 1)))
        np.testing.assert_array_equal(rows[:, :17], given[:, :17])
        np.testing.assert_array_equal(rows[:, 4321:], given[:, 4321:])
        if team is not None:
            team.free()


LAYOUTS = {
    "rows": (lambda: matrix(90, 5001, "f4"), (0,)),
    "long rows": (lambda: matrix(90, 5001, "f4"), (1,)),
    "middle": (lambda: matrix(60, 7200, "f8").reshape(60, 90, 80), (1,)),
    "ends": (lambda: matrix(60, 7200, "f8").reshape(60, 90, 80), (0, 2)),
    "turned": (lambda: matrix(300, 3000, "f4").T, (0,)),
    "backwards": (lambda: matrix(200, 3000, "f4")[::-1, ::-2], (0,)),
    "integers": (lambda: matrix(90, 5001, "i4"), (0,)),
    "complex": (lambda: matrix(90, 5001, "c8"), (0,)),
    "all": (lambda: matrix(90, 5001, "f4"), (0, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_sums_have_the_same_bits_with_any_number_of_threads(layout, monkeypatch):
    make, axes = LAYOUTS[layout]
    x = make()
    monkeypatch.setattr(local_sums, "_THREAD_NBYTES", 1000)
    found = []
    for count in COUNTS:
        team = team_of(count)
        total, size = local_sums.local_sum(x, axes, x.dtype, team)
        found.append((total.tobytes(), size))
        if team is not None:
            team.free()
    assert found[1:] == found[:1] * 3
    with np.errstate(all="ignore"):
        wide = np.promote_types(x.dtype, "i8" if x.dtype.kind == "i" else "f8")
        want = x.sum(axis=axes, dtype=wide).astype(x.dtype)
    np.testing.assert_allclose(total, want, rtol=1e-5)


def test_local_sums_are_divided_at_all(monkeypatch, team):
    monkeypatch.setattr(local_sums, "_THREAD_NBYTES", 1000)
    parts = []
    monkeypatch.setattr(Team, "run", lambda self, work, *rest: parts.append(rest))
    x = np.ones((90, 5001), np.float32)
    local_sums.local_sum(x, (0,), x.dtype, team)
    local_sums.local_sum(x, (1,), x.dtype, team)
    local_sums.local_sum(x, (0, 1), x.dtype, team)  # one sum, one thread
    assert parts == [(0, 5, x.nbytes // 1000), (0, 90, x.nbytes // 1000)]


@pytest.mark.parametrize(("asked", "wanted"), [("1", None), ("2", 2), ("3", 3)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_session_has_the_threads_that_are_asked_for(size, asked, wanted, monkeypatch):
    monkeypatch.setenv("MPISTRAT_THREADS", asked)

    def program(comm):
        team = ms.MirroredStrategy(comm=comm)._replicas.lockstep.session.team
        return team and team.count

    assert run_ranks(program, size) == [wanted] * size


@pytest.mark.parametrize(("cores", "wanted"), [(1, None), (2, None), (4, 2), (7, 3)])
def test_ranks_divide_the_cores_if_nothing_is_asked_for(cores, wanted, monkeypatch):
    monkeypatch.setattr("mpistrat.lockstep.startup.affinity_mask", lambda: (1 << cores) - 1)
    monkeypatch.setattr("mpistrat.lockstep.startup.cpu_quota", lambda: 100.0)

    def program(comm):
        team = ms.MirroredStrategy(comm=comm)._replicas.lockstep.session.team
        return team and team.count

    assert run_ranks(program, 2) == [wanted] * 2


@pytest.mark.parametrize("how", ["fresh", "in place"])
@pytest.mark.parametrize("per_node", ["0", "2"])
def test_all_reduces_have_the_same_bits_with_any_number_of_threads(how, per_node, monkeypatch):
    monkeypatch.setattr(rows_module, "_MIN_PART_COLUMNS", 5000)
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", per_node)
    done = []
    original = Team.run
    monkeypatch.setattr(Team, "run", lambda self, *rest: (done.append(1), original(self, *rest)))

    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        mine = np.random.default_rng(comm.rank).standard_normal(100_001).astype("f4")
        places = strategy.buffers([mine]) if how == "in place" else [np.empty_like(mine)]
        if how == "in place":
            places[0][:] = mine
        given = places if how == "in place" else [mine]
        strategy.run(
            lambda: ms.get_replica_context().all_reduce("MEAN", given, out=places) and None
        )
        return places[0].tobytes()

    found = []
    for count in COUNTS:
        monkeypatch.setenv("MPISTRAT_THREADS", str(count))
        done.clear()
        found += run_ranks(program, 3)
        assert bool(done) == (count > 1)
    assert found == found[:1] * len(found)


def test_reduce_over_rows_uses_them(monkeypatch):
    monkeypatch.setattr(local_sums, "_THREAD_NBYTES", 1000)
    monkeypatch.setenv("MPISTRAT_THREADS", "2")
    done = []
    original = Team.run
    monkeypatch.setattr(Team, "run", lambda self, *rest: (done.append(1), original(self, *rest)))
    strategy = ms.MirroredStrategy(comm=LoopbackComm(LoopbackWorld(1), 0))
    x = np.ones((50, 3000))
    np.testing.assert_array_equal(strategy.reduce("SUM", ms.PerReplica(x), axis=0), x.sum(0))
    assert done


def test_columns_beyond_what_a_c_int_counts(monkeypatch):
    """Pages that nobody touches take no memory, so rows of 8 GiB are cheap."""
    columns, width = 2**31 + 2**20, 300_000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    with_room = mmap.mmap(-1, 2 * columns * 4, flags=flags)
    rows = np.frombuffer(with_room, np.float32).reshape(2, columns)
    start, stop = 2**31 - width // 2, 2**31 + width // 2
    rows[0, start:stop], rows[1, start:stop] = 1.5, np.arange(stop - start)
    reduce_rows(np.add, rows, rows, start, stop)  # compiled
    want = np.arange(stop - start, dtype="f4") + np.float32(1.5)
    np.testing.assert_array_equal(rows[:, start:stop], [want, want])
    reduce_rows(np.maximum, rows, rows, start, stop)  # by NumPy
    np.testing.assert_array_equal(rows[:, start:stop], [want, want])
    assert not rows[:, start - 3000 : start].any()
    assert not rows[:, stop : stop + 3000].any()


@pytest.mark.nightly
@pytest.mark.parametrize("axis", [0, 1])
def test_local_sums_of_more_elements_than_a_c_int_counts(axis):
    x = np.lib.stride_tricks.as_strided(np.array([3], np.int8), (2**31 + 5, 1), (0, 1))
    total, count = local_sums.local_sum(x, (0,) if axis == 0 else (0, 1), np.dtype(np.int64))
    assert (total.ravel().tolist(), count) == ([3 * (2**31 + 5)], 2**31 + 5)


def test_threads_that_the_interpreter_has_ended_are_done_without():
    """As in what runs at exit, when pools are shut down already."""
    team, done = Team(3), []
    team.run(lambda low, high: done.append((low, high)), 0, 9, 3)
    team._pool.shutdown()
    team.run(lambda low, high: done.append((low, high)), 0, 9, 3)
    assert sorted(done) == sorted([(0, 3), (3, 6), (6, 9)] * 2)


def test_threads_that_cannot_be_started_are_done_without(monkeypatch):
    def none(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    team, done = Team(3), []
    for _ in range(2):
        team.run(lambda low, high: done.append((low, high)), 0, 9, 3)
    assert sorted(done) == sorted([(0, 3), (3, 6), (6, 9)] * 2)
