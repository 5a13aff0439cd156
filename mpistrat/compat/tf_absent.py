"""What to use instead of ``tf.*`` names that `mpistrat.compat.tf` does not have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from mpistrat.errors import RefusedError

__all__ = ["Names", "absent", "absent_from", "refusing"]

_GRADIENTS = (
    "Nothing here differentiates: write the backward pass (mpistrat.vjp for gradients through "
    "collectives), or take gradients with an autodiff library (torch, JAX, autograd) on the arrays "
    "of one replica and give them to all_reduce."
)
_SAVE = "tf.train.Checkpoint saves variables, and docs/concepts.md has a program that does."
_MODELS = "Models, layers, losses and optimizers are the program's own; this is for loops without."
_PYTHON = (
    "Everything runs at once, without graphs and sessions: use Python's own if, while and for, and "
    "call functions."
)
_DEVICES = (
    "Devices are labels. `mpistrat run -n N program.py` starts N ranks, one replica each; "
    "strategy.num_replicas_in_sync is their number."
)
_RANDOM = (
    "Seed each draw, tf.random.normal(shape, seed=7), or all of them, tf.random.set_seed(7); or "
    "keep a tf.random.Generator.from_seed(7)."
)
_STREAM = (
    "mpistrat.Dataset.from_batches(function) takes a function that returns an iterable of batches, "
    "and `rebatch` makes batches of another size of them."
)
_PARITY = "docs/parity.md lists every name of tf.distribute."
_FILES = (
    "mpistrat.Dataset.from_files(sorted(paths), read) takes a list of files and a function that "
    "reads one, and `rebatch` makes batches of their rows."
)

# By full name, or by the names that stand before it.
INSTEAD = {
    "tf.GradientTape": _GRADIENTS,
    "tf.gradients": _GRADIENTS,
    "tf.custom_gradient": _GRADIENTS,
    "tf.stop_gradient": _GRADIENTS,
    "tf.train.Saver": _SAVE,
    "tf.saved_model": _SAVE,
    "tf.summary": (
        "Write numbers with any logger where strategy.extended.should_save_summary is true."
    ),
    "tf.keras": _MODELS,
    "tf.optimizers": _MODELS,
    "tf.losses": _MODELS,
    "tf.metrics": _MODELS,
    "tf.initializers": _MODELS,
    "tf.Module": _MODELS,
    "tf.estimator": _MODELS,
    "tf.compat.v1.get_variable": "Use tf.Variable(initial_value, name=...) in strategy.scope().",
    "tf.compat.v1.global_variables_initializer": "Variables have their values from the start.",
    "tf.compat.v1.disable_v2_behavior": _PYTHON,
    "tf.compat.v1.disable_eager_execution": _PYTHON,
    "tf.compat.v1.distribute": _PARITY,
    "tf.compat.v1.placeholder": _PYTHON,
    "tf.compat.v1.train": _SAVE,
    "tf.compat.v1.layers": _MODELS,
    "tf.cond": _PYTHON,
    "tf.case": _PYTHON,
    "tf.while_loop": _PYTHON,
    "tf.map_fn": _PYTHON,
    "tf.scan": _PYTHON,
    "tf.autograph": _PYTHON,
    "tf.Graph": _PYTHON,
    "tf.Session": _PYTHON,
    "tf.compat.v1.Session": _PYTHON,
    "tf.config": _DEVICES,
    "tf.config.set_memory_growth": "It is tf.config.experimental.set_memory_growth.",
    "tf.TensorShape": "A shape is a tuple of integers.",
    "tf.random": _RANDOM,
    "tf.linalg": "Use numpy.linalg on the arrays.",
    "tf.signal": "Use numpy.fft on the arrays.",
    "tf.io": "Use numpy.load, h5py or zarr; Dataset.from_files reads a list of files.",
    "tf.data.TFRecordDataset": _FILES,
    "tf.data.TextLineDataset": _FILES,
    "tf.data.Dataset.from_generator": _STREAM,
    "tf.data.Dataset.interleave": _FILES,
    "tf.data.Dataset.list_files": _FILES,
    "tf.data.Dataset.zip": (
        "A tuple of arrays is one dataset of pairs: from_tensor_slices((x, y)); for streams let "
        "one function yield pairs of batches (mpistrat.Dataset.from_batches)."
    ),
    "tf.data.Dataset.filter": (
        "Choose the rows before the dataset, x[keep], so that every rank knows how many there are."
    ),
    "tf.data.Dataset.unbatch": "`rebatch` makes batches of another size.",
    "tf.data": "docs/coming-from.md has the table of what datasets here can do.",
    "tf.string": "Strings do not travel between ranks; give them numbers.",
    "tf.strings": "Strings do not travel between ranks; use Python's.",
    "tf.bfloat16": "It is ml_dtypes.bfloat16: pip install ml_dtypes.",
    "tf.debugging": "Use numpy.testing, and MPISTRAT_NAN=raise for NaN.",
    "tf.test": "Use pytest, and mpistrat.testing.run_ranks.",
    "tf.distribute": _PARITY,
    "tf.nest": "mpistrat.compat.tf.nest has flatten, map_structure, pack_sequence_as and two more.",
}


def absent(where: str, name: str) -> AttributeError:
    """Return the error that tells what to use instead of a name.

    Args:
      where: What it was asked of, such as ``tf.train``.
      name: The last part of its name.

    Example:
      >>> print(absent("tf", "TensorShape"))
      mpistrat.compat.tf has no tf.TensorShape. A shape is a tuple of integers.
    """
    path = f"{where}.{name}"
    found, rest = INSTEAD.get(path), path
    while found is None and "." in rest:
        rest = rest.rpartition(".")[0]
        found = INSTEAD.get(rest)
    if found is None and callable(getattr(np, name, None)):
        found = f"Tensors are NumPy arrays: numpy.{name} takes them."
    found = found or (
        "It has the few names that programs for tf.distribute without models need; "
        "docs/coming-from.md lists them."
    )
    return AttributeError(f"mpistrat.compat.tf has no {path}. {found}")


def absent_from(where: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module that stands for `where`, such as ``tf.data``.

    Raises:
      AttributeError: What is returned is called, as Python does for a name that is not there.
    """

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks for these
            raise AttributeError(name)
        raise absent(where, name)

    return __getattr__


class Names(SimpleNamespace):
    """Some names of a module of the other library; others say what to use.

    Args:
      where: What the module is called there.
      names: The names that there are.

    Example:
      >>> Names("tf.train", step=1).step
      1
    """

    def __init__(self, where: str, /, **names: Any):
        """Hold the names."""
        super().__init__(**names)
        vars(self)["_where"] = where

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError that says what to use instead of `name`."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise absent(vars(self).get("_where", "tf"), name)


def refusing(name: str) -> Callable[..., NoReturn]:
    """Return a function that says what to use instead of it.

    Args:
      name: Its full name there.

    Raises:
      RefusedError: What is returned is called.
    """
    text = str(absent(*name.rsplit(".", 1)))

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RefusedError(text)

    refuse.__doc__ = f"Refuse: {text}\n\nRaises:\n  RefusedError: It is called.\n"
    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse
