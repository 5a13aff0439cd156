"""``tf.train`` as programs that import `mpistrat.compat.tf` see it: checkpoints."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import checkpoint, files, manager, sharded
from mpistrat.checkpoint.files import find_checkpoint
from mpistrat.checkpoint.values import VALUES_NAME, parse_values
from mpistrat.cluster.resolver import ClusterSpec
from mpistrat.compat.absent import Advised as _Advised
from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.errors import RefusedError

__all__ = ["Checkpoint", "CheckpointManager", "CheckpointReader", "ClusterSpec"]
__all__ += ["latest_checkpoint", "list_variables", "load_checkpoint", "load_variable"]

__getattr__ = _make_getattr("tf.train")


class _Count(int):
    """A number of saves, to be asked for as a variable of TensorFlow is."""

    def numpy(self) -> Any:
        """Return it as a NumPy scalar."""
        return np.int64(self)


def _takes_options(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a checkpoint that takes ``options=None`` after the path, too."""

    @functools.wraps(method)
    def call(self: Checkpoint, *args: Any, **kwargs: Any) -> Any:
        second = len(args) == 2
        options = args[1] if second else kwargs.pop("options", None)
        if options is not None:
            raise RefusedError(
                f"Checkpoint.{method.__name__}(options=) is refused: leave it out, files are "
                "written and read alike everywhere."
            )
        return method(self, *(args[:1] if second else args), **kwargs)

    return call


@final
class Checkpoint(checkpoint.Checkpoint, metaclass=_Advised):
    """An `mpistrat.Checkpoint` whose `save_counter` has ``numpy()``; methods take ``options=None``.

    Like: ``tf.train.Checkpoint``.

    Example:
      >>> int(Checkpoint().save_counter), Checkpoint().save_counter.numpy()
      (0, np.int64(0))
    """

    _where = "tf.train.Checkpoint"
    save = _takes_options(checkpoint.Checkpoint.save)
    write = _takes_options(checkpoint.Checkpoint.write)
    restore = _takes_options(checkpoint.Checkpoint.restore)
    read = _takes_options(checkpoint.Checkpoint.read)

    @property
    def save_counter(self) -> _Count:
        """How many times it has been saved, those before it was restored included."""
        return _Count(super().save_counter)


