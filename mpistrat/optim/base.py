"""What every optimizer is: hyper-parameters as a frozen value, and a rule that loops follow.

Gradient clipping: by value, and by the global norm.

Groups of variables that have hyper-parameters of their own.

Where a run of an optimizer is: counters of a few numbers, and what a call does to them.

Pure functions of values that are equal on all ranks, so all ranks decide alike. A call of
``apply_gradients`` asks, in this order::

    if not progress.due(optimizer):             # accumulate=4: three calls of four
        ...add the gradients to the slot "pending"...
        progress = progress.added(weight)
    elif finite or optimizer.nonfinite != "skip":
        ...update with optimizer.scalars(progress.step), gradients over progress.weight + weight...
        progress = progress.updated(optimizer)
    else:
        ...put zeros into the slot "pending"...
        progress = progress.left_out(optimizer)
"""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, final

from mpistrat import pytree
from mpistrat.arrays import as_int, check_bool, is_real
from mpistrat.kernels.jit import Kernel
from mpistrat.optim.schedules import Schedule, check_value
from mpistrat.optim.words import NamedArguments, name_instead

__all__ = [
    "NO_NORMS",
    "ClipByGlobalNorm",
    "ClipByValue",
    "Group",
    "LossScale",
    "Match",
    "OptimizerSettings",
    "Progress",
    "Rule",
    "limit_of",
    "norm_of",
]


def norm_of(sums: Iterable[float]) -> float:
    """Return the square root of the sum of sums of squares, rounded once.

    So it has the same bits in whatever order they come; infinite if a sum is or becomes so, NaN if
    one is.

    Args:
      sums: Of squares, as loops over blocks return them.

    Example:
      >>> norm_of([9.0, 16.0])
      5.0
    """
    try:
        return math.sqrt(math.fsum(sums))
    except OverflowError:
        return math.inf


def _limited(clip: object, limit: Any) -> None:
    if not is_real(limit):
        raise TypeError(f"{clip}: the limit must be a number, got {type(limit).__name__}.")
    if not 0.0 < limit < math.inf:
        raise ValueError(f"{clip}: the limit must be a finite number above 0.")


@final
@dataclass(frozen=True)
class ClipByGlobalNorm(NamedArguments):
    """Gradients of all variables times ``limit / max(norm, limit)``.

    The norm is that of all gradients together (Pascanu and others, "On the difficulty of training
    recurrent neural networks", 2013), after the mean over replicas, as
    ``tf.clip_by_global_norm``.

    Attributes:
      limit: The largest norm that stays.

    Raises:
      TypeError: `limit` is not a number.
      ValueError: It is not finite, or not above 0.

    Cost: One more pass over the gradients of all ranks, before that of the update.
    """

    limit: float

    def __post_init__(self) -> None:
        """Check the limit."""
        _limited(self, self.limit)

    def factor(self, norm: float) -> float:
        """Return what to multiply gradients of this norm by; NaN if it is not finite.

        Args:
          norm: Of all gradients together.

        Example:
          >>> ClipByGlobalNorm(1.0).factor(4.0), ClipByGlobalNorm(1.0).factor(0.5)
          (0.25, 1.0)
        """
        return self.limit / max(norm, self.limit) if math.isfinite(norm) else math.nan


@final
@dataclass(frozen=True)
class ClipByValue(NamedArguments):
    """Each element of a gradient moved into the range from ``-limit`` to `limit`.

    After the mean over replicas, as ``tf.clip_by_value``. NaN stays NaN; infinities count as not
    finite (`Optimizer.nonfinite`), and are moved only where nobody looks for them (``"ignore"``).

    Attributes:
      limit: The largest absolute value that stays.

    Raises:
      TypeError: `limit` is not a number.
      ValueError: It is not finite, or not above 0.

    Cost: Nothing beside the pass of the update.
    """

    limit: float

    def __post_init__(self) -> None:
        """Check the limit."""
        _limited(self, self.limit)


def limit_of(clip: object) -> float:
    """Return the largest absolute value that stays of an element.

    Example:
      >>> limit_of(ClipByValue(0.5)), limit_of(None)
      (0.5, inf)
    """
    return clip.limit if isinstance(clip, ClipByValue) else math.inf


Match: TypeAlias = str | Callable[[str, tuple[int, ...]], bool]


@final
class Group:
    """Some of the variables, and the hyper-parameters that are different for them.

    A variable may be in several groups; of two that change the same thing the later one counts.

    Args:
      match: A pattern of names as shells have it, with case (``"*bias*"``), or a function of name
        and shape that returns whether the variable is in the group.
      changes: Hyper-parameters by name, such as ``weight_decay=0.0`` or ``learning_rate=1e-4``.

    Raises:
      TypeError: `match` is neither, or nothing is changed.

    Example:
      >>> Group("*bias*", weight_decay=0.0)
      Group('*bias*', weight_decay=0.0)
      >>> Group(lambda name, shape: len(shape) < 2, weight_decay=0.0).has("dense/bias", (10,))
      True
    """

    __slots__ = ("changes", "match")

    def __init__(self, match: Match, **changes: Any):
        """Check what is given, and keep it."""
        if not (isinstance(match, str) or callable(match)):
            raise TypeError(f"Group({match!r}): expected a pattern or a function.")
        if not changes:
            raise TypeError(f"Group({match!r}) changes nothing; give it a hyper-parameter by name.")
        self.match = match
        self.changes = changes

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a variable of this `name` and `shape` is in the group."""
        if isinstance(self.match, str):
            return fnmatch.fnmatchcase(name, self.match)
        return bool(self.match(name, shape))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a group of the same match and changes."""
        if not isinstance(other, Group):
            return NotImplemented
        return self.match == other.match and self.changes == other.changes

    def __hash__(self) -> int:
        """Return a hash of the match and the changes."""
        return hash((self.match, tuple(sorted(self.changes.items()))))

    def __repr__(self) -> str:
        """Return the call that makes it."""
        changes = "".join(f", {name}={value!r}" for name, value in self.changes.items())
        return f"Group({self.match!r}{changes})"


