"""Train; when the job is about to be ended, save and leave; the next start continues there."""

import numpy as np

import mpistrat as ms

EPOCHS, STEPS = 4, 3  # steps of an epoch
x = np.arange(10.0)
strategy = ms.MirroredStrategy()
with strategy.scope():
    w = ms.Variable(0.0)
handler = ms.experimental.PreemptionCheckpointHandler(None, ms.Checkpoint(w=w), "preempted")
done = handler.total_run_calls  # of all starts together


def step(batch):
    x, y = batch
    context = ms.get_replica_context()
    gradient = (w * x - y) @ x / max(len(x), 1)
    w.assign_sub(0.01 * context.all_reduce("mean", gradient, weight=len(x)))


dataset = ms.Dataset((x, 3 * x)).shuffle(seed=1).batch(4)
dataset.begin_after(done // STEPS - 1)
distributed = strategy.experimental_distribute_dataset(dataset)
for epoch in range(done // STEPS, EPOCHS):
    for number, batch in enumerate(distributed):
        if epoch * STEPS + number >= done:
            handler.run(strategy.run, step, args=(batch,))
if strategy.extended.should_save_summary:  # on rank 0
    print(handler.total_run_calls, float(w.numpy()))
