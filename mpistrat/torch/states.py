"""The state of PyTorch's objects in checkpoints.

Checkpoints save modules, optimizers, schedulers, tensors and generators by the names of
``state_dict``. They save numbers; flags and texts come from the program.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, final

import numpy as np
import torch

from mpistrat.arrays import Array, as_array
from mpistrat.checkpoint.values import Cell
from mpistrat.errors import LeafTypeError
from mpistrat.strategy.strategy import Strategy

__all__ = ["GRADIENTS", "collect_group_numbers", "find_gradients", "parts_of"]

GRADIENTS = "_mpistrat_gradients"  # in the attributes of a replicated model; a copy has none


def find_gradients(model: torch.nn.Module) -> list[Any]:
    """Return the `Gradients` of each replicated model in a module, which may be one itself."""
    candidates = (module.__dict__.get(GRADIENTS) for module in model.modules())
    return [gradients for gradients in candidates if gradients is not None]


def parts_of(value: Any) -> Mapping[str, Any] | None:
    """Return the parts of a value that a checkpoint saves, by name; None for another kind of value.

    Args:
      value: A module, an optimizer or scheduler of ``torch.optim``, a generator or a tensor. An
        optimizer that has made no step has the names of its later state; it gets the state when
        that is restored.

    Raises:
      LeafTypeError: An optimizer has made no step, and its later state cannot be predicted.
    """
    if isinstance(value, torch.nn.Module):
        return _collect_module(value)
    if isinstance(value, torch.optim.Optimizer):
        return value.tree() if hasattr(value, "tree") else _collect_optimizer(value)
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return dict(_iterate_cells(vars(value)))
    if isinstance(value, torch.Generator):
        state = functools.partial(as_array, value.get_state())

        def restore(array: Array) -> None:
            value.set_state(torch.from_numpy(array.copy()))

        return {"state": Cell("generator", state, restore, can_differ=True)}
    return (
        {"value": _create_tensor_cell("tensor", value)} if isinstance(value, torch.Tensor) else None
    )


def _create_tensor_cell(name: str, tensor: torch.Tensor, strategy: Strategy | None = None) -> Cell:
    array = as_array(tensor.detach(), name)

    def write(value: Array) -> None:
        array[...] = value

    # Buffers of a replicated model, such as running statistics, are each rank's own.
    return Cell(name, lambda: array, write, strategy, can_differ=strategy is not None)


def _collect_module(model: torch.nn.Module) -> dict[str, Any]:
    """Return parameters and persistent buffers, each under the first of its names."""
    strategy = None
    variables_by_id: dict[int, Any] = {}
    for gradients in find_gradients(model):
        strategy = gradients.strategy
        variables_by_id |= gradients.variables_by_id
    entries, visited_ids = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in visited_ids:
            visited_ids.add(id(tensor))
            variable = variables_by_id.get(id(tensor))
            entries[name] = (
                _create_tensor_cell(name, tensor, strategy) if variable is None else variable
            )
    return entries


def collect_group_numbers(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the numbers of the groups of an optimizer, by the numbers of the groups."""
    return {str(i): dict(_iterate_cells(group)) for i, group in enumerate(optimizer.param_groups)}


def _collect_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return state and groups; a parameter without state has the names of its later state."""
    groups = collect_group_numbers(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        return {"state": {"0": _LBFGSState(optimizer).create_cells()}, "groups": groups}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    predicted_states = _predict_states(
        optimizer, [p for p in params if p.requires_grad and not optimizer.state.get(p)]
    )
    state = {}
    for number, p in enumerate(params):
        param_state = optimizer.state.get(p) or predicted_states.get(p, {})
        if p.requires_grad or param_state:
            state[str(number)] = {
                **dict(_iterate_cells(param_state)),
                "begun": _create_presence_cell(optimizer.state, p, param_state),
            }
    return {"state": state, "groups": groups}


_LBFGS_NUMBERS: dict[str, type[int] | type[float]] = {
    "func_evals": int,
    "n_iter": int,
    "t": float,
    "H_diag": float,
    "prev_loss": float,
}


@final
class _LBFGSState:
    """The state of LBFGS: its lists as arrays for as many directions as there may be.

    Args:
      optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.LBFGS):
        """Read the shapes."""
        group = optimizer.param_groups[0]
        params, history_size = group["params"], group["history_size"]
        element_count = sum(2 * p.numel() if p.is_complex() else p.numel() for p in params)
        self._optimizer, self._first_parameter = optimizer, params[0]
        self._list_shapes = {
            "old_dirs": (history_size, element_count),
            "old_stps": (history_size, element_count),
            "ro": (history_size,),
        }
        vector_shapes = {"d": (element_count,), "prev_flat_grad": (element_count,)}
        self._shapes: dict[str, tuple[int, ...]] = {**self._list_shapes, **vector_shapes}
        first_parameter = params[0]
        self._dtype = (
            first_parameter.real.dtype if first_parameter.is_complex() else first_parameter.dtype
        )
        self._keys = [*_LBFGS_NUMBERS, *self._shapes, "count"]
        self._restored_state: dict[str, Any] = {}

    def create_cells(self) -> dict[str, Cell]:
        """Return a cell for each number and each array, by name."""
        bind = functools.partial
        return {key: Cell(key, bind(self._read, key), bind(self._write, key)) for key in self._keys}

    def _read(self, key: str) -> Array:
        state = self._optimizer.state.get(self._first_parameter, {})
        if key == "count":
            return np.array(len(state.get("old_dirs", ())) if "d" in state else -1, np.int64)
        if key in _LBFGS_NUMBERS:
            number_class = _LBFGS_NUMBERS[key]
            return np.array(number_class(state.get(key) or 0), np.dtype(number_class))
        tensor = torch.zeros(self._shapes[key], dtype=self._dtype)
        if key in self._list_shapes:
            for row, entry in zip(tensor, state.get(key, ()), strict=False):
                row.copy_(entry)
        elif key in state:
            tensor.copy_(state[key])
        return as_array(tensor, key)

    def _write(self, key: str, value: Array) -> None:
        """Keep one value; with the last one, set the state of the optimizer."""
        restored_state = self._restored_state
        if key in self._shapes:
            restored_state[key] = torch.empty(self._shapes[key], dtype=self._dtype)
            as_array(restored_state[key], key)[...] = value
        else:
            restored_state[key] = value.item()
        if len(restored_state) == len(self._keys):
            count = restored_state.pop("count")
            for name in self._list_shapes:
                rows = restored_state[name][: max(count, 0)]
                restored_state[name] = [row.clone() for row in rows]
            counts = {name: restored_state[name] for name in ("func_evals", "n_iter")}
            self._optimizer.state[self._first_parameter] = restored_state if count >= 0 else counts
            self._restored_state = {}


