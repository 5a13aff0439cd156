"""Processes of torchrun are no ranks of MPI, and the first strategy says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpistrat.config import child_environment, torchrun_size
from mpistrat.launch.plan import LaunchOptions
from mpistrat.launch.run import run

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
MIRRORED = "ms.MirroredStrategy()"
SPLIT = "from mpi4py import MPI\nms.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)"
# As where mpi4py finds no MPI library.
NO_MPI = (
    "from mpistrat.comm import session\n"
    "def library(): raise RuntimeError('cannot load MPI library')\n"
    f"session.library = library\n{MIRRORED}"
)


def alone(make, **variables):
    program = f"import mpistrat as ms\n{make}\nprint('begun')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("make", [MIRRORED, SPLIT, NO_MPI], ids=["world", "self", "no MPI"])
def test_a_process_of_torchrun_is_refused(make):
    code, out, err = alone(make, **TORCHRUN)
    assert (code, out) == (1, "")
    assert "PreflightError: torchrun started 2 processes, but MPI says that this job has 1" in err
    assert "`mpistrat run -n 2 train.py`" in err


@pytest.mark.parametrize(
    "variables",
    [
        TORCHRUN | {"MPISTRAT_RANKS": "1"},  # meant
        TORCHRUN | {"WORLD_SIZE": "1"},  # one of one
        TORCHRUN | {"WORLD_SIZE": "many"},
        {"WORLD_SIZE": "2", "RANK": "1"},  # exported by a shell or an image
    ],
    ids=["meant", "one", "text", "exported"],
)
@pytest.mark.parametrize("make", [MIRRORED, NO_MPI], ids=["world", "no MPI"])
def test_others_are_not(make, variables):
    assert alone(make, **variables)[:2] == (0, "begun\n")


def test_ranks_that_mpistrat_run_starts_inherit_what_torchrun_has_set(tmp_path, monkeypatch):
    for name, value in (TORCHRUN | {"WORLD_SIZE": "3"}).items():
        monkeypatch.setenv(name, value)
    program = tmp_path / "program.py"
    program.write_text(f"import mpistrat as ms\n{MIRRORED}")
    assert run(LaunchOptions(2), [str(program)], timeout=240) == 0


def test_the_size_is_that_of_torchrun():
    assert torchrun_size(TORCHRUN) == 2
    assert torchrun_size({"TORCHELASTIC_RUN_ID": "", "WORLD_SIZE": "2"}) is None
