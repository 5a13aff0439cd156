"""Learning rates as functions of the step: frozen values that are called.

Any function of an integer is a schedule; these can also be compared, printed and pickled. The step
counts the updates that were made, from 0.

    optim.SGD(optim.WarmUp(optim.Cosine(0.1, 10_000), 500), momentum=0.9)

Schedules have the same bits on every processor. ``**`` and `math.cos` do not: they call the C
library, whose results depend on the instructions of the processor, so two nodes of different age
may differ in the last bit, and then in their weights. `power` and `cos_pi` use only additions and
products, which IEEE 754 defines to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from mpistrat.arrays import as_int, is_real
from mpistrat.optim.words import NamedArguments

__all__ = [
    "Constant",
    "Cosine",
    "Linear",
    "Schedule",
    "Steps",
    "WarmUp",
    "check_value",
    "cos_pi",
    "evaluate_schedule",
    "power",
]


# The coefficients of sine and cosine, from the highest power down; exact to 1e-17 below pi / 4.
_SIN = [(-1) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1)]
_COS = [(-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1)]


def power(base: float, exponent: int) -> float:
    """Return `base` to the power of an integer that is not below 0, by repeated squaring.

    Example:
      >>> power(0.5, 10) == 2.0**-10
      True
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def cos_pi(turn: float) -> float:
    """Return the cosine of pi times a number from 0 to 1.

    Example:
      >>> cos_pi(0.0), cos_pi(0.5), cos_pi(1.0)
      (1.0, 0.0, -1.0)
    """
    if turn > 0.5:
        return -cos_pi(1.0 - turn)
    if turn > 0.25:
        x = math.pi * (0.5 - turn)
        return x * _evaluate_series(_SIN, x * x)
    x = math.pi * turn
    return _evaluate_series(_COS, x * x)


def _evaluate_series(coefficients: list[float], x: float) -> float:
    total = 0.0
    for coefficient in coefficients:
        total = total * x + coefficient
    return total


Schedule: TypeAlias = Callable[[int], float]


def evaluate_schedule(schedule: float | Schedule, step: int) -> float:
    """Return the value of a schedule at a step; a number has the same value at all steps.

    Args:
      schedule: The number or the function.
      step: How many updates were made before, from 0.

    Raises:
      TypeError: It is not a number there.
      ValueError: It is below 0, NaN or infinite there.
    """
    return check_value(schedule, step, schedule(step) if callable(schedule) else schedule)


def check_value(schedule: float | Schedule, step: int, value: Any) -> float:
    """Return the value of a schedule as a float; raise as `evaluate_schedule` does.

    Args:
      schedule: The number or the function, for messages.
      step: The step, for messages.
      value: The value there.
    """
    try:
        # Texts, and with older versions of NumPy arrays of one element, would convert.
        if isinstance(value, str) or getattr(value, "ndim", 0) > 0:
            raise TypeError
        number = float(value)
    except TypeError:
        raise TypeError(
            f"{schedule!r} is {value!r:.60} at step {step}; expected a number."
        ) from None
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{schedule!r} is {number} at step {step}; expected 0 or more.")
    return number


def _check_reals(owner: object, *field_names: str) -> None:
    for name in field_names:
        value = getattr(owner, name)
        if not is_real(value):
            raise TypeError(f"{type(owner).__name__}({name}={value!r:.60}): expected a number.")


def _check_positive(owner: object, *field_names: str) -> None:
    for name in field_names:
        value = getattr(owner, name)
        count = as_int(value)
        if count is None or count < 1:
            raise ValueError(
                f"{type(owner).__name__}({name}={value!r}): expected an integer, 1 or more."
            )
        object.__setattr__(owner, name, count)  # of NumPy's integers, Python's


@final
@dataclass(frozen=True)
class Constant(NamedArguments):
    """The same value at all steps.

    Attributes:
      value: The value.

    Raises:
      TypeError: `value` is not a number.

    Example:
      >>> Constant(0.1)(1000)
      0.1
    """

    value: float

    def __post_init__(self) -> None:
        """Check that it is a number."""
        _check_reals(self, "value")

    def __call__(self, step: int) -> float:
        """Return the value; `step` does not matter."""
        return self.value


