"""Sees numbered examples, one step after the other, and continues where it was told to end.

counted.py EXAMPLES SECONDS_PER_STEP SIGNAL... : each rank writes the examples of its steps to a
file of its own when the step is made.
"""

import os
import platform
import sys
import time
from pathlib import Path

import mpistrat as ms

EXAMPLES, SECONDS, names = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
strategy = ms.MirroredStrategy()
ranks = strategy.num_replicas_in_sync
with strategy.scope():
    total = ms.Variable(0)
config = ms.experimental.TerminationConfig(signals=names)
handler = ms.experimental.PreemptionCheckpointHandler(
    None, ms.Checkpoint(total=total), "saved", config
)


def step(number):
    context = ms.get_replica_context()
    rank = context.replica_id_in_sync_group
    example = number * ranks + rank
    time.sleep(SECONDS)
    total.assign_add(context.all_reduce("sum", example))
    with Path(f"seen-{rank}").open("a") as file:
        file.write(f"{example}\n")


def there():
    rank = ms.get_replica_context().replica_id_in_sync_group
    Path(f"pid-{rank}").write_text(f"{os.getpid()} {platform.node()}")


strategy.run(there)
if strategy.extended.should_save_summary:
    print(f"begins at {handler.total_run_calls}", flush=True)
for number in range(handler.total_run_calls, EXAMPLES // ranks):
    handler.run(strategy.run, step, args=(number,))
if strategy.extended.should_save_summary:
    print(f"the sum is {int(total.numpy())}", flush=True)
