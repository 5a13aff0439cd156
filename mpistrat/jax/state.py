"""Trees of JAX arrays that change from step to step, to be saved and restored."""

from __future__ import annotations

import functools
from typing import Any, final

import jax
import numpy as np

from mpistrat.arrays import Array, as_array, is_scalar
from mpistrat.checkpoint.cells import Cell
from mpistrat.distribute.strategies import current_strategy
from mpistrat.errors import StructureError
from mpistrat.jax.arrays import is_key

__all__ = ["TrainState"]


@final
class TrainState:
    """A tree of JAX, such as parameters and the state of an optimizer, in a place that can change.

    Arrays of JAX cannot be written to, so what a program trains is a new tree after each step. Of
    this a `Checkpoint` saves replica 0's tree, and restoring puts the one that was saved in its
    place, on every rank. Arrays are saved; so are numbers and keys of ``jax.random``.

    Args:
      value: The tree. It belongs to the strategy in whose scope the state is created.

    Attributes:
      value: The tree as it is now. What is restored has the structure, shapes and dtypes of it.

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
            *above, name = [jax.tree_util.keystr((key,), simple=True) for key in path] or ["value"]
            place = functools.reduce(lambda at, key: at.setdefault(key, {}), above, cells)
            read = functools.partial(self._read, number)
            write = functools.partial(self._write, number)
            if name in place:
                raise StructureError(
                    f"two leaves of the tree have the name {'/'.join([*above, name])!r}: keys are "
                    "told apart by their texts in a checkpoint. Take strings as keys."
                )
            place[name] = Cell("/".join([*above, name]), read, write, self._strategy)
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
