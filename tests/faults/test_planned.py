"""Class F of the faults: jobs that are told to end at any moment leave with 42 and continue."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpistrat.config import launched_by, passes_on_exit_code
from mpistrat.launch.mpi_libraries import find_launcher

HERE = Path(__file__).parent
JOB = HERE / "programs" / "planned_job.py"
LONGEST = 180  # tells a hang from a machine that is slow

pytestmark = [
    pytest.mark.timeout(LONGEST * 8),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


def wanted(size, steps):
    """The same steps in plain Python: whole numbers, so to the last bit."""
    ranks = size * (size - 1) // 2
    return f"{steps} {float(sum(ranks + size * step for step in range(steps))).hex()}"


def start(size, directory, steps, pause=0.002, by=None):
    """Start a job, by a command that takes the program, or by the launcher itself."""
    for old in directory.glob("pid-*"):
        old.unlink()
    launcher, _ = find_launcher()
    words = [sys.executable, str(JOB), str(directory), str(steps), str(pause)]
    argv, env = launcher.build_command(size, words)[:2] if by is None else ((*by, *words[1:]), {})
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    out, err = (directory / "out").open("w+"), (directory / "err").open("w+")
    job = subprocess.Popen(
        argv, env={**os.environ, **env, "PYTHONPATH": path}, stdout=out, stderr=err
    )
    out.close()
    err.close()
    return job


def pids(directory, size, job):
    end = time.monotonic() + LONGEST
    while True:
        found = [directory / f"pid-{rank}" for rank in range(size)]
        if all(path.exists() and path.read_text() for path in found):
            return [int(path.read_text()) for path in found]
        assert job.poll() is None, (directory / "err").read_text()
        assert time.monotonic() < end, "no rank has said its number"
        time.sleep(0.002)


def ended(job, directory):
    """Return code, output and errors."""
    try:
        code = job.wait(LONGEST)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
        pytest.fail(f"the job did not end: {(directory / 'err').read_text()}")
    return code, (directory / "out").read_text().strip(), (directory / "err").read_text()


def test_one_rank_that_waits_in_mpi_is_heard_at_once_and_all_leave(tmp_path):
    """F1, F4: rank 1 waits for rank 0, which sleeps in each step."""
    job = start(2, tmp_path, 10**6, pause=0.4)
    told = pids(tmp_path, 2, job)[1]
    time.sleep(0.2)
    os.kill(told, signal.SIGUSR1)
    begin = time.monotonic()
    while "rank 1 got SIGUSR1: the job will be ended in 5 s" not in (tmp_path / "err").read_text():
        assert time.monotonic() - begin < LONGEST
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):  # it has left already
        os.kill(told, signal.SIGUSR1)  # once more: one checkpoint all the same
    code, _, err = ended(job, tmp_path)
    assert code == 42, err
    assert err.count("mpistrat: told to end (rank 1 by SIGUSR1): saved as") == 1
    # What MPICH prints of its own abort may be cut off, so only its absence can be asked for.
    assert "Abort" not in err or not passes_on_exit_code(rank_env())
    assert len(list((tmp_path / "saved").glob("ckpt-*.npz"))) == 1


def rank_env():
    """What tells a rank of this launcher who started it."""
    launcher, _ = find_launcher()
    name = {"Open MPI": "OMPI_COMM_WORLD_SIZE"}.get(launcher.flavour.name, "PMI_RANK")
    return {name: "1"}


def preempted(directory, size, times, seed, steps):
    """Tell a job to end so many times, some rank or all of them; return what it says at its end."""
    rng = random.Random(seed)
    for _ in range(times):
        (directory / "hold").touch()
        job = start(size, directory, steps)
        ranks = pids(directory, size, job)
        time.sleep(rng.uniform(0.0, 0.3))
        for pid in rng.choice([ranks, [rng.choice(ranks)]]):
            with contextlib.suppress(ProcessLookupError):  # all have left, since the first was told
                os.kill(pid, signal.SIGUSR1)
        (directory / "hold").unlink()
        code, out, err = ended(job, directory)
        assert code == 42, f"{code} {out}{err}"
        assert err.count("mpistrat: told to end (") == 1, err
    code, out, err = ended(start(size, directory, steps), directory)
    assert code == 0, f"{code} {out}{err}"
    return out


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST * 21)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_twenty_random_preemptions_end_in_the_same_bits(size, tmp_path):
    """F7."""
    assert preempted(tmp_path, size, 20, size, 4000) == wanted(size, 4000)


@pytest.mark.mpi
def test_a_preempted_job_ends_in_the_same_bits(tmp_path):
    assert preempted(tmp_path, 2, 2, 7, 400) == wanted(2, 400)


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_the_launcher_is_told(number, tmp_path):
    """F2, F9: as if ranks were told, except for Open MPI's 0.25 s; the next start continues."""
    job = start(2, tmp_path, 10_000, by=(sys.executable, "-m", "mpistrat", "run", "-n", "2"))
    pids(tmp_path, 2, job)
    job.send_signal(number)
    code, _, err = ended(job, tmp_path)
    assert code != 0
    if find_launcher()[0].flavour.name == "MPICH":
        assert code == 42, err
        assert err.count("mpistrat: told to end (ranks 0, 1 by SIGTERM): saved as") == 1
        assert len(list((tmp_path / "saved").glob("ckpt-*.npz"))) == 1
    code, out, err = ended(start(2, tmp_path, 400), tmp_path)
    assert (code, out) == (0, wanted(2, 400)), err


@pytest.mark.mpi
def test_killed_while_it_saves_for_a_notice(tmp_path):
    """F3: the checkpoint is the one before, or the new one, and the next start continues."""
    rng = random.Random(3)
    for _ in range(4):
        (tmp_path / "hold").touch()
        job = start(2, tmp_path, 400)
        ranks = pids(tmp_path, 2, job)
        os.kill(ranks[0], signal.SIGUSR1)
        time.sleep(rng.uniform(0.0, 0.05))
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert ended(job, tmp_path)[0] != 0
        (tmp_path / "hold").unlink()
        for path in (tmp_path / "saved").glob("ckpt-*.npz"):
            with np.load(path) as found:
                assert found["step"] >= 0
    code, out, err = ended(start(2, tmp_path, 400), tmp_path)
    assert (code, out) == (0, wanted(2, 400)), err
