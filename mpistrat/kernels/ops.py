"""Reduce operations by name.

The names SUM and MEAN are those of ``tf.distribute.ReduceOp``; MIN, MAX and PROD are additions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["FOLDS", "ReduceOp"]


class ReduceOp(enum.Enum):
    """How the values of several replicas become one.

    ``MEAN`` is weighted wherever a count or a weight is known. ``MIN`` and ``MAX`` propagate NaN,
    as `numpy.minimum` and `numpy.maximum` do.

    Example:
      >>> ReduceOp.parse("mean")
      <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @staticmethod
    def from_variable_aggregation(aggregation: Any) -> ReduceOp:
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
            found = cls.__members__.get(op.upper())
            if found is None:
                known = ", ".join(member.value for member in cls)
                raise ValueError(f"{op!r} is not a valid ReduceOp. Known: {known}.")
            return found
        raise TypeError(
            f"reduce_op must be a ReduceOp or its name, not {op!r} ({type(op).__name__})."
        )


# What folds two values into one; MEAN divides afterwards.
FOLDS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
