"""Arrays and numbers that are not variables, as checkpoints take variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, spec_text
from mpistrat.distribute.kinds import DistributedVariable, VariableAggregation


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

    def write(found: Array) -> None:
        variable.store("assign", found, None)

    return Cell(name, functools.partial(np.asarray, variable), write)
