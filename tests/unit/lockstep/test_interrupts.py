"""Ctrl-C: kept while the library runs, raised at the next call or at once, and never lost."""

from __future__ import annotations

import collections
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.lockstep import ranks
from mpistrat.lockstep.exits import Exits
from mpistrat.lockstep.ranks import KeptInterrupt, is_in_library
from mpistrat.testing import run_ranks

Made = collections.namedtuple("Made", "frame")


@pytest.fixture
def deferred():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    kept = KeptInterrupt()
    kept.arm()
    yield kept
    kept.is_pending = False
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()  # nobody looks any more
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)  # to this thread, so that it does not come later


def test_in_the_code_of_the_program_it_raises_at_once(deferred):
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not deferred.is_pending


def test_in_the_library_it_is_kept_and_raised_at_the_next_call(deferred, monkeypatch):
    monkeypatch.setattr(ranks, "is_in_library", lambda frame: True)
    interrupt()
    assert deferred.is_pending
    with pytest.raises(KeyboardInterrupt):
        deferred.raise_pending()
    deferred.raise_pending()  # once
    time.sleep(0.2)  # and the second look finds nothing


def test_it_is_raised_in_a_program_that_calls_no_more(deferred, monkeypatch):
    inside = [True]
    monkeypatch.setattr(ranks, "is_in_library", lambda frame: inside[0])
    interrupt()
    inside[0] = False
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)


def test_a_second_one_is_not_swallowed(deferred, monkeypatch):
    monkeypatch.setattr(ranks, "is_in_library", lambda frame: True)
    interrupt()
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        deferred.raise_pending()


def test_a_handler_of_the_program_is_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        KeptInterrupt().arm()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    found = []
    thread = threading.Thread(target=lambda: found.append(KeptInterrupt().arm()))
    thread.start()
    thread.join()
    assert found == [None]


class TimeIsUp(Exception):
    pass


def runs_out(*_):
    raise TimeIsUp


@pytest.fixture
def guarded(deferred, monkeypatch):
    before = signal.getsignal(signal.SIGALRM)
    for name in ("signal", "getsignal"):
        monkeypatch.setattr(signal, name, getattr(signal, name))  # undone at the end
    yield deferred
    deferred.is_pending, deferred.kept_error = False, None
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("first", ["handler", "guard"])
def test_what_a_handler_raises_in_the_library_is_kept(guarded, monkeypatch, first):
    if first == "handler":
        signal.signal(signal.SIGALRM, runs_out)
    guarded.guard_handlers()
    if first == "guard":
        signal.signal(signal.SIGALRM, runs_out)
    assert signal.getsignal(signal.SIGALRM) is runs_out
    with pytest.raises(TimeIsUp):
        signal.raise_signal(signal.SIGALRM)
    inside = [True]
    monkeypatch.setattr(ranks, "is_in_library", lambda frame: inside[0])
    signal.raise_signal(signal.SIGALRM)
    assert guarded.is_pending
    with pytest.raises(TimeIsUp):
        guarded.raise_pending()
    assert not guarded.is_pending
    signal.raise_signal(signal.SIGALRM)
    inside[0] = False
    with pytest.raises(TimeIsUp):  # in a program that makes no call any more
        time.sleep(60)
    assert signal.signal(signal.SIGALRM, signal.SIG_IGN) is runs_out
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    signal.raise_signal(signal.SIGALRM)


def test_a_handler_that_raises_nothing_is_called_at_once(guarded, monkeypatch):
    guarded.guard_handlers()
    numbers = []
    signal.signal(signal.SIGALRM, lambda number, frame: numbers.append(number))
    monkeypatch.setattr(ranks, "is_in_library", lambda frame: True)
    signal.raise_signal(signal.SIGALRM)
    assert numbers == [signal.SIGALRM]
    assert not guarded.is_pending


def test_whose_code_runs():
    assert not is_in_library(sys._getframe())
    frames = []
    strategy = ms.OneDeviceStrategy("cpu")
    strategy.run(lambda: frames.append(sys._getframe()))
    assert not is_in_library(frames[0])
    assert is_in_library(frames[0].f_back)
    made = eval("lambda: f()", {"f": sys._getframe, "__name__": "namedtuple_Made"})()
    assert not is_in_library(made)
    inner = eval("lambda: f()", {"f": sys._getframe, "__name__": "mpistrat.lockstep.handshake"})
    assert is_in_library(inner())


@pytest.mark.parametrize("where", ["before the call", "at the end of run"])
def test_the_others_hear_of_it(where):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        kept = strategy._replicas.lockstep.state.kept_interrupt

        def fn():
            if comm.rank == 1 and where == "before the call":
                kept.is_pending = True
            ctx = ms.get_replica_context()
            ctx.all_reduce("SUM", np.ones(300))
            if comm.rank == 1:
                kept.is_pending = True

        with pytest.raises(KeyboardInterrupt if comm.rank == 1 else ms.RemoteError):
            strategy.run(fn)
        total = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1.0))
        return float(total.local)

    assert run_ranks(rank, 3) == [3.0] * 3


