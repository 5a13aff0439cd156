"""A planned leave under srun is code 42 and nothing else; a script starts the job again."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
JOB = Path(__file__).parents[1] / "faults" / "programs" / "planned_job.py"
TWO = ["-N2", "--ntasks-per-node=2"]
RUN = f"{sys.executable} -m mpistrat.launch.rank planned_job.py ."
WAIT = """
trap 'kill -USR1 $pid' USR1
{srun} {run} & pid=$!
wait $pid; code=$?
while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
echo code $code
"""
AGAIN = f"""
{sys.executable} -m mpistrat requeue --record exit-code --code $code --checkpoint saved && \
  scontrol requeue $SLURM_JOB_ID
exit $code
"""
ENDED_BADLY = ("Abort", "Killed", "CANCELLED")


def until(said, job, seconds=120):
    end = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < end, job.log
        time.sleep(0.05)


def script(pmi, steps, pause):
    return WAIT.format(srun=f"srun -K1 --mpi={pmi}", run=f"{RUN} {steps} {pause}")


def test_twenty_of_twenty(slurm, shared, pmi):
    """Of those that have begun: Open MPI under srun may crash in MPI_Init (its issue 12495)."""
    shutil.copy(JOB, shared)
    body = f"""
left=0
for i in $(seq 23); do
  rm -f pid-*
  srun -K1 --mpi={pmi} {RUN} 100000 0.02 > said 2>&1 & pid=$!
  until [ -s pid-0 ] && [ -s pid-3 ]; do kill -0 $pid || break; sleep 0.05; done
  kill -USR1 $pid
  wait $pid; code=$?
  while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
  [ -s pid-0 ] || continue
  cat said
  echo code $code
  ((++left == 20)) && break
done 2> noise
"""
    job = slurm.submit(shared, body, *TWO)
    job.until("COMPLETED", timeout=500)
    assert job.log.count("\ncode 42\n") == 20, job.log
    assert not [word for word in ENDED_BADLY if word in job.log], job.log


def test_a_script_starts_it_again_and_it_goes_on(slurm, shared, pmi):
    shutil.copy(JOB, shared)
    body = "export MPISTRAT_RECORD=$PWD/exit-code\n" + script(pmi, 100, 0.1) + AGAIN
    job = slurm.submit(shared, body, *TWO, "--requeue", "--signal=B:USR1@110")
    until(lambda: (shared / "pid-3").exists(), job)
    time.sleep(1)
    slurm("scancel", "--signal=USR1", "--batch", job.number)
    until(lambda: "no: it is done" in job.log, job)
    ranks, steps = sum(range(4)), sum(4 * step for step in range(100))
    assert f"100 {float(100 * ranks + steps).hex()}" in job.log
    assert "yes: it left with 42 after saving" in job.log


def test_a_job_that_is_cancelled_is_not_started_again(slurm, shared, pmi):
    shutil.copy(JOB, shared)
    body = "export MPISTRAT_RECORD=$PWD/exit-code\n" + script(pmi, 10**6, 0.1) + AGAIN
    job = slurm.submit(shared, body, *TWO, "--requeue")
    until(lambda: (shared / "pid-3").exists(), job)
    slurm("scancel", job.number)
    until(lambda: job.facts()["JobState"] == "CANCELLED", job)
    until(lambda: "saved as saved/ckpt-1.npz" in job.log, job)  # SIGTERM tells, and is enough
    assert job.facts()["Restarts"] == "0"
