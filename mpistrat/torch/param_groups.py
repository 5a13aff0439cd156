"""Hyper-parameters of `mpistrat.optim` as PyTorch's ``param_groups``, which programs change.

An optimizer of `mpistrat.optim` is a frozen value. `ParamGroups` makes a private copy of it, which
shares its state and has settings of its own for each group. Numbers that the program writes to a
group are copied to these settings before the next step.
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

# Options of torch.optim, other than numbers, that change the update.
_OPTIONS = (
    *("nesterov", "dampening", "maximize", "amsgrad", "centered"),
    *("decoupled_weight_decay", "lr_decay"),
)

# "alpha" is that of RMSprop, which has no `beta_1`.
_TORCH_NAMES = {"learning_rate": "lr", "epsilon": "eps", "beta_2": "alpha"}
_BETAS = ("beta_1", "beta_2")
_NAMES_BELOW_1 = ("beta_1", "beta_2", "momentum")


@final
class _GroupRate:
    """The learning rate of a group, as a schedule for `mpistrat.optim`.

    Args:
      index: The number of the group.
      rate: The rate at the start.

    Attributes:
      rate: The rate now.
    """

    def __init__(self, index: int, rate: float):
        self.rate, self._text = rate, f"{rate!r} at first, param_groups[{index}]['lr']"

    def __call__(self, step: int) -> float:
        return self.rate

    def __repr__(self) -> str:
        return self._text


@final
class _MemberMatcher:
    """Matches the variables of one group; see `mpistrat.optim.Group`."""

    def __init__(self, index: int, names: Sequence[str]):
        self._index, self._names = index, frozenset(names)

    def __call__(self, name: str, shape: tuple[int, ...]) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return f"param_groups[{self._index}]"


class _LiveGroup(NamedTuple):
    """A group with the settings that updates use.

    Attributes:
      initial_settings: The settings that the program has given.
      settings: The settings that updates use.
      group_rate: The learning rate; None if it is a schedule of `mpistrat.optim`.
    """

    initial_settings: OptimizerSettings
    settings: OptimizerSettings
    group_rate: _GroupRate | None


@final
class ParamGroups:
    """The groups of one optimizer of `mpistrat.optim`, in the form of PyTorch.

    Args:
      optimizer: The optimizer, as the program has given it.
      params_by_name: The parameters by name.

    Attributes:
      optimizer: The private optimizer, which shares the state of the argument.
      groups: The groups for the constructor of PyTorch's optimizer.
      defaults: The numbers of the first group.
      scheduled: The indices of groups with a schedule of `mpistrat.optim`.

    Raises:
      ValueError: A group of the optimizer has no variable.
    """

    def __init__(self, optimizer: Optimizer, params_by_name: Mapping[str, Any]):
        """Divide the parameters into groups of equal settings."""
        shapes = [(name, tuple(p.shape)) for name, p in params_by_name.items()]
        self._initial_settings: list[OptimizerSettings] = []
        self._member_names: list[list[str]] = []
        for name, settings in zip(
            params_by_name, optimizer._resolve_all_settings(shapes), strict=True
        ):
            if settings not in self._initial_settings:
                self._initial_settings.append(settings)
                self._member_names.append([])
            self._member_names[self._initial_settings.index(settings)].append(name)
        self._rates = [
            None
            if callable(initial_settings.learning_rate)
            else _GroupRate(i, float(initial_settings.learning_rate))
            for i, initial_settings in enumerate(self._initial_settings)
        ]
        self.optimizer = self._create_private_optimizer(optimizer)
        # Both have the same mapping of states.
        self.optimizer.__dict__["_states"] = optimizer._states
        self.groups = [
            {
                "params": [params_by_name[name] for name in names],
                **_read_initial_numbers(initial_settings),
            }
            for initial_settings, names in zip(
                self._initial_settings, self._member_names, strict=True
            )
        ]
        self.defaults = (
            _read_initial_numbers(self._initial_settings[0]) if self._initial_settings else {}
        )
        self._live_groups: list[_LiveGroup] = []
        self._checked_numbers: list[dict[str, float]] = [{} for _ in self._initial_settings]
        self._hyper_parameters: HyperParameters | None = None
        self.scheduled = [i for i, rate in enumerate(self._rates) if rate is None]
        self._shown_rates: dict[int, Any] = {}

    def _create_private_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if len(self._initial_settings) == 1 and not optimizer.groups:
            rate: Any = self._rates[0] or optimizer.learning_rate
            return dataclasses.replace(optimizer, learning_rate=rate)
        groups = []
        for i, (initial_settings, rate) in enumerate(
            zip(self._initial_settings, self._rates, strict=True)
        ):
            changes = {
                name: getattr(initial_settings, name) for name in initial_settings._group_fields()
            }
            changes["learning_rate"] = rate or initial_settings.learning_rate
            groups.append(Group(_MemberMatcher(i, self._member_names[i]), **changes))
        return dataclasses.replace(optimizer, groups=groups)

    def bind_settings(
        self, settings_by_name: Mapping[str, OptimizerSettings], groups: Sequence[Any]
    ) -> None:
        """Connect the groups to the settings that the private optimizer uses.

        Args:
          settings_by_name: The settings for each parameter, by name.
          groups: The ``param_groups`` of PyTorch's optimizer.
        """
        live_settings = [settings_by_name[names[0]] for names in self._member_names]
        self._live_groups = [
            _LiveGroup(*live_fields)
            for live_fields in zip(self._initial_settings, live_settings, self._rates, strict=True)
        ]
        self._shown_rates = {i: groups[i]["lr"] for i in self.scheduled}

    def write_learning_rates(self, groups: Sequence[dict[str, Any]], state: State) -> None:
        """Write the learning rates of schedules of `mpistrat.optim` to their groups.

        Args:
          groups: The ``param_groups``.
          state: The state of the optimizer, which counts the updates.
        """
        for i in self.scheduled:
            rate = self._live_groups[i].settings.rate(state.progress.step)
            self._shown_rates[i] = groups[i]["lr"] = rate
        if self.scheduled and self._hyper_parameters is not None:
            self._hyper_parameters.accept_values()

    def apply_changes(self, optimizer: torch.optim.Optimizer, lockstep: Lockstep) -> None:
        """Copy the numbers of groups; the next handshake compares them between ranks.

        Raises:
          ValueError: The optimizer of `mpistrat.optim` does not take a number.
          ContextError: The optimizer has a schedule, and the learning rate was set.
        """
        hyper_parameters = self._hyper_parameters
        if hyper_parameters is None or hyper_parameters.groups is not optimizer.param_groups:
            hyper_parameters = HyperParameters(optimizer, self.scheduled)
        elif not hyper_parameters.refresh():
            hyper_parameters = None
        if hyper_parameters is not None:
            self._hyper_parameters = None  # numbers that fail now fail at the next step too
            for i, group in enumerate(optimizer.param_groups):
                self._apply_group(i, group)
            self._hyper_parameters = hyper_parameters
        if lockstep.comm.size > 1 and self._hyper_parameters is not None:
            lockstep.defer_write(self._hyper_parameters)

    def _apply_group(self, i: int, group_options: dict[str, Any]) -> None:
        live_group = self._live_groups[i]
        if live_group.group_rate is None and (
            "initial_lr" in group_options or group_options["lr"] is not self._shown_rates[i]
        ):
            raise ContextError(
                f"param_groups[{i}]['lr'] was set, by a scheduler of PyTorch or the program, and "
                f"learning_rate of {type(live_group.initial_settings).__name__} is a schedule of "
                "mpistrat.optim. Use one of them: mpistrat.optim with learning_rate=1e-3, a "
                "number, lets a scheduler of PyTorch set it."
            )
        _check_options(i, live_group.initial_settings, group_options)
        values = _read_values(i, live_group.initial_settings, group_options)
        numbers_by_name = {name: _check_number(i, name, value) for name, value in values.items()}
        if live_group.group_rate is not None:
            live_group.group_rate.rate = numbers_by_name["learning_rate"]
        del numbers_by_name["learning_rate"]
        if numbers_by_name != self._checked_numbers[i]:
            _check_rule(i, live_group.initial_settings, numbers_by_name)
            for name, number in numbers_by_name.items():
                object.__setattr__(live_group.settings, name, number)
            self._checked_numbers[i] = numbers_by_name


def _check_options(
    i: int, initial_settings: OptimizerSettings, group_options: Mapping[str, Any]
) -> None:
    """Raise ValueError if a group has an option of PyTorch that the update would not follow."""
    optimizer_name = type(initial_settings).__name__
    followed_options = {
        "nesterov": getattr(initial_settings, "nesterov", False),
        "centered": getattr(initial_settings, "centered", False),
        # Both are the same without weight decay.
        "decoupled_weight_decay": optimizer_name != "Adam"
        if group_options.get("weight_decay")
        else None,
    }
    for name in _OPTIONS:
        value = group_options.get(name)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if (
            name in group_options
            and followed_options.get(name, False) is not None
            and value != followed_options.get(name, False)
        ):
            raise ValueError(
                f"param_groups[{i}]: {name} is {value!r:.60}, and {optimizer_name} updates as with "
                f"{followed_options.get(name, False)!r}. Choose an optimizer of mpistrat.optim "
                "that does it, or one of torch.optim with mt.replicate."
            )


def _check_rule(
    i: int, initial_settings: OptimizerSettings, numbers_by_name: dict[str, Any]
) -> None:
    """Raise ValueError if numbers need other slots or another loop than the state has."""
    changed_settings = dataclasses.replace(initial_settings, groups=(), **numbers_by_name)
    if changed_settings.rule != initial_settings.rule:
        raise ValueError(
            f"param_groups[{i}]: {type(initial_settings).__name__} has another rule of update with "
            f"{changed_settings._describe_options()} than it was made for, "
            f"{initial_settings._describe_options()}. Give it a momentum and a weight_decay above "
            "0 from the start; of OneCycleLR and CyclicLR cycle_momentum=False leaves the momentum "
            "alone."
        )


def _read_initial_numbers(settings: OptimizerSettings) -> dict[str, Any]:
    """Return the hyper-parameters that are numbers, by the names that PyTorch gives them."""
    fields = settings._group_fields()
    rate = settings.rate(0)
    beta_names = _BETAS if "beta_1" in fields else ()
    numbers_by_name = {
        _TORCH_NAMES.get(name, name): getattr(settings, name)
        for name in fields
        if name not in (*beta_names, "learning_rate") and _is_float(getattr(settings, name))
    }
    betas = {"betas": tuple(getattr(settings, name) for name in beta_names)} if beta_names else {}
    return {"lr": rate, **betas, **numbers_by_name}


def _is_float(value: object) -> bool:
    """Return whether a hyper-parameter is a number, and no flag."""
    return isinstance(value, float)


def _read_values(
    i: int, settings: OptimizerSettings, group_options: dict[str, Any]
) -> dict[str, Any]:
    """Return the values in group `i`, by the names of `mpistrat.optim`."""
    values = {}
    missing = _read_initial_numbers(settings).keys() - group_options.keys()
    if missing:
        raise ValueError(
            f"param_groups[{i}] has no {', '.join(sorted(missing))}, by which "
            f"{type(settings).__name__} updates: it is of an optimizer of another class."
        )
    for name in settings._group_fields():
        if name == "learning_rate" or _is_float(getattr(settings, name)):
            if name in _BETAS and "betas" in group_options:
                values[name] = group_options["betas"][_BETAS.index(name)]
            else:
                values[name] = group_options[_TORCH_NAMES.get(name, name)]
    return values


def _check_number(i: int, name: str, value: Any) -> float:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    limit = 1.0 if name in _NAMES_BELOW_1 else float("inf")
    if not is_real(number) or not 0.0 <= number < limit:
        limit_text = " and below 1" if limit == 1.0 else ", and finite"
        raise ValueError(
            f"param_groups[{i}]: {_TORCH_NAMES.get(name, name)} is {value!r:.60}; expected a "
            f"number not below 0{limit_text}."
        )
    return float(number)
