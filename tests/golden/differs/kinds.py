"""What a difference is, and how its expected value is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..recorder import Each


class Fails(NamedTuple):
    """Stands for an error that is of this class on every rank."""

    name: str


class Ranks(tuple):
    """Stands for values that differ between ranks."""


class Differs(NamedTuple):
    """One difference.

    Attributes:
      decision: A key of `DECISIONS`.
      why: What it means here.
      ours: What we give on n replicas.
      sizes: At which n it is a difference; at others the case is equal.
    """

    decision: str
    why: str
    ours: Callable[[int], Any]
    sizes: tuple[int, ...] = (2, 4)


def f32(value: Any) -> Any:
    return np.array(value, np.float32)


def same(value: Any) -> Callable[[int], Any]:
    """Return a function of n: a `PerReplica` of n times this value."""
    return lambda n: Each([value] * n)


def copies(value: float) -> Callable[[int], Any]:
    """Return a function of n: n copies of a float32 number."""
    return same(f32(value))


def fails(name: str) -> Callable[[int], Any]:
    return lambda n: Fails(name)


def upto(n: int) -> int:
    """Return 0 + 1 + ... + (n - 1)."""
    return n * (n - 1) // 2
