"""Collectives with a time of their own: who is named, and how the job ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MPIEXEC = Path(sys.executable).with_name("mpiexec")
JOB = HERE / "programs" / "timed_job.py"

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec in this environment"),
]


def run(size, *args, warn=1):
    """Run the job with a watchdog that would wait ten minutes; return its code and text."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    env |= {"MPISTRAT_WARN": str(warn), "MPISTRAT_TIMEOUT": "600"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    told = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False)
    flags = []
    if "Open MPI" in told.stdout or "PRRTE" in told.stdout:
        flags = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    start = [str(MPIEXEC), *flags, "-n", str(size), sys.executable, str(JOB), *map(str, args)]
    done = subprocess.run(start, env=env, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("way", "late"), [pytest.param("strategy", 1, marks=pytest.mark.mpi), ("call", 0)]
)
def test_the_job_ends_when_the_call_has_taken_its_time(way, late):
    code, said = run(3, late, way)
    assert code == 75, said
    line = next(
        n for n, text in enumerate(JOB.read_text().splitlines(), 1) if text.endswith("# late")
    )
    assert f"rank {late} (" in said
    assert f"timed_job.py:{line}" in said
    assert "nothing moved for 2 s" in said


@pytest.mark.parametrize(
    "warn",
    [pytest.param(1, marks=pytest.mark.mpi), pytest.param(60, marks=pytest.mark.nightly)],
)
def test_the_time_of_a_strategy_holds_for_its_runs_too(warn):
    code, said = run(3, 2, "run", warn=warn)
    assert code == 75, said
    place = next(n for n, text in enumerate(JOB.read_text().splitlines(), 1) if "# late in" in text)
    _, warned = said.split("mpistrat: rank 2 (", 1)  # the warning, and then the end
    for report in (warned, warned[warned.index("the job ends with exit code 75") :]):
        assert f"It is in timed_job.py:{place}" in report, said
    assert "mpistrat: \n" not in said


@pytest.mark.nightly
def test_what_is_no_such_call_may_take_longer():
    code, said = run(2, 1, "alone")
    assert code == 0, said
    assert "the job ends" not in said
