"""What ends jobs on a real Slurm, and how they continue."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "counted.py"
RUN = f"{sys.executable} -m mpistrat run"
FOUR = ["-N2", "--ntasks-per-node=2"]
EXAMPLES = 800
SUM = f"the sum is {EXAMPLES * (EXAMPLES - 1) // 2}"

# Hands the signal on, and asks for another turn if the program has left as planned.
REQUEUED = """
trap 'kill -USR1 $pid' USR1
{run} & pid=$!
wait $pid; code=$?
while ((code == 138)); do wait $pid; code=$?; done  # the trap has ended the waiting
echo "code $code"
if ((code == 42)); then scontrol requeue $SLURM_JOB_ID; sleep 60; fi
# Open MPI ends a job within a second when a node is lost. Slurm takes longer to notice (here 5 s),
# and then queues a job again that has not ended.
if ((code > 1)); then sleep 60; fi
exit $code
"""


def counted(seconds, *signals):
    return f"{RUN} {PROGRAM} {EXAMPLES} {seconds} {' '.join(signals)}"


def seen(directory):
    """How often each example was seen, by all ranks and in all turns."""
    rows = [file.read_text().split() for file in directory.glob("seen-*")]
    return Counter(int(word) for row in rows for word in row)


ONCE = Counter(range(EXAMPLES))


def test_time_limit(slurm, shared):
    """USR1 comes before the limit, the job saves, is queued again, and ends where it should."""
    body = REQUEUED.format(run=counted(0.25, "SIGUSR1"))
    words = ["--time=1", "--signal=B:USR1@45", "--requeue"]
    job = slurm.submit(shared, body, *FOUR, *words)
    job.until("COMPLETED", timeout=540)
    assert int(job.facts()["Restarts"]) >= 1, job.story()
    assert "code 42" in job.log
    # On a busy machine the notice may come before the first step, and the job begins at 0 again.
    begins = [int(word) for word in re.findall(r"begins at (\d+)", job.log)]
    assert begins[0] == 0 < begins[-1] and begins == sorted(begins), job.log
    assert SUM in job.log
    assert seen(shared) == ONCE


def test_preemption(slurm, shared):
    """A job of a higher partition wants the nodes: Slurm ends this one, and starts it again."""
    job = slurm.submit(shared, counted(0.05, "SIGTERM"), *FOUR, "--requeue")
    job.until_says("begins at 0")
    (shared / "other").mkdir()
    other = slurm.submit(shared / "other", "sleep 2", "-N2", "--exclusive", "--partition=high")
    other.until("COMPLETED", timeout=180)
    job.until("COMPLETED", timeout=300)
    assert int(job.facts()["Restarts"]) == 1
    assert "told to end" in job.log
    assert job.log.count("begins at 0\n") == 1
    assert SUM in job.log
    assert seen(shared) == ONCE


def test_a_killed_rank_ends_the_job(slurm, shared, hosts):
    job = slurm.submit(shared, counted(0.2, "SIGUSR1"), *FOUR, "--no-requeue")
    job.until_says("begins at 0")
    number, host = (shared / "pid-3").read_text().split()
    began = time.monotonic()
    hosts.run(host, "kill", "-9", number)
    job.until("FAILED", timeout=30)
    assert time.monotonic() - began < 15
    assert job.facts()["ExitCode"] != "0:0"


def test_a_node_without_power(slurm, shared, hosts):
    """Slurm starts the job again by itself; it continues from the last checkpoint."""
    body = REQUEUED.format(run=counted(0.1, "SIGUSR1"))
    job = slurm.submit(shared, body, *FOUR, "--requeue", "--time=10")
    job.until_says("begins at 0")
    time.sleep(2)
    slurm("scancel", "--signal=USR1", "--batch", job.number)
    job.until_says("begins at ", times=2, timeout=300)
    time.sleep(1)
    hosts.power_off("node2")
    job.until("PENDING", "COMPLETING", timeout=300)
    hosts.power_on("node2")
    slurm.join("node2")
    job.until("COMPLETED", timeout=180)
    begun = [int(line.split()[-1]) for line in job.log.splitlines() if "begins at" in line]
    assert begun[0] == 0
    assert begun[1] == begun[2] > 0, job.log
    assert SUM in job.log
    assert set(seen(shared)) == set(ONCE)


def test_an_array(slurm, shared):
    body = f"{RUN} -n 1 {PROGRAM} $((SLURM_ARRAY_TASK_ID * 10)) 0 SIGTERM"
    for task in (1, 2, 3):
        (shared / f"{task}").mkdir()
    job = slurm.submit(shared, f"cd $SLURM_ARRAY_TASK_ID\n{body}", "-n1", "--array=1-3")
    job.until("COMPLETED")
    assert len(job.states()) == 3
    sums = sorted(line for line in job.log.splitlines() if line.startswith("the sum is"))
    assert sums == ["the sum is 190", "the sum is 435", "the sum is 45"]


def test_a_failing_job_is_failed(slurm, shared):
    (shared / "fails.py").write_text(
        "import mpistrat as ms\n"
        "s = ms.MirroredStrategy()\n"
        "if s.run(lambda: ms.get_replica_context().replica_id_in_sync_group).local == 3:\n"
        "    raise ValueError('the last rank')\n"
        "s.run(lambda: ms.get_replica_context().all_reduce('sum', 1))\n"
    )
    job = slurm.submit(shared, f"{RUN} fails.py", *FOUR)
    job.until("FAILED")
    assert job.facts()["ExitCode"] == "1:0", job.story()
    assert "the last rank" in job.log


def test_what_was_cancelled_stays_ended(slurm, shared):
    body = REQUEUED.format(run=counted(0.2, "SIGUSR1", "SIGTERM"))
    job = slurm.submit(shared, body, *FOUR, "--requeue")
    job.until_says("begins at 0")
    slurm("scancel", job.number)
    job.until("CANCELLED", timeout=30)
    slurm.until_idle()
    time.sleep(5)
    assert job.states() == ["CANCELLED"]
    assert job.log.count("begins at") == 1
