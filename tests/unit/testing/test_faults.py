"""Faults on purpose: read strictly, made once, where and when they were asked for."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import config
from mpistrat.comm.loopback import LoopbackComm, LoopbackWorld
from mpistrat.errors import OptionError
from mpistrat.lockstep.inject import Injection, parse_fault
from mpistrat.testing import InjectedError, RanksFailed, inject, run_ranks

ctx = ms.get_replica_context
LARGE = 9000  # too large to be sent with the handshake


def test_a_fault_is_read():
    text = " rank=1; call=5 ;phase=proof;do=sleep:2.5"
    assert parse_fault(text) == (1, "proof", 5, "sleep", 2.5, text)
    assert parse_fault("rank=0;call=1;do=kill")[1] == "before"
    assert parse_fault("rank=0;phase=exit;do=os_exit:7")[:5] == (0, "exit", 0, "os_exit", 7)
    assert parse_fault("") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank=1;cal=5;do=kill", "unknown key 'cal'"),
        ("rank=1;call=5;call=6;do=kill", "a key that appears twice"),
        ("call=5;do=kill", "rank is missing"),
        ("rank=1;do=kill", "call is missing"),
        ("rank=1;call=5", "do is missing"),
        ("rank=one;call=5;do=kill", "rank wants a whole number from 0, not 'one'"),
        ("rank=-1;call=5;do=kill", "rank wants a whole number"),
        ("rank=1;call=0;do=kill", "call wants a whole number from 1"),
        ("rank=1;call=5;do=die", "unknown do='die'"),
        ("rank=1;call=5;do=kill:9", "do=kill takes nothing after it"),
        ("rank=1;call=5;do=exit", "an exit code from 0 to 255, not ''"),
        ("rank=1;call=5;do=exit:256", "an exit code from 0 to 255"),
        ("rank=1;call=5;do=exit:1.5", "an exit code from 0 to 255"),
        ("rank=1;call=5;do=sleep:nan", "wants seconds, not 'nan'"),
        ("rank=1;call=5;do=sleep:-1", "wants seconds"),
        ("rank=1;call=5;phase=later;do=kill", "unknown phase='later'"),
        ("rank=1;call=5;phase=exit;do=kill", "takes no call"),
        ("rank=1;phase=exit;do=raise", "only kill, stop, os_exit or sleep"),
        ("rank=1;call=5;phase=payload;do=bitflip", "when data has arrived"),
        ("rank=1;call=5;phase=proof;do=raise", "between handshake and payload nothing raises"),
        ("rank=1;call=5;phase=payload;do=exit:3", "do=exit wants phase=fn, before or after"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(text, words):
    with pytest.raises(OptionError) as found:
        parse_fault(text)
    assert words in str(found.value)
    assert "rank=1;call=5;phase=proof;do=kill" in str(found.value)


@pytest.mark.parametrize("text", ["kill", "rank=1;kill", "rank==1", ";"])
def test_the_variable_wants_pairs(text):
    with pytest.raises(OptionError, match="MPISTRAT_FAULT"):
        config.read_options({"MPISTRAT_FAULT": text})


def test_the_variable_is_read_when_a_strategy_is_made(monkeypatch):
    monkeypatch.setenv("MPISTRAT_FAULT", "rank=1;cal=5;do=kill")
    with pytest.raises(RanksFailed) as found:
        run_ranks(lambda comm: ms.MirroredStrategy(), 2)
    assert {type(error) for error in found.value.errors.values()} >= {OptionError}


def test_the_variable_means_the_ranks_of_a_job_not_threads(monkeypatch):
    monkeypatch.setenv("MPISTRAT_FAULT", "rank=1;call=1;do=kill")
    assert run_ranks(lambda comm: ms.MirroredStrategy().num_replicas_in_sync, 2) == [2, 2]


@pytest.mark.parametrize("do", ["kill", "stop", "os_exit:1"])
def test_threads_are_not_ended_with_their_process(do):
    comm = LoopbackComm(LoopbackWorld(2), 0)
    with pytest.raises(OptionError, match="threads of one process"):
        parse_fault(f"rank=1;call=1;do={do}", comm)
    with pytest.raises(OptionError, match="only 2 ranks"):
        parse_fault("rank=2;call=1;do=raise", comm)


def reducing(comm, fault, size=LARGE, calls=2):
    """Let a fault happen in a run of some all-reduces, then in a good one."""
    strategy = ms.MirroredStrategy()
    found = None
    with inject(fault, comm) as injection:
        try:
            strategy.run(lambda: [ctx().all_reduce("sum", np.ones(size)) for _ in range(calls)][-1])
        except BaseException as error:
            found = error
    after = strategy.reduce("sum", ms.PerReplica(1.0), None)
    return found, injection.happened, float(after)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("phase", ["fn", "before", "after"])
@pytest.mark.parametrize("last", [False, True])
def test_an_exception_reaches_every_rank(size, phase, last):
    rank = size - 1 if last else 0
    call = 1 if phase == "fn" else 2
    text = f"rank={rank};call={call};phase={phase};do=raise"
    got = run_ranks(reducing, size, text)
    for r, (error, happened, after) in enumerate(got):
        assert happened is (r == rank)
        assert isinstance(error, InjectedError if r == rank else ms.RemoteError)
        assert text in str(error)
        assert after == size


def test_an_exit_is_one_of_python():
    got = run_ranks(reducing, 2, "rank=1;call=1;do=exit:3")
    assert isinstance(got[1][0], SystemExit)
    assert got[1][0].code == 3
    assert isinstance(got[0][0], ms.RemoteError)


@pytest.mark.parametrize("phase", ["before", "proof", "payload", "after"])
def test_a_rank_that_sleeps_is_only_late(phase):
    start = time.monotonic()
    got = run_ranks(reducing, 2, f"rank=1;call=1;phase={phase};do=sleep:0.3")
    assert time.monotonic() - start >= 0.3
    assert [(error, after) for error, _, after in got] == [(None, 2.0)] * 2
    assert [happened for _, happened, _ in got] == [False, True]


def flipped(comm):
    strategy = ms.MirroredStrategy()
    with inject("rank=1;call=1;phase=after;do=bitflip"):
        got = strategy.run(lambda: ctx().all_reduce("sum", np.ones(LARGE))).local
    return got


def test_a_bit_that_flips_is_in_one_rank_only():
    got = run_ranks(flipped, 3)
    one, other = np.full(LARGE, 3.0), np.full(LARGE, 3.0)
    other[0] = np.nextafter(3.0, 4.0)
    assert [array.tobytes() for array in got] == [one.tobytes(), other.tobytes(), one.tobytes()]


def test_calls_are_counted_from_the_body_on():
    def program(comm):
        strategy = ms.MirroredStrategy()
        for _ in range(5):
            strategy.reduce("sum", ms.PerReplica(1.0), None)
        made = 0
        with inject("rank=0;call=3;do=raise"):
            try:
                for _ in range(5):
                    strategy.reduce("sum", ms.PerReplica(1.0), None)
                    made += 1
            except RuntimeError:
                return made
        return None

    with pytest.raises(RanksFailed):  # rank 0 is through and has left; rank 1 hears of it
        run_ranks(lambda comm: [program(comm), 1 / 0 if comm.rank else 0], 2)
    assert run_ranks(program, 2) == [2, 2]


def test_a_fault_that_does_not_happen_is_told():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with inject("rank=0;call=9;do=raise"):
            strategy.reduce("sum", ms.PerReplica(1.0), None)

    with pytest.raises(RanksFailed, match=r"call=9.*has not happened; the body made 1 calls"):
        run_ranks(program, 2)


def test_what_was_put_in_is_taken_out():
    def program(comm):
        strategy = ms.MirroredStrategy()
        session = strategy._replicas.lockstep.session
        owners = (session, session.comm, session.board)
        before = [set(vars(owner)) for owner in owners]
        checks = session.check
        with inject("rank=0;call=1;do=sleep:0"), inject("rank=1;call=1;do=sleep:0"):
            strategy.reduce("sum", ms.PerReplica(1.0), None)
        assert [set(vars(owner)) for owner in owners] == before
        assert session.check == checks
        assert strategy._replicas.lockstep.hooks.on_fn is None
        return strategy.reduce("sum", ms.PerReplica(1.0), None)

    assert [float(total) for total in run_ranks(program, 2)] == [2.0, 2.0]


def test_other_ranks_are_not_touched():
    def program(comm):
        session = ms.MirroredStrategy()._replicas.lockstep.session
        before = set(vars(session.comm)), session.check
        injection = Injection(session, parse_fault("rank=0;call=1;do=raise", comm))
        same = (set(vars(session.comm)), session.check) == before
        injection.remove()
        return same

    assert run_ranks(program, 3) == [False, True, True]
