"""JAX on many ranks: collectives take and return trees of JAX arrays.

Every call of mpistrat takes JAX arrays, and returns JAX arrays for them. The functions here also
take pytrees of JAX, and may be called in functions that JAX transforms: by ``jit``, ``grad``,
``vmap``, ``scan``, ``while_loop`` or ``cond``.

    import mpistrat.jax as mj

The room promises that the calls of a rank have the order of its program, whatever thread XLA makes
them in, that gradients in both modes are those of `mpistrat.vjp`, and that an error of a traced
call ends the run on all ranks, as any other does. Begin with `functions`, then `traced`.

- `functions`: the collectives `all_reduce`, `all_gather`, `broadcast`, and `replicate`.
- `traced`: a collective as a primitive of JAX: how it is lowered, differentiated and batched.
- `state`: `TrainState`, which checkpoints save, and keys of random numbers.
- `arrays`: conversion between JAX arrays and NumPy; `mpistrat.arrays` calls it.
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
