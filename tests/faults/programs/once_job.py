"""A job whose first rank works SECONDS for the others, and may take MOST."""

from __future__ import annotations

import os
import sys
import time

from mpi4py import MPI

import mpistrat as ms

if __name__ == "__main__":
    seconds, most = map(float, sys.argv[1:])
    MPI.COMM_WORLD.Barrier()  # to start may take longer
    os.environ |= {"MPISTRAT_TIMEOUT": "2", "MPISTRAT_WARN": "1"}
    ms.once(lambda: time.sleep(seconds), max_seconds=most)
