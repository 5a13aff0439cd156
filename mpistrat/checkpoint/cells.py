"""What is no variable, as checkpoints take variables: arrays, numbers, copies of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, spec_text
from mpistrat.checkpoint.entries import Entry
from mpistrat.distribute import on_read
from mpistrat.distribute.kinds import DistributedVariable, VariableAggregation
from mpistrat.lockstep.lockstep import Lockstep

PARTS = "/parts"


@final
@dataclass(frozen=True, eq=False)
class Cell:
    """A value that each rank has of its own, and that is the same on all: replica 0's is saved.

    It has those attributes of a variable that saving and restoring ask for.

    Attributes:
      name: What messages call it.
      read: Returns it, as an array.
      write: Takes an array of the same dtype and shape, which is replica 0's; of what it keeps it
        makes a copy, as the memory is that of all other values too.
      strategy: Whose ranks have it; None if nobody said.
      free: The array in a file may have another first axis than that of the program.
      values: The `Values` that it holds, if it is they.
    """

    name: str
    read: Callable[[], Array]
    write: Callable[[Array], None]
    strategy: Any = None
    free: bool = False
    values: Any = None

    on_read = of_metric = False
    aggregation = VariableAggregation.NONE

    @property
    def storage(self) -> Cell:
        """Itself: what has an `array`."""
        return self

    @property
    def array(self) -> Array:
        """The value."""
        return self.read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the value."""
        return np.asarray(self.array, dtype)

    def spec(self) -> str:
        """Return name, dtype and shape, as messages and handshakes show them."""
        return f"{self.name!r} {spec_text(self.array[:0] if self.free else self.array)}"

    def store(self, kind: str, values: Array, rows: Array | None) -> None:
        """Write the value.

        Args:
          kind: Always ``"assign"``.
          values: The value.
          rows: Always None.
        """
        self.write(values)


def cell_of(name: str, variable: DistributedVariable) -> Cell:
    """Return a variable that each rank has of its own as a cell of that name."""

    def write(value: Array) -> None:
        variable.store("assign", value, None)

    return Cell(name, functools.partial(np.asarray, variable), write)


def is_part(name: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a name is that of the parts of another of these arrays."""
    sum_entry = entries.get(name.removesuffix(PARTS)) if name.endswith(PARTS) else None
    return sum_entry is not None and entries[name].fits(
        sum_entry._replace(shape=(0, *sum_entry.shape))
    )


def _select_sums(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables whose copies of all replicas are saved too, by the name of these.

    That is free but where a tree of the program and one in the root have names that meet.
    """
    return {
        name + PARTS: variable
        for name, variable in variables.items()
        if on_read.has_partials(variable) and name + PARTS not in variables
    }


def saved_partials(lockstep: Lockstep, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that are saved beside `variables`, of shape (replicas, ...).

    Collective; unproved.
    """
    sums = _select_sums(variables)
    if not sums or lockstep.comm.size == 1:
        return {}
    rows = on_read.replica_partials(lockstep, list(sums.values()))
    return {name: _make_partial_cell(name, array) for name, array in zip(sums, rows, strict=True)}


def partial_targets(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return what takes the parts from a file, if it has some; of no replicas yet."""
    return {
        name: _make_partial_cell(name, np.empty((0, *variable.shape), variable.dtype))
        for name, variable in _select_sums(variables).items()
    }


def _make_partial_cell(name: str, rows: Array) -> Cell:
    return Cell(name, lambda: rows, lambda _: None, free=True)
