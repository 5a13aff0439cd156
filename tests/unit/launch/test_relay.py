"""What a job prints to a pipe: all of it arrives, and a reader that leaves does not end the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LINES = 20_000  # more than a pipe holds
PROGRAM = """
import sys
from mpistrat.launch.mpi_libraries import Command
from mpistrat.launch.process import run_job
from mpistrat.launch.streams import open_standard_streams

open_standard_streams()
sys.exit(run_job(Command(("/bin/sh", "-c", sys.argv[1]), {})).code)
"""


def start(script, directory=None, **streams):
    words = [sys.executable, "-c", PROGRAM, script]
    streams = {"stdout": subprocess.PIPE, **streams}
    # Without buffers, Python has nothing left at its end that it cannot write.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.Popen(words, text=True, cwd=directory, env=environment, **streams)


def talking(end):
    # A builtin: no other process is there to be ended by SIGPIPE in the shell's place.
    loop = f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); done"
    return f"{loop}; echo error >&2; {end}"


def test_all_that_is_printed_arrives():
    job = start(talking("exit 3"), stderr=subprocess.STDOUT)
    lines = job.communicate()[0].splitlines()
    assert lines == [*(f"line {i}" for i in range(LINES)), "error"]
    assert job.returncode == 3


@pytest.mark.parametrize("both", [False, True])
def test_the_job_goes_on_when_nobody_reads(both, tmp_path):
    errors = subprocess.STDOUT if both else subprocess.PIPE
    job = start(talking("echo $i > done"), tmp_path, stderr=errors)
    assert job.stdout.readline() == "line 0\n"
    job.stdout.close()
    told = "" if both else job.stderr.read()
    assert job.wait() == 0
    assert int((tmp_path / "done").read_text()) == LINES
    if not both:
        assert told.count("nobody reads the output") == 1
        assert "error\n" in told
        job.stderr.close()


def test_the_job_goes_on_when_the_disk_is_full(tmp_path):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        job = start(talking("echo $i > done"), tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert "nobody reads the output" in job.communicate()[1]
    assert job.returncode == 0
    assert int((tmp_path / "done").read_text()) == LINES


def test_what_outlives_the_launcher_is_not_waited_for(tmp_path):
    left = tmp_path / "left"
    job = start("sleep 600 & echo $! > left; echo words", tmp_path)
    try:
        assert job.stdout.readline() == "words\n"
        assert job.wait() == 0
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
        job.stdout.close()


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_streams_that_are_closed_are_nothing(taken, tmp_path):
    """Also those in whose place a library has opened files of its own."""
    there = tmp_path / "there"
    script = "echo lost; echo lost >&2; ls -l /proc/$$/fd > there"
    opened = f"import os\nfor _ in range({taken}):\n    os.open('/dev/zero', os.O_RDWR)\n"
    words = [sys.executable, "-c", opened + PROGRAM, script]
    closed = ["/bin/sh", "-c", '"$@" <&- >&- 2>&-', "sh", *words]
    assert subprocess.run(closed, cwd=tmp_path).returncode == 0
    if Path("/proc/self/fd").exists():
        descriptors = re.findall(r" (\d+) -> /dev/null", there.read_text())
        assert {"0", "2"} <= set(descriptors)
        assert "/dev/zero" not in there.read_text()
