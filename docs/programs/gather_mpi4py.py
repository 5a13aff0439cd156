"""Put rows of all ranks together, another number from each: mpi4py alone."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
local_rows = np.full((comm.rank + 1, 2), comm.rank + 1)
counts = np.zeros(comm.size, np.int64)
comm.Allgather(np.array(len(local_rows)), counts)
rows = np.empty((counts.sum(), 2), local_rows.dtype)
comm.Allgatherv(local_rows, (rows, 2 * counts))
if comm.rank == 0:
    print(float(rows.sum()))
