"""Jobs that are killed at any moment and started again: the same state as if they had not been."""

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

import mpistrat as ms
from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher

HERE = Path(__file__).parent
JOB = HERE / "programs" / "resumed_job.py"
ORDER = ms.Dataset(np.arange(200)).shuffle(seed=1).batch(8)  # each time of the next epoch
LONGEST = 240

pytestmark = [
    pytest.mark.timeout(LONGEST * 4),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


def wanted():
    """The same steps in plain NumPy."""
    rng, v = np.random.default_rng(0), 0.0
    ORDER.begin_after(-1)
    for rows in (rows for _ in range(2) for rows in ORDER):
        v = 0.9 * v + rng.random() * float(rows.sum())
    return f"50 {{2.0}} {v.hex()} 50"


def start(size, directory):
    for old in directory.glob("pid-*"):
        old.unlink()
    argv, env = find_launcher()[0].build_command(size, [sys.executable, str(JOB), str(directory)])[
        :2
    ]
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, **env, "PYTHONPATH": path}
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(job):
    try:
        out, err = job.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        job.kill()
        pytest.fail(f"the job did not end: {job.communicate()}")
    return job.returncode, out.decode().strip(), err.decode()


def killed(directory, size, seed):
    """Kill a rank of a job at some moment, and return whether it was still there."""
    rng = random.Random(seed)
    directory.mkdir(exist_ok=True)
    (directory / "hold").touch()
    job = start(size, directory)
    path, end = directory / f"pid-{rng.randrange(size)}", time.monotonic() + LONGEST
    while not (path.exists() and path.read_text()):
        assert job.poll() is None and time.monotonic() < end, ended(job)
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.4))
    os.kill(int(path.read_text()), signal.SIGKILL)
    assert ended(job)[0] != 0
    (directory / "hold").unlink()


def finished(directory, size):
    code, out, err = ended(start(size, directory))
    assert code == 0, err
    return out


def test_a_killed_job_goes_on_to_the_same_state(tmp_path):
    killed(tmp_path, 2, seed=0)
    assert finished(tmp_path, 2) == wanted()


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST * 60)  # sixty jobs
@pytest.mark.parametrize("size", [1, 2, 3])
def test_twenty_times(size, tmp_path):
    for seed in range(20):
        directory = tmp_path / str(seed)
        killed(directory, size, seed)
        killed(directory, size, seed + 100)
        assert finished(directory, size) == wanted()
