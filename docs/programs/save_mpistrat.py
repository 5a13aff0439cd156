"""Train one epoch at each start, save on one rank, go on where the last start stopped."""

from pathlib import Path

import numpy as np

import mpistrat as ms

FILE = Path("model.npz")
x = np.arange(10.0)
strategy = ms.MirroredStrategy()
with strategy.scope():
    variables = {"w": ms.Variable(0.0), "epochs": ms.Variable(0)}
here = strategy.extended.should_checkpoint  # rank 0


def restore():
    saved = dict(np.load(FILE)) if here and FILE.exists() else {}
    for name, variable in variables.items():
        # Replica 0's value on all: the others need no file, and cannot read another one.
        value = np.asarray(saved.get(name, variable))
        variable.assign(strategy.extended.broadcast_to(value, "cpu"))


def save():
    # On every rank: reading an ON_READ variable communicates.
    values = {name: variable.numpy() for name, variable in variables.items()}
    if here:
        part = FILE.with_name("part.npz")
        np.savez(part, **values)
        part.replace(FILE)  # whole, or not there


def step(batch):
    x, y = batch
    w, context = variables["w"], ms.get_replica_context()
    gradient = (w * x - y) @ x / max(len(x), 1)
    w.assign_sub(0.01 * context.all_reduce("mean", gradient, weight=len(x)))


restore()
for batch in strategy.experimental_distribute_dataset(ms.Dataset((x, 3 * x)).batch(4)):
    strategy.run(step, args=(batch,))
variables["epochs"].assign_add(1)
save()
if here:
    print(int(variables["epochs"].numpy()), float(variables["w"].numpy()))
