"""Fit a logistic regression by scipy.optimize; each rank has its part of the rows."""

import numpy as np
from scipy import optimize

import mpistrat as ms

strategy = ms.MirroredStrategy()
random = np.random.default_rng(0)  # the same rows on all ranks
x = random.normal(size=(200, 3))
y = x @ np.array([1.0, -2.0, 0.5]) + random.normal(size=200) > 0
rows, labels = strategy.local_rows((x, y))


def objective(w):
    margins = np.where(labels, 1, -1) * (rows @ w)
    loss = np.logaddexp(0, -margins).sum()
    gradient = -rows.T @ (np.where(labels, 1, -1) / (1 + np.exp(margins)))
    loss, gradient = strategy.all_reduce("sum", (loss, gradient), same=w)
    return loss + 0.5 * w @ w, gradient + w


start = strategy.broadcast(np.random.default_rng().normal(size=3))  # replica 0's, on all ranks
result = optimize.minimize(objective, start, jac=True, method="L-BFGS-B", tol=1e-12)
if strategy.rank == 0:
    print(*result.x.tolist())
