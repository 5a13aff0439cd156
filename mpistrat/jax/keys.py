"""Keys of random numbers that do not depend on the number of ranks.

All come from a seed and the number of a step, so a step that is done again, as after a restart, has
the same numbers. Keys of different kinds differ, whatever their numbers are.
"""

from __future__ import annotations

from typing import Any

import jax

from mpistrat.jax.calls import group_here

__all__ = ["example_keys", "replica_key", "step_key"]

_STEP, _REPLICA, _EXAMPLE = range(3)


def step_key(seed: Any, step: Any) -> Any:
    """Return the key of a step, the same on all replicas.

    Args:
      seed: A number, or a key that all replicas have.
      step: The number of the step; may be traced.

    Example:
      >>> step_key(0, 1) == step_key(0, 1), step_key(0, 1) == step_key(0, 2)
      (Array(True, dtype=bool), Array(False, dtype=bool))
    """
    return _folded(seed, step, _STEP)


def replica_key(seed: Any, step: Any) -> Any:
    """Return the key of this replica in a step; another one on each.

    What is made with it does depend on the number of ranks; for what belongs to examples, such as
    dropout, there is `example_keys`. Never communicates.

    Args:
      seed: A number, or a key that all replicas have.
      step: The number of the step; may be traced.

    Raises:
      ContextError: No strategy is in scope, in a job of several ranks.

    Example:
      >>> replica_key(0, 1) == step_key(0, 1)
      Array(False, dtype=bool)
    """
    group = group_here("replica_key")
    return jax.random.fold_in(_folded(seed, step, _REPLICA), group.lockstep.comm.rank)


def example_keys(seed: Any, step: Any, examples: Any) -> Any:
    """Return a key for each example of this replica's part of a batch.

    Args:
      seed: A number, or a key that all replicas have.
      step: The number of the step; may be traced.
      examples: Which examples of the data these are, counted over all replicas: integers of shape
        (rows,), as another column of the dataset gives them, ``ms.Dataset((x, y, np.arange(n)))``.

    Returns:
      Keys of shape (rows,), for ``jax.vmap``; none for no rows.

    Raises:
      ValueError: `examples` are not integers of one dimension.

    Example:
      >>> import numpy as np
      >>> whole = example_keys(0, 3, np.arange(4))
      >>> bool((whole[2:] == example_keys(0, 3, np.arange(2, 4))).all())
      True
    """
    rows = jax.numpy.asarray(examples)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ValueError(
            f"example_keys: examples must be integers of shape (rows,), not {rows.dtype} of shape "
            f"{rows.shape}; give the dataset a column np.arange(n)."
        )
    base = _folded(seed, step, _EXAMPLE)
    return jax.vmap(lambda example: jax.random.fold_in(base, example))(rows)


def _folded(seed: Any, step: Any, kind: int) -> Any:
    is_key = isinstance(seed, jax.Array) and (
        seed.ndim > 0 or jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key)
    )
    base = seed if is_key else jax.random.key(seed)
    return jax.random.fold_in(jax.random.fold_in(base, step), kind)
