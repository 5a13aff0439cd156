"""Jobs that are told to end at any moment, by any rank: no step is lost, none is made twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher

HERE = Path(__file__).parent
JOB = HERE / "programs" / "preempted_job.py"
STEPS, SIZE = 120, 20_000
LONGEST = 240

pytestmark = [
    pytest.mark.timeout(LONGEST * 6),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


def wanted():
    """The same steps in plain NumPy, and the sum of their numbers."""
    v = np.zeros(SIZE)
    for number in range(STEPS):
        v = 0.9 * v + np.full(SIZE, float(number % 7))
    return f"{STEPS} {float(v[7]).hex()} {sum(range(STEPS))}"


def start(size, directory, *signals):
    for old in directory.glob("pid-*"):
        old.unlink()
    launcher, _ = find_launcher()
    words = [sys.executable, str(JOB), str(directory), *signals]
    argv, env = launcher.build_command(size, words)[:2]
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        argv,
        env={**os.environ, **env, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(job):
    try:
        out, err = job.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        job.kill()
        out, err = job.communicate()
        pytest.fail(f"the job did not end: {out}{err}")
    return job.returncode, out, err


def pid(directory, rank, job):
    path, end = directory / f"pid-{rank}", time.monotonic() + LONGEST
    while not (path.exists() and path.read_text()):
        assert job.poll() is None, ended(job)
        assert time.monotonic() < end, "no rank has said its number"
        time.sleep(0.002)
    return int(path.read_text())


def runs(directory):
    """How many runs the checkpoint tells of."""
    [path] = (directory / "saved").glob("[!j]*")  # one, and nothing that was not finished
    with np.load(path) as found:
        return int(found["checkpointed_runs"])


def preempted(directory, size, times, seed, name="SIGTERM"):
    """Tell a job to end so many times; return what it says at its end."""
    rng, before = random.Random(seed), 0
    for _ in range(times):
        (directory / "hold").touch()
        job = start(size, directory, name)
        told = pid(directory, rng.randrange(size), job)
        time.sleep(rng.uniform(0.0, 0.4 / times))
        os.kill(told, getattr(signal, name))
        (directory / "hold").unlink()
        code, out, err = ended(job)
        assert code == 42, f"{code} {out}{err}"
        assert err.count("told to end (") == 1, err
        now = runs(directory)
        assert before <= now < STEPS
        before = now
    code, out, err = ended(start(size, directory, name))
    assert code == 0, f"{code} {out}{err}"
    return out.strip()


@pytest.mark.mpi
@pytest.mark.parametrize(("size", "name"), [(2, "SIGTERM"), (3, "SIGUSR1")])
def test_the_end_is_that_of_a_run_that_was_left_alone(size, name, tmp_path):
    assert preempted(tmp_path, size, 2, seed=size, name=name) == wanted()


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST * 21)  # so many jobs
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_twenty_times(size, tmp_path):
    assert preempted(tmp_path, size, 20, seed=size) == wanted()


def test_a_rank_that_is_killed_leaves_the_checkpoint_before(tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    job = start(2, tmp_path, "SIGTERM")
    os.kill(pid(tmp_path, 0, job), signal.SIGTERM)
    hold.unlink()
    code, out, err = ended(job)
    assert code == 42, f"{code} {out}{err}"
    assert err.count("told to end (") == 1, err
    before = runs(tmp_path)
    assert before < STEPS
    hold.touch()
    job = start(2, tmp_path, "SIGTERM")
    os.kill(pid(tmp_path, 1, job), signal.SIGKILL)
    assert ended(job)[0] != 0
    hold.unlink()
    assert runs(tmp_path) == before
    code, out, _ = ended(start(2, tmp_path, "SIGTERM"))
    assert (code, out.strip()) == (0, wanted())
