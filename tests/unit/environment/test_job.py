"""What the launcher says of the job, without starting MPI."""

from __future__ import annotations

import pytest

from mpistrat.environment import environment, job_size, launched_by


@pytest.mark.parametrize(
    ("env", "size"),
    [
        ({}, None),
        ({"PMI_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_NTASKS": "8"}, None),  # in sbatch without srun there is one rank
        ({"PMI_SIZE": ""}, None),
        ({"PMI_SIZE": "many"}, None),
        ({"PMI_SIZE": "-1"}, None),
        ({"PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, 2),  # mpiexec in an srun of one task
    ],
    ids=str,
)
def test_the_size_of_the_job(env, size):
    assert job_size(env) == size


@pytest.mark.parametrize(
    "env", [{}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, {"PATH": "mpiexec"}]
)
def test_plain_processes_and_batch_scripts_have_no_launcher(env):
    assert launched_by(env) is None


def test_the_environment_is_copied(monkeypatch):
    monkeypatch.delenv("MINE", raising=False)
    copy = environment({"MINE": "1"})
    assert copy["MINE"] == "1"
    assert "MINE" not in environment({})
