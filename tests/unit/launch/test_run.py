"""`run` from its program to its exit code, with the MPI of this environment."""

from __future__ import annotations

import sys

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch.flavours import of_launcher, of_library
from mpistrat.launch.mpiexec import Launcher, Library
from mpistrat.launch.run import plan_note, python_program, refuse_inside, run

STEPS = {
    "srun": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    "mpiexec of Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"},
    "a launcher that speaks PMIx": {"PMIX_RANK": "0"},
    "mpiexec of MPICH or Intel MPI": {"PMI_RANK": "0", "PMI_SIZE": "2"},
    "mpiexec of PALS": {"PALS_RANKID": "0"},
}


@pytest.mark.parametrize(("launcher", "env"), STEPS.items())
def test_rank_of_a_job_is_refused(launcher, env):
    with pytest.raises(LaunchError, match=launcher):
        refuse_inside(env)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0"},  # a batch script
        {  # a shell of salloc
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
        },
    ],
)
def test_plain_shell_and_batch_script_are_not_ranks(env):
    refuse_inside(env)


def test_rank_started_by_the_launcher_here_is_refused(capfd):
    assert run(1, ["mpistrat", "run", "-n", "2", "never.py"], module=True) == 2
    assert "this process already is one rank of a job" in capfd.readouterr().err


def test_all_ranks_start_and_the_line_is_printed(tmp_path, capfd):
    program = tmp_path / "hello world.py"
    program.write_text(
        "import os, sys\nfrom mpi4py import MPI\n"
        "w, word = MPI.COMM_WORLD, sys.argv[1].encode()\n"
        "os.write(1, b'rank %d of %d %s\\n' % (w.rank, w.size, word))\n"
    )
    assert run(3, [str(program), "--flag"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.split("\n"))[-3:] == [f"rank {r} of 3 --flag" for r in range(3)]
    assert err.startswith("mpistrat: ")
    assert f"-n 3 {sys.executable} -m mpi4py '{program}' --flag" in err.splitlines()[0]


@pytest.mark.parametrize("failure", ["raise ValueError('one rank')", "raise SystemExit(9)"])
def test_failure_on_one_rank_ends_the_job(failure, tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(
        "from mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank == 1:\n    {failure}\nMPI.COMM_WORLD.Barrier()\n"
    )
    assert run(2, [str(program)], timeout=30) not in (0, 124)


def test_job_that_takes_too_long_is_ended(tmp_path, capfd):
    program = tmp_path / "sleeps.py"
    program.write_text("import time\ntime.sleep(600)\n")
    assert run(2, [str(program)], timeout=3) == 124
    assert "longer than --timeout 3 s" in capfd.readouterr().err


def test_module_is_run_as_python_does():
    assert python_program(["pkg.mod", "a"], module=True)[1:] == [
        "-m",
        "mpi4py",
        "-m",
        "pkg.mod",
        "a",
    ]


@pytest.mark.parametrize(
    ("launcher", "loaded", "note"),
    [
        ("HYDRA build details:\n Version: 5.0.2", "MPICH Version: 5.0.2", ""),
        (
            "HYDRA build details:\n Version: 4.0.2",
            "MPICH Version: 5.0.2",
            "4.0.2 but the library is 5.0.2",
        ),
        ("something else", "MPICH Version: 5.0.2", "may not be one"),
        ("HYDRA build details:\n Version: 4.0.2", "MVAPICH Version: 3.0", "may not be one"),
    ],
)
def test_doubtful_pairs_are_remarked(launcher, loaded, note):
    pair = (
        Launcher("mpiexec", of_launcher(launcher), launcher),
        Library(of_library(loaded), loaded, ""),
    )
    assert (note in plan_note(*pair)) if note else plan_note(*pair) == ""