@pytest.mark.parametrize("when", ["before the exchange", "after it"])
@pytest.mark.parametrize("size", [1, 300, 70_000])  # in the handshake, its barrier, more after it
def test_what_a_handler_of_the_program_raises_in_a_handshake(strategy_on, size, when):
    """A timer that has run out while this rank waited; the others are in the midst of the call."""

    def rank(comm):
        strategy = strategy_on(comm)
        lockstep, ctx = strategy._replicas.lockstep, ms.get_replica_context

        def exchange(*args):
            lockstep._raw_comm = raw
            if when == "after it":
                getattr(raw, name)(*args)
            raise TimeoutError("an alarm")

        def fn(fails):
            if fails:
                lockstep._raw_comm = SimpleNamespace(**{name: exchange})
            return float(ctx().all_reduce("SUM", np.full(size, comm.rank + 1.0))[0])

        raw, name = lockstep._raw_comm, "allgather" if lockstep.uses_frames else "allreduce"
        with pytest.raises(TimeoutError, match="an alarm") as caught:
            strategy.run(fn, args=(comm.rank == 1,))
        assert isinstance(caught.value, ms.RemoteError) == (comm.rank != 1)
        return strategy.run(fn, args=(False,)).local

    assert run_ranks(rank, 3) == [6.0] * 3


def test_what_no_call_has_raised_any_more_is_how_the_program_ends():
    ways = Exits()
    assert ways.kept_interrupt.try_keep(SystemExit(3), True)
    assert ways.kept_interrupt.try_keep(SystemExit(4), True)
    ways.at_exit()
    assert ways.failure.code == 3


def test_ctrl_c_that_no_call_has_raised_any_more_is_how_the_program_ends(monkeypatch):
    ways, printed = Exits(), []
    monkeypatch.setattr(ways, "_print_failure", lambda: printed.append(ways.failure))
    ways.kept_interrupt.is_pending = True
    ways.at_exit()
    assert isinstance(ways.failure, KeyboardInterrupt)
    assert printed == [ways.failure]


def test_what_was_kept_is_raised_in_a_program_that_handles_ctrl_c_itself():
    """By the signal whose handler has raised it, a little later."""
    program = """
import signal, threading, time
import mpistrat.lockstep.ranks as interrupts

def late(number, frame):
    raise TimeoutError("too late")

signal.signal(signal.SIGINT, lambda number, frame: None)
interrupted = interrupts.KeptInterrupt()
interrupted.guard_handlers()
signal.signal(signalnum=signal.SIGALRM, handler=late)
is_in_library = interrupts.is_in_library
interrupts.is_in_library = lambda frame: True
signal.raise_signal(signal.SIGALRM)
interrupts.is_in_library = is_in_library
assert interrupted.is_pending
try:
    time.sleep(30)
except TimeoutError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("too late\n", "")


class Shell:
    """The part of IPython that keeps the functions to call after each cell."""

    def __init__(self):
        self.events = SimpleNamespace(register=lambda name, fn: self.called.append((name, fn)))
        self.called = []


@pytest.mark.parametrize("is_kernel", [True, False])
def test_in_ipython_an_interrupt_does_not_outlive_its_cell(is_kernel, monkeypatch):
    shell, way = Shell(), Exits()
    monkeypatch.setattr(sys, "ps1", "In: ", raising=False)
    module = SimpleNamespace(get_ipython=lambda: shell if is_kernel else None)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setattr("atexit.register", lambda *args: None)
    run_ranks(lambda comm: way.arm(ms.MirroredStrategy()._replicas.lockstep.session), 1)
    assert [name for name, _ in shell.called] == ["post_execute", "post_run_cell"] * is_kernel
    way.kept_interrupt.keep_error(KeyboardInterrupt())
    for _, end_cell in shell.called[:1]:
        end_cell()
    assert way.kept_interrupt.is_pending is not is_kernel


@pytest.mark.parametrize("failed_ranks", [{1}, {0, 1, 2}, set()])
def test_calls_of_a_failed_cell_and_of_the_next_are_not_one_call(failed_ranks):
    """Rank 1 fails before its call; the others wait in theirs when rank 1 runs the next cell."""

    def program(comm):
        strategy, way = ms.MirroredStrategy(comm=comm), Exits()
        way.sessions = [strategy._replicas.lockstep.session]
        way._note_failed_cell(SimpleNamespace(success=comm.rank not in failed_ranks))
        way._note_failed_cell(SimpleNamespace(success=True))
        texts = []
        for _ in range(2):
            try:
                texts.append(int(strategy.all_reduce("sum", 1)))
            except ms.LockstepError as error:
                texts.append(str(error))
        return texts

    for first, second in run_ranks(program, 3):
        assert second == 3
        if failed_ranks == {1}:
            assert re.search(r"rank 1: .*after a cell that failed on this rank; run", first)
            assert "ranks 0, 2: " in first
        else:
            assert first == 3
