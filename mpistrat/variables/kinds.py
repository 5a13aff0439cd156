"""The kinds of variables, what strategies know of one, and the names of leaves that may be one.

What each verb of a variable, such as ``assign_add``, does to an array.

How much of the other replicas' values a strategy shows.

One rank is one replica always. What differs between strategies is a row here.
"""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array, quiet, spec_text
from mpistrat.errors import StructureError
from mpistrat.kernels.elementwise import normalize_nans
from mpistrat.shm.storage import Storage, Write


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
        if not self.storage.is_complete:
            raise StructureError(
                f"{self.label} is sharded over all ranks (shard='all'), so no rank has a "
                "copy of it. Read it on every rank: v.numpy()."
            )
        return self.storage.view.view()

    def holds(self, array: Any) -> bool:
        """Tell whether `array` is what views of this replica's copy are views of."""
        return array is self.storage.base

    @abc.abstractmethod
    def read_value(self) -> Any:
        """Return a copy of the value."""

    @abc.abstractmethod
    def store(self, kind: str, values: Array, rows: Array | None) -> None:
        """Write, all ranks alike."""


def named(leaves: Sequence[Any], structure: pytree.Structure) -> Sequence[str]:
    """Return the names of the leaves; of a variable it says which one it is."""
    return [
        f"{path}={leaf.name}(no. {leaf.number})" if isinstance(leaf, DistributedVariable) else path
        for leaf, path in zip(leaves, pytree.path_names(structure), strict=True)
    ]


def _put(array: Array, values: Array, rows: Array | None) -> None:
    array[... if rows is None else rows] = values


def _combine(ufunc: np.ufunc, array: Array, values: Array, rows: Array | None) -> None:
    if rows is None:
        quiet().run(ufunc, array, values, array)
    else:
        with np.errstate(all="ignore"):
            if ufunc is np.divide and array.dtype.kind in "iu":
                _divide(array, values, rows)
            else:
                ufunc.at(array, rows, values)
                if array.dtype.kind == "c":  # where its loop depends on addresses, so NaN bits do
                    touched = array[rows]
                    normalize_nans(touched)
                    array[rows] = touched


def _divide(array: Array, values: Array, rows: Array) -> None:
    # Integers divide towards zero, as in C: magnitudes and signs apart.
    touched, where = np.unique(rows, return_inverse=True)
    part = array[touched]
    if array.dtype.kind == "u":
        np.floor_divide.at(part, where, values)
        array[touched] = part
        return
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    sizes, signs = np.abs(part).view(unsigned), np.where(part < 0, -1, 1).astype(array.dtype)
    np.floor_divide.at(sizes, where, np.abs(values).view(unsigned))
    np.multiply.at(signs, where, np.where(values < 0, -1, 1).astype(array.dtype))
    array[touched] = sizes.view(array.dtype) * signs


# How to write values to all of an array, or to some rows, in place and without warnings. At a row
# that appears several times it is done several times; of several updates the last one stays.
WRITES: dict[str, Write] = {
    "assign": _put,
    "assign_add": functools.partial(_combine, np.add),
    "assign_sub": functools.partial(_combine, np.subtract),
    "scatter_add": functools.partial(_combine, np.add),
    "scatter_sub": functools.partial(_combine, np.subtract),
    "scatter_mul": functools.partial(_combine, np.multiply),
    "scatter_div": functools.partial(_combine, np.divide),
    "scatter_min": functools.partial(_combine, np.minimum),
    "scatter_max": functools.partial(_combine, np.maximum),
    "scatter_update": _put,
}


class Plain(enum.Enum):
    """What a plain value means where a value per replica is wanted."""

    REFUSED = "refused"
    PER_REPLICA = "each replica's own"
    SAME = "the one there is"


class View(NamedTuple):
    """One row: what cross-replica code sees.

    Attributes:
      wraps: All replicas are seen: results of ``run`` and arguments of ``merge_fn`` come as
        `PerReplica`; those of ``reduce_to``, ``update`` and ``broadcast_to``, which really
        broadcasts, as `Mirrored`.
      wraps_inputs: Dataset elements and values from functions come as `PerReplica`.
      plain: What a plain value means in ``reduce`` and ``gather``.
    """

    wraps: bool
    wraps_inputs: bool
    plain: Plain


GLOBAL = View(wraps=True, wraps_inputs=True, plain=Plain.REFUSED)
LOCAL = View(wraps=False, wraps_inputs=True, plain=Plain.PER_REPLICA)
ALONE = View(wraps=False, wraps_inputs=False, plain=Plain.SAME)
