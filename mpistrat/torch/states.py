"""What checkpoints save of PyTorch's objects: modules, optimizers, schedulers, tensors, generators.

Names are those of ``state_dict``. Numbers are saved; flags and texts are the program's own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from mpistrat.arrays import Array, as_array
from mpistrat.checkpoint.cells import Cell

__all__ = ["GRADIENTS", "parts_of"]

GRADIENTS = "_mpistrat_gradients"  # in the attributes of a replicated model; a copy has none


def parts_of(value: Any) -> Mapping[str, Any] | None:
    """Return what a checkpoint saves of a value, by name; None if that is nothing known here.

    Args:
      value: A module, an optimizer or scheduler of ``torch.optim``, a generator or a tensor. An
        optimizer that has made no step gets its state first, as its first step would.
    """
    if isinstance(value, torch.nn.Module):
        return _module(value)
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer(value)
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return dict(_numbers(vars(value)))
    if isinstance(value, torch.Generator):
        state = functools.partial(as_array, value.get_state())

        def restore(array: Array) -> None:
            value.set_state(torch.from_numpy(array.copy()))

        return {"state": Cell("generator", state, restore)}
    return {"value": _tensor("tensor", value)} if isinstance(value, torch.Tensor) else None


def _tensor(name: str, tensor: Any, strategy: Any = None) -> Cell:
    array = as_array(tensor.detach(), name)

    def write(values: Array) -> None:
        array[...] = values

    return Cell(name, lambda: array, write, strategy)


def _module(model: Any) -> dict[str, Any]:
    """Return parameters and persistent buffers; what has several names under the first."""
    gradients = model.__dict__.get(GRADIENTS)
    strategy = getattr(gradients, "strategy", None)
    variables = getattr(gradients, "variables", {})
    found, seen = {}, set()
    for name, one in model.state_dict(keep_vars=True).items():
        if isinstance(one, torch.Tensor) and id(one) not in seen:
            seen.add(id(one))
            own = variables.get(id(one))
            found[name] = _tensor(name, one, strategy) if own is None else own
    return found


def _optimizer(optimizer: Any) -> dict[str, Any]:
    if not optimizer.state:
        _begin(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for number, p in enumerate(params):
        of_one = optimizer.state.get(p, {})
        state[str(number)] = dict(_numbers(of_one))
    groups = {str(i): dict(_numbers(group)) for i, group in enumerate(optimizer.param_groups)}
    return {"state": state, "groups": groups}


def _begin(optimizer: Any) -> None:
    """Create the state that a first step would, without a change of weights."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    before = [(p, p.grad) for p in params]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    try:
        optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for p, gradient in before:
            p.grad = gradient
    for of_one in optimizer.state.values():
        if isinstance(of_one.get("step"), torch.Tensor):
            of_one["step"].zero_()
        elif "step" in of_one:
            of_one["step"] = 0


def _numbers(holder: MutableMapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors and numbers of a mapping, and of the sequences in it."""
    for key, value in list(holder.items()):
        name = str(key)
        if key == "params":
            continue
        if isinstance(value, torch.Tensor):
            yield name, _tensor(name, value)
        elif _is_number(value):
            yield name, _number(name, holder, key)
        elif isinstance(value, Sequence) and value and all(map(_is_number, value)):
            yield name, _row(name, holder, key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(name: str, holder: MutableMapping[Any, Any], key: Any) -> Cell:
    kind = type(holder[key])

    def write(values: Array) -> None:
        holder[key] = kind(values.item())

    dtype = np.int64 if kind is int else np.float64
    return Cell(name, lambda: np.array(holder[key], dtype), write)


def _row(name: str, holder: MutableMapping[Any, Any], key: Any) -> Cell:
    kind, kinds = type(holder[key]), [type(one) for one in holder[key]]

    def write(values: Array) -> None:
        holder[key] = kind([made(one) for made, one in zip(kinds, values.tolist(), strict=True)])

    return Cell(name, lambda: np.array(holder[key], np.float64), write)
