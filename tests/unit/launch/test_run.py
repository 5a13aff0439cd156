"""`run` from its program to its exit code, with the MPI of this environment."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from mpistrat.cluster.allocation import Allocation
from mpistrat.config import THREAD_VARIABLES
from mpistrat.errors import LaunchError
from mpistrat.launch.mpi_libraries import (
    Command,
    Launcher,
    Library,
    find_launcher,
    recognize_launcher,
    recognize_library,
)
from mpistrat.launch.plan import LOCAL_HOST, LaunchOptions
from mpistrat.launch.process import Outcome, run_job
from mpistrat.launch.roster import EndedRank, Roster
from mpistrat.launch.run import (
    _decide_exit_code,
    _report_ended_ranks,
    _run_watched_job,
    build_rank_command,
    check_outside_of_job,
    describe_mismatch,
    plan_command,
    run,
    split_python_call,
)
from mpistrat.launch.streams import Output

STEPS = {
    "srun": {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1"},
        **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    },
    "mpiexec of Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"},
    "a launcher that speaks PMIx": {"PMIX_RANK": "0"},
    "mpiexec of MPICH or Intel MPI": {"PMI_RANK": "0", "PMI_SIZE": "2"},
    "mpiexec of PALS": {"PALS_RANKID": "0"},
}


def test_a_directory_for_output_that_cannot_be_made(tmp_path):
    (tmp_path / "x.py").touch()
    output = Output(str(tmp_path / "x.py"))
    with pytest.raises(LaunchError, match=r"--output-dir .*x\.py cannot be made: File exists"):
        run(LaunchOptions(1), [str(tmp_path / "x.py")], output=output)


@pytest.mark.parametrize(("launcher", "env"), STEPS.items())
def test_rank_of_a_job_is_refused(launcher, env):
    with (
        mock.patch.dict(os.environ, env, clear=True),
        pytest.raises(LaunchError, match=launcher),
    ):
        check_outside_of_job()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0"},  # a batch script
        # An editor that came by ssh.
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        # `srun --pty --mpi=pmi2 bash`, as recorded.
        {
            **{"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node1"},
            **{"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "43375"},
            **{"PMI_FD": "11", "PMI_RANK": "0", "PMI_SIZE": "1"},
        },
        {  # a shell of salloc
            "SLURM_JOB_ID": "3",
            "SLURM_STEP_NODELIST": "n1",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
        },
    ],
)
def test_plain_shell_and_batch_script_are_not_ranks(env):
    with mock.patch.dict(os.environ, env, clear=True):
        check_outside_of_job()


def test_rank_started_by_the_launcher_here_is_refused(capfd):
    assert run(LaunchOptions(1), ["mpistrat", "run", "-n", "2", "never.py"], is_module=True) == 2
    assert "this process already is one rank of a job" in capfd.readouterr().err


# As an editor leaves them that came by ssh, or a container: launchers believe some of them.
LEFT = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NODELIST": "", "PMI_RANK": ""},
    **{"PBS_JOBID": "7", "PBS_ENVIRONMENT": "PBS_BATCH", "SLURM_CONF": "/etc/slurm.conf"},
}


def test_all_ranks_start_and_the_line_is_printed(tmp_path, capfd, monkeypatch):
    for name, text in LEFT.items():
        monkeypatch.setenv(name, text)
    program = tmp_path / "hëllo world.py"
    program.write_text(
        "import os, sys\nfrom mpi4py import MPI\n"
        "w, words = MPI.COMM_WORLD, [sys.argv[1], sys.warnoptions, sys.flags.optimize]\n"
        "os.write(1, b'rank %d of %d %s\\n' % (w.rank, w.size, str(words).encode()))\n"
    )
    assert run(LaunchOptions(3), ["python", "-u", "-O", "-W", "error", str(program), "--flag"]) == 0
    out, err = capfd.readouterr()
    told = "['--flag', ['error'], 1]"
    assert sorted(out.split("\n"))[-3:] == [f"rank {r} of 3 {told}" for r in range(3)]
    note, line = err.splitlines()[:2]
    some = "PBS_ENVIRONMENT, PBS_JOBID, SLURM_JOB_ID and 2 more"
    assert note == f"mpistrat: note: {some} are set, but this is no allocation; they are ignored"
    assert line.startswith("mpistrat: ")
    assert " OMP_NUM_THREADS=" in line or "OMP_NUM_THREADS" in os.environ


@pytest.mark.parametrize(
    "failure",
    ["raise ValueError('one rank')", pytest.param("raise SystemExit(9)", marks=pytest.mark.mpi)],
)
def test_failure_on_one_rank_ends_a_job_that_waits_for_it(failure, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MPISTRAT_GRACE", "1")
    program = tmp_path / "fails.py"
    program.write_text(
        "from mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank == 1:\n    {failure}\nMPI.COMM_WORLD.Barrier()\n"
    )
    assert run(LaunchOptions(2), [str(program)], timeout=240) not in (0, 124)
    assert "rank 1 of 2 failed, and the others have not come" in capfd.readouterr().err


def ways(*cases, names, by_default):
    """Name the cases; what is not for the default run comes with `-m mpi`."""
    marks = [() if name in by_default else pytest.mark.mpi for name in names]
    together = zip(cases, names, marks, strict=True)
    return [pytest.param(*case, id=name, marks=mark) for case, name, mark in together]


NO_DISK = "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (0, r.RLIM_INFINITY)); "
ONE_DESCRIPTOR = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
try:
    while True:
        last = os.open(os.devnull, os.O_RDONLY)
except OSError:
    os.close(last)
"""


