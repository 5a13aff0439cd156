"""Jobs of the example on a real Slurm, as users start them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

WHO = (
    "from mpi4py import MPI; import os, numpy as np; c = MPI.COMM_WORLD; "
    "x = c.allreduce(1); n = c.Split_type(MPI.COMM_TYPE_SHARED).size; "
    "os.write(1, b'rank %d of %d, %d here, %s\\n' % "
    "(c.rank, x, n, MPI.Get_processor_name().encode()))"
)
EVERYBODY = sorted(f"rank {r} of 4, 2 here, node{r // 2 + 1}" for r in range(4))


def ranks(text):
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


def test_two_nodes_by_srun_and_by_mpirun(slurm, shared, pmi):
    (shared / "who.py").write_text(WHO)
    job = slurm.submit(
        shared,
        f"srun -K1 --mpi={pmi} {sys.executable} who.py; echo; mpirun {sys.executable} who.py",
        "-N2",
        "--ntasks-per-node=2",
    )
    job.until("COMPLETED")
    by_srun, by_mpirun = job.log.split("\n\n")
    assert ranks(by_srun) == EVERYBODY
    assert ranks(by_mpirun) == EVERYBODY


HALF = ["-N2", "--ntasks-per-node=2"]
RUN = f"{sys.executable} -m mpistrat run"


def lines(job, start):
    return [line for line in job.log.splitlines() if line.startswith(start)]


class TestRun:
    """`mpistrat run` in an allocation."""

    def test_it_takes_srun_and_all_tasks(self, slurm, shared, pmi):
        (shared / "who.py").write_text(WHO)
        job = slurm.submit(shared, f"{RUN} who.py; echo code $?", *HALF)
        job.until("COMPLETED")
        [call] = lines(job, "mpistrat: ")
        assert f" srun --mpi={pmi} -K1 -X --export=ALL --nodes=2 --ntasks=4 " in call
        assert ranks(job.log) == EVERYBODY
        assert "code 0" in job.log
        assert sorted(path.name for path in shared.iterdir()) == ["job.sh", "log", "who.py"]

    def test_mpiexec_on_chosen_nodes(self, slurm, shared):
        (shared / "who.py").write_text(WHO)
        body = "\n".join(
            f"{RUN} --launcher mpiexec {words} who.py; echo code $?"
            for words in ("", "--nodes 1", "--per-node 1 --bind none")
        )
        job = slurm.submit(shared, body, *HALF)
        job.until("COMPLETED")
        assert job.log.count("code 0") == 3, job.log
        every, one, spread = job.log.split("code 0")[:3]
        assert ranks(every) == EVERYBODY
        assert ranks(one) == [f"rank {r} of 2, 2 here, node1" for r in range(2)]
        assert ranks(spread) == [f"rank {r} of 2, 1 here, node{r + 1}" for r in range(2)]

    def test_words_for_the_launcher_files_and_labels(self, slurm, shared):
        (shared / "who.py").write_text(WHO)
        body = f"{RUN} --label --output-dir out who.py -- --distribution=cyclic --cpu-bind=none"
        job = slurm.submit(shared, body, *HALF)
        job.until("COMPLETED")
        assert lines(job, "[") == ["[0@node1] rank 0 of 4, 2 here, node1"]
        found = [(shared / "out" / f"rank-{r}.txt").read_text() for r in range(4)]
        assert found == [f"rank {r} of 4, 2 here, node{r % 2 + 1}\n" for r in range(4)]

    def test_the_code_that_ranks_agree_on_comes_from_another_node(self, slurm, shared):
        (shared / "leaves.py").write_text(
            "import sys, mpistrat as ms; ms.MirroredStrategy(); sys.exit(42)"
        )
        body = f"MPISTRAT_RECORD=kept {RUN} leaves.py; echo code $?"
        job = slurm.submit(shared, body, "-N2", "--ntasks-per-node=1")
        job.until("COMPLETED")
        assert "code 42" in job.log
        assert (shared / "kept").read_text().strip() == "42"

    def test_from_the_head_through_salloc(self, slurm, shared):
        (shared / "who.py").write_text(WHO)
        done = slurm.command("salloc", *HALF, *RUN.split(), "who.py", cwd=shared)
        assert done.returncode == 0, done.stderr
        assert ranks(done.stdout) == EVERYBODY

    def test_a_shell_of_srun_is_no_rank(self, slurm, shared, pmi):
        (shared / "who.py").write_text(WHO)
        inside = f"cd {shared} && timeout 60 {RUN} -n 2 who.py"
        words = f"srun -N1 -c2 --pty --mpi={pmi} bash -c '{inside}'"
        done = slurm.command("script", "-qec", words, "/dev/null", cwd=shared)
        assert done.returncode == 0, done.stdout
        assert " --overlap " in done.stdout
        assert "rank 1 of 2, 2 here" in done.stdout

    def test_a_rank_is_no_shell(self, slurm, shared, pmi):
        done = slurm.command("srun", "-n2", f"--mpi={pmi}", *RUN.split(), "x.py", cwd=shared)
        assert done.returncode
        assert "this process already is one rank of a job (srun started it)" in done.stderr

    def test_variables_that_an_editor_has_left_are_ignored(self, slurm, shared):
        (shared / "who.py").write_text(WHO)
        left = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2"}
        left |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
        done = slurm.command(*RUN.split(), "-n", "2", "who.py", cwd=shared, env=left)
        assert done.returncode == 0, done.stderr
        assert ranks(done.stdout) == [f"rank {r} of 2, 2 here, head" for r in range(2)]


def test_what_has_started_a_process(slurm, shared, pmi):
    """Slurm's variables are in the batch script too, and in what MPI's own launcher starts."""
    (shared / "tell.py").write_text(
        "from mpistrat.config import launched_by\nprint('by', launched_by(), flush=True)"
    )
    tell = f"{sys.executable} tell.py"
    body = "\n".join([tell, f"srun -n1 {tell}", f"srun -n1 --overlap --mpi={pmi} {tell}"])
    job = slurm.submit(shared, f"{body}\nmpiexec -n 1 {tell}", *HALF)
    job.until("COMPLETED")
    by_hand, *by_srun, by_mpiexec = [line[3:] for line in lines(job, "by ")]
    assert (by_hand, by_srun) == ("None", ["srun", "srun"]), job.log
    assert by_mpiexec == ("mpiexec of Open MPI" if pmi == "pmix" else "srun"), job.log


def test_doctor_in_an_allocation(slurm, shared):
    words = ["salloc", *HALF, sys.executable, "-m", "mpistrat", "doctor", "--json", str(shared)]
    done = slurm.command(*words, cwd=shared)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["command"].startswith("srun --mpi=")
    assert sorted(rank["host"] for rank in told["ranks"]) == ["node1"] * 2 + ["node2"] * 2
    assert told["sizes"] == [4]
    assert told["inside"]
    assert told["between"]
    assert list(shared.iterdir()) == []


def wrong(done):
    return {one["name"]: one["text"] for one in json.loads(done.stdout)["findings"] if one["mend"]}


def test_doctor_finds_what_is_wrong(slurm, shared):
    """Another PMI, threads of BLAS, a directory of each node, and a rank that others wait for."""
    doctor = ["salloc", *HALF, sys.executable, "-m", "mpistrat", "doctor", "--json"]
    words = [*doctor, "--launcher", "srun --mpi=none", str(shared), "/run"]
    done = slurm.command(*words, cwd=shared, env={"OMP_NUM_THREADS": "64"})
    assert done.returncode == 1, done.stdout + done.stderr
    found = wrong(done)
    assert found["ranks"].startswith("4 jobs of 1")
    assert "x 64 BLAS threads" in found["cores"] or "share" in found["cores"]
    assert "/run is not the same directory" in found["directories"]
    assert "KillOnBadExit is 0" in found["a rank that dies"]


def test_doctor_finds_a_node_without_the_environment(slurm, shared, hosts):
    doctor = ["salloc", *HALF, sys.executable, "-m", "mpistrat", "doctor", "--json", str(shared)]
    assert hosts.run("node2", "mount", "-t", "tmpfs", "none", sys.prefix).returncode == 0
    try:
        done = slurm.command(*doctor, cwd=shared)
    finally:
        hosts.run("node2", "umount", sys.prefix)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot be started on node2" in wrong(done)["start"]


def test_a_drill_on_one_node_of_an_allocation(slurm, shared):
    program = Path(__file__).parents[1] / "faults" / "programs" / "drilled_job.py"
    program = f"{program} --steps 150 --pause 0.1"  # asleep: it takes as long on a busy machine
    body = f"{sys.executable} -m mpistrat drill -n 2 --kills 1 {program}; echo code $?"
    job = slurm.submit(shared, body, *HALF)
    job.until("COMPLETED", timeout=300)
    assert "\ncode 0" in job.log, job.log
    assert "after 1 interruption equal to the reference run to the bit" in job.log


def test_programs_start_without_mpistrat_run(slurm, shared, pmi):
    """The example, by the batch system's own words; the same answer as on one rank."""
    digits = f"{sys.executable} -m mpistrat.examples.digits --epochs 2"
    body = "export OMP_NUM_THREADS=1\n"  # a thread for each core in every rank would take a minute
    body += f"srun -K1 --mpi={pmi} {digits}; mpirun {digits}; mpirun -n 1 {digits}"
    job = slurm.submit(shared, body, *HALF)
    job.until("COMPLETED")
    last = [line.split("   ")[:-1] for line in lines(job, "epoch 2 of 2")]
    assert len(last) == 3, job.log
    assert last[0] == last[1] == last[2]
    assert [line.split()[-1] for line in lines(job, "ranks")] == ["4", "4", "1"]


def test_ranks_that_do_not_find_each_other_do_not_start(slurm, shared):
    (shared / "alone.py").write_text("import mpistrat as ms; ms.MirroredStrategy(); print('in')")
    words = ["srun", "-n2", "--mpi=none", sys.executable, "alone.py"]
    done = slurm.command(*words, cwd=shared)
    assert done.returncode == 1, done.stderr
    assert "2 ranks were started, but MPI says that this job has 1" in done.stderr
    assert not done.stdout
    done = slurm.command(*words, cwd=shared, env={"MPISTRAT_RANKS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["in", "in"]


def test_an_interrupt_ends_the_job_at_once(slurm, shared):
    (shared / "sleeps.py").write_text(
        "import time, mpistrat as ms; ms.MirroredStrategy(); print('in', flush=True)\n"
        "time.sleep(99)"
    )
    body = f"timeout --foreground --preserve-status -s INT 20 {RUN} sleeps.py; echo code $?"
    job = slurm.submit(shared, body, *HALF)
    job.until("COMPLETED")
    assert job.log.count("in\n") == 4
    assert "code 130" in job.log
