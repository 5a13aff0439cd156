"""Put rows of all ranks together, another number from each: mpi4py alone."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
mine = np.full((comm.rank + 1, 2), comm.rank + 1)
counts = np.zeros(comm.size, np.int64)
comm.Allgather(np.array(len(mine)), counts)
rows = np.empty((counts.sum(), 2), mine.dtype)
comm.Allgatherv(mine, (rows, 2 * counts))
if comm.rank == 0:
    print(float(rows.sum()))