@final
@dataclass(frozen=True)
class LossScale(NamedArguments):
    """A factor of the loss that keeps small gradients in float16 from becoming 0.

    The program multiplies its loss by the scale, the update divides the gradients by it. Where one
    is not finite the update is left out and the scale made smaller; after many good ones in a row
    it grows again (Micikevicius and others, "Mixed precision training", 2018).

    Attributes:
      start: The scale at first.
      growth: What it is multiplied by after `every` updates without a failure.
      backoff: What it is multiplied by after a failure.
      every: How many good updates let it grow.
      least: It never becomes less.

    Raises:
      TypeError: Something is not a number, or `every` is not an integer.
      ValueError: A factor does not do what its name says. Powers of two alone change no bits.

    Example:
      >>> LossScale(start=1024.0).start
      1024.0
    """

    start: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    every: int = 2000
    least: float = 1.0

    def __post_init__(self) -> None:
        """Check the factors."""
        reals = all(map(is_real, (self.start, self.growth, self.backoff, self.least)))
        if not reals or as_int(self.every) is None:
            raise TypeError(f"{self}: expected numbers, and an integer for `every`.")
        factors = self.growth >= 1.0 >= self.backoff > 0.0
        if not (factors and self.every >= 1 and 0.0 < self.least <= self.start < math.inf):
            raise ValueError(
                f"{self}: expected growth >= 1 >= backoff > 0, every >= 1, 0 < least <= start."
            )


class Counted(Protocol):
    """What progress depends on of an `Optimizer`."""

    @property
    def accumulate(self) -> int:
        """How many calls make an update."""

    @property
    def loss_scale(self) -> LossScale | None:
        """The factor of the loss, if there is one."""


@final
class Progress(NamedTuple):
    """Counters of an optimizer, equal on all ranks; `Checkpoint` saves them as numbers.

    Attributes:
      step: How many updates were made: what schedules and bias corrections count.
      calls: How many calls have accumulated since the last update.
      weight: The sum of their weights.
      skipped: How many updates were left out because a gradient was not finite.
      scale: What the program is to multiply its loss by.
      good: How many updates were made since the scale has changed.
    """

    step: int = 0
    calls: int = 0
    weight: float = 0.0
    skipped: int = 0
    scale: float = 1.0
    good: int = 0

    @classmethod
    def start(cls, optimizer: Counted) -> Progress:
        """Return the counters before the first call.

        Args:
          optimizer: Whose counters they are.
        """
        return cls(scale=optimizer.loss_scale.start if optimizer.loss_scale else 1.0)

    def due(self, optimizer: Counted) -> bool:
        """Return whether the next call updates the weights; else it accumulates.

        Args:
          optimizer: Whose counters they are.
        """
        return self.calls + 1 >= optimizer.accumulate

    def added(self, weight: float) -> Progress:
        """Return the counters after a call that has accumulated gradients.

        Args:
          weight: The sum of the weights of all replicas in this call.
        """
        return self._replace(calls=self.calls + 1, weight=self.weight + weight)

    def dropped(self) -> Progress:
        """Return the counters after what was accumulated is dropped, by an error or the program."""
        return self._replace(calls=0, weight=0.0)

    def updated(self, optimizer: Counted) -> Progress:
        """Return the counters after an update.

        Args:
          optimizer: Whose counters they are.
        """
        rule, finite_steps, scale = optimizer.loss_scale, self.good + 1, self.scale
        if rule and finite_steps >= rule.every:
            # A scale that would become infinite does not change.
            grown_scale = scale * rule.growth
            finite_steps, scale = 0, grown_scale if math.isfinite(grown_scale) else scale
        return Progress(self.step + 1, 0, 0.0, self.skipped, scale, finite_steps)

    def left_out(self, optimizer: Counted) -> Progress:
        """Return the counters after an update that was left out; it does not count as a step.

        Args:
          optimizer: Whose counters they are.
        """
        rule, scale = optimizer.loss_scale, self.scale
        if rule:
            scale = max(scale * rule.backoff, rule.least)
        skipped = self.skipped + 1
        return Progress(self.step, 0, 0.0, skipped, scale, 0)


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
        pytree.register_leaf_class(cls)

    @property
    @abc.abstractmethod
    def rule(self) -> Rule:
        """The state and the loops."""

    @abc.abstractmethod
    def scalars(self, step: int, norms: tuple[float, float] = NO_NORMS) -> tuple[float, ...]:
        """Return the numbers of a step, which the loops get in the dtype of the weights.

        Everything that is the same for all elements is computed here, in Python floats, and powers
        by `mpistrat.optim.schedules.power`: loops add, multiply, divide and take square roots,
        which have the same bits on every processor.

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
            flag = check_bool(f"{type(self).__name__}({name})", getattr(self, name))
            object.__setattr__(self, name, flag)
        for group in self.groups:
            self._check(group)
        call_count = as_int(self.accumulate)
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
