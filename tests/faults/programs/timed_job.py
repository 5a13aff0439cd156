"""A job whose rank RANK does not come to a collective that may take two seconds.

``timed_job.py RANK WAY``: the time is in the options of the strategy, or of the call. With ``run``
it is in those of the strategy, and the rank is late inside a run that calls nothing.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import mpistrat as ms

TIME = ms.CommunicationOptions(timeout_seconds=2.0)


def main(late: int, way: str) -> None:
    warm = ms.MultiWorkerMirroredStrategy()  # without a limit: all is imported, if it takes minutes
    warm.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3)))
    options = TIME if way in ("strategy", "run") else None
    strategy = ms.MultiWorkerMirroredStrategy(communication_options=options)
    rank = strategy._replicas.lockstep.comm.rank

    def step(value, options=None):
        return ms.get_replica_context().all_reduce("SUM", value, options)

    strategy.run(step, args=(np.ones(3),))
    if way != "call":
        time.sleep(2.5)  # longer than the call may take, but nobody waits in one
    if way == "run":
        strategy.run(lambda: time.sleep(600 * (rank == late)))  # late in a run
    if way == "alone":  # the time is the call's; the run is another, so it may take longer
        strategy.run(lambda: time.sleep(2.5 * (rank == late)))
        strategy.run(step, args=(np.ones(3),))
        return
    if rank == late:
        time.sleep(600)  # late
    strategy.run(step, args=(np.ones(3), TIME if way == "call" else None))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