@pytest.mark.parametrize(
    ("body", "code", "told"),
    ways(
        ("", 0, ""),
        (NO_DISK + "sys.exit(5)", 5, "left with exit code 5"),
        (NO_DISK, 0, ""),
        (ONE_DESCRIPTOR, 0, ""),
        ("import sys; sys.exit(5 if rank else 0)", 5, ""),
        ("if rank: raise ValueError('only here')", 1, "ValueError: only here"),
        ("raise ValueError('everywhere')", 1, "on 2 ranks of 2"),
        ("if rank: import no_such_module", 1, "No module named 'no_such_module'"),
        ("import os; os._exit(0)", 70, "mpi"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("MPI.Finalize()", 0, ""),
        names=[
            "end",
            "exit_full",
            "full",
            "one_file",
            "exit",
            "one",
            "all",
            "import",
            "os._exit",
            "interrupt",
            "finalize",
        ],
        by_default=["exit", "one", "os._exit", "interrupt"],
    ),
)
def test_ways_out(body, code, told, tmp_path, capfd):
    program = tmp_path / "leaves.py"
    program.write_text(f"from mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n{body}\n")
    ended = run(LaunchOptions(2), [str(program)], timeout=240)
    # Open MPI's launcher notices by itself that a rank has not left in order.
    assert ended == code or (code == 70 and ended == 1)
    err = capfd.readouterr().err
    assert told in err
    assert err.count("ValueError: ") <= 1  # an exception is printed once


KILLS = """
import os, signal, sys
from pathlib import Path
from mpi4py import MPI

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

launcher = os.getpid()
while parent(launcher) != int(sys.argv[1]):
    launcher = parent(launcher)
os.kill(launcher, int(sys.argv[2]))
os._exit(0)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the launcher in /proc")
@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGSEGV", marks=pytest.mark.mpi)])
def test_a_launcher_that_is_killed_is_told_of_in_one_line(name, tmp_path, capfd):
    program, number = tmp_path / "kills.py", getattr(signal, name)
    program.write_text(KILLS)
    assert (
        run(LaunchOptions(1), [str(program), str(os.getpid()), str(int(number))], timeout=240)
        == 128 + number
    )
    told = [line for line in capfd.readouterr().err.splitlines() if "was ended by" in line]
    assert len(told) == 1
    assert f"mpiexec itself was ended by signal {int(number)} ({name})" in told[0]
    assert "memory" in told[0]


HEAD = """
import mpistrat as ms, sys, threading
s = ms.MirroredStrategy()
rank = int(s.run(lambda: ms.get_replica_context().replica_id_in_sync_group).local)
"""


@pytest.mark.parametrize(
    ("body", "code", "told"),
    ways(
        ("pass", 0, ""),
        ("if rank: sys.exit(5)", 5, ""),
        ("try:\n    sys.exit(2)\nexcept SystemExit:\n    pass", 0, ""),
        (
            "def f():\n    try:\n        sys.exit(2)\n    except SystemExit:\n        pass\nf()",
            0,
            "",
        ),
        ("t = threading.Thread(target=sys.exit, args=(3,))\nt.start()\nt.join()", 0, ""),
        ("if rank: raise ValueError('only here')\ns.run(lambda: 1)", 1, "only here"),
        ("if rank: sys.exit()\ns.run(lambda: 1)", 77, "a collective call under `if rank"),
        (
            "for _ in range(2 + rank):\n    try:\n        s.run(lambda: 1)\n"
            "    except ValueError:\n        pass",
            77,
            "rank 0 has left the program (exit code 0)",
        ),
        (
            "try:\n    if not rank: sys.exit(0)\n    s.run(lambda: 1)\n"
            "except ms.LockstepError:\n    sys.exit(0)",
            77,
            "rank 1 of 2 caught this exception",
        ),
        ("sys.excepthook\nraise KeyError('all')", 1, "on 2 ranks of 2"),
        (
            "from mpi4py import MPI\nc = MPI.COMM_WORLD.Dup()\n"
            "ms.MirroredStrategy(comm=c)\nc.Free()",
            0,
            "",
        ),
        (
            "from mpi4py import MPI\nt = ms.MirroredStrategy(comm=MPI.COMM_WORLD.Dup())\n"
            "if rank: raise ValueError('before its call')\nt.run(lambda: 1)",
            1,
            "before its call",
        ),
        names=[
            *("end", "exit", "caught", "caught deep", "thread", "one", "early"),
            *("swallowed", "swallowed exit", "all", "freed", "two"),
        ],
        by_default=["early", "swallowed"],
    ),
)
def test_ways_out_without_the_runner(body, code, told, tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_GRACE", "600")  # none ends by that of a timer
    program, output = tmp_path / "leaves.py", tmp_path / "output"
    program.write_text(HEAD + body + "\n")
    launcher, _ = find_launcher()
    with output.open("wb") as file:
        outcome = run_job(launcher.build_command(2, [sys.executable, str(program)]), 240, file)
    assert (outcome.code, outcome.has_timed_out) == (code, False), output.read_text()
    assert told in output.read_text()


BLAS = """
import os
import numpy as np
import mpistrat as ms
from threadpoolctl import threadpool_info

strategy = ms.MirroredStrategy()
threads = max(library["num_threads"] for library in threadpool_info())
cores = len(os.sched_getaffinity(0))
total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", threads)).local
assert total <= max(cores, 2), (total, cores)
"""


def test_ranks_without_the_runner_have_no_more_threads_than_cores(tmp_path, monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    program, output = tmp_path / "multiplies.py", tmp_path / "output"
    program.write_text(BLAS)
    launcher, _ = find_launcher()
    with output.open("wb") as file:
        outcome = run_job(launcher.build_command(2, [sys.executable, str(program)]), 240, file)
    said = output.read_text()
    assert (outcome.code, outcome.has_timed_out) == (0, False), said
    assert said.count("MPISTRAT_BLAS_THREADS") <= 1


THREADS = """
import os
import threading
import mpistrat as ms

def told(make):
    try:
        make()
        return "fine"
    except ms.StrategyError as error:
        return str(error)

def work():
    strategy = ms.MirroredStrategy()
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", 1))
    os.write(1, b"worker got %d\\n" % total.local)  # at once: ranks write to one file

worker = threading.Thread(target=work, name="worker")
worker.start()
worker.join()
os.write(1, b"main got %s\\n" % told(lambda: ms.MirroredStrategy().run(lambda: 1)).encode())
"""


@pytest.mark.parametrize("runner", [True, pytest.param(False, marks=pytest.mark.mpi)])
def test_the_ranks_belong_to_the_thread_of_the_first_strategy(runner, tmp_path, capfd):
    program, output = tmp_path / "threads.py", tmp_path / "output"
    program.write_text(THREADS)
    if runner:
        assert run(LaunchOptions(2), [str(program)], timeout=240) == 0
        text = capfd.readouterr().out
    else:
        launcher, _ = find_launcher()
        with output.open("wb") as file:
            assert (
                run_job(launcher.build_command(2, [sys.executable, str(program)]), 240, file).code
                == 0
            )
        text = output.read_text()
    assert text.count("worker got 2") == 2
    assert len(re.findall("main got .*'MainThread'.* belong to 'worker', which made", text)) == 2


@pytest.mark.parametrize(
    ("name", "value", "code", "told"),
    [
        ("NUMBA", "maybe", 1, "MPISTRAT_NUMBA='maybe' cannot be used"),
        # By which the ranks find their nodes, before anything has been compared.
        ("RANKS_PER_NODE", "1", 78, "MPISTRAT_RANKS_PER_NODE: 0 on rank 0; 1 on rank 1"),
    ],
)
def test_an_option_that_one_rank_has_alone_ends_the_job(name, value, code, told, tmp_path):
    program, output = tmp_path / "never.py", tmp_path / "output"
    program.write_text(
        "import os\nfrom mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank: os.environ['MPISTRAT_{name}'] = {value!r}\n"
        "import mpistrat as ms\nms.MirroredStrategy()\nprint('never')\n"
    )
    launcher, _ = find_launcher()
    with output.open("wb") as file:
        outcome = run_job(launcher.build_command(2, [sys.executable, str(program)]), 240, file)
    assert outcome.code == code
    assert told in output.read_text()
    assert "never\n" not in output.read_text()


def test_jobs_of_one_rank_each_are_found_out(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS", "3")
    job = subprocess.run(
        [sys.executable, "-m", "mpistrat.launch.rank", "never.py"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 78
    assert "3 ranks were started, but MPI says that this job has 1" in job.stderr


def test_job_that_takes_too_long_is_ended(tmp_path, capfd):
    program = tmp_path / "sleeps.py"
    program.write_text("import time\ntime.sleep(600)\n")
    assert run(LaunchOptions(2), [str(program)], timeout=1) == 124
    assert "longer than --timeout 1 s" in capfd.readouterr().err


@pytest.mark.mpi
def test_a_rank_that_ends_before_mpi_is_waited_for_no_longer_than_for_others(tmp_path, monkeypatch):
    """MPICH's launcher does not see it; the others are in MPI_Init."""
    first = "'PMI_RANK' in os.environ and os.environ['PMI_RANK'] or os.environ.get('PMIX_RANK')"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif ({first}) == '1':\n    os._exit(0)\n"
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("MPISTRAT_TIMEOUT", "3")
    (tmp_path / "job.py").write_text("")
    assert run(LaunchOptions(ranks=2), [str(tmp_path / "job.py")], timeout=240) not in (0, 124)


def test_a_job_runs_where_nothing_can_be_said(tmp_path):
    """As where the disk of the log is full."""
    script = tmp_path / "job.py"
    script.write_text(f"open({str(tmp_path / 'done')!r}, 'w').close()")
    words = [sys.executable, "-m", "mpistrat", "run", "-n", "1", str(script)]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        assert subprocess.run(words, stderr=full).returncode == 0
    assert (tmp_path / "done").exists()


@pytest.mark.job
def test_a_job_in_a_directory_with_names_of_modules(tmp_path, monkeypatch):
    """As by ``python``, where the directory of the script alone is looked into; and TMPDIR=."""
    here, there = tmp_path / "here", tmp_path / "there"
    for each in (here, there):
        each.mkdir()
    (here / "random.py").write_text("raise SystemExit(5)")
    (here / "beside.py").write_text("")
    (there / "helper.py").write_text("")
    (there / "train.py").write_text(
        "import importlib.util, os, helper, random\nos.chdir('/')\n"
        "assert importlib.util.find_spec('beside') is None\nrandom.random()\n"
    )
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", ".")
    assert run(LaunchOptions(2), [str(there / "train.py")]) == 0


def test_a_directory_that_cannot_be_removed_does_not_fail_the_job(tmp_path, monkeypatch):
    """As on NFS while somebody has one of its files open."""

    def busy(*args, **more):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "rmdir", busy)
    command = Command(("/bin/sh", "-c", "printf 0 > $MPISTRAT_RECORD"), {})
    for place in (LOCAL_HOST, Allocation("", ("n1", "n2"), (1, 1))):
        assert _run_watched_job(command, "", place, 1, None) == 0
    monkeypatch.undo()


