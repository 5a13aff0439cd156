"""Programs that a rank starts inherit the launcher's variables, and are no ranks."""

from __future__ import annotations

import os
import sys

import pytest

from mpistrat import config
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job
from mpistrat.launch.run import build_rank_command

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(config.launched_by() is not None, reason="this process is a rank"),
]

CHILD = """
import os, sys
import mpistrat as ms

strategy = ms.MirroredStrategy()
total = strategy.all_reduce("sum", 1.0)
size = strategy.num_replicas_in_sync
os.write(1, f"child of {sys.argv[1]} alone, {total} {size}\\n".encode())
"""
PARENT = """
import os, subprocess, sys, time
import mpistrat as ms

how, child = sys.argv[1:]
strategy = ms.MirroredStrategy()
size, rank = strategy.num_replicas_in_sync, strategy.rank
assert strategy.all_reduce("sum", 1.0) == size
words, env = [sys.executable, child, str(rank)], dict(os.environ)
if how == "alone":
    env["MPISTRAT_RANKS"] = "1"
elif how == "shell":
    words = ["sh", "-c", f"exec 2>&1; {' '.join(words)}; exit 1"]
elif how == "runner":
    words[1:1] = ["-m", "mpistrat.launch.rank"]
elif how == "orphan":
    words = ["sh", "-c", f"( sleep 0.5; {' '.join(words)}; echo >child-{rank}.ended ) >&2 &"]
if how != "rank 0" or rank == 0:
    code = subprocess.run(words, env=env).returncode
    while how == "orphan" and not os.path.exists(f"child-{rank}.ended"):
        time.sleep(0.05)
    os.write(1, f"code {code}\\n".encode())
assert strategy.all_reduce("sum", 1.0) == size
os.write(1, b"parent goes on\\n")
"""
REFUSED = "StrategyError: this process (pid "


def job(tmp_path, how, size, runner):
    for name, text in (("parent.py", PARENT), ("child.py", CHILD)):
        (tmp_path / name).write_text(text)
    program = [str(tmp_path / "parent.py"), how, str(tmp_path / "child.py")]
    words = build_rank_command(program, False) if runner else [sys.executable, *program]
    with (tmp_path / "printed").open("wb") as output:
        outcome = run_job(find_launcher()[0].build_command(size, words), 240, output, tmp_path)
    printed = (tmp_path / "printed").read_text()
    assert (outcome.code, outcome.has_timed_out) == (0, False), printed
    assert printed.count("parent goes on") == size
    return printed


RUNNER = pytest.mark.parametrize("runner", [False, True], ids=["mpiexec", "runner"])


@RUNNER
@pytest.mark.parametrize(
    "how",
    [
        "on each rank",
        "rank 0",
        *(pytest.param(w, marks=pytest.mark.mpi) for w in ("shell", "runner")),
    ],
)
def test_a_program_that_a_rank_starts_is_refused_at_once(tmp_path, how, runner):
    children = 1 if how == "rank 0" else 2
    printed = job(tmp_path, how, 2, runner)
    assert (printed.count(REFUSED), printed.count("code 1")) == (children, children), printed
    assert "was started by rank 0 of a job (pid" in printed
    assert 'env={**os.environ, "MPISTRAT_RANKS": "1"}' in printed


def test_so_is_one_whose_parent_has_ended(tmp_path):
    assert job(tmp_path, "orphan", 2, runner=False).count(REFUSED) == 2


@RUNNER
def test_with_a_variable_it_runs_alone(tmp_path, runner):
    printed = job(tmp_path, "alone", 2, runner)
    for rank in (0, 1):
        assert f"child of {rank} alone, 1.0 1" in printed
    assert printed.count("code 0") == 2


def test_that_of_the_only_rank_runs_alone(tmp_path):
    assert "child of 0 alone, 1.0 1" in job(tmp_path, "inherited", 1, runner=False)


ENV = {"PMI_RANK": "1", "PMI_SIZE": "2", "_MPISTRAT_RANK": "1 50 40"}


@pytest.mark.parametrize(
    ("env", "processes", "session", "is_child"),
    [
        (ENV, {99: ("python", 50), 50: ("python", 7), 7: ("prted", 1)}, 40, True),
        (ENV, {99: ("python", 60), 60: ("sh", 50), 50: ("python", 7)}, 99, True),
        (ENV, {99: ("python", 1), 1: ("init", 0)}, 40, True),  # the parent has ended
        (ENV, {99: ("python", 1), 1: ("init", 0)}, 41, False),  # started by a daemon
        (ENV, {99: ("python", 98), 98: ("hydra_pmi_proxy", 50), 50: ("python", 7)}, 40, False),
        (ENV, {99: ("python", 98), 98: ("slurmstepd", 1), 1: ("init", 0)}, 40, False),
        (ENV | {"_MPISTRAT_RANK": "1 99 40"}, {99: ("python", 7)}, 40, False),  # os.execv
        (ENV | {"_MPISTRAT_RANK": "1 50"}, {99: ("python", 50), 50: ("python", 7)}, 40, False),
        ({"_MPISTRAT_RANK": "1 50 40"}, {99: ("python", 50), 50: ("python", 7)}, 40, False),
        ({"PMI_RANK": "1"}, {99: ("python", 98), 98: ("sh", 7), 7: ("prted", 1)}, 40, False),
    ],
)
def test_whose_child_a_process_is(monkeypatch, env, processes, session, is_child):
    monkeypatch.setattr(config, "_marked_pids", [])
    monkeypatch.setattr(config, "_name_and_parent", processes.get)
    monkeypatch.setattr(os, "getpid", lambda: 99)
    monkeypatch.setattr(os, "getsid", lambda pid: session)
    assert config.parent_rank(env) == ((1, 50, 40) if is_child else None)


def test_what_a_launcher_sets_is_forgotten_and_nothing_else():
    kept = {"OMPI_MCA_btl": "self", "PMIX_MCA_gds": "hash", "SLURM_JOB_ID": "7", "HOME": "/root"}
    kept |= {
        "MPISTRAT_RANKS": "1",
        "MPISTRAT_NAN": "raise",
        "PRTE_MCA_x": "1",
        "OMP_NUM_THREADS": "2",
    }
    env = kept | {
        "OMPI_COMM_WORLD_SIZE": "2",
        "PMIX_RANK": "0",
        "PMI_FD": "9",
        "HYDI_CONTROL_FD": "7",
    }
    env |= {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "MPI_LOCALNRANKS": "2", "PALS_RANKID": "0"}
    env |= {"MPISTRAT_RECORD": "x", "_MPISTRAT_RANK": "0 1 1", "OMPI_MCA_num_procs": "2"}
    config.forget_launcher(env)
    assert env == kept
