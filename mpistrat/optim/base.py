"""What every optimizer is: hyper-parameters as a frozen value, and a rule that loops follow."""

from __future__ import annotations

import abc
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from mpistrat import nest
from mpistrat.arrays import is_real, truth, whole
from mpistrat.kernels.jit import Kernel
from mpistrat.optim.clipping import ClipByGlobalNorm, ClipByValue
from mpistrat.optim.groups import Group
from mpistrat.optim.progress import LossScale
from mpistrat.optim.schedules import Schedule, check_value
from mpistrat.optim.words import NamedArguments, name_instead

__all__ = ["NO_NORMS", "OptimizerSettings", "Rule"]

Self = TypeVar("Self", bound="OptimizerSettings")

NO_NORMS = (1.0, 1.0)
# Hyper-parameters of a whole step; those of variables may differ between groups.
_OF_THE_STEP = ("groups", "clip", "accumulate", "ema", "nonfinite", "loss_scale", "shard")
_FRACTION_FIELDS = ("beta_1", "beta_2", "momentum", "ema")


class Rule(NamedTuple):
    """What an update does to memory; see `mpistrat.optim.passes` for who calls it.

    Attributes:
      slots: The names of the arrays of state that each variable has, as large as it and zero at
        first, in the order in which the loops take them.
      update: ``update(w, g, slots, s, low, high)`` changes the elements from `low` to `high` of `w`
        and of all `slots`, in place; `g` is the gradient of these alone, and not written; `s` are
        the `OptimizerSettings.scalars`. All are of one dtype, float32 or float64, flat and
        contiguous. What an element becomes depends on no other element.
      measure: None, or ``measure(w, g, slots, s, low, high, out)``, which comes before `update` and
        writes the direction of the step, whose norm `update` needs, to `out`. It may change slots.
      reads: Whether `update` reads `g`; if not, `measure` has taken in all that is needed.
      guards: Whether `update` takes one more argument, `guard`, that says whether to leave out
        elements whose gradient is not finite, and returns whether there were any. To look at a
        gradient in the same loop saves a look at it before.
    """

    slots: tuple[str, ...]
    update: Kernel[..., Any]
    measure: Kernel[..., None] | None = None
    reads: bool = True
    guards: bool = False


