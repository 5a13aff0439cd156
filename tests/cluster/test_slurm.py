"""Jobs of the example on a real Slurm, as users start them."""

from __future__ import annotations

import sys

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
