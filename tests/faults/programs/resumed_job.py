"""Two epochs of steps that can be counted, by `manager.resume`; the test kills its ranks.

Its last step comes when the file `hold` is gone: until then a signal cannot come too late.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import mpistrat as ms

ROWS, SIZE = 200, 20_000
directory = Path(sys.argv[1])
strategy = ms.MirroredStrategy()
with strategy.scope():
    v, counts = ms.Variable(np.zeros(SIZE)), ms.Variable(np.zeros(ROWS))
    history = ms.History()
dataset = ms.Dataset(np.arange(ROWS)).shuffle(seed=1).batch(8)
rng = np.random.default_rng(0)
checkpoint = ms.Checkpoint(v=v, counts=counts, history=history, data=dataset, rng=rng, step=0)
manager = ms.CheckpointManager(checkpoint, directory / "saved", 2, every="5 steps")


def step(rows, drawn):
    context = ms.get_replica_context()
    counts.assign_add(context.all_reduce("sum", np.bincount(rows, minlength=ROWS) * 1.0))
    v.assign(0.9 * v + drawn * context.all_reduce("sum", np.full(SIZE, float(rows.sum()))))


def told(context):
    (directory / f"pid-{context.replica_id_in_sync_group}").write_text(str(os.getpid()))


strategy.run(lambda: told(ms.get_replica_context()))
for batch in manager.resume(strategy.experimental_distribute_dataset(dataset), epochs=2):
    while checkpoint.step == 49 and (directory / "hold").exists():
        time.sleep(0.003)
    strategy.run(step, args=(batch, rng.random()))
    history.append(checkpoint.step, v=v.numpy()[7])
    checkpoint.step += 1
    time.sleep(0.005)
if strategy.extended.should_save_summary:
    table = history.table()
    print(checkpoint.step, set(counts.numpy().tolist()), table[-1, 1].hex(), len(table))
