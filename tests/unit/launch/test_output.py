"""What a rank prints, passed on by a process that outlives it."""

import os
import platform
import subprocess
import sys

import pytest

from mpistrat.launch.plan import LaunchOptions
from mpistrat.launch.run import run
from mpistrat.launch.streams import Output

PROGRAM = """
import os, signal, sys
from mpistrat.launch.streams import Output, redirect
known = redirect(Output({directory!r}, {label}))
print("first")
known({rank}, 12)
os.write(2, b"half ")
sys.stdout.write("step 1\\rstep 2\\r")
sys.stdout.flush()
os.write(2, b"line\\nno end")
os.kill(os.getpid(), {signal})
"""


def started(directory="", label=False, rank=3, signal=0):
    text = PROGRAM.format(directory=str(directory), label=label, rank=rank, signal=signal)
    words = [sys.executable, "-c", text]
    return subprocess.run(words, capture_output=True, check=False)


HOST = platform.node()


@pytest.mark.parametrize("signal", [0, 9])
def test_lines_are_labelled_whole(signal):
    done = started(label=True, signal=signal)
    name = f"[03@{HOST}] ".encode()
    assert done.stdout == b"".join(name + line for line in (b"first\n", b"step 1\r", b"step 2\r"))
    assert done.stderr == name + b"half line\n" + name + b"no end"
    assert done.returncode == -signal


@pytest.mark.parametrize("rank", [0, 3])
def test_one_rank_is_on_the_terminal_and_all_have_files(rank, tmp_path):
    done = started(tmp_path, rank=rank)
    assert done.stdout == (b"first\nstep 1\rstep 2\r" if rank == 0 else b"")
    assert done.stderr == (b"half line\nno end" if rank == 0 else b"")
    [file] = tmp_path.iterdir()
    assert file.name == f"rank-0{rank}.txt"
    text = file.read_bytes()
    assert text.replace(b"half line\nno end", b"") in (b"first\nstep 1\rstep 2\r", text)
    assert len(text) == len(b"first\nstep 1\rstep 2\rhalf line\nno end")


@pytest.mark.parametrize("at", ["full", "missing"])
def test_what_no_file_takes_is_on_the_terminal(at, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "rank-03.txt").symlink_to("/dev/full")
    done = started(tmp_path / at)
    assert done.returncode == 0
    assert done.stdout == b"first\nstep 1\rstep 2\r"
    said = done.stderr.decode()
    assert f"{tmp_path / at}/rank-03.txt': what it does not take is on the terminal\n" in said
    assert ("No space left" if at == "full" else "No such file") in said


@pytest.mark.job
def test_a_job_keeps_the_output_of_each_rank(tmp_path, capfd):
    program = tmp_path / "says.py"
    program.write_text("from mpi4py import MPI; print('I am', MPI.COMM_WORLD.rank)")
    assert (
        run(
            LaunchOptions(2),
            [str(program)],
            output=Output(str(tmp_path / "out"), True),
            timeout=240,
        )
        == 0
    )
    assert capfd.readouterr().out == f"[0@{HOST}] I am 0\n"
    found = sorted((tmp_path / "out").iterdir())
    assert [file.read_text() for file in found] == ["I am 0\n", "I am 1\n"]


def test_a_dry_run_only_prints(tmp_path, capfd):
    where = tmp_path / "out"
    words = {"output": Output(str(where)), "dry_run": True}
    assert run(LaunchOptions(2), ["x"], is_module=True, **words) == 0
    assert f" -m mpistrat.launch.rank --output-dir {where} -m x" in capfd.readouterr().err
    assert not os.path.lexists(where)
