"""Mistakes that type checkers have to find: mypy complains if one of these is not an error.

Nothing calls this function.
"""

from __future__ import annotations

import numpy as np

import mpistrat as ms


def mistakes() -> None:
    """Make all of them."""
    strategy = ms.MirroredStrategy()
    context = ms.get_replica_context()
    v = ms.Variable(np.zeros(3))

    context.all_redcue("sum", 1)  # type: ignore[union-attr]
    context.all_reduce("sum")  # type: ignore[call-arg]
    context.all_reduce("sum", 1, wieght=2.0)  # type: ignore[call-arg]
    context.all_reduce(3, 1)  # type: ignore[arg-type]
    strategy.runn(lambda: 1)  # type: ignore[attr-defined]
    strategy.num_replicas_in_sync = 3  # type: ignore[misc]
    ms.MirroredStrategy(cross_device_ops="ring")  # type: ignore[arg-type]
    ms.Variable(0.0, nmae="w")  # type: ignore[call-arg]
    v.assing(1.0)  # type: ignore[attr-defined]
    ms.Dataset(np.zeros(3)).batch("4")  # type: ignore[arg-type]
    strategy.experimental_distribute_dataset(np.zeros(3))  # type: ignore[arg-type]
    strategy.experimental_distribute_dataset(ms.Dataset(np.zeros(3))).lenght()  # type: ignore[union-attr]
    ms.optim.Adam(learning_rate="fast")  # type: ignore[arg-type]
    ms.optim.Adam(0.1, beta_3=0.9)  # type: ignore[call-arg]
    ms.optim.Adam(0.1).apply_gradients([(np.zeros(3), "w")])  # type: ignore[list-item]
    print(ms.PerReplica(1).lokal)  # type: ignore[attr-defined]
    print(ms.NoSuchName)  # type: ignore[attr-defined]
