"""Infers two weights by numpyro on a part of the rows; prints the means of all ranks, and exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import mpistrat as ms
import mpistrat.jax as mj

NOISE = 0.1
rng = np.random.default_rng(0)
X = rng.normal(size=(240, 2))
Y = X @ [1.0, -2.0] + NOISE * rng.normal(size=240)


def model(x, y):
    w = numpyro.sample("w", numpyro.distributions.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.sample("y", numpyro.distributions.Normal(x @ w, NOISE).to_event(1), obs=y)


def average(gradients, state, parameters=None):
    del parameters
    return mj.all_reduce("mean", gradients), state


strategy = ms.MirroredStrategy()
over_ranks = optax.GradientTransformation(lambda _: optax.EmptyState(), average)
optimizer = optax.chain(over_ranks, optax.adam(optax.exponential_decay(0.05, 300, 0.3)))
scaled = numpyro.handlers.scale(model, strategy.size)  # the mean over ranks is that of all rows
inference = SVI(scaled, AutoNormal(model), optimizer, Trace_ELBO(num_particles=8))
part = slice(strategy.rank, None, strategy.size)


def train():
    state = inference.init(jax.random.key(0), X[part], Y[part])
    update = jax.jit(inference.update)
    for _ in range(1500):
        state, _ = update(state, X[part], Y[part])
    return mj.all_gather(inference.get_params(state)["w_auto_loc"][None], axis=0)


means = np.asarray(strategy.run(train).local)
exact = np.linalg.solve(X.T @ X / NOISE**2 + np.eye(2), X.T @ Y / NOISE**2)
strategy.print(*means.ravel().tolist(), *exact.tolist())
