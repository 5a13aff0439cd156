"""A job that finalizes MPI itself while the watchdogs of two nodes talk to each other."""

from __future__ import annotations

import time

from mpi4py import MPI

from mpistrat.comm.mpi import MPIComm
from mpistrat.watchdog.observer import Limits
from mpistrat.watchdog.watchdog import WatchedBoard

comm = MPI.COMM_WORLD
board = WatchedBoard.open(MPIComm(comm), Limits(0.1, 5.0), 1)
board.enter(1, "barrier()")
comm.Barrier()
board.leave()
time.sleep(0.3)
start = time.perf_counter()
MPI.Finalize()
print(f"finalized: {board.close()} in {time.perf_counter() - start:.3f} s", flush=True)
