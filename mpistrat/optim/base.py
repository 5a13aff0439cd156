"""What every optimizer is: hyper-parameters as a frozen value, and a rule that loops follow."""

from __future__ import annotations

import abc
import dataclasses
import math
import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from mpistrat.distribute.default import current_strategy
from mpistrat.distribute.variables import Variable
from mpistrat.errors import ContextError
from mpistrat.kernels.jit import Kernel
from mpistrat.optim import apply
from mpistrat.optim.clipping import ClipByGlobalNorm, ClipByValue
from mpistrat.optim.groups import Group
from mpistrat.optim.progress import LossScale, Progress
from mpistrat.optim.schedules import Schedule, value_at
from mpistrat.optim.state import State

__all__ = ["NO_NORMS", "Optimizer", "Rule"]

Self = TypeVar("Self", bound="Optimizer")

NO_NORMS = (1.0, 1.0)
# Hyper-parameters of a whole step; those of variables may differ between groups.
_OF_THE_STEP = ("groups", "clip", "accumulate", "ema", "nonfinite", "loss_scale")
_BELOW_ONE = ("beta_1", "beta_2", "momentum", "ema")


class Rule(NamedTuple):
    """What an update does to memory; see `mpistrat.optim.passes` for who calls it.

    Attributes:
      slots: The names of the arrays of state that each variable has, as large as it and zero at
        first, in the order in which the loops take them.
      update: ``update(w, g, slots, s, low, high)`` changes the elements from `low` to `high` of `w`
        and of all `slots`, in place; `g` is the gradient of these alone, and not written; `s` are
        the `Optimizer.scalars`. All are of one dtype, float32 or float64, flat and contiguous.
        What an element becomes depends on no other element.
      measure: None, or ``measure(w, g, slots, s, low, high, out)``, which comes before `update` and
        writes the direction of the step, whose norm `update` needs, to `out`. It may change slots.
      reads: Whether `update` reads `g`; if not, `measure` has taken in all that is needed.
    """

    slots: tuple[str, ...]
    update: Kernel[..., None]
    measure: Kernel[..., None] | None = None
    reads: bool = True


