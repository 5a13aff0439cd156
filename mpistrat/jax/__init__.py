"""JAX on many ranks: collectives take and return trees of JAX arrays.

Every call of mpistrat takes JAX arrays, and returns JAX arrays for them. The functions here also
take pytrees of JAX, and may be called in functions that JAX transforms: by ``jit``, ``grad``,
``vmap``, ``scan``, ``while_loop`` or ``cond``.

    import mpistrat.jax as mj
"""

from __future__ import annotations

try:
    import jax  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("mpistrat.jax needs JAX: pip install 'mpistrat[jax]'.") from error

from mpistrat.jax.functions import all_gather, all_reduce, broadcast, replicate
from mpistrat.jax.state import TrainState, example_keys, replica_key, step_key

__all__ = [
    "TrainState",
    "all_gather",
    "all_reduce",
    "broadcast",
    "example_keys",
    "replica_key",
    "replicate",
    "step_key",
]
