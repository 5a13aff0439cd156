"""The wait for all ranks to make their first strategy, by a clock that the test sets."""

import itertools
import threading

import pytest

from mpistrat.lockstep import startup
from mpistrat.watchdog.observer import Limits

LIMITS = Limits(warn=0.01, timeout=50.0)


@pytest.fixture
def told(monkeypatch):
    """What was said, and then the code that the job was ended with; `ended` is set by that."""
    said, ended = [], threading.Event()

    def end(code):
        said.append(code)
        ended.set()

    monkeypatch.setattr(startup, "say", said.append)
    monkeypatch.setattr(startup, "end_stuck_job", end)
    return said, ended


def waits(told, rank, clock, advice=""):
    """Wait for others who never come, until the job is ended."""
    with startup.watching_meeting(rank, 3, f"rank {rank} of 3", advice, LIMITS, clock=clock):
        assert told[1].wait(240)
    return told[0]


def test_the_first_and_the_last_rank_warn_and_end_the_job(told):
    warning, ending, code = waits(told, 0, itertools.count().__next__, " Ask.")
    assert warning.startswith("mpistrat: rank 0 of 3 has waited 0.01 s in ")
    assert warning.endswith("one may have failed earlier. Ask.")
    assert ending.startswith("mpistrat: rank 0 of 3 has waited 50 s in ")
    assert code == 75


def test_the_others_end_it_a_little_later_and_do_not_warn(told):
    ticks = itertools.count()
    assert len(waits(told, 1, ticks.__next__)) == 2
    assert next(ticks) > 55


def test_time_in_which_the_job_was_suspended_does_not_count(told):
    ticks = itertools.chain(range(40), itertools.count(10_000))
    waits(told, 2, ticks.__next__)
    assert next(ticks) > 10_050


def test_nobody_waits_alone(told):
    with startup.watching_meeting(0, 1, "", "", LIMITS, clock=told[0].append):
        pass
    assert not told[0]
