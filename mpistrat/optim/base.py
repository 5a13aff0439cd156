"""The hyper-parameters of optimizers as frozen values, their rules, and the counters of a run.

- `ClipByGlobalNorm`, `ClipByValue`: gradient clipping.
- `Group`: hyper-parameters of some of the variables.
- `LossScale`: a factor of the loss for gradients in float16.
- `Progress`: the counters of an optimizer.
- `Rule`: the loops of an optimizer and the state that they need.
- `OptimizerSettings`: the hyper-parameters that all optimizers have, and their checks.

All functions here are pure, and their arguments are equal on all ranks, so all ranks decide alike.
A call of ``apply_gradients`` uses `Progress` in this way::

    if not progress.is_update_due(optimizer):   # accumulate=4: three calls of four
        ...add the gradients to the slot "pending"...
        progress = progress.count_call(weight)
    elif finite or optimizer.nonfinite != "skip":
        ...update with optimizer.scalars(progress.step), gradients over progress.weight + weight...
        progress = progress.count_update(optimizer)
    else:
        ...put zeros into the slot "pending"...
        progress = progress.count_skipped_update(optimizer)
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
from mpistrat.optim.words import NamedArguments, suggest_names

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

    So it has the same bits in every order of the sums. It is infinite if a sum is infinite or the
    total overflows, and NaN if a sum is NaN.

    Args:
      sums: The sums of squares of blocks.

    Example:
      >>> norm_of([9.0, 16.0])
      5.0
    """
    try:
        return math.sqrt(math.fsum(sums))
    except OverflowError:
        return math.inf


def _check_limit(clip: object, limit: float) -> None:
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
        _check_limit(self, self.limit)

    def factor(self, norm: float) -> float:
        """Return the factor for gradients of this norm; NaN if the norm is not finite.

        Args:
          norm: The norm of all gradients together.

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
    finite (`Optimizer.nonfinite`), and are moved only where they are not checked (``"ignore"``).

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
        _check_limit(self, self.limit)


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

    A variable may be in several groups. If two of them change the same hyper-parameter, the later
    one counts.

    Args:
      match: A pattern of names as shells have it, with case (``"*bias*"``), or a function of name
        and shape that returns whether the variable is in the group.
      changes: Hyper-parameters by name, such as ``weight_decay=0.0`` or ``learning_rate=1e-4``.

    Raises:
      TypeError: `match` is neither, or nothing is changed.

    Example:
      >>> Group("*bias*", weight_decay=0.0)
      Group('*bias*', weight_decay=0.0)
      >>> Group(lambda name, shape: len(shape) < 2, weight_decay=0.0).matches("dense/bias", (10,))
      True
    """

    __slots__ = ("changes", "match")

    def __init__(self, match: Match, **changes: Any):
        """Check the arguments, and store them."""
        if not (isinstance(match, str) or callable(match)):
            raise TypeError(f"Group({match!r}): expected a pattern or a function.")
        if not changes:
            raise TypeError(f"Group({match!r}) changes nothing; give it a hyper-parameter by name.")
        self.match = match
        self.changes = changes

    def matches(self, name: str, shape: tuple[int, ...]) -> bool:
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

    The program multiplies its loss by the scale, and the update divides the gradients by it. Where
    a gradient is not finite, the update is left out and the scale becomes smaller; after many
    finite updates in a row it grows again (Micikevicius and others, "Mixed precision training",
    2018).

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
        are_reals = all(map(is_real, (self.start, self.growth, self.backoff, self.least)))
        if not are_reals or as_int(self.every) is None:
            raise TypeError(f"{self}: expected numbers, and an integer for `every`.")
        has_valid_factors = self.growth >= 1.0 >= self.backoff > 0.0
        if not (
            has_valid_factors and self.every >= 1 and 0.0 < self.least <= self.start < math.inf
        ):
            raise ValueError(
                f"{self}: expected growth >= 1 >= backoff > 0, every >= 1, 0 < least <= start."
            )


