"""A job of a few equal steps, until one rank does something else: ``process_job.py CASE RANK``.

RANK does CASE in or beside the third step, every rank if it is -1; the others continue.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time

STEPS = 5
LENGTH = 9000  # too large to be sent with the handshake

CASE, CULPRIT = sys.argv[1], int(sys.argv[2])
HERE = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def say(text: str) -> None:
    # One write: lines of two ranks must not mix.
    os.write(1, f"{text}\n".encode())


def fault() -> None:
    say(f"fault at {time.time():.3f}")


def kill() -> None:
    fault()
    os.kill(os.getpid(), signal.SIGKILL)


if HERE == CULPRIT and CASE == "killed after the last handshake":
    atexit.register(kill)  # registered first, called last
if HERE == CULPRIT and CASE == "killed before MPI starts":
    kill()
if HERE == CULPRIT and CASE == "import":
    fault()
    import no_such_module  # noqa: F401

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpistrat as ms  # noqa: E402
from mpistrat.data.dataset import Dataset  # noqa: E402


def mine() -> bool:
    return MPI.COMM_WORLD.rank == CULPRIT or CULPRIT < 0


def raising() -> None:
    raise ValueError("mine")  # raising


def leaving_with_3() -> None:
    sys.exit(3)


def leaving_with_0() -> None:
    sys.exit(0)


def ending_with_3() -> None:
    os._exit(3)


def ending_with_0() -> None:
    os._exit(0)


def crashing() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def aborting() -> None:
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    ctypes.CDLL(None).abort()


def interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


def aborting_mpi() -> None:
    MPI.COMM_WORLD.Abort(9)


def sleeping() -> None:
    time.sleep(60)  # sleeping


def holding() -> None:
    ctypes.PyDLL(None).sleep(60)  # holding


def waiting() -> None:
    """Nothing is wrong until somebody outside does something."""
    time.sleep(0.01)


def step(strategy: ms.Strategy, number: int, case: str) -> None:
    def fn() -> object:
        if number == 3 and mine() and case in IN_FN:
            fault()
            globals()[case]()
        return ms.get_replica_context().all_reduce("sum", np.ones(LENGTH))  # waiting

    strategy.run(fn)


IN_FN = {
    *("raising", "leaving_with_3", "leaving_with_0", "ending_with_3", "ending_with_0"),
    *("crashing", "aborting", "interrupted", "aborting_mpi", "sleeping", "holding"),
}


def merging(strategy: ms.Strategy) -> None:
    def merge_fn(strategy: ms.Strategy) -> None:
        if mine():
            fault()
            raising()

    strategy.run(lambda: ms.get_replica_context().merge_call(merge_fn))


def reading(strategy: ms.Strategy) -> None:
    def rows() -> object:
        for number in range(8):
            if number == 4 and mine():
                fault()
                raising()
            yield np.full(2, float(number))

    def fn(batch: object) -> object:
        return ms.get_replica_context().all_reduce("sum", np.sum(batch))

    for batch in strategy.experimental_distribute_dataset(Dataset.from_batches(rows)):
        strategy.run(fn, args=(batch,))


def recursing(strategy: ms.Strategy) -> None:
    def fn() -> None:
        if mine():
            fault()
            strategy.run(lambda: 1)

    strategy.run(fn)


def declared(strategy: ms.Strategy) -> None:
    """A long operation of 2 T on one rank."""
    with strategy.long_operation("evaluate", max_seconds=60):
        if mine():
            fault()
            time.sleep(4)
    step(strategy, 0, CASE)


def main() -> None:
    say(f"rank {MPI.COMM_WORLD.rank} is {os.getpid()}")
    strategy = ms.MirroredStrategy()
    if CASE == "everywhere":
        fault()
        strategy.run(raising)
    if CASE in ("merging", "reading", "recursing", "declared"):
        globals()[CASE](strategy)
        return say("through")
    if CASE == "outside":
        step(strategy, 0, CASE)
        if mine():
            fault()
            raising()
    steps = STEPS
    if CASE == "waiting":
        steps = 100_000
        fault()
    if CASE == "uneven" and mine():
        steps = 3
    for number in range(1, steps + 1):
        if number == 3 and (CASE == "all finalize" or (CASE == "one finalizes" and mine())):
            fault()
            MPI.Finalize()
        if CASE == "waiting":
            waiting()
        step(strategy, number, CASE)
    if CASE == "uneven" and mine():
        fault()
    return say("through")


if __name__ == "__main__":
    main()