def test_module_is_run_as_python_does():
    assert build_rank_command(["pkg.mod", "a"], is_module=True)[1:] == [
        "-m",
        "mpistrat.launch.rank",
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
        ("something else", "MPICH Version: 5.0.2", "may belong to different"),
        ("\nNo home directory\nx", "Open MPI v5.0.2", "--version says: No home directory)"),
        (
            "HYDRA build details:\n Version: 4.0.2",
            "MVAPICH Version: 3.0",
            "may belong to different MPIs",
        ),
    ],
)
def test_doubtful_pairs_are_remarked(launcher, loaded, note):
    pair = (
        Launcher("mpiexec", recognize_launcher(launcher), launcher),
        Library(recognize_library(loaded), loaded, ""),
    )
    assert (note in describe_mismatch(*pair)) if note else describe_mismatch(*pair) == ""


@pytest.mark.parametrize(("ranks", "code"), [("", 1), ("1", 0)])
def test_a_rank_that_finds_no_other_is_refused_unless_it_is_meant(ranks, code, tmp_path):
    program = tmp_path / "alone.py"
    program.write_text("import mpistrat as ms; ms.MirroredStrategy(); print('in')")
    # As `srun --mpi=none` starts two of it.
    env = {
        **os.environ,
        "SLURM_STEP_NUM_TASKS": "2",
        **({"MPISTRAT_RANKS": ranks} if ranks else {}),
    }
    words = [sys.executable, str(program)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    assert ("2 ranks were started" in done.stderr) == (code == 1)


FOUND = (
    Launcher("mpiexec", recognize_launcher("HYDRA build details:"), "5.0"),
    Library(recognize_library("MPICH Version: 5.0"), "MPICH Version: 5.0", ""),
)


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_a_full_dev_shm_is_guessed(tmp_path):
    (tmp_path / "x.py").write_text("import mpistrat as ms; ms.MirroredStrategy()")
    words = f"{sys.executable} -m mpistrat run -n 2 {tmp_path / 'x.py'}"
    inner = f"mount -t tmpfs -o size=1m none /dev/shm && {words}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", inner], capture_output=True, text=True)
    if find_launcher()[1].flavour.name == "MPICH":  # Open MPI continues without it
        assert done.returncode, done.stderr
        assert "df -h /dev/shm" in done.stderr


