"""A rank fails after the handshake, while the others are in MPI: the job ends and says why."""

from __future__ import annotations

import sys

import pytest

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

LONGEST = 240
pytestmark = [
    pytest.mark.timeout(LONGEST + 30),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]

# Memory that ends while the ranks tell one another why a call has failed.
TELLING = """
import numpy as np
import mpistrat as ms
from mpistrat.lockstep import mismatch

strategy = ms.MirroredStrategy()

def step():
    ctx = ms.get_replica_context()
    if ctx.replica_id_in_sync_group == 0:
        mismatch.shorten_text = lambda text: bytes(2**62)
        raise ValueError('why')
    ctx.all_reduce("sum", np.ones(3))

strategy.run(step)
"""
PROGRAM = """
import resource, sys
import numpy as np
import mpistrat as ms
from mpi4py import MPI

strategy = ms.MirroredStrategy()
strategy._replicas.reducer.node.arena.refused = True  # ranks cannot share memory
value = np.ones(5_000_000)
fold = lambda x: strategy.run(lambda: ms.get_replica_context().all_reduce("max", x))
fold(np.ones(10))
if MPI.COMM_WORLD.rank == 0:
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 60 * 2**20,) * 2)
fold(value)
"""


def test_memory_that_ends_in_the_midst_of_a_call_ends_the_job(tmp_path):
    text = output_of(PROGRAM, tmp_path)
    assert "rank 0 of 2 failed inside all_reduce(MAX, *) float64[5000000]" in text
    assert "Unable to allocate" in text


def test_memory_that_ends_while_ranks_explain_ends_the_job(tmp_path):
    text = output_of(TELLING, tmp_path)
    assert "rank 0 of 2 failed inside run, whose function returned. The other ranks" in text
    assert "MemoryError" in text
    assert "ValueError: why" in text


def output_of(program, tmp_path):
    """Return what a job of two ranks prints; it ends, with code 1."""
    path, said = tmp_path / "train.py", tmp_path / "said"
    path.write_text(program)
    call = find_launcher()[0].build_command(2, [sys.executable, str(path)])
    # Else what threads have reserved is there when no more memory is to be had.
    call = call._replace(env={**call.env, "MALLOC_ARENA_MAX": "1"})
    with said.open("wb") as output:
        outcome = run_job(call, LONGEST, output)
    text = said.read_text(errors="replace")
    assert not outcome.has_timed_out, text
    assert outcome.code == 1, text
    return text
