"""Steps that can be counted, of a job that is told to end; the test sends the signals.

It makes its last ten steps when the file `hold` is gone: until then a signal cannot come too late.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import mpistrat as ms

STEPS, SIZE = 120, 20_000  # large enough to be shared by the ranks of a node
directory, names = Path(sys.argv[1]), sys.argv[2:]
strategy = ms.MirroredStrategy()
with strategy.scope():
    v = ms.Variable(np.zeros(SIZE))
    seen = ms.Variable(
        0,
        synchronization=ms.VariableSynchronization.ON_READ,
        aggregation=ms.VariableAggregation.SUM,
    )
config = ms.experimental.TerminationConfig(signals=names)
handler = ms.experimental.PreemptionCheckpointHandler(
    None, ms.Checkpoint(v=v, seen=seen), directory / "saved", config
)


def step(number):
    context = ms.get_replica_context()
    total = context.all_reduce("mean", np.full(SIZE, float(number % 7)))
    v.assign(0.9 * v + total)
    seen.assign_add(number if context.replica_id_in_sync_group == 0 else 0)


def told(context):
    (directory / f"pid-{context.replica_id_in_sync_group}").write_text(str(os.getpid()))


strategy.run(lambda: told(ms.get_replica_context()))
for number in range(handler.total_run_calls, STEPS):
    while number >= STEPS - 10 and (directory / "hold").exists():
        time.sleep(0.003)
    handler.run(strategy.run, step, args=(number,))
    time.sleep(0.003)
counted = int(seen.numpy())
if strategy.extended.should_save_summary:
    print(handler.total_run_calls, float(v.numpy()[7]).hex(), counted)
