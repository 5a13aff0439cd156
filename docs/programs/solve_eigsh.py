"""The largest eigenvalues of a covariance by eigsh; each rank has its part of the rows."""

import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh

import mpistrat as ms

strategy = ms.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(500, 40)) * np.arange(1.0, 41.0)
rows = strategy.local_rows(x)


def multiply(v):
    v = v.reshape(-1)
    return strategy.all_reduce("sum", rows.T @ (rows @ v), same=v) / len(x)


covariance = LinearOperator((40, 40), matvec=multiply, dtype=x.dtype)
values = eigsh(covariance, k=3, v0=np.ones(40), return_eigenvectors=False)  # without v0: random
if strategy.rank == 0:
    print(*sorted(values.tolist()))