@dataclass(frozen=True)
class OptimizerSettings(NamedArguments, abc.ABC):
    """The fields of all optimizers, and what follows from them; see `mpistrat.optim.Optimizer`."""

    learning_rate: float | Schedule = 1e-3
    groups: Sequence[Group] = dataclasses.field(default=(), kw_only=True)
    clip: ClipByGlobalNorm | ClipByValue | None = dataclasses.field(default=None, kw_only=True)
    accumulate: int = dataclasses.field(default=1, kw_only=True)
    ema: float | None = dataclasses.field(default=None, kw_only=True)
    nonfinite: Literal["raise", "skip", "ignore"] = dataclasses.field(default="raise", kw_only=True)
    loss_scale: LossScale | None = dataclasses.field(default=None, kw_only=True)
    shard: Literal["node", "all"] = dataclasses.field(default="node", kw_only=True)

    def __init_subclass__(cls, **more: Any) -> None:
        """Register optimizers as leaves of trees."""
        super().__init_subclass__(**more)
        nest.leaf(cls)

    @property
    @abc.abstractmethod
    def rule(self) -> Rule:
        """The state and the loops."""

    @abc.abstractmethod
    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a step, which the loops get in the dtype of the weights.

        Everything that is the same for all elements is computed here, in Python floats, and powers
        by `mpistrat.optim.floats.power`: loops add, multiply, divide and take square roots, which
        have the same bits on every processor.

        Args:
          step: How many updates were made before, from 0.
          norms: Of the weights of the variable and of the direction of the step, for the `update`
            of rules that have a `measure`; others do not look.
        """

    def __post_init__(self) -> None:
        """Check every number, and that the options go together."""
        groups: object = self.groups
        if isinstance(groups, Group) or not isinstance(groups, Iterable):
            raise TypeError(f"{self._told('groups')}: expected a list of them, groups=[...].")
        object.__setattr__(self, "groups", tuple(self.groups))
        for name, value in list(self._numbers()):
            object.__setattr__(self, name, value)
            upper_limit = 1.0 if name in _FRACTION_FIELDS else math.inf
            if not 0.0 <= value < upper_limit:
                limit = " and below 1" if upper_limit == 1.0 else " and finite"
                raise ValueError(f"{self._told(name)}: expected a number not below 0{limit}.")
        for name in [f.name for f in dataclasses.fields(self) if isinstance(f.default, bool)]:
            flag = truth(f"{type(self).__name__}({name})", getattr(self, name))
            object.__setattr__(self, name, flag)
        for group in self.groups:
            self._check(group)
        call_count = whole(self.accumulate)
        if call_count is None or call_count < 1:
            raise ValueError(f"{self._told('accumulate')}: expected an integer, 1 or more.")
        object.__setattr__(self, "accumulate", call_count)
        if self.clip is not None and not isinstance(self.clip, ClipByGlobalNorm | ClipByValue):
            raise TypeError(f"{self._told('clip')}: expected ClipByGlobalNorm(1.0), ClipByValue.")
        if self.nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(f"{self._told('nonfinite')}: expected 'raise', 'skip' or 'ignore'.")
        if self.shard not in ("node", "all"):
            raise ValueError(f"{self._told('shard')}: expected 'node' or 'all'.")
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise TypeError(f"{self._told('loss_scale')}: expected LossScale(start=2.0**16).")
        if self.loss_scale is not None and self.nonfinite != "skip":
            raise ValueError(
                f"{type(self).__name__}(loss_scale=...) adjusts its scale by overflows; it "
                "needs nonfinite='skip'."
            )

    @property
    def looks(self) -> bool:
        """Whether the norm of all gradients has to be known before an update."""
        return isinstance(self.clip, ClipByGlobalNorm) or self.nonfinite == "skip"

    def _told(self, name: str) -> str:
        return f"{type(self).__name__}({name}={getattr(self, name)!r})"

    def _numbers(self) -> Iterable[tuple[str, float]]:
        """Iterate over the hyper-parameters that are numbers, with their names."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(field.default, float) or field.name == "ema"
            if not number or (value is None and field.name == "ema"):
                continue
            if field.name == "learning_rate" and callable(value):
                continue
            if not is_real(value):
                raise TypeError(f"{self._told(field.name)}: expected a number.")
            yield field.name, float(value)

    def _check(self, group: Group) -> None:
        if not isinstance(group, Group):
            raise TypeError(f"{type(self).__name__}(groups=...): {group!r} is not a Group.")
        group_fields = {*self.group_fields()}
        if unknown := sorted(group.changes.keys() - group_fields):
            raise ValueError(
                f"{group} changes {', '.join(unknown)}; a group of {type(self).__name__} may "
                f"change {', '.join(sorted(group_fields))}{name_instead(unknown, group_fields)}."
            )
        self._with(group.changes)

    def group_fields(self) -> list[str]:
        """Return the names of the hyper-parameters that a `Group` may change."""
        names = [field.name for field in dataclasses.fields(self)]
        return [name for name in names if name not in _OF_THE_STEP]

    def _with(self: Self, changes: dict[str, Any]) -> Self:
        return dataclasses.replace(self, groups=(), **changes)

    def of(self: Self, name: str, shape: tuple[int, ...]) -> Self:
        """Return the optimizer of one variable: with the changes of its groups, and without groups.

        Args:
          name: The name of the variable.
          shape: Its shape.
        """
        if not self.groups:
            return self
        changes: dict[str, Any] = {}
        for group in self.groups:
            changes |= group.changes if group.has(name, shape) else {}
        return self._with(changes)

    def of_all(self: Self, variables: Iterable[tuple[str, tuple[int, ...]]]) -> list[Self]:
        """Return the optimizer of each variable, as `of` does.

        Args:
          variables: Names and shapes, in an order that is the same on all ranks.

        Raises:
          ValueError: A group has none of them, which is a mistake in its pattern.
        """
        variables = list(variables)
        for group in self.groups:
            if variables and not any(group.has(name, shape) for name, shape in variables):
                names = ", ".join(name for name, _ in variables[:5])
                raise ValueError(f"{group} has no variable; there are {names} and so on.")
        return [self.of(name, shape) for name, shape in variables]

    def slots(self) -> tuple[str, ...]:
        """Return the names of all arrays of state per variable.

        All are as large as the variable. ``"ema"`` begins as a copy of the weights, others as 0.
        """
        extras = {"pending": self.accumulate > 1, "ema": self.ema is not None}
        return (*self.rule.slots, *(name for name, is_used in extras.items() if is_used))

    def text(self) -> str:
        """Return a string that is the same on two ranks if their optimizers are.

        It is the `repr`, in which functions of the program have no addresses.
        """
        return _without_addresses(repr(self))

    def chosen(self) -> str:
        """Return `text` without the options that have their default values.

        Example:
          >>> import mpistrat as ms
          >>> ms.optim.SGD(0.1, momentum=0.9).chosen()
          'SGD(learning_rate=0.1, momentum=0.9)'
        """
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in fields}
        field_texts = [
            f"{name}={value!r}"
            for name, value in values.items()
            if name == "learning_rate" or value != fields[name]
        ]
        return _without_addresses(f"{type(self).__name__}({', '.join(field_texts)})")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step.

        Args:
          step: How many updates were made before, from 0.

        Raises:
          ValueError: The schedule gives something below 0, NaN or infinite.
        """
        schedule = self.learning_rate
        value = schedule(step) if callable(schedule) else schedule
        if type(value) is float and 0.0 <= value < math.inf:
            return value
        return check_value(schedule, step, value)


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
