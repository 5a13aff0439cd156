"""The foundation of the room: kinds of variables, `DistributedVariable`, writes to arrays, views.

`WRITES` says how each writing method of a variable, such as ``assign_add``, changes an array. The
views at the end say how much of the other replicas' values cross-replica code sees. One rank is one
replica always, so a strategy's view is all that differs between strategies: one row here.
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
    """A variable as strategies know it; `Variable` is the class that programs see.

    It is abstract, but no `abc.ABC`, whose `isinstance` is a Python function: every step asks which
    leaves are variables.

    Attributes:
      strategy: The strategy that it belongs to.
      name: For messages and checkpoints.
      _number: Its number among the variables of its session.
      _number_hash: A hash of `_number`, of 63 bits; part of the seed of digests of writes.
      _storage: This rank's copy.
      _label: Its name in messages.
      _is_large: It is compared in the line of each write, as the ranks of a node may have it once.
      _has_deferred_checks: A write in replica code is compared in the next handshake.
      _has_plain_bytes: Equal bytes are equal values of its dtype.
      _is_metric_sum: It is a sum of a metric, so checkpoints have each replica's part of it, too.
      synchronization: When its copies are made equal.
      aggregation: How the values that replicas write or hold become one.
    """

    strategy: Any
    name: str
    _number: int
    _number_hash: int
    _storage: Storage
    _label: str
    _is_large: bool
    _has_deferred_checks: bool
    _has_plain_bytes: bool
    _is_metric_sum: bool = False
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @functools.cached_property
    def _is_on_read(self) -> bool:
        """Whether each replica owns its copy."""
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self._storage.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._storage.array.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._storage.array.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._storage.array.size

    def _spec(self) -> str:
        """Return name, number, dtype and shape, as messages and handshakes show them."""
        return f"{self.name!r} no. {self._number} {spec_text(self._storage.array)}"

    def _component(self) -> Array:
        """Return this replica's copy: a live, read-only view. Never communicates.

        Raises:
          StructureError: It is sharded over all ranks, so that there is no copy.
        """
        if not self._storage.is_complete:
            raise StructureError(
                f"{self._label} is sharded over all ranks (shard='all'), so no rank has a "
                "copy of it. Read it on every rank: v.numpy()."
            )
        return self._storage.view.view()

    def _is_base_of_views(self, array: object) -> bool:
        """Tell whether `array` is the base of all views of this replica's copy."""
        return array is self._storage.base

    @abc.abstractmethod
    def read_value(self) -> Any:
        """Return a copy of the value."""

    @abc.abstractmethod
    def _store(self, kind: str, new_values: Array, rows: Array | None) -> None:
        """Write, all ranks alike."""


def name_leaves(leaves: Sequence[Any], structure: pytree.Structure) -> Sequence[str]:
    """Return the names of the leaves; of a variable it says which one it is."""
    return [
        f"{path}={leaf.name}(no. {leaf._number})" if isinstance(leaf, DistributedVariable) else path
        for leaf, path in zip(leaves, pytree.path_names(structure), strict=True)
    ]


def _assign(array: Array, new_values: Array, rows: Array | None) -> None:
    array[... if rows is None else rows] = new_values


def _apply_ufunc(ufunc: np.ufunc, array: Array, new_values: Array, rows: Array | None) -> None:
    if rows is None:
        quiet().run(ufunc, array, new_values, array)
    else:
        with np.errstate(all="ignore"):
            if ufunc is np.divide and array.dtype.kind in "iu":
                _divide_integer_rows(array, new_values, rows)
            else:
                ufunc.at(array, rows, new_values)
                if array.dtype.kind == "c":  # where its loop depends on addresses, so NaN bits do
                    written_rows = array[rows]
                    normalize_nans(written_rows)
                    array[rows] = written_rows


def _divide_integer_rows(array: Array, divisors: Array, rows: Array) -> None:
    # Integers divide towards zero, as in C: magnitudes and signs apart.
    unique_rows, positions = np.unique(rows, return_inverse=True)
    quotients = array[unique_rows]
    if array.dtype.kind == "u":
        np.floor_divide.at(quotients, positions, divisors)
        array[unique_rows] = quotients
        return
    unsigned_dtype = np.dtype(f"u{array.dtype.itemsize}")
    magnitudes, signs = (
        np.abs(quotients).view(unsigned_dtype),
        np.where(quotients < 0, -1, 1).astype(array.dtype),
    )
    np.floor_divide.at(magnitudes, positions, np.abs(divisors).view(unsigned_dtype))
    np.multiply.at(signs, positions, np.where(divisors < 0, -1, 1).astype(array.dtype))
    array[unique_rows] = magnitudes.view(array.dtype) * signs


# How to write values to all of an array, or to some rows, in place and without warnings. At a row
# that appears several times it is done several times; of several updates the last one stays.
WRITES: dict[str, Write] = {
    "assign": _assign,
    "assign_add": functools.partial(_apply_ufunc, np.add),
    "assign_sub": functools.partial(_apply_ufunc, np.subtract),
    "scatter_add": functools.partial(_apply_ufunc, np.add),
    "scatter_sub": functools.partial(_apply_ufunc, np.subtract),
    "scatter_mul": functools.partial(_apply_ufunc, np.multiply),
    "scatter_div": functools.partial(_apply_ufunc, np.divide),
    "scatter_min": functools.partial(_apply_ufunc, np.minimum),
    "scatter_max": functools.partial(_apply_ufunc, np.maximum),
    "scatter_update": _assign,
}


class PlainValueRule(enum.Enum):
    """The meaning of a plain value where a value per replica is wanted."""

    REFUSED = "refused"
    PER_REPLICA = "each replica's own"
    SAME = "the one there is"


class View(NamedTuple):
    """How much cross-replica code sees of the other replicas' values.

    Attributes:
      should_wrap: All replicas are seen: results of ``run`` and arguments of ``merge_fn`` come as
        `PerReplica`; those of ``reduce_to``, ``update`` and ``broadcast_to``, which really
        broadcasts, as `Mirrored`.
      should_wrap_inputs: Dataset elements and values from functions come as `PerReplica`.
      plain_rule: The meaning of a plain value in ``reduce`` and ``gather``.
    """

    should_wrap: bool
    should_wrap_inputs: bool
    plain_rule: PlainValueRule


GLOBAL_VIEW = View(should_wrap=True, should_wrap_inputs=True, plain_rule=PlainValueRule.REFUSED)
LOCAL_VIEW = View(should_wrap=False, should_wrap_inputs=True, plain_rule=PlainValueRule.PER_REPLICA)
SINGLE_REPLICA = View(should_wrap=False, should_wrap_inputs=False, plain_rule=PlainValueRule.SAME)