PLACE = Allocation("Slurm", ("n1", "n2"), (2, 2))


def test_an_allocation_that_cannot_be_reached_is_no_hang(monkeypatch):
    monkeypatch.setattr(
        "mpistrat.launch.run.list_srun_plugins", lambda: "srun: fatal: no configuration\n"
    )
    with pytest.raises(LaunchError, match=r"srun: fatal: no configuration.*\n.*unset SLURM_JOB_ID"):
        plan_command(PLACE, LaunchOptions(), ["x"], {})
    monkeypatch.setattr("mpistrat.launch.run.list_srun_plugins", lambda: "")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("mpistrat.launch.run.find_launcher", lambda: FOUND)
    with pytest.raises(LaunchError, match="the 2 hosts of this allocation are reached by srun"):
        plan_command(PLACE, LaunchOptions(), ["x"], {})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    alone = plan_command(Allocation("Slurm", ("n1",), (2,)), LaunchOptions(), ["x"], {})[0]
    assert "SLURM_JOB_ID" not in alone.build_environment()


def test_what_python_is_to_be_told(tmp_path):
    with pytest.raises(LaunchError, match="write the code to a file"):
        run(LaunchOptions(1), ["python", "-c", "print(1)"])
    for program in (["-"], ["python", "-u", "-", "a"]):
        with pytest.raises(LaunchError, match="-: only one rank gets standard input"):
            run(LaunchOptions(1), program)
    (tmp_path / "__main__.py").touch()
    assert run(LaunchOptions(1), [str(tmp_path)], dry_run=True) == 0


