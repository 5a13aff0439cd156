"""A launcher's end: its code, its time, its signals, and nothing left behind."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mpistrat.config import launched_by
from mpistrat.launch import process
from mpistrat.launch.mpi_libraries import Command, find_launcher
from mpistrat.launch.process import TIMED_OUT, find_descendants, run_job


def shell(script):
    return Command(("/bin/sh", "-c", script), {})


def alive(pid):
    try:
        # A killed process whose new parent has not looked yet is no longer running.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_exit_code_is_the_launchers(code):
    assert run_job(shell(f"exit {code}")).code == code


def test_end_by_signal_is_128_more():
    assert run_job(shell("kill -9 $$")).code == 128 + 9


def test_a_signal_that_ended_the_launcher_is_known_unless_it_was_handed_on(tmp_path):
    assert run_job(shell("kill -9 $$")).killing_signal == signal.SIGKILL
    assert run_job(shell("kill -15 $$")).killing_signal == signal.SIGTERM
    assert run_job(shell("exit 137")).killing_signal == 0
    assert run_job(shell("exec sleep 30"), 0.5).killing_signal == 0
    # Again and again: the first may come before there is anybody to hand it on.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        handed = run_job(shell(f"while :; do kill -15 {os.getpid()}; sleep 0.1; done"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (handed.code, handed.killing_signal) == (128 + 15, 0)


def test_output_and_variables_reach_the_job(tmp_path):
    command = Command(("/bin/sh", "-c", "echo $WORD; echo err >&2; pwd"), {"WORD": "word"})
    with (tmp_path / "out").open("wb") as output:
        run_job(command, output_file=output, cwd=tmp_path)
    assert (tmp_path / "out").read_text().splitlines() == ["word", "err", str(tmp_path)]
    assert "WORD" not in os.environ


def test_files_of_a_launcher_are_in_a_directory_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "touch $FILES/one; chmod 0 $FILES/one; kill -9 $$"
    assert run_job(Command(("/bin/sh", "-c", script), {}, session_variable="FILES")).killing_signal
    assert list(tmp_path.iterdir()) == []
    for env, session in [({"FILES": "chosen"}, "FILES"), ({}, "")]:
        command = Command(("/bin/sh", "-c", "test x$FILES = x$1", "", *env.values()), env, session)
        assert run_job(command).code == 0


def test_the_directory_of_a_launcher_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", ".")  # as of TMPDIR=. until Python 3.11
    command = Command(("/bin/sh", "-c", "cd / && test -d $FILES"), {}, session_variable="FILES")
    assert run_job(command).code == 0


def of_the_next(processes):
    """Return the numbers that the next processes of this system will get, at most so many."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    last = subprocess.run(["/bin/sh", "-c", "echo $$"], stdout=subprocess.PIPE, check=True)
    return [(int(last.stdout) + more) % most for more in range(processes)]


@pytest.mark.job
@pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job")
def test_a_job_starts_beside_what_killed_jobs_have_left(tmp_path, monkeypatch):
    """Open MPI 5 does not, where such a directory has the number of its own process."""
    launcher, library = find_launcher()
    if library.flavour.name != "Open MPI":
        pytest.skip(f"the launcher of {library.flavour.name} keeps no such files")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for number in of_the_next(2000):
        left = tmp_path / f"ompi.{number}"
        left.mkdir()
        (left / f"pmix.{platform.node().split('.')[0]}.tool.{number}").touch()
    for _ in range(3):
        assert run_job(launcher.build_command(1, ["true"]), 120).code == 0


def in_time(script, ready, directory):
    """Run what has no end until its time is up, of which it has enough to be ready for that."""
    for seconds in (0.3, 2, 8, 64):
        outcome = run_job(shell(script), seconds, cwd=directory)
        if ready():
            break
    return outcome


def test_job_that_takes_too_long_is_asked_to_end(tmp_path):
    said, up = tmp_path / "said", tmp_path / "up"
    wait = "touch up; while :; do sleep 0.1; done"
    outcome = in_time(f"trap 'echo asked > said; exit 0' TERM; {wait}", up.exists, tmp_path)
    assert outcome.has_timed_out
    assert outcome.code == TIMED_OUT
    assert said.read_text() == "asked\n"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_processes_that_do_not_listen_are_ended_wherever_they_are(tmp_path, monkeypatch):
    """Below the launcher, in a session of their own and deaf to SIGTERM."""
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.5)
    pids = tmp_path / "pids"
    deaf = "trap '' TERM; echo $$ >> pids; while :; do sleep 0.1; done"
    numbers = []

    def both():
        numbers[:] = map(int, pids.read_text().split() if pids.exists() else ())
        pids.unlink(missing_ok=True)
        return len(numbers) == 2

    began = time.monotonic()
    apart = deaf.replace("$", r"\$")
    outcome = in_time(f'setsid sh -c "{apart}" & {deaf}', both, tmp_path)
    assert outcome.has_timed_out
    assert time.monotonic() - began >= 0.3 + 0.5  # the grace period
    assert len(numbers) == 2
    end = time.monotonic() + 240
    while any(map(alive, numbers)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(alive, numbers))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_descendants_are_children_and_grandchildren():
    process = subprocess.Popen(["/bin/sh", "-c", "sh -c 'sleep 60; :' & wait"])
    try:
        end = time.monotonic() + 240
        while len(find_descendants(process.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        found = find_descendants(process.pid)
        assert len(found) == 2
        assert process.pid not in found
    finally:
        for pid in [*find_descendants(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(("started", "code"), [(True, 3), (False, 4)])
def test_ctrl_c_before_mpi_has_started_ends_the_job(started, code):
    came = 'trap "exit 3" INT; trap "exit 4" TERM; kill -INT $PPID; while :; do sleep 0.1; done'
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = run_job(Command(("/bin/sh", "-c", came), {}), 240, has_started=lambda: started)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.code, outcome.is_interrupted) == (code, True)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_signal_is_handed_on_once(name, tmp_path):
    said = tmp_path / "said"
    short = name.removeprefix("SIG")
    # Until it has come, at most for four minutes; then for a second one.
    wait = "for i in $(seq 2400); do [ -e said ] && break; sleep 0.1; done; sleep 0.2"
    job = f"trap 'echo {name} >> said' {short}; touch up; {wait}"
    program = (
        "from mpistrat.launch.process import run_job\n"
        "from mpistrat.launch.mpi_libraries import Command\n"
        # What a shell starts in the background would not hear it.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"raise SystemExit(run_job(Command(('/bin/sh', '-c', {job!r} + '; exit 5'), {{}})).code)"
    )
    words = [sys.executable, "-c", program]
    process = subprocess.Popen(words, start_new_session=True, cwd=tmp_path)
    end = time.monotonic() + 240
    while not (tmp_path / "up").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(process.pid, getattr(signal, name))  # as a terminal does
    assert process.wait() == 5
    assert said.read_text() == f"{name}\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks prctl(2)")
def test_a_job_does_not_outlive_who_runs_it(tmp_path):
    job = "echo $$ > pid; touch up; exec sleep 600"
    program = (
        "from mpistrat.launch.process import run_job\n"
        "from mpistrat.launch.mpi_libraries import Command\n"
        f"run_job(Command(('/bin/sh', '-c', {job!r}), {{}}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    end = time.monotonic() + 240
    while not (tmp_path / "up").exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 240
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(pid)
