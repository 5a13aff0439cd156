"""Hyper-parameters of `mpistrat.optim` as PyTorch's ``param_groups``, whose changes count.

An optimizer of `mpistrat.optim` is a frozen value. `ParamGroups` makes a private one of it, with
settings of its own for each group, which share its state, and writes to these what the program
writes to a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from mpistrat.arrays import is_real
from mpistrat.errors import ContextError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.optim.base import Group, OptimizerSettings
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.state import State
from mpistrat.torch.ddp.stepping import HyperParameters

__all__ = ["ParamGroups"]

# Options in groups of torch.optim that change the update, beside the numbers.
_OPTIONS = (
    *("nesterov", "dampening", "maximize", "amsgrad", "centered"),
    "decoupled_weight_decay",
)

_TORCH_NAMES = {"learning_rate": "lr", "epsilon": "eps"}
_BETAS = ("beta_1", "beta_2")
_NAMES_BELOW_ONE = ("beta_1", "beta_2", "momentum")


@final
class _Rate:
    """A learning rate that a group holds; a schedule, as far as optimizers know.

    Args:
      index: The number of the group.
      value: The rate.

    Attributes:
      value: The rate now.
    """

    def __init__(self, index: int, value: float):
        self.value, self._text = value, f"{value!r} at first, param_groups[{index}]['lr']"

    def __call__(self, step: int) -> float:
        return self.value

    def __repr__(self) -> str:
        return self._text


@final
class _Members:
    """Matches the variables of one group; see `mpistrat.optim.Group`."""

    def __init__(self, index: int, names: Sequence[str]):
        self._index, self._names = index, frozenset(names)

    def __call__(self, name: str, shape: tuple[int, ...]) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return f"param_groups[{self._index}]"


class _Live(NamedTuple):
    """One group.

    Attributes:
      start: Its settings as the program has given them.
      settings: Those that updates go by.
      rate: Its learning rate; None if that is a schedule of `mpistrat.optim`.
    """

    start: OptimizerSettings
    settings: OptimizerSettings
    rate: _Rate | None


@final
class ParamGroups:
    """The groups of one optimizer of `mpistrat.optim`, as PyTorch has them.

    Args:
      optimizer: The optimizer, as the program has given it.
      named: The parameters by name.

    Attributes:
      optimizer: The one to update by: it shares the state of the other.
      groups: What PyTorch's optimizers are made of.
      defaults: The numbers of the first group.
      scheduled: Which groups have a schedule of `mpistrat.optim`.

    Raises:
      ValueError: A group of the optimizer has no variable.
    """

    def __init__(self, optimizer: Optimizer, named: Mapping[str, Any]):
        """Divide the parameters into groups of equal settings."""
        shapes = [(name, tuple(p.shape)) for name, p in named.items()]
        self._starts: list[OptimizerSettings] = []
        self._members: list[list[str]] = []
        for name, settings in zip(named, optimizer.of_all(shapes), strict=True):
            if settings not in self._starts:
                self._starts.append(settings)
                self._members.append([])
            self._members[self._starts.index(settings)].append(name)
        self._rates = [
            None if callable(start.learning_rate) else _Rate(i, float(start.learning_rate))
            for i, start in enumerate(self._starts)
        ]
        self.optimizer = self._private(optimizer)
        # The states of an optimizer are those of all its copies here.
        self.optimizer.__dict__["_states"] = optimizer._states
        self.groups = [
            {"params": [named[name] for name in names], **_numbers_of(start)}
            for start, names in zip(self._starts, self._members, strict=True)
        ]
        self.defaults = _numbers_of(self._starts[0]) if self._starts else {}
        self._live: list[_Live] = []
        self._numbers: list[dict[str, float]] = [{} for _ in self._starts]
        self._record: HyperParameters | None = None
        self.scheduled = [i for i, rate in enumerate(self._rates) if rate is None]
        self._shown_rates: dict[int, Any] = {}

    def _private(self, optimizer: Optimizer) -> Optimizer:
        if len(self._starts) == 1 and not optimizer.groups:
            rate: Any = self._rates[0] or optimizer.learning_rate
            return dataclasses.replace(optimizer, learning_rate=rate)
        groups = []
        for i, (start, rate) in enumerate(zip(self._starts, self._rates, strict=True)):
            changes = {name: getattr(start, name) for name in start.group_fields()}
            changes["learning_rate"] = rate or start.learning_rate
            groups.append(Group(_Members(i, self._members[i]), **changes))
        return dataclasses.replace(optimizer, groups=groups)

    def begin(self, settings: Mapping[str, OptimizerSettings], groups: Sequence[Any]) -> None:
        """Let groups count from now on.

        Args:
          settings: Those that the private optimizer updates each parameter by, by name.
          groups: The ``param_groups`` of PyTorch's optimizer.
        """
        private_settings = [settings[names[0]] for names in self._members]
        self._live = [
            _Live(*live_fields)
            for live_fields in zip(self._starts, private_settings, self._rates, strict=True)
        ]
        self._shown_rates = {i: groups[i]["lr"] for i in self.scheduled}

    def show_rates(self, groups: Sequence[dict[str, Any]], state: State) -> None:
        """Write the learning rates of schedules of `mpistrat.optim` to their groups.

        Args:
          groups: The ``param_groups``.
          state: That of the optimizer, which counts the updates.
        """
        for i in self.scheduled:
            rate = self._live[i].settings.rate(state.progress.step)
            self._shown_rates[i] = groups[i]["lr"] = rate
        if self.scheduled and self._record is not None:
            self._record.keep()

    def take(self, optimizer: torch.optim.Optimizer, lockstep: Lockstep) -> None:
        """Take what groups hold; the next handshake compares it between ranks.

        Raises:
          ValueError: A number is not one that the optimizer of `mpistrat.optim` takes.
          ContextError: It has a schedule, and something else has set the learning rate.
        """
        record = self._record
        if record is None or record.groups is not optimizer.param_groups:
            record = HyperParameters(optimizer, self.scheduled)
        elif not record.refresh():
            record = None
        if record is not None:
            self._record = None  # what is refused now is refused at the next step too
            for i, group in enumerate(optimizer.param_groups):
                self._take_group(i, group)
            self._record = record
        if lockstep.comm.size > 1 and self._record is not None:
            lockstep.defer_write(self._record)

    def _take_group(self, i: int, group: dict[str, Any]) -> None:
        live = self._live[i]
        if live.rate is None and ("initial_lr" in group or group["lr"] is not self._shown_rates[i]):
            raise ContextError(
                f"param_groups[{i}]['lr'] was set, by a scheduler of PyTorch or the program, and "
                f"learning_rate of {type(live.start).__name__} is a schedule of mpistrat.optim. "
                "Use one of them: mpistrat.optim with learning_rate=1e-3, a number, lets a "
                "scheduler of PyTorch set it."
            )
        _check_options(i, live.start, group)
        values = _values_of(i, live.start, group)
        numbers = {name: _checked(i, name, value) for name, value in values.items()}
        if live.rate is not None:
            live.rate.value = numbers["learning_rate"]
        del numbers["learning_rate"]
        if numbers != self._numbers[i]:
            _check_rule(i, live.start, numbers)
            for name, number in numbers.items():
                object.__setattr__(live.settings, name, number)
            self._numbers[i] = numbers


def _check_options(i: int, start: OptimizerSettings, group: Mapping[str, Any]) -> None:
    """Raise ValueError if a group has an option of PyTorch that the update would not follow."""
    kind = type(start).__name__
    own = {
        "nesterov": getattr(start, "nesterov", False),
        # Of a weight decay of 0 both are the same.
        "decoupled_weight_decay": kind != "Adam" if group.get("weight_decay") else None,
    }
    for name in _OPTIONS:
        value = group.get(name)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if name in group and own.get(name, False) is not None and value != own.get(name, False):
            raise ValueError(
                f"param_groups[{i}]: {name} is {value!r:.60}, and {kind} updates as with "
                f"{own.get(name, False)!r}. Choose an optimizer of mpistrat.optim that does it, or "
                "one of torch.optim with mt.replicate."
            )


def _check_rule(i: int, start: OptimizerSettings, numbers: dict[str, Any]) -> None:
    """Raise ValueError if numbers want other slots or another loop than the state was made for."""
    changed_settings = dataclasses.replace(start, groups=(), **numbers)
    if changed_settings.rule != start.rule:
        raise ValueError(
            f"param_groups[{i}]: {type(start).__name__} has another rule of update with "
            f"{changed_settings.chosen()} than it was made for, {start.chosen()}. Give it a "
            "momentum and a weight_decay above 0 from the start; of OneCycleLR and CyclicLR "
            "cycle_momentum=False leaves the momentum alone."
        )


def _numbers_of(settings: OptimizerSettings) -> dict[str, Any]:
    """Return the hyper-parameters that are numbers, by the names that PyTorch gives them."""
    fields = settings.group_fields()
    rate = settings.rate(0)
    numbers = {
        _TORCH_NAMES.get(name, name): getattr(settings, name)
        for name in fields
        if name not in _BETAS and name != "learning_rate" and _is_float(getattr(settings, name))
    }
    betas = (
        {"betas": tuple(getattr(settings, name) for name in _BETAS)} if "beta_1" in fields else {}
    )
    return {"lr": rate, **betas, **numbers}


def _is_float(value: Any) -> bool:
    """Tell whether a hyper-parameter is a number, and no flag."""
    return isinstance(value, float)


def _values_of(i: int, settings: OptimizerSettings, group: dict[str, Any]) -> dict[str, Any]:
    """Return what group `i` holds, by the names of `mpistrat.optim`."""
    values = {}
    missing = _numbers_of(settings).keys() - group.keys()
    if missing:
        raise ValueError(
            f"param_groups[{i}] has no {', '.join(sorted(missing))}, by which "
            f"{type(settings).__name__} updates: it is of an optimizer of another class."
        )
    for name in settings.group_fields():
        if name == "learning_rate" or _is_float(getattr(settings, name)):
            if name in _BETAS:
                values[name] = group["betas"][_BETAS.index(name)]
            else:
                values[name] = group[_TORCH_NAMES.get(name, name)]
    return values


def _checked(i: int, name: str, value: Any) -> float:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    limit = 1.0 if name in _NAMES_BELOW_ONE else float("inf")
    if not is_real(number) or not 0.0 <= number < limit:
        limit_text = " and below 1" if limit == 1.0 else ", and finite"
        raise ValueError(
            f"param_groups[{i}]: {_TORCH_NAMES.get(name, name)} is {value!r:.60}; expected a "
            f"number not below 0{limit_text}."
        )
    return float(number)
