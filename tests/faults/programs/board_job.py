"""A job whose ranks call one barrier after the other, until one of them does something else.

``board_job.py CASE RANK``: RANK does CASE before its fourth barrier.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from mpi4py import MPI

from mpistrat.comm.mpi import MPIComm
from mpistrat.watchdog.observer import Limits
from mpistrat.watchdog.watchdog import WatchedBoard

CALLS = 6


def sleeping(board: WatchedBoard) -> None:
    time.sleep(60)  # sleeping


def computing(board: WatchedBoard) -> None:
    while True:
        sum(range(1000))  # computing


def holding(board: WatchedBoard) -> None:
    sleep = ctypes.PyDLL(None).sleep
    sleep(60)  # holding


def killed(board: WatchedBoard) -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # killed


def left(board: WatchedBoard) -> None:
    board.close()
    time.sleep(60)


def declared(board: WatchedBoard) -> None:
    with board.long_operation("evaluate", max_seconds=30):
        time.sleep(5)


def overdue(board: WatchedBoard) -> None:
    with board.long_operation("evaluate", max_seconds=1):
        time.sleep(60)  # overdue


def pausing(board: WatchedBoard) -> None:
    time.sleep(1.6)


def longer(board: WatchedBoard) -> None:
    time.sleep(3.2)


def nothing(board: WatchedBoard) -> None:
    pass


def main() -> None:
    case, culprit = globals()[sys.argv[1]], int(sys.argv[2])
    comm = MPI.COMM_WORLD
    limits = Limits(
        float(os.environ.get("MPISTRAT_WARN", "60")),
        float(os.environ.get("MPISTRAT_TIMEOUT", "1800")),
    )
    # Emulate nodes where the MPI library cannot.
    per_node = int(os.environ.get("BOARD_RANKS_PER_NODE", "0"))
    board = WatchedBoard.open(MPIComm(comm), limits, per_node)
    print(f"rank {comm.rank} is {os.getpid()}", flush=True)
    for number in range(1, CALLS + 1):
        if number == 4 and comm.rank == culprit:
            print(f"fault at {time.time():.3f}", flush=True)
            case(board)
        board.enter(number, f"barrier no. {number}")
        comm.Barrier()  # waiting
        board.leave()
    print(f"rank {comm.rank} is through", flush=True)
    if not board.close():
        comm.Abort(70)


if __name__ == "__main__":
    main()
