"""The state of a `FusedOptimizer` as ``state_dict`` of PyTorch has it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpistrat.distribute.variables import Variable
from mpistrat.optim.progress import Progress
from mpistrat.optim.state import State
from mpistrat.torch.tensors import as_array, tensor_of

__all__ = ["COUNTERS", "progress_in", "state_of", "values_in"]

# The key of the counters of `mpistrat.optim` in a state_dict.
COUNTERS = "mpistrat"
# Slots that an optimizer of PyTorch has, by their names there; others keep their own.
_TORCH_NAMES = {"m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buffer"}
_COPIED = ("ema",)  # slots that do not begin with zeros


def state_of(state: State, variable: Variable) -> dict[str, Any]:
    """Return a copy of the state of one variable. Collective with ``shard="all"``.

    Args:
      state: That of the optimizer.
      variable: One that it updates.
    """
    slots = state.targets[variable.number].slots
    tensors = {_TORCH_NAMES.get(name, name): tensor_of(slots[name].numpy()) for name in slots}
    return {"step": torch.tensor(float(state.progress.step)), **tensors}


def values_in(state: State, variable: Variable, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the slots of one variable, by name. Never communicates.

    Args:
      state: That of the optimizer.
      variable: One that it updates.
      saved: What `state_of` has returned, or an optimizer of PyTorch; empty for its beginning.

    Raises:
      ValueError: A slot is missing, or has another shape.
    """
    values = {}
    for name in state.targets[variable.number].slots:
        own = _TORCH_NAMES.get(name, name)
        value = saved.get(own)
        if value is None and (saved or name in _COPIED):
            raise ValueError(
                f"FusedOptimizer.load_state_dict: {own!r} of {variable.name!r} is not in it. Load "
                "the state of an optimizer of the same class and options."
            )
        shape = variable.shape
        array = np.zeros(shape, variable.dtype) if value is None else as_array(value.detach(), own)
        if array.shape != shape:
            raise ValueError(
                f"FusedOptimizer.load_state_dict: {own!r} of {variable.name!r} has shape "
                f"{array.shape}; expected {shape}."
            )
        values[name] = array
    return values


def progress_in(saved: Mapping[str, Any], before: Progress) -> Progress:
    """Return the counters in a ``state_dict``; of one of PyTorch, its steps.

    Args:
      saved: The ``state_dict``.
      before: The counters now, for what it does not tell.
    """
    counters = saved.get(COUNTERS)
    if counters is not None:
        return Progress(**counters)
    steps = [int(one["step"]) for one in saved["state"].values() if "step" in one]
    return before._replace(step=max(steps, default=0), calls=0, weight=0.0)
