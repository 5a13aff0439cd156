"""Train a model that centres its layer over the global batch, backward pass by hand: mpistrat."""

import numpy as np

import mpistrat as ms

x = np.linspace(0.0, 1.0, 10)
y = 2 * (x - x.mean()) ** 2
strategy = ms.MirroredStrategy()
with strategy.scope():
    weights = [ms.Variable(value) for value in (0.5, 1.0, 0.0)]


def step(batch):
    x, y = batch
    u, v, b = (float(weight) for weight in weights)
    context, rows = ms.get_replica_context(), len(x)
    total = context.all_reduce("sum", rows)

    # Forward: the mean over the batch of all replicas, and how a gradient comes back through it.
    layer = np.tanh(u * x)
    mean, pull = ms.vjp.all_reduce("MEAN", layer.sum() / max(rows, 1), weight=rows)
    centred = layer - mean
    error = v * centred + b - y

    # Backward. It differentiates the sum of the losses of all replicas.
    by_error = 2 * error / total
    by_centred = v * by_error
    by_layer = by_centred + pull(-by_centred.sum()) / max(rows, 1)
    by_u = (by_layer * (1 - layer**2)) @ x
    gradients = [by_u, by_error @ centred, by_error.sum()]

    for weight, gradient in zip(weights, context.all_reduce("sum", gradients), strict=True):
        weight.assign_sub(0.5 * gradient)
    return error**2  # one loss per example


dataset = ms.Dataset((x, y)).batch(4)
for _ in range(20):
    for batch in strategy.experimental_distribute_dataset(dataset):
        losses = strategy.run(step, args=(batch,))
        loss = strategy.reduce("mean", losses, axis=0)  # over all examples

if strategy.extended.should_save_summary:  # rank 0
    print(*(float(weight) for weight in weights), float(loss))
