"""A handler of a signal that raises, such as a time limit, on one rank: never amid a call."""

from __future__ import annotations

import sys

import pytest

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

PROGRAM = """
import random, signal, sys, time
import numpy as np
import mpistrat as ms

class TimeIsUp(Exception):
    pass

def handle(*_):
    raise TimeIsUp("of this rank")

if sys.argv[2] == "before":
    signal.signal(signal.SIGALRM, handle)
strategy = ms.MirroredStrategy()
signal.signal(signal.SIGALRM, handle)
with strategy.scope():
    v = ms.Variable(np.zeros(20_000))

def step():
    context = ms.get_replica_context()
    context.all_reduce("sum", np.ones(200_000))
    return context.all_reduce("sum", {"a": np.ones(3), "b": np.ones(9000, "f4")})

random.seed(int(sys.argv[1]))
strategy.run(step)
if strategy.rank == 1:
    signal.setitimer(signal.ITIMER_REAL, 0.05 + 0.1 * random.random())
while True:
    strategy.run(step)
    v.assign(np.ones(20_000))
    strategy.check_same(v)
"""

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(launched_by() is not None, reason="this process is a rank"),
]


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.mpi) for seed in range(3, 12))]
)
def test_the_exception_ends_the_program_in_order(tmp_path, seed):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, str(tmp_path / "program.py"), str(seed), "before" * (seed % 2)]
    with (tmp_path / "printed").open("wb") as output:
        outcome = run_job(find_launcher()[0].build_command(2, words), 120, output)
    printed = (tmp_path / "printed").read_text()
    assert (outcome.code, outcome.has_timed_out) == (1, False), printed
    assert printed.count("TimeIsUp: of this rank") == 1, printed
    assert "on rank 1 of 2" in printed
    assert "aborting the job" not in printed
    assert "runcated" not in printed