def test_the_python_of_a_program(tmp_path):
    assert split_python_call([sys.executable, "-u", "a.py"]) == (["-u"], ["a.py"], False)
    (tmp_path / "python3.9").touch(0o755)
    with pytest.raises(LaunchError, match=f"the ranks run {sys.executable}, .*and not"):
        split_python_call([str(tmp_path / "python3.9"), "a.py"])
    for program in (["python.py", "a"], [str(tmp_path), "a"], ["python3.9"]):
        assert split_python_call(program) == ([], program, False)


def test_hosts_of_a_file(tmp_path, capfd):
    file = tmp_path / "hosts"
    with pytest.raises(LaunchError, match=r"the list of hosts cannot be used: .*hosts"):
        run(LaunchOptions(2), ["x"], is_module=True, hostfile=str(file), dry_run=True)
    file.write_bytes(b"\xff\xfe a b")
    with pytest.raises(LaunchError, match=rf"{file}: .* is not HOST"):
        run(LaunchOptions(2), ["x"], is_module=True, hostfile=str(file), dry_run=True)
    file.write_text("here:2\nthere:2\n")
    assert run(LaunchOptions(), ["x"], is_module=True, hostfile=str(file), dry_run=True) == 0
    assert "here:2,there:2 " in capfd.readouterr().err
    with pytest.raises(LaunchError, match="not inside an allocation of Slurm"):
        run(LaunchOptions(2, launcher="srun"), ["x"], is_module=True)
    with pytest.raises(LaunchError, match="only -n N can tell"):
        run(LaunchOptions(), ["x"], is_module=True)


