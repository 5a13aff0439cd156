"""Trials of a sweep on the two halves of a job: what the first one does to the second."""

import sys
import threading
import time

from mpi4py import MPI

import mpistrat as ms

world = MPI.COMM_WORLD
trial, what = world.rank % 2, sys.argv[1]
strategy = ms.MirroredStrategy(comm=world.Split(trial, world.rank))


def call(op, value):
    return strategy.run(lambda: ms.get_replica_context().all_reduce(op, value)).local


def go_on(seconds):
    """Make a checked call ten times a second."""
    until = call("max", time.monotonic() + seconds)
    while call("max", time.monotonic()) < until:
        time.sleep(0.1)
    print(f"rank {world.rank} has continued\n", end="", flush=True)


def measure():
    """Print how much processor time a second of waiting takes."""
    time.sleep(1.0)
    before = time.process_time()
    time.sleep(1.0)
    spent = time.process_time() - before
    print(f"rank {world.rank} used {spent:.3f} s of a second\n", end="", flush=True)


call("sum", 1)
if what == "end":
    if trial:
        go_on(4.0)
    else:
        threading.Thread(target=measure, daemon=True).start()
elif what == "raise":
    if not trial:
        raise ValueError("trial 0 diverges")
    go_on(4.0)
elif what == "partner":
    if world.rank == 0:
        raise ValueError("trial 0 diverges")
    go_on(4.0)
elif what == "alone":
    strategy = ms.MirroredStrategy(comm=world.Split(world.rank))
    if world.rank == 0:
        sys.exit("a bad trial")
    go_on(4.0)
elif what == "codes":
    if not trial:
        sys.exit(3)
    sys.exit(2)
elif what == "idle":
    if not trial:
        raise ValueError("trial 0 diverges")
    time.sleep(60)
elif what in ("python", "compiled", "polls"):
    if not trial:
        raise ValueError("trial 0 diverges")
    end = time.monotonic() + 6
    while what == "python" and time.monotonic() < end:
        time.sleep(0.01)
        sum(range(10_000))
        time.sleep(0.01)
    while what == "compiled" and time.monotonic() < end:
        sum(range(100_000_000))  # one call, which does not let another thread run
    if what == "polls":
        world.recv(source=0)
    go_on(0.1)
elif what == "hang":
    if world.rank == 0:
        time.sleep(60)
    call("sum", 1)
elif what == "declared":
    if world.rank == 1:
        with strategy.long_operation("evaluate", 60):
            time.sleep(5)
    if trial:
        go_on(0.1)
elif what == "cross":
    everybody = ms.MirroredStrategy()
    (strategy if world.rank == 2 else everybody).run(lambda: 1)
elif what == "join":
    if not trial:
        raise ValueError("trial 0 diverges")
    try:
        ms.MirroredStrategy().run(lambda: 1)
    except ValueError as error:
        print(f"rank {world.rank} was told: {error}\n", end="", flush=True)
