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
IN_INIT = "mca_pml_ob1_recv_frag_callback_match"
ENDED_BADLY = ("Abort", "Killed", "CANCELLED")


def until(said, job, seconds=120):
    end = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < end, job.log
        time.sleep(0.05)


def script(pmi, steps, pause):
    return WAIT.format(srun=f"srun -K1 --mpi={pmi}", run=f"{RUN} {steps} {pause}")


def test_twenty_of_twenty(slurm, shared, pmi):
    """Starts that died in Open MPI's own MPI_Init, see docs/faq.md, are made again."""
    shutil.copy(JOB, shared)
    body = f"""
for i in $(seq 20); do
  while true; do
    rm -f pid-*
    srun -K1 --mpi={pmi} {RUN} 100000 0.02 >out-$i 2>&1 & pid=$!
    until [ -s pid-0 ] && [ -s pid-3 ]; do kill -0 $pid || break; sleep 0.05; done
    grep -q {IN_INIT} out-$i || break
    wait $pid; mv out-$i died-$i
  done
  kill -USR1 $pid
  wait $pid; code=$?
  while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
  cat out-$i
  echo code $code
done
"""
    job = slurm.submit(shared, body, *TWO)
    until(lambda: job.log.count("\ncode ") >= 20, job, 400)
    assert job.log.count("\ncode 42\n") == 20, job.log
    assert not [word for word in ENDED_BADLY if word in job.log], job.log
    died = sorted(shared.glob("died-*"))
    assert all("MPI_Init_thread" in log.read_text() for log in died)
    assert not died if pmi == "pmi2" else len(died) < 5


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
