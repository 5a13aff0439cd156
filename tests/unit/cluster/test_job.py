"""What a batch system tells of its job, and how it is asked."""

from __future__ import annotations

import time

import pytest

from mpistrat.cluster import batch_job

SQUEUE = ["squeue", "-h", "-j", "7", "-O", "EndTime"]
QSTAT = """Job Id: 12.pbs
    Job_Name = train
    resources_used.walltime = 00:10:02
    Resource_List.ncpus = 4
    Resource_List.walltime = 02:30:15
    stime = Sun Nov 22 15:00:00 2026
"""


def answers(words, text):
    def asked(given):
        assert given == words
        return text

    return asked


def test_slurm_tells_it_in_the_environment_and_is_not_asked():
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}
    assert batch_job.get_end_time(env, answers(None, "")) == 1700000000.0


def test_squeue():
    when = time.mktime((2026, 11, 22, 16, 30, 0, 0, 0, -1))
    asked = answers(SQUEUE, "2026-11-22T16:30:00           \n")
    assert batch_job.get_end_time({"SLURM_JOB_ID": "7"}, asked) == when


@pytest.mark.parametrize("text", ["N/A", "NONE", "Unknown\n"])
def test_a_job_without_an_end(text):
    assert batch_job.get_end_time({"SLURM_JOB_ID": "7"}, answers(SQUEUE, text)) is None


def test_an_answer_that_is_no_time():
    with pytest.raises(OSError, match="squeue answered 'tomorrow'"):
        batch_job.get_end_time({"SLURM_JOB_ID": "7"}, answers(SQUEUE, "tomorrow"))


def test_qstat():
    when = time.mktime((2026, 11, 22, 17, 30, 15, 0, 0, -1))
    assert (
        batch_job.get_end_time({"PBS_JOBID": "12.pbs"}, answers(["qstat", "-f", "12.pbs"], QSTAT))
        == when
    )
    none = QSTAT.replace("Resource_List.walltime", "Resource_List.x")
    assert batch_job.get_end_time({"PBS_JOBID": "12.pbs"}, lambda words: none) is None
    with pytest.raises(OSError, match="no stime"):
        batch_job.get_end_time({"PBS_JOBID": "12.pbs"}, lambda words: QSTAT.replace("stime", "x"))


def test_outside_of_a_batch_job_nobody_is_asked():
    assert batch_job.get_end_time({}, answers(None, "")) is None
    assert batch_job.get_job_id({}) == ""
    assert batch_job.get_job_state({}, answers(None, "")) == ""


def test_the_real_commands_by_stand_ins(tmp_path, monkeypatch):
    for name, text in [
        ("squeue", "echo 2026-11-22T16:30:00"),
        ("qstat", "echo no such job >&2; exit 3"),
    ]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert batch_job.get_end_time({"SLURM_JOB_ID": "7"}) is not None
    with pytest.raises(OSError, match="qstat ended with 3: no such job"):
        batch_job.get_end_time({"PBS_JOBID": "12.pbs"})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="squeue"):
        batch_job.get_end_time({"SLURM_JOB_ID": "7"})


def test_a_state():
    text = "JobId=7 JobName=x UserId=u(1) JobState=CANCELLED Reason=None"
    assert batch_job.get_job_state({"SLURM_JOB_ID": "7"}, lambda words: text) == "CANCELLED"


def test_no_scontrol_as_in_a_container(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert batch_job.get_job_state({"SLURM_JOB_ID": "7"}) == ""


@pytest.mark.parametrize(("text", "count"), [("3", 3), ("", 0), ("x", 0)])
def test_restarts(text, count):
    assert batch_job.get_restart_count({"SLURM_RESTART_COUNT": text}) == count


CONFIG = """Configuration data as of 2026-01-01T00:00:00
KillOnBadExit           = 0
KillWait                = 10 sec
"""


def test_the_kill_wait_of_slurm():
    env = {"SLURM_JOB_ID": "7"}
    assert batch_job.get_kill_wait(env, answers(["scontrol", "show", "config"], CONFIG)) == 10.0
    assert batch_job.get_kill_wait(env, lambda words: "slurm_load_ctl_conf error") is None
    assert batch_job.get_kill_wait({"PBS_JOBID": "12.pbs"}) is None

    def absent(words):
        raise FileNotFoundError(words[0])

    assert batch_job.get_kill_wait(env, absent) is None