@dataclass(frozen=True)
class Optimizer(abc.ABC):
    """Hyper-parameters of an optimizer; all that it remembers is in slots and in `Progress`.

    A value: frozen, compared by what is in it, picklable if schedules and groups are.

    Attributes:
      learning_rate: A number, or a function of the step, from 0 (`mpistrat.optim.schedules`).
      groups: What is different for some of the variables.
      clip: `ClipByGlobalNorm` or `ClipByValue`; None for neither.
      accumulate: How many calls make one update, by the weighted mean of their gradients. More than
        1 costs one more slot, ``"pending"``.
      ema: How much of the moving average of the weights stays in an update, such as 0.999; None for
        none. The average is one more slot, ``"ema"``, which begins as a copy of the weights.
      nonfinite: What a gradient that is NaN or infinite does. ``"raise"``: an error on all ranks;
        weights are finite then, but what was in other blocks of 4096 elements may be updated.
        ``"skip"``: the update is left out on all ranks, at the cost of one more pass over the
        gradients, if `clip` does not need it anyway. ``"ignore"``: nobody looks.
      loss_scale: For gradients in float16; wants `nonfinite` to be ``"skip"``.

    Raises:
      ValueError: A number is not finite, below 0 or too large; or options contradict each other.
      TypeError: An option is of the wrong type.
    """

    learning_rate: float | Schedule = 1e-3
    groups: Sequence[Group] = dataclasses.field(default=(), kw_only=True)
    clip: ClipByGlobalNorm | ClipByValue | None = dataclasses.field(default=None, kw_only=True)
    accumulate: int = dataclasses.field(default=1, kw_only=True)
    ema: float | None = dataclasses.field(default=None, kw_only=True)
    nonfinite: Literal["raise", "skip", "ignore"] = dataclasses.field(default="raise", kw_only=True)
    loss_scale: LossScale | None = dataclasses.field(default=None, kw_only=True)

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
        object.__setattr__(self, "groups", tuple(self.groups))
        for name, value in list(self._numbers()):
            object.__setattr__(self, name, value)
            below = 1.0 if name in _BELOW_ONE else math.inf
            if not 0.0 <= value < below:
                limit = " and below 1" if below == 1.0 else " and finite"
                raise ValueError(f"{self._told(name)}: wanted is a number not below 0{limit}.")
        for group in self.groups:
            self._check(group)
        if isinstance(self.accumulate, bool) or not (
            isinstance(self.accumulate, int) and self.accumulate >= 1
        ):
            raise ValueError(f"{self._told('accumulate')}: wanted is an integer, 1 or more.")
        if self.clip is not None and not isinstance(self.clip, ClipByGlobalNorm | ClipByValue):
            raise TypeError(f"{self._told('clip')}: wanted is ClipByGlobalNorm(1.0), ClipByValue.")
        if self.nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(f"{self._told('nonfinite')}: wanted is 'raise', 'skip' or 'ignore'.")
        if self.loss_scale is not None and self.nonfinite != "skip":
            raise ValueError(
                f"{type(self).__name__}(loss_scale=...) finds its scale by overflows; "
                "give nonfinite='skip' with it."
            )

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
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{self._told(field.name)}: wanted is a number.")
            yield field.name, float(value)

    def _check(self, group: Group) -> None:
        if not isinstance(group, Group):
            raise TypeError(f"{type(self).__name__}(groups=...): {group!r} is not a Group.")
        known = {field.name for field in dataclasses.fields(self)} - set(_OF_THE_STEP)
        if unknown := sorted(group.changes.keys() - known):
            raise ValueError(
                f"{group} changes {', '.join(unknown)}; a group of {type(self).__name__} may "
                f"change {', '.join(sorted(known))}."
            )
        self._with(group.changes)

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
        more = {"pending": self.accumulate > 1, "ema": self.ema is not None}
        return (*self.rule.slots, *(name for name, wanted in more.items() if wanted))

    def text(self) -> str:
        """Return a text that is the same on two ranks if their optimizers are.

        It is the `repr`, in which functions of the program have no addresses.
        """
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(self))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step.

        Args:
          step: How many updates were made before, from 0.

        Raises:
          ValueError: The schedule gives something below 0, NaN or infinite.
        """
        return value_at(self.learning_rate, step)

    # What is below communicates, and remembers: the rest of the room is pure.

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the state for these variables, as the first `apply_gradients` does by itself.

        Before a checkpoint is restored there has to be something to restore. It may be called
        again, with the same variables or some of them, and does nothing then.

        Collective: all ranks call it, with the same variables in the same order.

        Args:
          variables: ON_WRITE variables of one strategy, of float32 or float64.

        Raises:
          ValueError: There are none, one comes twice or is ON_READ, or the optimizer was built for
            others; or a group has no variable.
          TypeError: One is no variable.
          LeafTypeError: One has another dtype.
          StrategyError: They belong to several strategies, or another one rules here.
          MemoryError: There is no memory to share for the state.
          LockstepError: The ranks give different variables, or have other options.

        Cost: that of creating the variables of the state: six numbers, and each slot.
        """
        apply.build(self, self._states, variables)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], weight: float | None = None
    ) -> Variable:
        """Update variables by their gradients, on all replicas alike.

        In replica code, gradients are each replica's own: the mean over its rows. The update goes
        by the mean over all replicas. In cross-replica code gradients have to be the same on all
        ranks: what a reduction gave, or values that are compared.

        Collective: all ranks call it, with gradients of the same variables in the same order.

        Args:
          grads_and_vars: Pairs of gradient and variable. A gradient is an array of the shape of the
            variable, or `IndexedSlices` of some of its rows; with None, the variable and its state
            stay as they are. What arrays of ``Strategy.gradient_buffers`` hold afterwards is
            undefined. Of `IndexedSlices` those rows alone change, weights and state; but with
            `accumulate`, `ema`, and where the optimizer needs norms, as if it were dense.
          weight: How many rows this replica's gradients are the mean of, so that the update goes by
            the mean over all rows. A gradient of weight 0 is never read. None: replicas count
            alike.

        Returns:
          `iterations`.

        Raises:
          ValueError: There is no gradient at all, or not of all variables with `accumulate`; a
            variable comes twice, is ON_READ, or is not one that the optimizer was built for; the
            weight is no number of rows, or all are 0; the learning rate is not a finite number.
          StructureError: A gradient has another shape; or is a value per replica in cross-replica
            code.
          LeafTypeError: A gradient does not convert to the dtype of its variable, or that is
            neither float32 nor float64.
          NonFiniteError: A gradient is NaN or infinite, with ``nonfinite="raise"``; says where.
          StrategyError: The variables belong to another strategy than rules here, or to several.
          ContextError: It is called in the function of ``extended.update``, or where no strategy
            rules in a job of several ranks.
          LockstepError: The ranks give other variables, have other options, or other gradients
            where these have to be the same.
          RemoteError: Another rank failed.

        Cost: one handshake. Gradients in ``Strategy.gradient_buffers`` are folded and the variables
        updated in one pass over memory, in which each rank does its part of all variables of 64 KiB
        and more, then one barrier of the node. Other gradients are copied there first, if there are
        such variables; without, it is an all-reduce. Norms, and ``nonfinite="skip"``, take one more
        pass over the gradients. `IndexedSlices` take a handshake and a gather more. The first call
        creates the state.
        As: ``tf.keras.optimizers.Optimizer.apply_gradients`` for what replicas give, with weights.

        Example:
          >>> import numpy as np, mpistrat as ms
          >>> strategy = ms.OneDeviceStrategy("cpu")
          >>> with strategy.scope():
          ...     w = ms.Variable(np.ones(2), name="w")
          >>> optimizer = ms.optim.SGD(0.5)
          >>> def step(x):
          ...     optimizer.apply_gradients([(x.mean(0) * w, w)], weight=len(x))
          >>> strategy.run(step, args=(np.array([[1.0, 2.0], [1.0, 0.0]]),))
          >>> w.numpy(), int(optimizer.iterations)
          (array([0.5, 0.5]), 1)
        """
        return apply.apply(self, self._states, grads_and_vars, weight)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The state: counters, then slots, named as ``"w/Adam/m"``; none before it is built."""
        state = self._state()
        return () if state is None else state.variables

    @property
    def iterations(self) -> Variable:
        """How many updates were made: a variable, int64.

        Raises:
          ContextError: There is no state yet.
        """
        return self._built("iterations").counters["iterations"]

    @property
    def progress(self) -> Progress:
        """The counters, as numbers: those of the start, before there is state."""
        state = self._state()
        return Progress.start(self) if state is None else state.progress

    def slot(self, variable: Variable, name: str) -> Variable:
        """Return a slot of a variable; never communicates.

        Args:
          variable: One that the optimizer was built for.
          name: One of `slots`.

        Raises:
          ContextError: There is no state yet.
          ValueError: The variable or the slot is not known.
        """
        found = self._built("slots").targets.get(variable.number)
        if found is None or name not in found.slots:
            raise ValueError(
                f"{type(self).__name__} has no slot {name!r} of {variable.label}; slots are "
                f"{', '.join(self.slots()) or 'none'}."
            )
        return found.slots[name]

    def average(self, variable: Variable) -> Variable:
        """Return the moving average of a variable's values; see the attribute `ema`.

        Args:
          variable: One that the optimizer was built for.

        Raises:
          ContextError: There is no state yet.
          ValueError: The variable is not known, or there are no averages.
        """
        return self.slot(variable, "ema")

    def tree(self) -> dict[str, Any]:
        """Return the state by the names that it has in checkpoints; empty before it is built."""
        state = self._state()
        return {} if state is None else state.tree()

    @property
    def _states(self) -> dict[Any, State]:
        """The state of each strategy whose variables it has updated; no field of the value."""
        found: dict[Any, State] = self.__dict__.setdefault("_kept", {})
        return found

    def _state(self) -> State | None:
        states = self._states
        mine = states.get(current_strategy())
        return mine or (next(iter(states.values())) if len(states) == 1 else None)

    def _built(self, what: str) -> State:
        state = self._state()
        if state is None:
            raise ContextError(
                f"{type(self).__name__} has no {what} yet: its state is created by the first "
                "apply_gradients, or by optimizer.build(variables)."
            )
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Return the hyper-parameters; a copy begins without state."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}