def _create_presence_cell(
    states: MutableMapping[Any, Any], p: torch.Tensor, param_state: dict[str, Any]
) -> Cell:
    """Return the cell of whether a parameter has state; writing to it sets or removes the state."""

    def write(value: Array) -> None:
        if value:
            states[p] = param_state
        else:
            states.pop(p, None)

    return Cell("begun", lambda: np.array(bool(states.get(p)), np.int64), write)


def _predict_states(
    optimizer: torch.optim.Optimizer, params: list[Any]
) -> dict[Any, dict[str, Any]]:
    """Return the state that a first step would give these parameters, with zeros in it.

    Another optimizer steps parameters that are zeros, so this optimizer does not change.
    """
    if not params:
        return {}
    copies = {p: torch.zeros_like(p, requires_grad=False) for p in params}
    for param_copy in copies.values():
        param_copy.grad = torch.zeros_like(param_copy)
    optimizer_class = type(optimizer)
    trial_optimizer, step = object.__new__(optimizer_class), optimizer_class.step
    # Schedulers put a `step` of this optimizer into its attributes.
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}
    groups = [
        {**group, "params": [copies[p] for p in group["params"] if p in copies]}
        for group in optimizer.param_groups
    ]
    vars(trial_optimizer).update(
        attributes, param_groups=groups, state=collections.defaultdict(dict)
    )
    if getattr(step, "hooked", False):  # a wrapper that calls hooks, also those of all optimizers
        step = step.__wrapped__
    try:
        step(trial_optimizer)
    except Exception as error:
        raise LeafTypeError(
            f"the state of torch's {optimizer_class.__name__} cannot be saved or restored before "
            f"it has made a step, as a step with zero gradients failed: {error}\n  Leave the "
            "optimizer out of the checkpoint, or use another one."
        ) from error
    for param_state in trial_optimizer.state.values():
        for key, value in param_state.items():
            param_state[key] = _make_zero(value)
    return {
        p: trial_optimizer.state[param_copy]
        for p, param_copy in copies.items()
        if param_copy in trial_optimizer.state
    }


def _make_zero(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.zero_()
    return type(value)(0) if _is_number(value) else value


def _iterate_cells(holder: MutableMapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors and numbers of a mapping, and of sequences and schedulers in it."""
    for key, value in list(holder.items()):
        name = str(key)
        if key == "params":
            continue
        if isinstance(value, torch.Tensor):
            yield name, _create_tensor_cell(name, value)
        elif key == "_schedulers":  # of schedulers that are made of others
            yield (
                name,
                {
                    str(i): dict(_iterate_cells(vars(scheduler)))
                    for i, scheduler in enumerate(value)
                },
            )
        elif _is_number(value):
            yield name, _create_number_cell(name, holder, key)
        elif isinstance(value, Sequence) and value and all(map(_is_number, value)):
            yield name, _create_sequence_cell(name, holder, key)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _create_number_cell(name: str, holder: MutableMapping[Any, Any], key: Any) -> Cell:
    number_class = type(holder[key])

    def write(value: Array) -> None:
        holder[key] = number_class(value.item())

    dtype = np.int64 if number_class is int else np.float64
    return Cell(name, lambda: np.array(holder[key], dtype), write)


def _create_sequence_cell(name: str, holder: MutableMapping[Any, Any], key: Any) -> Cell:
    sequence_class, number_classes = type(holder[key]), [type(number) for number in holder[key]]

    def write(value: Array) -> None:
        holder[key] = sequence_class(
            [
                number_class(number)
                for number_class, number in zip(number_classes, value.tolist(), strict=True)
            ]
        )

    return Cell(name, lambda: np.array(holder[key], np.float64), write)
