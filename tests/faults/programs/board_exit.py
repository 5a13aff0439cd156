"""A job of two nodes that ends a moment after its board was opened, without closing it."""

from __future__ import annotations

import random
import time

from mpi4py import MPI

from mpistrat.board.board import Board
from mpistrat.board.observer import Limits

comm = MPI.COMM_WORLD
board = Board.on(comm, Limits(0.05, 20.0), comm.Split(comm.rank % 2, comm.rank))
board.enter(1, "barrier()")
comm.Barrier()
board.leave()
time.sleep(random.random() * 0.1)
