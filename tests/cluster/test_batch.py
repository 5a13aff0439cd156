"""Scripts that `mpistrat batch` writes, on a real Slurm."""

from __future__ import annotations

import csv
import importlib.util
import re
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
import slurm as scheduler

from mpistrat.launch.batch import render_script
from mpistrat.launch.batch_job import BatchJob
from mpistrat.launch.mpi_libraries import find_library

PROGRAM = str(Path(__file__).parent / "programs" / "leaving.py")


def hand_in(slurm, pmi, shared, program, **fields):
    """Submit the script of a job of 2 nodes x 2 ranks."""
    shape = {"nodes": 2, "per_node": 2, "time": "00:05:00", "pmi": pmi}
    text = render_script(BatchJob(tuple(map(str, program)), **{**shape, **fields}))
    # The virtual hosts share /tmp; what is each one's own is /run.
    (shared / "job.sbatch").write_text(text.replace("/tmp/job-", "/run/job-"))
    words = ["--parsable", "--output=log", "--open-mode=append", "job.sbatch"]
    number = slurm("sbatch", *words, cwd=shared).strip()
    return scheduler.Job(slurm, number, shared)


def test_it_goes_on_after_its_time(slurm, shared, pmi):
    """Twice told that time ends: every step is made once, over three starts of one job."""
    job = hand_in(
        slurm, pmi, shared, (PROGRAM, 100), time="00:01:00", notice=40, checkpoint="my runs"
    )
    job.until("COMPLETED", timeout=300)
    assert int(job.facts()["Restarts"]) >= 1, job.story()
    assert re.findall(r"^step (\d+)$", job.log, re.MULTILINE) == [str(n) for n in range(100)]
    assert job.log.count("begins at 0 on 4\n") == 1


def test_a_chain_is_jobs_one_after_the_other(slurm, shared, pmi):
    job = hand_in(slurm, pmi, shared, (PROGRAM, 30), checkpoint="runs", requeue="chain")
    job.until_says("step 3\n")
    slurm("scancel", "--signal=USR1", job.number)
    job.until("FAILED", timeout=60)
    following = scheduler.Job(slurm, str(int(job.number) + 1), shared)
    following.until("COMPLETED", timeout=300)
    logs = "".join(path.read_text() for path in [shared / "log", *shared.glob("slurm-*.out")])
    assert sorted(map(int, re.findall(r"^step (\d+)$", logs, re.MULTILINE))) == list(range(30))


def test_scancel_stays_ended(slurm, shared, pmi):
    job = hand_in(slurm, pmi, shared, (PROGRAM, 1000), checkpoint="runs")
    job.until_says("step 2\n")
    slurm("scancel", job.number)
    job.until("CANCELLED", timeout=60)
    slurm.until_idle()
    assert job.states() == ["CANCELLED"]


def test_an_array_has_directories_of_its_own(slurm, shared, pmi):
    job = hand_in(
        slurm, pmi, shared, (PROGRAM,), nodes=1, each=("1", "2"), checkpoint="runs", requeue="no"
    )
    job.until("COMPLETED", timeout=300)
    assert {"ends at 1", "ends at 2"} <= set(job.log.splitlines())
    assert sorted(path.name for path in (shared / "runs").iterdir()) == ["0", "1"]


def test_files_and_environment_are_on_each_node_while_it_runs(slurm, shared, pmi, hosts):
    (shared / "data set.txt").write_text("data")
    program = shared / "read.py"
    program.write_text(
        "import sys, mpistrat as ms\nfrom pathlib import Path\n"
        "print(ms.MirroredStrategy().rank, Path(sys.argv[1]).read_text(), sys.prefix)\n"
    )
    venv.create(shared / "env", symlinks=True)
    (site,) = (shared / "env").glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # the packages stay there
    with tarfile.open(shared / "env.tar", "w") as archive:
        archive.add(shared / "env", ".")
    fields = {"stage": ("data set.txt",), "archive": "env.tar"}
    fields |= {
        "directive": (f"--export=ALL,MPI4PY_LIBMPI={find_library().file_path}",)
    }  # stays there too
    job = hand_in(slurm, pmi, shared, (program, "{local}/data set.txt"), **fields)
    job.until("COMPLETED", timeout=180)
    said = re.findall(rf"^\d data /run/job-{job.number}/environment$", job.log, re.MULTILINE)
    assert len(said) == 4, job.story()
    for name in hosts.names:
        assert hosts.run(name, "ls", f"/run/job-{job.number}").returncode != 0


def test_a_scaling_study_of_nodes(slurm, shared, pmi):
    study = ["-m", "mpistrat", "scaling", "--nodes", "1,2", "--per-node", "2", "--output", "s/a"]
    program = ["--", Path(__file__).parents[2] / "docs" / "programs" / "fit_mpistrat.py"]
    job = hand_in(slurm, pmi, shared, (*study, *program), launcher="none")
    job.until("COMPLETED", timeout=300)
    with (shared / "s/a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["nodes"]) for row in rows] == [("2", "1"), ("4", "2")], job.story()


HPC_JOBS = Path(__file__).parents[2] / "hpc_jobs"
# Options of sbatch, words for the program so that it is soon done, what is printed, package.
SCRIPTS = {
    "one_node": ((), ("--epochs=1",), "test accuracy", ""),
    "several_nodes": ((), ("--epochs=1",), "test accuracy", ""),
    "requeue": (("--ntasks-per-node=2",), ("--steps=2", "--every=2"), "step 4 of 4", ""),
    "sweep_array": (("--array=1",), ("--epochs=1",), "test accuracy", ""),
    "sweep_one_job": ((), ("--epochs=1",), "trial 3: rate 0.4, ranks 2: test accuracy", ""),
    "scaling": (("--partition=wide",), ("--epochs=1", "--hidden=32"), "\n    16      4 ", ""),
    "container": ((), ("--epochs=1",), "test accuracy", ""),
    "torch": ((), ("--steps=2",), "held-out loss", "torch"),
    "jax": ((), ("--epochs=1",), "test accuracy", "jax"),
}
# Stands in for Apptainer, which is not here: the program runs outside of any image.
APPTAINER = '#!/bin/bash\n[[ $1 == exec && $2 == mpistrat.sif ]] && shift 2 && exec "$@"\n'


@pytest.mark.parametrize("script", sorted(path.stem for path in HPC_JOBS.glob("*.sbatch")))
def test_scripts_of_hpc_jobs(slurm, shared, pmi, script):
    """As a user submits them, with few steps."""
    shape, words, says, package = SCRIPTS[script]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"NO {package} in this environment")
    (shared / "apptainer").write_text(APPTAINER)
    (shared / "apptainer").chmod(0o755)
    (shared / ".venv").symlink_to(sys.prefix)
    (shared / "hpc_jobs").symlink_to(HPC_JOBS)
    given = f"--export=ALL,SLURM_MPI_TYPE={pmi},PATH={shared}:{slurm.env['PATH']}"
    options = ["--parsable", "--output=log", given, *shape]
    number = slurm("sbatch", *options, f"hpc_jobs/{script}.sbatch", *words, cwd=shared).strip()
    job = scheduler.Job(slurm, number, shared)
    job.until("COMPLETED", timeout=540)
    assert says in job.log, job.story()