@final
@dataclass(frozen=True)
class Steps(NamedArguments):
    """Step decay: a value that is multiplied by a factor at given steps.

    Formula: ``start * factor ** k``, with k how many of the steps `at` have been reached, or
    ``step // every``.

    Attributes:
      start: The value at step 0.
      factor: The factor by which it is multiplied.
      at: The steps at which it is multiplied; in any order.
      every: Instead of `at`, multiply at all multiples of this many steps.

    Raises:
      TypeError: Something is not a number.
      ValueError: Both or none of `at` and `every` are given, or `every` is less than 1.

    Example:
      >>> [Steps(1.0, 0.5, every=2)(step) for step in range(5)]
      [1.0, 1.0, 0.5, 0.5, 0.25]
      >>> [Steps(1.0, 0.5, at=(1, 4))(step) for step in range(5)]
      [1.0, 0.5, 0.5, 0.5, 0.25]
    """

    start: float
    factor: float
    at: Iterable[int] = ()
    every: int | None = None

    def __post_init__(self) -> None:
        """Check that exactly one of `at` and `every` says when."""
        _check_reals(self, "start", "factor")
        steps: object = self.at
        if not isinstance(steps, Iterable) or not all(map(is_real, at := tuple(steps))):
            raise TypeError(f"Steps(at={steps!r:.60}): expected the numbers of steps, at=[...].")
        object.__setattr__(self, "at", tuple(sorted(at)))
        if bool(self.at) == (self.every is not None):
            raise ValueError(f"{self}: give either `at` or `every`.")
        if self.every is not None:
            _check_positive(self, "every")

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        reached_count = step // self.every if self.every else sum(step >= edge for edge in self.at)
        return self.start * power(self.factor, reached_count)


@final
@dataclass(frozen=True)
class Linear(NamedArguments):
    """Linear interpolation from one value to another, which is then kept.

    Attributes:
      start: The value at step 0.
      stop: The value from step `steps` on.
      steps: How many steps there are between them.

    Raises:
      TypeError: A value is not a number.
      ValueError: `steps` is less than 1.

    Example:
      >>> [Linear(1.0, 0.0, 4)(step) for step in (0, 1, 4, 9)]
      [1.0, 0.75, 0.0, 0.0]
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_reals(self, "start", "stop")
        _check_positive(self, "steps")

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        remaining_share = 1.0 - min(step, self.steps) / self.steps
        return self.stop + (self.start - self.stop) * remaining_share


@final
@dataclass(frozen=True)
class Cosine(NamedArguments):
    """Cosine decay from one value to another, which is then kept.

    Formula: ``stop + (start - stop) * (1 + cos(pi * step / steps)) / 2`` (Loshchilov and Hutter,
    "SGDR: Stochastic gradient descent with warm restarts", 2017), without restarts.

    Attributes:
      start: The value at step 0.
      steps: How many steps there are between them.
      stop: The value from step `steps` on.

    Raises:
      TypeError: A value is not a number.
      ValueError: `steps` is less than 1.

    Example:
      >>> [Cosine(1.0, 4)(step) for step in (0, 2, 4, 9)]
      [1.0, 0.5, 0.0, 0.0]
    """

    start: float
    steps: int
    stop: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_reals(self, "start", "stop")
        _check_positive(self, "steps")

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        wave = (1.0 + cos_pi(min(step, self.steps) / self.steps)) / 2.0
        return self.stop + (self.start - self.stop) * wave


@final
@dataclass(frozen=True)
class WarmUp(NamedArguments):
    """Linear warm-up, followed by another schedule.

    Attributes:
      then: The schedule that begins, with its step 0, at step `steps` of this one; or a number.
      steps: The number of steps of the warm-up.
      start: The value at step 0. With the default the first update changes no weight, as in optax.

    Raises:
      TypeError: A value is not a number.
      ValueError: `steps` is less than 1.

    Example:
      >>> [WarmUp(Steps(1.0, 0.5, every=1), 2)(step) for step in range(5)]
      [0.0, 0.5, 1.0, 0.5, 0.25]
    """

    then: float | Schedule
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_reals(self, "start") if callable(self.then) else _check_reals(self, "start", "then")
        _check_positive(self, "steps")

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        if step >= self.steps:
            return evaluate_schedule(self.then, step - self.steps)
        return self.start + (evaluate_schedule(self.then, 0) - self.start) * step / self.steps
