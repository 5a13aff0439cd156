"""Fit a line on every rank: mpi4py alone."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = np.arange(10.0)
y = 3 * x
w = np.zeros(())
comm.Bcast(w, root=0)

for first in range(0, len(x), 4):
    rows = min(4, len(x) - first)
    piece = -(-rows // comm.size)
    lo = first + min(rows, comm.rank * piece)
    hi = first + min(rows, (comm.rank + 1) * piece)
    local_x, local_y = x[lo:hi], y[lo:hi]
    # The sum and the number of examples are sent together; only then is it divided.
    total = np.array([(w * local_x - local_y) @ local_x, hi - lo])
    comm.Allreduce(MPI.IN_PLACE, total, op=MPI.SUM)
    w -= 0.01 * total[0] / total[1]

if comm.rank == 0:
    print(float(w))