@final
class CheckpointManager(manager.CheckpointManager, metaclass=_Advised):
    """An `mpistrat.CheckpointManager` that may save at every so many steps only.

    Args:
      checkpoint: As there.
      directory: As there.
      max_to_keep: As there.
      keep_checkpoint_every_n_hours: None; anything else is refused.
      checkpoint_name: As there.
      step_counter: A variable, or a number, that counts steps.
      checkpoint_interval: `save` does nothing until the counter has grown by this much since the
        last save; None for always.
      init_fn: As there.
      **more: ``every`` and ``background``, as there.

    Raises:
      RefusedError: `keep_checkpoint_every_n_hours` is given.
      ValueError: An interval without a counter; or as there.

    Like: ``tf.train.CheckpointManager``.

    Example:
      >>> import tempfile, mpistrat as ms
      >>> step = ms.Variable(0)
      >>> options = {"step_counter": step, "checkpoint_interval": 2}
      >>> manager = CheckpointManager(Checkpoint(step=step), tempfile.mkdtemp(), 3, **options)
      >>> [manager.save() is not None for _ in range(4) if step.assign_add(1) is step]
      [True, False, True, False]
    """

    _where = "tf.train.CheckpointManager"

    def __init__(
        self,
        checkpoint: checkpoint.Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: Any = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Any = None,
        **more: Any,
    ):
        """Create a manager, and find the checkpoints that are there."""
        if keep_checkpoint_every_n_hours is not None:
            raise RefusedError(
                "CheckpointManager(keep_checkpoint_every_n_hours=) is refused: it keeps the newest "
                "max_to_keep. What is to stay, write elsewhere: checkpoint.save(other + '/ckpt')."
            )
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError("CheckpointManager: a checkpoint_interval needs a step_counter.")
        self._interval, self._counter = checkpoint_interval, step_counter
        self._last: int | None = None
        super().__init__(
            checkpoint,
            directory,
            max_to_keep,
            checkpoint_name=checkpoint_name,
            init_fn=init_fn,
            **more,
        )

    @property
    def checkpoint_interval(self) -> int | None:
        """The least number of steps between two saves."""
        return self._interval

    def save(  # type: ignore[override]  # the signature of the other library, on purpose
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: Any = None,
    ) -> str | None:
        """Save the checkpoint, if the step counter has come so far; collective as there.

        Args:
          checkpoint_number: As there.
          check_interval: False to save at any step that has not been saved.
          options: No effect.

        Returns:
          The path, or None if nothing was saved.
        """
        if self._interval is None:
            return super().save(checkpoint_number)
        step = int(self._counter)
        grown = self._interval if self._last is None else step - self._last
        if grown == 0 or (check_interval and grown < self._interval):
            return None
        path = super().save(checkpoint_number)
        self._last = step
        return path

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint, or initialize; the interval counts from its step.

        Collective.

        Returns:
          The path of the restored checkpoint, or None.

        Cost: as there.
        """
        path = super().restore_or_initialize()
        if path is not None and self._interval is not None:
            self._last = int(self._counter)
        return path


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], latest_filename: None = None, *, name: str | None = None
) -> str | None:
    """Return the path of the newest checkpoint in a directory, as `mpistrat.latest_checkpoint`.

    Args:
      checkpoint_dir: As there.
      latest_filename: None; anything else is refused.
      name: As there.

    Raises:
      RefusedError: `latest_filename` is given.
    """
    if latest_filename is not None:
        raise RefusedError(
            "latest_checkpoint(latest_filename=) is refused: no file lists the checkpoints, their "
            "names have numbers. Leave it out, or give name=, which comes before the number."
        )
    return files.latest_checkpoint(checkpoint_dir, name)


_VARIABLE_SUFFIX = (
    "/.ATTRIBUTES/VARIABLE_VALUE"  # what names of variables end with in files of TensorFlow
)


@final
class NoVariable(FileNotFoundError, ValueError):
    """A checkpoint has no variable of that name; ``tf.errors.NotFoundError`` catches it."""


@final
class CheckpointReader:
    """The values in the file of a checkpoint, all of them read and checked. Never communicates.

    Python numbers of the program are among them; strings and other objects are not.

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
        self._arrays: dict[str, Array] = sharded.read_checkpoint(path).arrays
        values = self._arrays.pop(VALUES_NAME, None)
        for name, value in {} if values is None else parse_values(values).items():
            if isinstance(value, int | float):
                self._arrays[name] = np.array(value)

    def has_tensor(self, name: str) -> bool:
        """Return whether there is a variable `name`."""
        return name.removesuffix(_VARIABLE_SUFFIX) in self._arrays

    def get_tensor(self, name: str) -> Array:
        """Return the value of the variable `name`, with or without the ending that it has there.

        Raises:
          NoVariable: There is no such name; the message lists those that exist.
        """
        if not self.has_tensor(name):
            raise NoVariable(f"the checkpoint has no {name!r}; it has {sorted(self._arrays)}.")
        return self._arrays[name.removesuffix(_VARIABLE_SUFFIX)]

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Return the shapes by name, with the ending that names have there."""
        return {name + _VARIABLE_SUFFIX: list(array.shape) for name, array in self._arrays.items()}

    def get_variable_to_dtype_map(self) -> dict[str, Any]:
        """Return the dtypes by name, as `get_variable_to_shape_map`."""
        return {name + _VARIABLE_SUFFIX: array.dtype for name, array in self._arrays.items()}


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
    return CheckpointReader(find_checkpoint(ckpt_dir_or_file))


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> Array:
    """Return the value of one variable.

    Args:
      ckpt_dir_or_file: As in `load_checkpoint`, which says what is raised and what it costs.
      name: Its name.
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Return the names of the variables in a checkpoint, sorted, each with its shape.

    Names end with ``/.ATTRIBUTES/VARIABLE_VALUE``, as there.

    Args:
      ckpt_dir_or_file: As in `load_checkpoint`, which says what is raised and what it costs.
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())
