"""The kinds of variables, what strategies know of one, and the names of leaves that may be one."""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arena.storage import Storage
from mpistrat.arrays import Array, spec_text
from mpistrat.errors import StructureError


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are made equal."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas write, or hold, become one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class DistributedVariable:
    """What strategies know of a variable; `Variable` is the class that programs see.

    It is abstract, but no `abc.ABC`, whose `isinstance` is a Python function: every step asks which
    leaves are variables.

    Attributes:
      strategy: Whose it is.
      name: For messages and checkpoints.
      number: Which of its session's variables it is.
      mark: A hash of `number`, of 63 bits; part of the seed of digests of writes.
      storage: This rank's copy.
      label: What messages call it.
      large: It is compared in the line of each write, as the ranks of a node may have it once.
      waits: A write in replica code is compared in the next handshake.
      simple: The bytes of its dtype tell its values.
      of_metric: It is a sum of a metric, so checkpoints have each replica's part of it, too.
      synchronization: When its copies are made equal.
      aggregation: How the values that replicas write or hold become one.
    """

    strategy: Any
    name: str
    number: int
    mark: int
    storage: Storage
    label: str
    large: bool
    waits: bool
    simple: bool
    of_metric: bool = False
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @functools.cached_property
    def on_read(self) -> bool:
        """Whether each replica owns its copy."""
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self.storage.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.storage.array.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.storage.array.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.storage.array.size

    def spec(self) -> str:
        """Return name, number, dtype and shape, as messages and handshakes show them."""
        return f"{self.name!r} no. {self.number} {spec_text(self.storage.array)}"

    def component(self) -> Array:
        """Return this replica's copy: a live, read-only view. Never communicates.

        Raises:
          StructureError: It is sharded over all ranks, so that there is no copy.
        """
        if not self.storage.whole:
            raise StructureError(
                f"{self.label} is sharded over all ranks (shard='all'), so no rank has a "
                "copy of it. Read it on every rank: v.numpy()."
            )
        return self.storage.seen.view()

    def holds(self, array: Any) -> bool:
        """Tell whether `array` is what views of this replica's copy are views of."""
        return array is self.storage.base

    @abc.abstractmethod
    def read_value(self) -> Any:
        """Return a copy of the value."""

    @abc.abstractmethod
    def store(self, kind: str, values: Array, rows: Array | None) -> None:
        """Write, all ranks alike."""


def named(leaves: Sequence[Any], structure: nest.Structure) -> Sequence[str]:
    """Return the names of the leaves; of a variable it says which one it is."""
    return [
        f"{path}={leaf.name}(no. {leaf.number})" if isinstance(leaf, DistributedVariable) else path
        for leaf, path in zip(leaves, nest.path_names(structure), strict=True)
    ]
