"""Train one epoch at each start, save, and continue where the last start stopped."""

import numpy as np

import mpistrat as ms

x = np.arange(10.0)
strategy = ms.MirroredStrategy()
with strategy.scope():
    w, epochs = ms.Variable(0.0), ms.Variable(0)
checkpoint = ms.Checkpoint(model={"w": w}, epochs=epochs)
manager = ms.CheckpointManager(checkpoint, "saved", max_to_keep=2)
manager.restore_or_initialize()


def step(batch):
    x, y = batch
    context = ms.get_replica_context()
    gradient = (w * x - y) @ x / max(len(x), 1)
    w.assign_sub(0.01 * context.all_reduce("mean", gradient, weight=len(x)))


dataset = ms.Dataset((x, 3 * x)).shuffle(seed=1).batch(4)
dataset.begin_after(int(epochs.numpy()) - 1)  # the order of the next epoch, not of the first
for batch in strategy.experimental_distribute_dataset(dataset):
    strategy.run(step, args=(batch,))
epochs.assign_add(1)
manager.save()
if strategy.extended.should_save_summary:  # on rank 0
    print(int(epochs.numpy()), float(w.numpy()))
