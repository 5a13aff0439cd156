"""Does the watchdog leave a job alone whose ranks are late, but not too late?

    MPISTRAT_TIMEOUT=1 MPISTRAT_WARN=0.9 mpiexec -n 2 python tests/faults/soak.py [--runs 1000]

Makes that many runs. Before or in the middle of each, one rank or several pause for up to 0.8 of
``MPISTRAT_TIMEOUT``: asleep, computing, or holding the GIL. The job must come to its end; one that
the watchdog ends leaves with exit code 75, and this prints nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import time

import numpy as np

import mpistrat as ms


def asleep(seconds: float) -> None:
    time.sleep(seconds)


def computing(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def holding(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


PAUSES = (asleep, computing, holding)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    longest = 0.8 * float(os.environ.get("MPISTRAT_TIMEOUT", "1"))
    strategy = ms.MirroredStrategy()
    rank, size = strategy._replicas.lockstep.comm.rank, strategy.num_replicas_in_sync
    rng = random.Random(chosen.seed)  # the same on all ranks
    paused = dict.fromkeys((pause.__name__ for pause in PAUSES), 0)
    begin = time.monotonic()
    for number in range(chosen.runs):
        culprits = {rng.randrange(size) for _ in range(rng.choice((1, 1, 1, 2)))}
        pause, seconds, inside = rng.choice(PAUSES), rng.uniform(0, longest), rng.random() < 0.5
        paused[pause.__name__] += 1

        def fn(
            pause=pause, seconds=seconds, mine=inside and rank in culprits, number=number
        ) -> float:
            ctx = ms.get_replica_context()
            ctx.all_reduce("sum", 1.0)
            if mine:
                pause(seconds)
            return float(ctx.all_reduce("sum", np.full(300, number))[-1])

        if not inside and rank in culprits:
            pause(seconds)
        if strategy.run(fn).local != number * size:
            print(f"run {number}: wrong sum", file=sys.stderr)
            return 1
    if rank == 0:
        kinds = ", ".join(f"{count} {name}" for name, count in paused.items())
        spent = time.monotonic() - begin
        print(f"{size} ranks, {chosen.runs} runs ({kinds}), pauses up to {longest:g} s: ", end="")
        print(f"0 false aborts, {spent:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
