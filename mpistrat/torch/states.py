"""What checkpoints save of PyTorch's objects: modules, optimizers, schedulers, tensors, generators.

Names are those of ``state_dict``. Numbers are saved; flags and texts are the program's own.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from mpistrat.arrays import Array, as_array
from mpistrat.checkpoint.values import Cell
from mpistrat.errors import LeafTypeError

__all__ = ["GRADIENTS", "all_gradients", "groups_of", "parts_of"]

GRADIENTS = "_mpistrat_gradients"  # in the attributes of a replicated model; a copy has none


def all_gradients(model: Any) -> list[Any]:
    """Return the gradients of the replicated models in a module: it, or what it has inside."""
    candidates = (module.__dict__.get(GRADIENTS) for module in model.modules())
    return [gradients for gradients in candidates if gradients is not None]


def parts_of(value: Any) -> Mapping[str, Any] | None:
    """Return what a checkpoint saves of a value, by name; None if that is nothing known here.

    Args:
      value: A module, an optimizer or scheduler of ``torch.optim``, a generator or a tensor. An
        optimizer that has made no step has the names that its state will have; it has no state
        before some is restored.

    Raises:
      LeafTypeError: An optimizer has made no step, and what its state will be cannot be told.
    """
    if isinstance(value, torch.nn.Module):
        return _module(value)
    if isinstance(value, torch.optim.Optimizer):
        return value.tree() if hasattr(value, "tree") else _optimizer(value)
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
    """Return parameters and persistent buffers, each under the first of its names."""
    strategy = None
    variables: dict[int, Any] = {}
    for gradients in all_gradients(model):
        strategy = gradients.strategy
        variables |= gradients.variables
    entries, visited_ids = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in visited_ids:
            visited_ids.add(id(tensor))
            variable = variables.get(id(tensor))
            entries[name] = _tensor(name, tensor, strategy) if variable is None else variable
    return entries


def groups_of(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the numbers of the groups of an optimizer, by the numbers of the groups."""
    return {str(i): dict(_numbers(group)) for i, group in enumerate(optimizer.param_groups)}


def _optimizer(optimizer: Any) -> dict[str, Any]:
    """Return state and groups; a parameter without state yet has the names of its later state."""
    groups = groups_of(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        return {"state": {"0": _history(optimizer)}, "groups": groups}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    new = _first(optimizer, [p for p in params if p.requires_grad and not optimizer.state.get(p)])
    state = {}
    for number, p in enumerate(params):
        param_state = optimizer.state.get(p) or new.get(p, {})
        if p.requires_grad or param_state:
            state[str(number)] = {
                **dict(_numbers(param_state)),
                "begun": _create_presence_cell(optimizer.state, p, param_state),
            }
    return {"state": state, "groups": groups}


def _history(optimizer: Any) -> dict[str, Cell]:
    """Return the state of LBFGS: its lists as arrays for as many directions as there may be."""
    group = optimizer.param_groups[0]
    first, room = group["params"][0], group["history_size"]
    size = sum(2 * p.numel() if p.is_complex() else p.numel() for p in group["params"])
    numbers = {"func_evals": int, "n_iter": int, "t": float, "H_diag": float, "prev_loss": float}
    rows = {"old_dirs": (room, size), "old_stps": (room, size), "ro": (room,)}
    shapes = {**rows, "d": (size,), "prev_flat_grad": (size,)}
    dtype = first.real.dtype if first.is_complex() else first.dtype
    written: dict[str, Any] = {}

    def read(key: str) -> Array:
        state = optimizer.state.get(first, {})
        if key == "count":
            return np.array(len(state.get("old_dirs", ())) if "d" in state else -1, np.int64)
        if key in numbers:
            return np.array(numbers[key](state.get(key) or 0), np.dtype(numbers[key]))
        tensor = torch.zeros(shapes[key], dtype=dtype)
        if key in state:
            sources = state[key][:room] if key in rows else [state[key]]
            for place, source in zip(tensor if key in rows else [tensor], sources, strict=False):
                place.copy_(source)
        return as_array(tensor, key)

    def write(key: str, values: Array) -> None:
        if key in shapes:
            written[key] = torch.empty(shapes[key], dtype=dtype)
            as_array(written[key], key)[...] = values
        else:
            written[key] = values.item()
        if len(written) == len(keys):  # only all of it is a state
            count = written.pop("count")
            for name in rows:
                written[name] = [row.clone() for row in written[name][: max(count, 0)]]
            counts = {name: written[name] for name in ("func_evals", "n_iter")}
            optimizer.state[first] = dict(written) if count >= 0 else counts
            written.clear()

    keys, bind = [*numbers, *shapes, "count"], functools.partial
    return {key: Cell(key, bind(read, key), bind(write, key)) for key in keys}


def _create_presence_cell(states: Any, p: Any, param_state: dict[str, Any]) -> Cell:
    """Return whether a parameter has state; writing it sets or removes `param_state`."""

    def write(values: Array) -> None:
        if values:
            states[p] = param_state
        else:
            states.pop(p, None)

    return Cell("begun", lambda: np.array(bool(states.get(p)), np.int64), write)


def _first(optimizer: Any, params: list[Any]) -> dict[Any, dict[str, Any]]:
    """Return the state that these parameters would get by a first step, with zeros in it.

    Another optimizer makes the step, of parameters that are zeros, so nothing of this one changes.
    """
    if not params:
        return {}
    copies = {p: torch.zeros_like(p, requires_grad=False) for p in params}
    for param_copy in copies.values():
        param_copy.grad = torch.zeros_like(param_copy)
    kind = type(optimizer)
    other, step = object.__new__(kind), kind.step
    # Schedulers put a `step` of this optimizer into its attributes; of hooks it has its own.
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}
    groups = [
        {**group, "params": [copies[p] for p in group["params"] if p in copies]}
        for group in optimizer.param_groups
    ]
    vars(other).update(attributes, param_groups=groups, state=collections.defaultdict(dict))
    if getattr(step, "hooked", False):  # what calls the hooks, also those of all optimizers
        step = step.__wrapped__
    try:
        step(other)
    except Exception as error:
        raise LeafTypeError(
            f"the state of torch's {kind.__name__} cannot be saved or restored before it has made "
            f"a step, as a step with zero gradients failed: {error}\n  Leave the optimizer out of "
            "the checkpoint, or use another one."
        ) from error
    for param_state in other.state.values():
        for key, value in param_state.items():
            param_state[key] = _zero(value)
    return {
        p: other.state[param_copy] for p, param_copy in copies.items() if param_copy in other.state
    }


def _zero(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.zero_()
    return type(value)(0) if _is_number(value) else value


def _numbers(holder: MutableMapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors and numbers of a mapping, and of sequences and schedulers in it."""
    for key, value in list(holder.items()):
        name = str(key)
        if key == "params":
            continue
        if isinstance(value, torch.Tensor):
            yield name, _tensor(name, value)
        elif key == "_schedulers":  # of those that are made of others
            yield (
                name,
                {str(i): dict(_numbers(vars(scheduler))) for i, scheduler in enumerate(value)},
            )
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
    kind, kinds = type(holder[key]), [type(number) for number in holder[key]]

    def write(values: Array) -> None:
        holder[key] = kind(
            [
                number_type(number)
                for number_type, number in zip(kinds, values.tolist(), strict=True)
            ]
        )

    return Cell(name, lambda: np.array(holder[key], np.float64), write)
