"""What the launcher says of the job, without starting MPI."""

from __future__ import annotations

from importlib import metadata

import pytest

from mpistrat.config import child_environment, find_versions, job_size, launched_by


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
    "env",
    [{}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, {"PATH": "mpiexec"}, {"PMI_RANK": ""}],
)
def test_plain_processes_and_batch_scripts_have_no_launcher(env):
    assert launched_by(env) is None


def test_the_environment_is_copied(monkeypatch):
    monkeypatch.delenv("MINE", raising=False)
    copy = child_environment({"MINE": "1"})
    assert copy["MINE"] == "1"
    assert "MINE" not in child_environment({})


def test_versions_are_those_of_the_metadata():
    names = ("numpy", "optree", "mpi4py")
    assert find_versions(names) == {name: metadata.version(name) for name in names}


def test_versions_are_found_as_different_installers_leave_them(tmp_path):
    early, late = tmp_path / "early", tmp_path / "late"
    for path in (
        early / "NumPy-1.26.4.dist-info",
        late / "numpy-2.0.dist-info",  # hidden by the first
        late / "numba-0.56.4.egg-info",  # Debian's
        late / "mpi4py-4.1-py3.11.egg-info",
        late / "optree-0.1+local.dist-info",
        late / "other-1.0.dist-info",
        late / "numpy.libs",
    ):
        path.mkdir(parents=True)
    places = [str(tmp_path / "none.zip"), str(early), str(late)]
    assert find_versions(("numpy", "numba", "mpi4py", "optree", "mpistrat"), places) == {
        **{"numpy": "1.26.4", "numba": "0.56.4"},
        **{"mpi4py": "4.1", "optree": "0.1+local"},
    }
