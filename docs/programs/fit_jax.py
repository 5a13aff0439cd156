"""Fit a line on every rank: JAX and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpistrat as ms
import mpistrat.jax as mj

optimizer = optax.sgd(0.01)


@jax.jit
def gradient(w, x, y):
    return jax.grad(lambda w: ((w * x - y) ** 2).sum() / 2 / max(len(x), 1))(w)


@jax.jit
def update(w, state, gradient):
    changes, state = optimizer.update(gradient, state)
    return optax.apply_updates(w, changes), state


def step(w, state, x, y):
    mean = mj.all_reduce("mean", gradient(w, x, y), weight=len(x))
    return update(w, state, mean)


x = np.arange(10, dtype=np.float32)
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = mj.replicate(jnp.zeros(()))
state = optimizer.init(w)

for batch in strategy.experimental_distribute_dataset(ms.Dataset((x, 3 * x)).batch(4)):
    w, state = strategy.run(step, args=(w, state, *batch))

if strategy.rank == 0:
    print(float(w))
