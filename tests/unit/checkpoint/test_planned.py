"""`preemption`: one rank is told, all save at the same step and leave with 42."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import claim, notice, planned
from mpistrat.checkpoint.planned import RemainingTime, format_duration
from mpistrat.testing import run_ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3])


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(notice, "_POLL_SECONDS", 0.001)


def made(directory):
    with ms.MirroredStrategy().scope():
        step = ms.Variable(0)
    return ms.CheckpointManager(ms.Checkpoint(step=step), directory, max_to_keep=3), step


def steps(leaving, step, until, before=lambda number: None):
    for number in range(int(step.numpy()), until):
        before(number)
        step.assign_add(1)
        leaving.step(number + 1, until)


def until_told(leaving):
    done = threading.Event()
    while not leaving._read_reason():
        done.wait(0.001)


def silent(manager, **more):
    return ms.preemption(manager, signals=(), ends=None, **more)


@SIZES
def test_one_rank_is_told_and_all_leave_at_one_step(size, tmp_path, capfd):
    def program(comm):
        manager, step = made(tmp_path)
        told = threading.Event()

        def before(number):
            if number == 4 and comm.rank == size - 1:
                told.set()
                until_told(leaving)

        with pytest.raises(SystemExit) as left, silent(manager, test=told.is_set) as leaving:
            steps(leaving, step, 10, before)
        assert left.value.code == 42
        again, step = made(tmp_path)
        assert again.restore_or_initialize() is not None
        with silent(again) as leaving:
            steps(leaving, step, 10)
        return int(step.numpy())

    assert run_ranks(program, size) == [10] * size
    said = capfd.readouterr().err
    who = f"rank {size - 1}"
    assert f"{who} got the test of the program: the job will be ended in 120 s" in said
    assert f"told to end ({who} by the test of the program): saved as {tmp_path}/ckpt-1.npz" in said
    found = claim.read_claim(tmp_path / claim.CLAIM_FILE_NAME)
    assert found["saved_step"] == 5


def test_what_state_sees_of_it(tmp_path):
    """`CheckpointManager.resume` asks it before each step, and calls `leave` when it has saved."""
    manager, _ = made(tmp_path)
    assert manager._preemption is None
    with silent(manager) as leaving:
        assert manager._preemption is leaving
        assert leaving._read_reason() == ""
        with pytest.raises(ValueError, match="in the body of another one"):
            silent(manager).__enter__()
    assert manager._preemption is None


def test_a_stop_file(tmp_path):
    stop = tmp_path / "stop"

    def program(comm):
        manager, step = made(tmp_path / "saved")

        def before(number):
            if number == 2 and comm.rank == 0:
                stop.touch()
                until_told(leaving)

        with pytest.raises(SystemExit), silent(manager, stop_file=stop) as leaving:
            steps(leaving, step, 10, before)
        return int(step.numpy())

    assert run_ranks(program, 2) == [3, 3]
    assert (
        claim.read_claim(tmp_path / "saved" / claim.CLAIM_FILE_NAME)["left_because"]
        == f"rank 0 by the file {stop}"
    )


def test_a_test_that_fails_is_said_once_and_asked_no_more(tmp_path, capfd):
    asked, said = [], ""

    def broken():
        asked.append(1)
        raise ZeroDivisionError("the metadata server")

    manager, step = made(tmp_path)
    with silent(manager, test=broken) as leaving:
        while not said:
            time.sleep(0.001)
            said = capfd.readouterr().err
        time.sleep(0.05)  # for it to be asked again
        steps(leaving, step, 3)
    assert len(asked) == 1
    said += capfd.readouterr().err
    assert said.count("failed and is not called again: ZeroDivisionError: the metadata server") == 1


@pytest.fixture
def usr1():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    yield heard
    signal.signal(signal.SIGUSR1, before)
    assert mine is not before


def test_handlers_that_were_there_hear_too_and_are_put_back(tmp_path, usr1):
    mine = signal.getsignal(signal.SIGUSR1)
    manager, step = made(tmp_path)
    with ms.preemption(manager, signals=["SIGUSR1"], ends=None):
        assert signal.getsignal(signal.SIGUSR1) != mine
    assert signal.getsignal(signal.SIGUSR1) is mine
    with (
        pytest.raises(SystemExit),
        ms.preemption(manager, signals=["SIGUSR1"], ends=None) as leaving,
    ):
        os.kill(os.getpid(), signal.SIGUSR1)
        steps(leaving, step, 3)
    assert usr1 == [signal.SIGUSR1]
    assert int(step.numpy()) == 1


def test_a_save_that_takes_longer_than_the_notice_is_said_at_the_next_start(tmp_path, capfd):
    manager, _ = made(tmp_path)
    manager.save()
    manager._claim.update_progress(save_seconds=150.0)
    del manager
    with silent(made(tmp_path)[0]):
        pass
    said = capfd.readouterr().err
    assert "the last save of the previous job took 2 min 30 s, but grace is 2 min 0 s" in said


class Told:
    """A claim that keeps what it is told."""

    def __init__(self, **shown):
        self.progress = shown

    def update_progress(self, **told):
        self.progress.update(told)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now

    def wall(self):
        return self.now + 5000


def test_the_end_of_the_jobs_time(capfd):
    clock, asked = Clock(), []

    def ends():
        asked.append(clock.now)
        return 6000.0 + 7200.0

    claimed = Told(save_seconds=12.0)
    left = RemainingTime(ends, 120.0, claimed, clock, clock.wall)
    told = []
    for second in range(7200):
        left.step, left.total_steps = second // 10, 2400
        if (seconds := left()) is not None:
            told.append((second, seconds))
        clock.now += 1
    assert told[0] == (7080, 120.0)
    assert len(asked) == 7200 // 300
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 300
    lines = [line for line in capfd.readouterr().err.splitlines() if "at this rate" in line]
    assert len(lines) == 4
    assert lines[1].startswith("mpistrat: at this rate done in 6 h")
    assert lines[1].endswith("the job ends in 1 h 29 min; last save 12 s, notice 2 min 0 s.")
    assert claimed.progress["steps"] == 2400


@pytest.mark.parametrize(("saving", "at"), [(12.0, 120.0), (200.0, 400.0)])
def test_it_leaves_earlier_where_saving_takes_longer(saving, at):
    clock = Clock()
    left = RemainingTime(6000.0 + 1000.0, 120.0, Told(save_seconds=saving), clock, clock.wall)
    while (seconds := left()) is None:
        clock.now += 1
    assert seconds == at


def test_a_time_that_is_no_number_is_not_known(capfd):
    clock = Clock()
    left = RemainingTime(lambda: float("nan"), 120.0, Told(), clock, clock.wall)
    assert left() is None
    assert (
        "the time limit of this job is not known: it is not a number.\n" in capfd.readouterr().err
    )


def test_seconds_that_are_left_are_no_time(capfd):
    clock = Clock()
    clock.now = 1e9
    left = RemainingTime(lambda: 3600.0, 120.0, Told(), clock, clock.wall)
    assert left() is None
    assert "is not known: 3600 is long over; seconds since 1970" in capfd.readouterr().err


@SIZES
def test_steps_are_integers_of_any_kind(size, tmp_path):
    def program(comm):
        manager, step = made(tmp_path / str(size))
        later = time.time() + 3600
        with ms.preemption(manager, signals=(), ends=later) as leaving:
            for number in (step.numpy(), step, np.int32(1), np.array(2)):
                leaving.step(number, np.int64(9))
                manager.save()  # which writes what was told
            for wrong in ("a", 1.5, -1):
                with pytest.raises(ValueError, match="preemption: step must be an integer of"):
                    leaving.step(wrong if comm.rank == 0 else 3)

    run_ranks(program, size)


def test_a_batch_system_that_does_not_answer_is_one_line(capfd):
    clock = Clock()

    def ends():
        raise OSError("squeue did not answer for 20 s")

    left = RemainingTime(ends, 120.0, Told(), clock, clock.wall)
    for _ in range(2000):
        assert left() is None
        clock.now += 1
    said = capfd.readouterr().err
    assert said == (
        "mpistrat: the time limit of this job is not known: squeue did not answer for 20 s.\n"
    )


def test_only_rank_0_asks_the_batch_system(tmp_path):
    asked = []

    def program(comm):
        def ends():
            asked.append(comm.rank)

        manager, step = made(tmp_path)
        with ms.preemption(manager, signals=(), ends=ends) as leaving:
            while not asked:
                time.sleep(0.001)
            time.sleep(0.05)  # for the others, too
            steps(leaving, step, 3)

    run_ranks(program, 3)
    assert asked == [0]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"grace": 0}, ValueError),
        ({"grace": "2 min"}, TypeError),
        ({"test": 3}, TypeError),
        ({"ends": "12:00"}, TypeError),
        ({"ends": 3600}, ValueError),
        ({"signals": ["SIGNOTHING"]}, ValueError),
        ({"signals": ["SIGKILL"]}, ValueError),
        ({"signals": "SIGTERM"}, TypeError),
        ({"signals": None}, TypeError),
        ({"stop_file": 3}, TypeError),
    ],
)
def test_arguments(words, error, tmp_path):
    with pytest.raises(error, match="preemption: "):
        ms.preemption(made(tmp_path)[0], **words)


@pytest.mark.parametrize("manager", [None, "runs/a"])
def test_what_saves_is_a_manager(manager):
    with pytest.raises(TypeError, match="preemption: manager must be a CheckpointManager, got"):
        ms.preemption(manager)


def test_a_stop_file_without_a_name_is_none(tmp_path):
    with ms.preemption(made(tmp_path)[0], signals=(), ends=None, stop_file="") as leaving:
        assert leaving._stop_file is None


def test_signals_are_for_the_main_thread(tmp_path):
    def program(comm):
        with pytest.raises(ValueError, match="main thread only"):
            ms.preemption(made(tmp_path)[0]).__enter__()

    run_ranks(program, 2)


def test_times_in_words():
    assert [format_duration(one) for one in (0.4, 59.6, 3600, 6900)] == [
        *("0 s", "1 min 0 s", "1 h 0 min", "1 h 55 min")
    ]
    assert planned.EXIT_CODE == 42


def test_sigterm_of_slurm_comes_its_kill_wait_before_the_end(tmp_path, monkeypatch, capfd):
    asked = []

    def kill_wait():
        asked.append(1)
        return 30.0

    monkeypatch.setattr(planned, "get_kill_wait", kill_wait)
    manager, step = made(tmp_path)
    with (
        pytest.raises(SystemExit),
        ms.preemption(manager, signals=["SIGTERM", "SIGUSR1"], ends=None) as leaving,
    ):
        while leaving._notice.kill_wait_seconds is None:
            threading.Event().wait(0.001)
        signal.raise_signal(signal.SIGTERM)
        steps(leaving, step, 1)
    said = capfd.readouterr().err
    assert "rank 0 got SIGTERM: the job will be ended in 30 s (KillWait of Slurm)" in said
    assert asked == [1]


def test_other_signals_come_as_long_before_as_was_asked_for(capfd):
    told = notice.Notice(0, 120.0)
    told.kill_wait_seconds = 30.0
    told.record("SIGUSR1")
    assert "got SIGUSR1: the job will be ended in 120 s." in capfd.readouterr().err
