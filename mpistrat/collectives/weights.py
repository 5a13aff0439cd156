"""The weights of a MEAN, as factors of each rank's values and divisors of their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, is_bfloat16
from mpistrat.errors import LeafTypeError

# The least that a weight that is not 0 may become: values of weight 0 are not read.
_TINY_WEIGHT = 5e-324
_LEAST_NORMAL = float(np.finfo(np.float64).tiny)
# Whole numbers up to here are exact in float32.
_EXACT = 2**24


class Scales(NamedTuple):
    """The factors of the values of each rank, and the divisors of the sums.

    Attributes:
      table: The factors: one row per rank, one column per leaf or one for all; None for all ones.
      divisors: One per leaf, or one for all; None for 1.
    """

    table: Array | None = None
    divisors: Sequence[float] | None = None

    def select_leaf(self, leaf_index: int) -> tuple[Array | None, float]:
        """Return the factors of one leaf, one per rank or None, and its divisor."""
        table, divisors = self.table, self.divisors
        column = None if table is None else table[:, leaf_index if table.shape[1] > 1 else 0]
        divisor = 1.0 if divisors is None else divisors[leaf_index if len(divisors) > 1 else 0]
        return column, divisor

    @property
    def is_uniform(self) -> bool:
        """Whether all leaves have the same factors and divisor."""
        has_one_column = self.table is None or self.table.shape[1] == 1
        return has_one_column and (self.divisors is None or len(self.divisors) == 1)


def as_weight(weight: Any, caller: str = "") -> float:
    """Return the weight of a mean, as a program has given it, as a float.

    Args:
      weight: A finite number of any kind, 0 or more; an array of one is, if it has no dimensions.
      caller: The name of the call, for errors.

    Raises:
      ValueError: It is no such number.

    Example:
      >>> as_weight(np.float16(2.5))
      2.5
    """
    number = math.nan
    try:
        if type(weight) in (int, float):
            number = float(weight)  # or a whole number that no float holds
        else:
            array = as_array(weight)
            if array.ndim == 0 and (array.dtype.kind in "iuf" or is_bfloat16(array.dtype)):
                number = float(array)
    except (LeafTypeError, OverflowError):
        pass
    if not 0 <= number < math.inf:
        text = f"weight must be a number of examples, 0 or more, not {weight!r:.60}."
        raise ValueError(f"{caller}: {text}" if caller else text)
    return number


def normalize_weights(table: Array) -> Array:
    """Return the weights (one row per rank, one column per leaf), divided so that no sum overflows.

    If all ranks have the same weight it becomes 1: as long as batches are full, nothing is
    multiplied, and a mean over one rank is the value itself. Other weights are divided by a power
    of two, so that their sum is less than 1/2. This loses nothing unless values are very close to
    0; no sum overflows, not by rounding either, and no sum equals the mean before the division.
    """
    columns = [_normalize_column(column) for column in table.T.tolist()]
    return np.array(columns, np.float64).T.reshape(table.shape)


def _normalize_column(weights: list[float]) -> Array:
    largest = max(weights)
    if not largest or weights.count(largest) == len(weights):
        return np.full(len(weights), 1.0 if largest else 0.0)
    column = weight_column = np.array(weights)
    if largest > _EXACT or not all(map(float.is_integer, weights)):
        # By a power of two too, so that nothing is rounded: their sum might be too large otherwise.
        with np.errstate(all="ignore"):
            column = np.ldexp(weight_column, -math.frexp(largest)[1])
        weights = column.tolist()
    size = 2.0 ** (-1 - math.frexp(math.fsum(weights))[1])
    if min(weights) * size >= _LEAST_NORMAL:  # else some may become 0
        return column * size
    with np.errstate(all="ignore"):
        scaled_column = column * size
    scaled_column[(scaled_column == 0) & (weight_column > 0)] = _TINY_WEIGHT
    return scaled_column


def sum_weights(weights: list[float]) -> Any:
    """Return the sum of weights, as a longdouble where a float is not exact."""
    rounded_total = math.fsum(weights)
    rest = math.fsum([*weights, -rounded_total]) if math.isfinite(rounded_total) else 0.0
    return np.longdouble(rounded_total) + np.longdouble(rest) if rest else rounded_total


def compute_scales(table: Array, is_weighting: bool) -> Scales:
    """Return the scales that follow from the weights of every rank (rows) and leaf (columns).

    Without `is_weighting` the values are sums over their examples already; they are divided only.
    """
    if is_weighting and table.shape[1] == 1:  # as in nearly all calls
        weights = table[:, 0].tolist()
        if weights[0] and weights.count(weights[0]) == len(weights):
            return Scales(None, (float(len(weights)),))
        column = _normalize_column(weights)
        return Scales(column.reshape(-1, 1), (sum_weights(column.tolist()),))
    table = normalize_weights(table) if is_weighting else table
    is_unscaled = not is_weighting or bool((table == 1).all())
    return Scales(
        None if is_unscaled else table, [sum_weights(column) for column in table.T.tolist()]
    )


def compute_equal_scales(weights: list[float], rank_count: int, is_weighting: bool) -> Scales:
    """Return the scales of `compute_scales` where every rank has the same weights.

    Cost: It does not depend on the number of ranks, unless a weight is 0 or no whole number.

    Args:
      weights: The weight of each leaf, or of all.
      rank_count: The number of ranks.
      is_weighting: As that of `compute_scales`.
    """
    if is_weighting and all(weights):
        return Scales(None, (float(rank_count),) * len(weights))
    if not is_weighting and all(w <= _EXACT and w.is_integer() for w in weights):
        return Scales(None, [weight * rank_count for weight in weights])
    return compute_scales(np.full((rank_count, len(weights)), weights), is_weighting)


def sum_equal(weights: Array) -> float:
    """Return the sum of equal weights, rounded once; the cost does not depend on their number."""
    return float(weights[0]) * len(weights)
