"""What a rank that leaves does with its streams."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.lockstep.ending import flush_streams


def shut():
    stream = io.StringIO()
    stream.close()
    return stream


def full():
    stream = Path("/dev/full").open("w")  # noqa: SIM115  # closing it fails too
    stream.write("lost")
    return stream


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stream", [shut, full, lambda: None])
def test_streams_that_take_nothing_keep_no_rank_from_leaving(stream, monkeypatch):
    other = io.TextIOWrapper(io.BufferedWriter(raw := io.BytesIO()))
    other.write("said")
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.setattr(sys, "stderr", other)
    flush_streams()
    assert raw.getvalue() == b"said"


def test_a_timer_of_the_program_does_not_end_it_while_the_last_one_is_set():
    """Its handler is taken away only when the timer is no longer its own."""
    program = """
import signal
from mpistrat.lockstep.ending import _end_after
signal.signal(signal.SIGALRM, lambda *args: None)
for _ in range(500):
    signal.setitimer(signal.ITIMER_REAL, 2e-5, 2e-5)
    _end_after(60.0)
    signal.signal(signal.SIGALRM, lambda *args: None)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
