"""A job that continues from its last checkpoint, for tests that tell it to end; it waits in MPI.

It makes its last ten steps when the file `hold` is gone: until then a signal cannot come too late.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import mpistrat as ms

directory, count, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
strategy = ms.MirroredStrategy()
with strategy.scope():
    total = ms.Variable(np.zeros(1000))
    step = ms.Variable(0)
manager = ms.CheckpointManager(ms.Checkpoint(total=total, step=step), directory / "saved", 2)
manager.restore_or_initialize()


def work():
    context = ms.get_replica_context()
    rank = context.replica_id_in_sync_group
    if rank == 0:
        time.sleep(pause)  # the others wait in MPI
    total.assign_add(context.all_reduce("sum", np.full(1000, float(rank + int(step)))))
    step.assign_add(1)


def told():
    rank = ms.get_replica_context().replica_id_in_sync_group
    (directory / f"pid-{rank}").write_text(str(os.getpid()))


with ms.preemption(manager, grace=5.0) as leaving:
    strategy.run(told)
    for number in range(int(step.numpy()), count):
        while number >= count - 10 and (directory / "hold").exists():
            time.sleep(0.003)
        strategy.run(work)
        leaving.step(number + 1, count)
if strategy.extended.should_save_summary:
    print(int(step.numpy()), float(total.numpy()[7]).hex())
