"""`TrainState`, a tree of JAX arrays that checkpoints save, and keys of random numbers.

All keys come from a seed and the number of a step, so a step that is repeated, as after a restart,
has the same random numbers. Keys of different kinds differ, whatever their numbers are.
"""

from __future__ import annotations

import functools
from typing import Any, final

import jax
import numpy as np

from mpistrat.arrays import Array, as_array, is_scalar
from mpistrat.checkpoint.values import Cell
from mpistrat.errors import StructureError
from mpistrat.jax.arrays import is_key
from mpistrat.jax.traced import find_group
from mpistrat.strategy.strategies import current_strategy

__all__ = [
    "TrainState",
    "example_keys",
    "replica_key",
    "step_key",
]


@final
class TrainState:
    """A tree of JAX, such as parameters and optimizer state, in an object that can change.

    Arrays of JAX cannot be written to, so a program has a new tree after each step. A `Checkpoint`
    saves replica 0's tree, and restoring replaces the tree of every rank by the saved one. Arrays
    are saved; so are numbers and keys of ``jax.random``.

    Args:
      value: The tree. It belongs to the strategy in whose scope the state is created.

    Attributes:
      value: The current tree. A restored tree has the same structure, shapes and dtypes.

    Example:
      >>> import tempfile, jax.numpy as jnp, mpistrat as ms
      >>> state = TrainState({"w": jnp.zeros(2), "step": 0})
      >>> checkpoint = ms.Checkpoint(model=state)
      >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
      >>> state.value = {"w": jnp.ones(2), "step": 1}
      >>> _ = checkpoint.restore(path)
      >>> state.value
      {'step': 0, 'w': Array([0., 0.], dtype=float32)}
    """

    def __init__(self, value: Any):
        """Hold a tree."""
        self.value = value
        self._strategy = current_strategy()

    def tree(self) -> dict[str, Any]:
        """Return the cells that checkpoints save, by name."""
        cells: dict[str, Any] = {}
        for number, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(self.value)[0]):
            names = [jax.tree_util.keystr((key,), simple=True) for key in path] or ["value"]
            *parent_names, name = names
            parent_cells = cells
            for parent_name in parent_names:
                parent_cells = parent_cells.setdefault(parent_name, {})
            read = functools.partial(self._read, number)
            write = functools.partial(self._write, number)
            if name in parent_cells:
                raise StructureError(
                    f"two leaves of the tree have the name {'/'.join(names)!r}: keys are "
                    "told apart by their texts in a checkpoint. Take strings as keys."
                )
            parent_cells[name] = Cell("/".join(names), read, write, self._strategy)
        return cells

    def _read(self, number: int) -> Array:
        leaf = jax.tree.leaves(self.value)[number]
        return as_array(jax.random.key_data(leaf) if is_key(leaf) else leaf)

    def _write(self, number: int, values: Array) -> None:
        leaves, structure = jax.tree.flatten(self.value)
        like = leaves[number]
        if is_key(like):
            new_leaf: Any = jax.random.wrap_key_data(values.copy(), impl=jax.random.key_impl(like))
        elif isinstance(like, np.ndarray):
            new_leaf = values.copy()
        elif is_scalar(like):
            new_leaf = type(like)(values.item())
        else:
            new_leaf = jax.device_put(values.copy(), like.sharding)
        leaves[number] = new_leaf
        self.value = jax.tree.unflatten(structure, leaves)


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
    return _fold_key(seed, step, _STEP)


def replica_key(seed: Any, step: Any) -> Any:
    """Return the key of this replica in a step; another one on each.

    Random numbers of it depend on the number of ranks; for numbers that belong to examples, such as
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
    group = find_group("replica_key")
    return jax.random.fold_in(_fold_key(seed, step, _REPLICA), group.lockstep.comm.rank)


def example_keys(seed: Any, step: Any, examples: Any) -> Any:
    """Return a key for each example of this replica's part of a batch.

    Args:
      seed: A number, or a key that all replicas have.
      step: The number of the step; may be traced.
      examples: The numbers of the examples, counted over all replicas: integers of shape (rows,),
        as another column of the dataset gives them, ``ms.Dataset((x, y, np.arange(n)))``.

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
    base = _fold_key(seed, step, _EXAMPLE)
    return jax.vmap(lambda example: jax.random.fold_in(base, example))(rows)


def _fold_key(seed: Any, step: Any, key_kind: int) -> Any:
    is_key = isinstance(seed, jax.Array) and (
        seed.ndim > 0 or jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key)
    )
    base = seed if is_key else jax.random.key(seed)
    return jax.random.fold_in(jax.random.fold_in(base, step), key_kind)
