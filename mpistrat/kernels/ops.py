"""Reduce operations: for each the ufunc of two values, its name in MPI, and its dtypes.

The names SUM and MEAN are those of ``tf.distribute.ReduceOp``; the others are additions. To add an
operation, add one row to `ReduceOp`; CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np


class Reduction(NamedTuple):
    """How a reduce operation is computed.

    Attributes:
      ufunc: A ufunc of two arguments, associative; bits are the same on all ranks in any case.
      mpi_name: The name of the operation in MPI; empty if MPI has none, so that values have to be
        gathered.
      identity: Returns, for a dtype, the value that changes nothing.
      kinds: The kinds of dtypes that it takes, as `numpy.dtype.kind` names them.
      is_idempotent: Reducing equal values gives the value itself; no values have no result.
      may_lose_nan: MPI's own operation may lose a NaN.
    """

    ufunc: np.ufunc
    mpi_name: str
    identity: Callable[[np.dtype[Any]], Any]
    kinds: str = "iufcV"  # V: what ml_dtypes adds; b: bool, which is sent as uint8
    is_idempotent: bool = False
    may_lose_nan: bool = False


def _make_zero(dtype: np.dtype[Any]) -> Any:
    return dtype.type(0)


def _make_one(dtype: np.dtype[Any]) -> Any:
    return dtype.type(1)


def _make_lowest(dtype: np.dtype[Any]) -> Any:
    return dtype.type(-np.inf if dtype.kind == "f" else np.iinfo(dtype).min)


def _make_highest(dtype: np.dtype[Any]) -> Any:
    return dtype.type(np.inf if dtype.kind == "f" else np.iinfo(dtype).max)


class ReduceOp(enum.Enum):
    """How the values of several replicas become one.

    ``MEAN`` is weighted wherever a count or a weight is known. ``MIN`` and ``MAX`` propagate NaN,
    as `numpy.minimum` and `numpy.maximum` do. ``ALL`` and ``ANY`` are for bool only, of which
    ``MIN`` and ``MAX`` are the same.

    Example:
      >>> ReduceOp.parse("mean")
      <ReduceOp.MEAN: 'MEAN'>
    """

    _reduction: Reduction  # how the operation is computed
    if TYPE_CHECKING:  # type checkers take any type for the value of such members

        @property
        def value(self) -> str:
            """The name."""

    SUM = "SUM", Reduction(np.add, "SUM", _make_zero)
    MEAN = "MEAN", Reduction(np.add, "SUM", _make_zero, is_idempotent=True)  # divided afterwards
    MIN = (
        "MIN",
        Reduction(np.minimum, "MIN", _make_highest, "biufV", is_idempotent=True, may_lose_nan=True),
    )
    MAX = (
        "MAX",
        Reduction(np.maximum, "MAX", _make_lowest, "biufV", is_idempotent=True, may_lose_nan=True),
    )
    PROD = "PROD", Reduction(np.multiply, "PROD", _make_one)
    ALL = "ALL", Reduction(np.minimum, "MIN", _make_highest, "b", is_idempotent=True)
    ANY = "ANY", Reduction(np.maximum, "MAX", _make_lowest, "b", is_idempotent=True)

    def __new__(cls, name: str, reduction: Any = None) -> ReduceOp:
        """Create a member, whose value is its name; ``ReduceOp("SUM")`` finds one."""
        member = object.__new__(cls)
        member._value_, member._reduction = name, reduction
        return member

    __hash__ = object.__hash__  # each member is equal to itself alone

    @staticmethod
    def from_variable_aggregation(aggregation: object) -> ReduceOp:
        """Return the operation that a `VariableAggregation` names: SUM or MEAN.

        Args:
          aggregation: The member of `VariableAggregation`.

        Raises:
          ValueError: It is NONE or ONLY_FIRST_REPLICA, which reduce nothing.
        """
        name = getattr(aggregation, "name", aggregation)
        if name not in ("SUM", "MEAN"):
            raise ValueError(
                f"Could not convert from `VariableAggregation` {aggregation} to `ReduceOp`: it "
                "reduces nothing; only SUM and MEAN do."
            )
        return ReduceOp[name]

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the operation that `op` names.

        Args:
          op: A `ReduceOp`, or its name in any case.

        Raises:
          ValueError: The name is unknown.
          TypeError: `op` is neither.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str):
            operation = cls.__members__.get(op.upper())
            if operation is None:
                known_names = ", ".join(member.value for member in cls)
                raise ValueError(f"{op!r} is not a valid ReduceOp. Known: {known_names}.")
            return operation
        raise TypeError(
            f"reduce_op must be a ReduceOp or its name, not {op!r} ({type(op).__name__})."
        )


# The ufunc that reduces two values into one; MEAN divides afterwards.
UFUNCS: dict[ReduceOp, Callable[..., Any]] = {op: op._reduction.ufunc for op in ReduceOp}