class TestWhatIsSaidOfAJob:
    @pytest.fixture
    def ranks(self, tmp_path):
        found = Roster(tmp_path, 0)
        yield found
        found.close()

    def test_of_ranks_that_end_alike_there_is_one_line(self, ranks, capfd):
        killed = [EndedRank(rank, 100 + rank, signal.SIGKILL, 0, True) for rank in range(512)]
        _report_ended_ranks(killed, ranks)
        (line,) = capfd.readouterr().err.splitlines()
        assert "ranks 0 (process 100), 1 (process 101), 2 (process 102) and 509 others" in line
        assert "were ended by signal 9 (SIGKILL)" in line
        assert line.endswith("; a launcher ends all others once one has ended")

    def test_those_that_end_otherwise_have_their_own(self, ranks, capfd):
        _report_ended_ranks(
            [EndedRank(1, 101, 0, 3, True), EndedRank(0, 100, signal.SIGSEGV, 0, True)], ranks
        )
        one, two = capfd.readouterr().err.splitlines()
        assert "rank 1 (process 101) ended with exit code 3" in one
        assert "rank 0 (process 100) was ended by signal 11 (SIGSEGV): a crash" in two

    @pytest.mark.parametrize(
        ("number", "said"),
        [
            (signal.SIGALRM, "(SIGALRM): a timer of the program"),
            (signal.SIGPIPE, "(SIGPIPE): it wrote to a pipe"),
            (signal.SIGXCPU, "(SIGXCPU): its limit of processor time (ulimit -t)"),
            (signal.SIGHUP, "(SIGHUP), from outside of the job; look for a limit"),
            (signal.SIGKILL, "(SIGKILL), from outside of the job; look for a lack of memory"),
        ],
    )
    def test_a_signal_is_told_with_where_it_came_from(self, ranks, capfd, number, said):
        _report_ended_ranks([EndedRank(1, 101, number, 0, True)], ranks)
        assert said in capfd.readouterr().err

    @pytest.mark.parametrize("code", [1, 128 + signal.SIGTERM])  # Open MPI's launcher, MPICH's
    def test_a_signal_that_was_handed_on_is_no_kill_by_hand(self, ranks, capfd, code):
        outcome = Outcome(code, False, frozenset({signal.SIGTERM}))
        assert _decide_exit_code(outcome, None, ranks, "mpiexec", None) == code
        (line,) = capfd.readouterr().err.splitlines()
        assert "mpistrat run received signal 15 (SIGTERM) and passed it on" in line
        assert "from outside" not in line

    def test_ranks_that_gave_up_waiting_in_mpi(self, ranks, capfd):
        assert _decide_exit_code(Outcome(signal.SIGALRM, False), 0, ranks, "mpiexec", None) == 75
        assert "waited 1800 s (MPISTRAT_TIMEOUT) for others to end" in capfd.readouterr().err
        kept = Outcome(signal.SIGALRM, False, frozenset({signal.SIGTERM}))
        assert _decide_exit_code(kept, 0, ranks, "mpiexec", None) == signal.SIGALRM

    # With 16 to 18 MB in /dev/shm MPICH's MPI_Init ends with the second, with less by the first.
    @pytest.mark.parametrize("number", [signal.SIGBUS, signal.SIGSEGV])
    @pytest.mark.parametrize("code", [0, 128])  # as MPICH's launcher passes it on, and Open MPI's
    def test_of_a_crash_in_mpi_init_it_is_said_what_to_look_at(self, ranks, capfd, number, code):
        assert (
            _decide_exit_code(Outcome(code + number, False), None, ranks, "mpiexec", None)
            == code + number
        )
        assert "/dev/shm may be full, or small" in capfd.readouterr().err

    def test_nor_is_it_one_if_the_ranks_have_agreed_on_their_exit_code(self, ranks, capfd):
        outcome = Outcome(42, False, frozenset({signal.SIGUSR1}))
        assert _decide_exit_code(outcome, 42, ranks, "mpiexec", None) == 42
        assert not capfd.readouterr().err


LATE = """
import os, signal
import mpistrat as ms
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):
        kill(pid, number)
late = Late()
ms.MirroredStrategy().run(lambda: None)
"""


@pytest.mark.job
def test_a_notice_that_comes_after_the_program_has_ended_does_no_harm(tmp_path):
    program = tmp_path / "late.py"
    program.write_text(LATE)
    assert run(LaunchOptions(2), [str(program)], timeout=240) == 0