class ProgressSettings(Protocol):
    """The fields of an `Optimizer` that `Progress` depends on."""

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
      step: How many updates were made; schedules and bias corrections count these.
      calls: How many calls have accumulated since the last update.
      weight: The sum of their weights.
      skipped: How many updates were left out because a gradient was not finite.
      scale: The factor by which the program multiplies its loss.
      good: How many updates were made since the scale has changed.
    """

    step: int = 0
    calls: int = 0
    weight: float = 0.0
    skipped: int = 0
    scale: float = 1.0
    good: int = 0

    @classmethod
    def start(cls, optimizer: ProgressSettings) -> Progress:
        """Return the counters before the first call.

        Args:
          optimizer: The optimizer that the counters belong to.
        """
        return cls(scale=optimizer.loss_scale.start if optimizer.loss_scale else 1.0)

    def is_update_due(self, optimizer: ProgressSettings) -> bool:
        """Return whether the next call updates the weights; else it accumulates.

        Args:
          optimizer: The optimizer that the counters belong to.
        """
        return self.calls + 1 >= optimizer.accumulate

    def count_call(self, weight: float) -> Progress:
        """Return the counters after a call that has accumulated gradients.

        Args:
          weight: The sum of the weights of all replicas in this call.
        """
        return self._replace(calls=self.calls + 1, weight=self.weight + weight)

    def drop_calls(self) -> Progress:
        """Return the counters after an error or the program has dropped accumulated gradients."""
        return self._replace(calls=0, weight=0.0)

    def count_update(self, optimizer: ProgressSettings) -> Progress:
        """Return the counters after an update.

        Args:
          optimizer: The optimizer that the counters belong to.
        """
        loss_scale, finite_steps, scale = optimizer.loss_scale, self.good + 1, self.scale
        if loss_scale and finite_steps >= loss_scale.every:
            # A scale that would become infinite does not change.
            grown_scale = scale * loss_scale.growth
            finite_steps, scale = 0, grown_scale if math.isfinite(grown_scale) else scale
        return Progress(self.step + 1, 0, 0.0, self.skipped, scale, finite_steps)

    def count_skipped_update(self, optimizer: ProgressSettings) -> Progress:
        """Return the counters after an update that was left out; it does not count as a step.

        Args:
          optimizer: The optimizer that the counters belong to.
        """
        loss_scale, scale = optimizer.loss_scale, self.scale
        if loss_scale:
            scale = max(scale * loss_scale.backoff, loss_scale.least)
        skipped_count = self.skipped + 1
        return Progress(self.step, 0, 0.0, skipped_count, scale, 0)


Self = TypeVar("Self", bound="OptimizerSettings")

NO_NORMS = (1.0, 1.0)
# Hyper-parameters of a whole step; those of variables may differ between groups.
_STEP_FIELDS = ("groups", "clip", "accumulate", "ema", "nonfinite", "loss_scale", "shard")
_FRACTION_FIELDS = ("beta_1", "beta_2", "momentum", "ema")


class Rule(NamedTuple):
    """The loops of an optimizer; `mpistrat.optim.passes` calls them.

    Attributes:
      slots: The names of the arrays of state that each variable has, as large as it and zero at
        first, in the order in which the loops take them.
      update: ``update(w, g, slots, s, low, high)`` changes the elements from `low` to `high` of `w`
        and of all `slots`, in place; `g` is the gradient of these alone, and not written; `s` are
        the `OptimizerSettings.scalars`. All are of one dtype, float32 or float64, flat and
        contiguous. The update of an element depends on no other element.
      measure: None, or ``measure(w, g, slots, s, low, high, out)``, which comes before `update` and
        writes the direction of the step, whose norm `update` needs, to `out`. It may change slots.
      needs_gradient: Whether `update` reads `g`; if not, `measure` has taken in all that is needed.
      can_guard: Whether `update` takes one more argument, `guard`, that says whether to leave out
        elements whose gradient is not finite, and returns whether there were any. The check in the
        same loop saves a pass over the gradient before.
    """

    slots: tuple[str, ...]
    update: Kernel[..., Any]
    measure: Kernel[..., None] | None = None
    needs_gradient: bool = True
    can_guard: bool = False


@dataclass(frozen=True)
class OptimizerSettings(NamedArguments, abc.ABC):
    """The fields of all optimizers, and their checks; see `mpistrat.optim.Optimizer`."""

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
          norms: The norm of the weights of the variable and that of the direction of the step,
            for the `update` of rules that have a `measure`; others ignore them.
        """

    def __post_init__(self) -> None:
        """Check every number, and that the options fit together."""
        groups: object = self.groups
        if isinstance(groups, Group) or not isinstance(groups, Iterable):
            raise TypeError(f"{self._quote('groups')}: expected a list of them, groups=[...].")
        object.__setattr__(self, "groups", tuple(self.groups))
        for name, value in list(self._iterate_numbers()):
            object.__setattr__(self, name, value)
            upper_limit = 1.0 if name in _FRACTION_FIELDS else math.inf
            if not 0.0 <= value < upper_limit:
                bound = " and below 1" if upper_limit == 1.0 else " and finite"
                raise ValueError(f"{self._quote(name)}: expected a number not below 0{bound}.")
        for name in [f.name for f in dataclasses.fields(self) if isinstance(f.default, bool)]:
            flag = check_bool(f"{type(self).__name__}({name})", getattr(self, name))
            object.__setattr__(self, name, flag)
        for group in self.groups:
            self._check_group(group)
        call_count = as_int(self.accumulate)
        if call_count is None or call_count < 1:
            raise ValueError(f"{self._quote('accumulate')}: expected an integer, 1 or more.")
        object.__setattr__(self, "accumulate", call_count)
        if self.clip is not None and not isinstance(self.clip, ClipByGlobalNorm | ClipByValue):
            raise TypeError(f"{self._quote('clip')}: expected ClipByGlobalNorm(1.0), ClipByValue.")
        if self.nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(f"{self._quote('nonfinite')}: expected 'raise', 'skip' or 'ignore'.")
        if self.shard not in ("node", "all"):
            raise ValueError(f"{self._quote('shard')}: expected 'node' or 'all'.")
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise TypeError(f"{self._quote('loss_scale')}: expected LossScale(start=2.0**16).")
        if self.loss_scale is not None and self.nonfinite != "skip":
            raise ValueError(
                f"{type(self).__name__}(loss_scale=...) adjusts its scale by overflows; it "
                "needs nonfinite='skip'."
            )

    @property
    def needs_global_norm(self) -> bool:
        """Whether the norm of all gradients has to be known before an update."""
        return isinstance(self.clip, ClipByGlobalNorm) or self.nonfinite == "skip"

    def _quote(self, name: str) -> str:
        return f"{type(self).__name__}({name}={getattr(self, name)!r})"

    def _iterate_numbers(self) -> Iterable[tuple[str, float]]:
        """Iterate over the hyper-parameters that are numbers, with their names."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(field.default, float) or field.name == "ema"
            if not is_number or (value is None and field.name == "ema"):
                continue
            if field.name == "learning_rate" and callable(value):
                continue
            if not is_real(value):
                raise TypeError(f"{self._quote(field.name)}: expected a number.")
            yield field.name, float(value)

    def _check_group(self, changed_group: Group) -> None:
        if not isinstance(changed_group, Group):
            raise TypeError(f"{type(self).__name__}(groups=...): {changed_group!r} is not a Group.")
        group_fields = {*self._group_fields()}
        if unknown := sorted(changed_group.changes.keys() - group_fields):
            known_text = ", ".join(sorted(group_fields)) + suggest_names(unknown, group_fields)
            raise ValueError(
                f"{changed_group} changes {', '.join(unknown)}; a group of {type(self).__name__} "
                f"may change {known_text}."
            )
        self._apply_changes(changed_group.changes)

    def _group_fields(self) -> list[str]:
        """Return the names of the hyper-parameters that a `Group` may change."""
        names = [field.name for field in dataclasses.fields(self)]
        return [name for name in names if name not in _STEP_FIELDS]

    def _apply_changes(self: Self, changes: dict[str, Any]) -> Self:
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
            changes |= group.changes if group.matches(name, shape) else {}
        return self._apply_changes(changes)

    def _resolve_all_settings(
        self: Self, names_and_shapes: Iterable[tuple[str, tuple[int, ...]]]
    ) -> list[Self]:
        """Return the optimizer of each variable, as `of` does.

        Args:
          names_and_shapes: Names and shapes, in an order that is the same on all ranks.

        Raises:
          ValueError: A group has none of them, which is a mistake in its pattern.
        """
        names_and_shapes = list(names_and_shapes)
        for group in self.groups:
            if names_and_shapes and not any(
                group.matches(name, shape) for name, shape in names_and_shapes
            ):
                names = ", ".join(name for name, _ in names_and_shapes[:5])
                raise ValueError(f"{group} has no variable; there are {names} and so on.")
        return [self.of(name, shape) for name, shape in names_and_shapes]

    def slots(self) -> tuple[str, ...]:
        """Return the names of all arrays of state per variable.

        All are as large as the variable. ``"ema"`` begins as a copy of the weights, others as 0.
        """
        extras = {"pending": self.accumulate > 1, "ema": self.ema is not None}
        return (*self.rule.slots, *(name for name, is_used in extras.items() if is_used))

    def _text(self) -> str:
        """Return a string that is the same on two ranks if their optimizers are.

        It is the `repr`, in which functions of the program have no addresses.
        """
        return _without_addresses(repr(self))

    def _describe_options(self) -> str:
        """Return `_text` without the options that have their default values.

        Example:
          >>> import mpistrat as ms
          >>> ms.optim.SGD(0.1, momentum=0.9)._describe_options()
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
