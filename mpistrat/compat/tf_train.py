"""``tf.train`` as programs that import `mpistrat.compat.tf` see it: checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import checkpoint, sharded
from mpistrat.checkpoint.files import found, latest_checkpoint
from mpistrat.checkpoint.manager import CheckpointManager
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.compat.absent import absent_from as _absent_from

__all__ = ["Checkpoint", "CheckpointManager", "CheckpointReader", "ClusterSpec"]
__all__ += ["latest_checkpoint", "list_variables", "load_checkpoint", "load_variable"]

__getattr__ = _absent_from("tf.train")


class _Count(int):
    """A number of saves, to be asked for as a variable of TensorFlow is."""

    def numpy(self) -> Any:
        """Return it as a NumPy scalar."""
        return np.int64(self)


@final
class Checkpoint(checkpoint.Checkpoint):
    """An `mpistrat.Checkpoint` whose `save_counter` has ``numpy()``, too.

    As: ``tf.train.Checkpoint``.

    Example:
      >>> int(Checkpoint().save_counter), Checkpoint().save_counter.numpy()
      (0, np.int64(0))
    """

    @property
    def save_counter(self) -> _Count:
        """How many times it has been saved, those before it was restored included."""
        return _Count(super().save_counter)


_THERE = "/.ATTRIBUTES/VARIABLE_VALUE"  # what names of variables end with in files of TensorFlow


@final
class CheckpointReader:
    """The values in the file of a checkpoint, all of them read and checked. Never communicates.

    Args:
      path: The file.

    Raises:
      OSError: It cannot be read.
      CheckpointError: It is damaged, or not a checkpoint.
      DataError: It is of another format.

    Cost: memory for the whole file.
    """

    def __init__(self, path: Path):
        """Read the file."""
        self._arrays: dict[str, Array] = sharded.read(path).arrays

    def has_tensor(self, name: str) -> bool:
        """Tell whether there is a variable `name`."""
        return name.removesuffix(_THERE) in self._arrays

    def get_tensor(self, name: str) -> Array:
        """Return the value of the variable `name`.

        Raises:
          ValueError: There is no such name; the message lists those that exist.
        """
        if not self.has_tensor(name):
            raise ValueError(f"the checkpoint has no {name!r}; it has {sorted(self._arrays)}.")
        return self._arrays[name.removesuffix(_THERE)]

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Return the shapes by name."""
        return {name: list(array.shape) for name, array in self._arrays.items()}

    def get_variable_to_dtype_map(self) -> dict[str, Any]:
        """Return the dtypes by name."""
        return {name: array.dtype for name, array in self._arrays.items()}


def load_checkpoint(ckpt_dir_or_file: str | os.PathLike[str]) -> CheckpointReader:
    """Return a reader of a checkpoint. Never communicates.

    Args:
      ckpt_dir_or_file: A path that `Checkpoint.save` returned, with or without ``.npz``, or a
        directory, whose newest checkpoint is taken.

    Raises:
      OSError: It cannot be read, or the directory has none.
      CheckpointError: It is damaged, or not a checkpoint; or the directory has several names.
      DataError: It is of another format.

    Cost: reads the whole file into memory.
    """
    return CheckpointReader(found(ckpt_dir_or_file))


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> Array:
    """Return the value of one variable.

    Args:
      ckpt_dir_or_file: As in `load_checkpoint`, which says what is raised and what it costs.
      name: Its name.
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Return the names of the variables in a checkpoint, sorted, each with its shape.

    Args:
      ckpt_dir_or_file: As in `load_checkpoint`, which says what is raised and what it costs.
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())
