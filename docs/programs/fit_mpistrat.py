"""Fit a line on every rank: mpistrat."""

import numpy as np

import mpistrat as ms

x = np.arange(10.0)
strategy = ms.MirroredStrategy()
with strategy.scope():
    w = ms.Variable(0.0)


def step(batch):
    x, y = batch
    gradient = (w * x - y) @ x / max(len(x), 1)
    context = ms.get_replica_context()
    w.assign_sub(0.01 * context.all_reduce("mean", gradient, weight=len(x)))


dataset = ms.Dataset((x, 3 * x)).batch(4)
for batch in strategy.experimental_distribute_dataset(dataset):
    strategy.run(step, args=(batch,))

if strategy.extended.should_save_summary:  # rank 0
    print(float(w.numpy()))
