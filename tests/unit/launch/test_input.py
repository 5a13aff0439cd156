"""Standard input of a job: rank 0 has that of `mpistrat run` to its end, the others have none."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from mpistrat.config import child_environment
from mpistrat.launch.streams import leave_input, take_input

PROGRAM = """
import os, sys
import mpistrat as ms

text = sys.stdin.read()
rank = ms.MirroredStrategy().rank
os.write(1, f"rank {rank} read {len(text)}: {text[:9]!r}\\n".encode())
"""
LONG = "x" * 3_000_000  # MPICH's launcher ends a job that does not read as fast as it writes


def job(tmp_path, size=2, **given):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mpistrat", "run", "-n", str(size), str(program)],
        env=child_environment({"MPISTRAT_TIMEOUT": "60"}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **given,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


NOTHING = [f"rank {rank} read 0: ''" for rank in (1, 2)]


@pytest.mark.parametrize("text", ["a line\n", pytest.param(LONG, id="long")])
def test_a_pipe_is_rank_0s(tmp_path, text):
    head = f"rank 0 read {len(text)}: {text[:9]!r}"
    assert job(tmp_path, 3, input=text) == [head, *NOTHING]


def test_nothing_ends_at_once(tmp_path):
    assert job(tmp_path, stdin=subprocess.DEVNULL) == ["rank 0 read 0: ''", NOTHING[0]]


def test_closed_input_is_none(tmp_path):
    assert job(tmp_path, preexec_fn=lambda: os.close(0)) == ["rank 0 read 0: ''", NOTHING[0]]


def test_a_file_is_read_from_where_it_is(tmp_path):
    (tmp_path / "text").write_text("first\nsecond\n")
    with (tmp_path / "text").open("rb", buffering=0) as file:
        assert file.readline() == b"first\n"
        assert job(tmp_path, stdin=file) == ["rank 0 read 7: 'second\\n'", NOTHING[0]]


@pytest.fixture
def spare(monkeypatch):
    """Input of this process that a test may replace."""
    before = os.dup(0)
    monkeypatch.setattr(sys, "stdin", sys.__stdin__ or sys.stdin)
    yield
    os.dup2(before, 0)
    os.close(before)


@pytest.mark.usefixtures("spare")
def test_a_terminal_is_left_to_the_launcher(tmp_path):
    outer, inner = pty.openpty()
    os.dup2(inner, 0)
    assert not leave_input(tmp_path)
    assert not list(tmp_path.iterdir())
    take_input(0, tmp_path)
    assert os.isatty(0)
    for end in (outer, inner):
        os.close(end)


@pytest.mark.usefixtures("spare")
def test_without_the_runner_rank_0_keeps_what_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdin").symlink_to("/dev/zero")  # a file of the user's
    read, write = os.pipe()
    os.dup2(read, 0)
    os.write(write, b"text")
    os.close(write)
    os.close(read)
    take_input(0, None)
    assert os.read(0, 9) == b"text"
    take_input(1, None)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        assert os.path.sameopenfile(0, nothing.fileno())


@pytest.mark.usefixtures("spare")
def test_a_closed_number_is_not_touched(tmp_path, monkeypatch):
    """Python has no stdin where the process began without, and its number may be that of MPI."""
    monkeypatch.setattr(sys, "stdin", None)
    read, write = os.pipe()
    os.dup2(read, 0)
    take_input(1, None)
    assert os.path.sameopenfile(0, read)
    for end in (read, write):
        os.close(end)
