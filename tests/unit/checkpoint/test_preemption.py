"""A notice on one rank makes all of them save at one step, and leave."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

import mpistrat as ms
from mpistrat.checkpoint import notice, preemption
from mpistrat.cluster.resolver import ClusterSpec
from mpistrat.cluster_resolver import SimpleClusterResolver
from mpistrat.comm.callsite import ranks_text
from mpistrat.experimental import (
    PreemptionCheckpointHandler,
    PreemptionWatcher,
    TerminationConfig,
)
from mpistrat.testing import run_ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3])


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(notice, "_POLL_SECONDS", 0.001)


class Notice:
    """What a function that is asked every second answers."""

    def __init__(self):
        self.given = threading.Event()
        self.heard = threading.Event()

    def asked(self):
        if self.given.is_set():
            self.heard.set()
        return self.given.is_set()

    def give(self, handler):
        self.given.set()
        assert self.heard.wait(240)
        end = time.monotonic() + 240
        while not handler._notice.reason and time.monotonic() < end:
            time.sleep(0.001)
        self.given.clear()


class Run:
    """A program of one rank: counts its steps, and may be told to end before one."""

    def __init__(self, directory, told_at=None, rank=None, **config):
        self.notice, self.told_at, self.left = Notice(), told_at, 0
        self.strategy = ms.MirroredStrategy()
        with self.strategy.scope():
            self.v = ms.Variable(0)
        self.rank = rank
        config.setdefault("exit_fn", self.leave)
        self.handler = PreemptionCheckpointHandler(
            None,
            ms.Checkpoint(v=self.v),
            directory,
            TerminationConfig(self.notice.asked, **config),
        )

    def leave(self):
        self.left += 1
        raise SystemExit(42)

    def step(self):
        self.v.assign_add(1)

    def loop(self, until, comm):
        for step in range(self.handler.total_run_calls, until):
            if step == self.told_at and self.rank in (None, comm.rank):
                self.notice.give(self.handler)
            self.handler.run(self.strategy.run, self.step)


@SIZES
@pytest.mark.parametrize("rank", [0, "last", None])
def test_told_on_one_rank_all_leave_at_one_step_and_go_on_there(size, rank, tmp_path, capfd):
    rank = size - 1 if rank == "last" else rank

    def program(comm):
        run = Run(tmp_path, 3, rank)
        with pytest.raises(SystemExit) as left:
            run.loop(10, comm)
        assert left.value.code == 42
        assert run.left == 1
        first = int(run.v.numpy()), run.handler.total_run_calls
        again = Run(tmp_path)
        assert int(again.v.numpy()) == again.handler.total_run_calls == 3
        again.loop(10, comm)
        return first, int(again.v.numpy()), again.handler.total_run_calls

    assert run_ranks(program, size) == [((3, 3), 10, 10)] * size
    said = capfd.readouterr().err
    assert said.count("mpistrat: told to end (") == 1
    who = f"{ranks_text(range(size) if rank is None else [rank])} by termination_watcher_fn"
    assert who in said
    assert "ckpt-1.npz after 3 runs; leaving." in said
    assert [path.name for path in tmp_path.glob("ckpt*")] == ["ckpt-1.npz"]


@SIZES
def test_nobody_is_told(size, tmp_path):
    def program(comm):
        run = Run(tmp_path)
        run.loop(5, comm)
        return int(run.v.numpy())

    assert run_ranks(program, size) == [5] * size
    assert list(tmp_path.iterdir()) == []


@SIZES
def test_several_preemptions(size, tmp_path):
    def program(comm):
        left = 0
        for told in (0, 1, 4, 4, 7):
            run = Run(tmp_path, told, told % size)
            try:
                run.loop(8, comm)
            except SystemExit:
                left += 1
        last = Run(tmp_path)
        last.loop(8, comm)
        return left, int(last.v.numpy())

    assert run_ranks(program, size) == [(5, 8)] * size
    assert [path.name for path in tmp_path.glob("ckpt*")] == ["ckpt-5.npz"]


def test_exit_fn_may_return_and_the_run_goes_on(tmp_path):
    def program(comm):
        left = []
        run = Run(tmp_path, 2, 0, exit_fn=lambda: left.append(1))
        run.loop(5, comm)
        return len(left), int(run.v.numpy()), run.handler.total_run_calls

    assert run_ranks(program, 2) == [(1, 5, 5)] * 2


def test_a_grace_period_is_used(tmp_path, monkeypatch):
    """Save, continue, and save again when what is left is as much as six runs take."""
    clock = [0.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: clock[0])

    def program(comm):
        run = Run(tmp_path, exit_fn=None, grace_period=30.0)
        run.notice = None
        saved = []
        real = run.handler._save

        def save(args, kwargs):
            saved.append((clock[0], int(run.v.numpy())))
            real(args, kwargs)

        run.handler._save = save

        def step():
            clock[0] += 1.0
            run.v.assign_add(1)

        with pytest.raises(SystemExit) as left:
            for number in range(100):
                if number == 4:
                    run.handler._notice.record("a test")
                run.handler.run(run.strategy.run, step)
        return saved, left.value.code, run.handler.total_run_calls

    [(saved, code, runs)] = run_ranks(program, 1)
    # Told at 4 s; the end is at 34 s, and six runs of 1 s before that is 28 s.
    assert saved == [(4.0, 4), (29.0, 29)]
    assert (code, runs) == (42, 29)


def test_the_end_of_a_grace_period_is_that_of_all_ranks(tmp_path):
    def program(comm):
        run = Run(tmp_path, 2, 1, exit_fn=None, grace_period=0.2)
        with pytest.raises(SystemExit):
            run.loop(10**6, comm)
        again = Run(tmp_path)
        return run.handler.total_run_calls, int(again.v.numpy())

    found = run_ranks(program, 3)
    assert len(set(found)) == 1
    assert found[0][0] == found[0][1] > 2


def test_save_fn_saves(tmp_path):
    def with_fn(comm):
        strategy, notice, saved = ms.MirroredStrategy(), Notice(), []
        with strategy.scope():
            config = TerminationConfig(notice.asked, save_fn=lambda *a, **k: saved.append((a, k)))
            handler = PreemptionCheckpointHandler(None, None, None, config)
        handler.run(strategy.run, lambda: None)
        if comm.rank == 0:
            notice.give(handler)
        with pytest.raises(SystemExit):
            handler.save_checkpoint_if_preempted(7, x=8)
        return saved, handler.total_run_calls

    assert run_ranks(with_fn, 2) == [([((7,), {"x": 8})], 2)] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_manager_with_its_own_numbers(tmp_path):
    def program(comm):
        strategy, notice = ms.MirroredStrategy(), Notice()
        with strategy.scope():
            v = ms.Variable(0)
            manager = ms.CheckpointManager(ms.Checkpoint(v=v), tmp_path, 5, checkpoint_name="m")
            handler = PreemptionCheckpointHandler(
                None, manager, termination_config=TerminationConfig(notice.asked)
            )
            for step in range(10):
                strategy.run(lambda: v.assign_add(1))
                if step == 4 and comm.rank == 1:
                    notice.give(handler)
                if step == 4:
                    with pytest.raises(SystemExit):
                        handler.save_checkpoint_if_preempted(checkpoint_number=500)
                    break
                handler.save_checkpoint_if_preempted()
        return manager.latest_checkpoint.rpartition("/")[2], handler.total_run_calls

    assert run_ranks(program, 2) == [("m-500.npz", 5)] * 2


def test_a_watcher_that_fails_is_told_on_all_ranks(tmp_path):
    def broken():
        raise ZeroDivisionError("the metadata server")

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(0)
        config = TerminationConfig(broken if comm.rank == 1 else lambda: False)
        handler = PreemptionCheckpointHandler(None, ms.Checkpoint(v=v), tmp_path, config)
        with pytest.raises(ZeroDivisionError, match="the metadata server"):
            while True:
                handler.run(strategy.run, lambda: None)
        # It is asked again, and told again.
        with pytest.raises(ZeroDivisionError):
            while True:
                handler.run(strategy.run, lambda: None)

    run_ranks(program, 2)


def test_a_save_that_fails_is_tried_again(tmp_path):
    def program(comm):
        run = Run(tmp_path / "d", 1, 0)
        if comm.rank == 0:
            (tmp_path / "d").touch()
        run.strategy.group(None)
        with pytest.raises(OSError, match="d"):
            run.loop(5, comm)
        if comm.rank == 0:
            (tmp_path / "d").unlink()
        run.strategy.group(None)
        run.told_at = None
        with pytest.raises(SystemExit):
            run.loop(5, comm)
        return run.handler.total_run_calls

    assert run_ranks(program, 2) == [1, 1]


def test_ranks_that_do_not_call_alike_are_told(tmp_path):
    def program(comm):
        run = Run(tmp_path)
        with pytest.raises(ms.LockstepError):
            if comm.rank:
                run.strategy.run(run.step)
            else:
                run.handler.run(run.strategy.run, run.step)

    run_ranks(program, 2)


def test_it_is_not_for_replica_code(tmp_path):
    def program(comm):
        run = Run(tmp_path)
        with pytest.raises(ms.ContextError, match="outside of run"):
            run.strategy.run(lambda: run.handler.run(lambda: None))

    run_ranks(program, 2)


def test_nothing_is_asked_any_more_when_the_handler_is_gone(tmp_path):
    asking = threading.Event()

    def watcher():
        asking.set()
        return False

    before = set(threading.enumerate())
    handler = PreemptionCheckpointHandler(None, checkpoint(), tmp_path, TerminationConfig(watcher))
    assert asking.wait(240)
    [asks] = set(threading.enumerate()) - before
    del handler
    asks.join(240)
    assert not asks.is_alive()


@pytest.fixture
def _signals():
    kept = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


def told_by(number, directory, **config):
    strategy = ms.OneDeviceStrategy("cpu")
    with strategy.scope():
        v = ms.Variable(0)
    handler = PreemptionCheckpointHandler(
        None, ms.Checkpoint(v=v), directory, TerminationConfig(**config) if config else None
    )
    for step in range(5):
        if step == 3:
            os.kill(os.getpid(), number)
        handler.run(strategy.run, lambda: v.assign_add(1))


@pytest.mark.usefixtures("_signals")
def test_a_signal(tmp_path, capfd):
    with pytest.raises(SystemExit) as left:
        told_by(signal.SIGTERM, tmp_path)
    assert left.value.code == 42
    assert "told to end (rank 0 by SIGTERM)" in capfd.readouterr().err
    assert (tmp_path / "ckpt-1.npz").exists()


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("given", ["SIGUSR1", signal.SIGUSR1, int(signal.SIGUSR1)])
def test_another_signal(given, tmp_path):
    with pytest.raises(SystemExit):
        told_by(signal.SIGUSR1, tmp_path, signals=(given, "SIGTERM"))


@pytest.mark.usefixtures("_signals")
def test_handlers_that_were_there_are_called_too_and_ours_once(tmp_path):
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    for number in range(3):
        with pytest.raises(SystemExit):
            told_by(signal.SIGTERM, tmp_path / str(number))
    assert heard == [signal.SIGTERM] * 3


def test_signals_reach_the_main_thread_only(tmp_path):
    def program(comm):
        with ms.MirroredStrategy().scope():
            checkpoint = ms.Checkpoint(v=ms.Variable(0))
        with pytest.raises(ValueError, match=r"main thread only. Make it there, or give"):
            PreemptionCheckpointHandler(None, checkpoint, tmp_path)

    run_ranks(program, 2)


def checkpoint():
    return ms.Checkpoint(v=ms.Variable(0))


RESOLVER = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((RESOLVER, None, None), NotImplementedError, "parameter servers"),
        ((None, None, None), TypeError, "save_fn="),
        ((None, 3, None), TypeError, "got 3"),
        ((3, None, None), TypeError, "cluster_resolver must be an instance of ClusterResolver"),
        (
            (None, None, None, 30),
            TypeError,
            "termination_config must be an instance of TerminationConfig",
        ),
    ],
)
def test_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        PreemptionCheckpointHandler(*arguments)


def test_a_checkpoint_needs_a_directory():
    with pytest.raises(ValueError, match="no checkpoint_dir"):
        PreemptionCheckpointHandler(None, checkpoint())


def test_a_resolver_without_parameter_servers_will_do(tmp_path):
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}))
    config = TerminationConfig(lambda: False)
    handler = PreemptionCheckpointHandler(resolver, checkpoint(), tmp_path, config)
    with handler.watch_preemption_scope():
        assert handler.run(max, 3, 4) == 4
    with pytest.raises(ZeroDivisionError), handler.watch_preemption_scope():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"termination_watcher_fn": 3}, TypeError),
        ({"exit_fn": 42}, TypeError),
        ({"save_fn": "x"}, TypeError),
        ({"grace_period": "30"}, TypeError),
        ({"grace_period": True}, TypeError),
        ({"grace_period": -1}, ValueError),
        ({"grace_period": float("nan")}, ValueError),
        ({"signals": ["SIGNOTHING"]}, ValueError),
        ({"signals": [signal.SIGKILL]}, ValueError),
        ({"signals": [12345]}, ValueError),
        ({"signals": []}, ValueError),
    ],
)
def test_what_cannot_be_configured(arguments, error):
    with pytest.raises(error, match="TerminationConfig: "):
        TerminationConfig(**arguments)


def test_a_program_that_saves_by_itself_too(tmp_path):
    """Whoever saves, the count is that of the weights."""

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(0)
        manager = ms.CheckpointManager(ms.Checkpoint(v=v), tmp_path, 3)
        config = TerminationConfig(lambda: False)
        handler = PreemptionCheckpointHandler(None, manager, None, config)
        first = handler.total_run_calls
        for number in range(first, 7 if first == 0 else 10):
            handler.run(strategy.run, lambda: v.assign_add(1))
            if number == 5:
                manager.save()
        return first, int(v.numpy())

    assert run_ranks(program, 2) == [(0, 7)] * 2  # and then the machine stops
    assert run_ranks(program, 3) == [(6, 10)] * 3


def test_a_run_that_has_checkpoints_may_get_a_handler(tmp_path):
    def program(comm):
        with ms.MirroredStrategy().scope():
            v = ms.Variable(4)
        manager = ms.CheckpointManager(ms.Checkpoint(v=v), tmp_path, 1)
        manager.save()
        v.assign(0)
        handler = PreemptionCheckpointHandler(None, manager, None, TerminationConfig(lambda: False))
        return handler.total_run_calls, int(v.numpy())

    assert run_ranks(program, 2) == [(0, 4)] * 2


def test_a_name_that_is_taken(tmp_path):
    taken = ms.Checkpoint(v=ms.Variable(0), checkpointed_runs=ms.Variable(5))
    with pytest.raises(ValueError, match="which is taken"):
        PreemptionCheckpointHandler(None, taken, tmp_path, TerminationConfig(lambda: False))


def test_save_fn_that_fails_on_one_rank(tmp_path):
    def program(comm):
        def save():
            if comm.rank:
                raise OSError("the disk of rank 1")

        strategy, left = ms.MirroredStrategy(), []
        with strategy.scope():
            config = TerminationConfig(lambda: False, save_fn=save, exit_fn=lambda: left.append(1))
            handler = PreemptionCheckpointHandler(None, None, None, config)
        handler._notice.record("a test")
        with pytest.raises(OSError, match="the disk of rank 1"):
            handler.run(strategy.run, lambda: None)
        return left

    assert run_ranks(program, 2) == [[], []]


@pytest.mark.usefixtures("_signals")
def test_all_handlers_hear_and_one_that_is_gone_does_not(tmp_path):
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    config = TerminationConfig(exit_fn=lambda: None)
    one = PreemptionCheckpointHandler(None, checkpoint(), tmp_path / "1", config)
    two = PreemptionCheckpointHandler(None, checkpoint(), tmp_path / "2", config)
    os.kill(os.getpid(), signal.SIGTERM)
    one.run(lambda: None)
    two.run(lambda: None)
    assert (tmp_path / "1" / "ckpt-1.npz").exists()
    assert (tmp_path / "2" / "ckpt-1.npz").exists()
    assert heard == [signal.SIGTERM]
    del one, two
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2


@pytest.mark.usefixtures("_signals")
def test_a_handler_that_was_there_and_exits_waits_for_the_checkpoint(tmp_path):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with pytest.raises(SystemExit) as left:
        told_by(signal.SIGTERM, tmp_path)
    assert left.value.code == 42
    assert (tmp_path / "ckpt-1.npz").exists()


@pytest.mark.usefixtures("_signals")
def test_a_signal_beside_a_function(tmp_path):
    with pytest.raises(SystemExit):
        told_by(
            signal.SIGUSR1,
            tmp_path,
            termination_watcher_fn=lambda: False,
            signals=map(str, ["SIGUSR1"]),
        )


def test_the_defaults_are_those_of_tensorflow_outside_of_its_clouds():
    config = TerminationConfig()
    assert config.termination_watcher_fn is config.exit_fn is config.save_fn is None
    assert config.grace_period is None
    assert config._parse_signals() == (signal.SIGTERM,)


def test_a_watcher_warns():
    with pytest.warns(RuntimeWarning, match="PreemptionCheckpointHandler saves"):
        watcher = PreemptionWatcher()
    assert watcher.preemption_message is None
    assert watcher.block_until_worker_exit() is None
