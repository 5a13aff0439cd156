"""Comparison of hyper-parameters of ``torch.optim``: what steps go by is the same on all ranks.

A rank that has another learning rate would train other weights without a word. The digest of all
numbers in ``param_groups`` is sent with the handshake that reduces gradients; a step by numbers
that have changed since then, or of an optimizer that is new, has a handshake of its own.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator
from typing import Any, final

import torch
from torch.optim.optimizer import Optimizer

from mpistrat.lockstep.lockstep import Lockstep, digest_of

__all__ = ["HyperParameters", "StepComparison"]

_MAX_OPTIMIZERS = 8  # optimizers of one model that are remembered
_values_of, _version = operator.methodcaller("values"), operator.attrgetter("_version")


@final
class HyperParameters:
    """The numbers in the groups of one optimizer, as one handshake compares them.

    It has the groups and not the optimizer, which ends at another time on each rank.

    Args:
      optimizer: The optimizer.
      scheduled: The numbers of groups whose learning rate is compared elsewhere.

    Attributes:
      groups: Its ``param_groups``.
      digest: That of the text.
    """

    def __init__(self, optimizer: Optimizer, scheduled: Collection[int] = ()):
        """Read the numbers."""
        self.groups, self._scheduled = optimizer.param_groups, scheduled
        self._kind = type(optimizer).__name__
        self._text = ""
        self._read(self._values())

    def _values(self) -> list[Any]:
        return [*itertools.chain.from_iterable(map(_values_of, self.groups))]

    def _read(self, values: list[Any]) -> None:
        self._last_values = values
        self._tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._versions = [*map(_version, self._tensors)]
        texts = [
            f"{text} (group {i})"
            for i, group in enumerate(self.groups)
            for text in _number_texts(
                group, {"params", "lr"} if i in self._scheduled else {"params"}
            )
        ]
        self._text = f"{self._kind}.param_groups: {', '.join(texts)}"
        self.digest = digest_of(self._text)

    def refresh(self) -> bool:
        """Read the groups again; tell whether one has other values, of whatever kind."""
        # Each step asks, so this goes over all values in built-in functions.
        values = self._values()
        same = len(values) == len(self._last_values) and all(
            map(operator.is_, values, self._last_values)
        )
        if same and [*map(_version, self._tensors)] == self._versions:
            return False
        self._read(values)
        return True

    def keep(self) -> None:
        """Take the values for those that have been read: a learning rate that is not compared."""
        self._last_values = self._values()

    def text(self) -> str:
        """Return the numbers, for the error of a handshake."""
        return self._text

    def undo(self) -> None:
        """Do nothing: no weight has been updated by them."""


def _number_texts(group: dict[str, Any], skipped_names: set[str]) -> Iterator[str]:
    for name, value in group.items():
        if name in skipped_names:
            continue
        is_sequence = isinstance(value, tuple | list)
        texts = [*map(_number_text, value if is_sequence else [value])]
        if texts and all(texts):
            names = [f"{name}[{i}]" for i in range(len(texts))] if is_sequence else [name]
            yield from map("=".join, zip(names, texts, strict=True))


def _number_text(value: Any) -> str:
    """Return a number, or what a tensor of one element holds, as text; "" of anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return repr(float(value))  # also of NumPy's
    return repr(value) if isinstance(value, int) else ""


@final
class StepComparison:
    """The optimizers that update one replicated model, and whether ranks step by the same numbers.

    Args:
      lockstep: Compares.
    """

    def __init__(self, lockstep: Lockstep):
        """Know of no optimizer."""
        self._lockstep = lockstep
        self._hyperparameters: list[HyperParameters] = []

    def ride(self) -> None:
        """Compare the numbers of all optimizers by the next handshake, which reduces gradients."""
        for hyperparameters in self._hyperparameters:
            hyperparameters.refresh()
            self._lockstep.defer(hyperparameters)

    def check(self, optimizer: Optimizer) -> None:
        """Raise LockstepError, on all ranks, if an optimizer would step by other numbers there.

        Collective for a new optimizer, and if numbers have changed since `ride`.
        """
        groups = optimizer.param_groups
        hyperparameters = next(
            (candidate for candidate in self._hyperparameters if candidate.groups is groups), None
        )
        if hyperparameters is None:
            hyperparameters = HyperParameters(optimizer)
            self._hyperparameters = [*self._hyperparameters[1 - _MAX_OPTIMIZERS :], hyperparameters]
        else:
            earlier_digest = hyperparameters.digest
            if not hyperparameters.refresh() or hyperparameters.digest == earlier_digest:
                return
        self._lockstep.defer(hyperparameters)
        self._lockstep.handshake(f"{type(optimizer).__name__}.step")
