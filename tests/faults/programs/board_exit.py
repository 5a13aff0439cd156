"""A job of two nodes that ends a moment after its board was opened, without closing it."""

from __future__ import annotations

import random
import time

from mpi4py import MPI

from mpistrat.comm.mpi import MPIComm
from mpistrat.watchdog.observer import Limits
from mpistrat.watchdog.watchdog import WatchedBoard

comm = MPI.COMM_WORLD
board = WatchedBoard.open(MPIComm(comm), Limits(0.05, 20.0), 1)
board.enter(1, "barrier()")
comm.Barrier()
board.leave()
time.sleep(random.random() * 0.1)
