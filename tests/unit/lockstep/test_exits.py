"""The stand-in for ``sys.exit``; `tests/faults/test_leaving.py` holds the codes of programs."""

from __future__ import annotations

import pickle
import threading

import pytest

import mpistrat as ms
from mpistrat.environment import passes_on_a_code
from mpistrat.lockstep.exits import Exits, NotedExit
from mpistrat.testing import run_ranks


def raised(status):
    with pytest.raises(SystemExit) as found:
        Exits().exit(status)
    return found.value


@pytest.mark.parametrize("status", [None, 0, 3, "text", (1, 2)])
def test_it_is_a_system_exit_like_any_other(status):
    error, usual = raised(status), SystemExit(status)
    assert (error.code, error.args, str(error), repr(error)) == (
        *(usual.code, usual.args, str(usual), repr(usual)),
    )
    error.code = 7
    assert error.code == 7
    assert type(pickle.loads(pickle.dumps(error))) is SystemExit
    assert type(error) is NotedExit


def test_another_thread_raises_what_python_passes_over():
    kinds = []

    def work():
        try:
            Exits().exit(3)
        except SystemExit as error:
            kinds.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kinds == [SystemExit]


FAILED = ValueError("lost")


@pytest.mark.parametrize(
    ("left", "planned"),
    [
        ([(42, SystemExit(42))] * 3, True),
        ([(0, None)] * 3, False),
        ([(42, SystemExit(42)), (42, SystemExit(42)), (3, SystemExit(3))], False),
        ([(42, SystemExit(42)), (0, None), (42, SystemExit(42))], False),
        ([(1, FAILED)] * 3, False),
    ],
)
def test_ranks_that_leave_with_one_code_have_planned_it(left, planned):
    def program(comm):
        lockstep = ms.MirroredStrategy().replicas.lockstep
        return lockstep.leave(*left[comm.rank]).planned

    assert run_ranks(program, 3) == [planned] * 3


HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_ID": "0"}
SRUN |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PMI_RANK": "0"}


@pytest.mark.parametrize(
    ("env", "passes"),
    [
        (SRUN, True),
        (HYDRA, False),
        ({**SRUN, **HYDRA}, False),  # Hydra inside an allocation
        ({"OMPI_COMM_WORLD_SIZE": "2", "MPI_LOCALNRANKS": "2"}, True),
        ({}, False),
    ],
)
def test_launchers_that_pass_on_the_code_of_the_last_rank(env, passes):
    assert passes_on_a_code(env) is passes
