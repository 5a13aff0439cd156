"""Results of a step: numbers of examples, or means with weights, added to metrics.

A function that `fit` or `evaluate` calls returns a dict. Each value is an array with one number for
each example of this replica, or a pair ``(mean, weight)``: the mean of so many examples. A single
number would be the mean of a part of the batch, and the mean of such means is wrong where parts
differ in size, so it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpistrat import pytree
from mpistrat.errors import StructureError
from mpistrat.metrics import Mean


def as_numbers(value: Any) -> Any:
    """A value as NumPy takes it: tensors of PyTorch without their graph."""
    return value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)


def count_rows(batch: Any) -> int | None:
    """The number of rows of this replica's part of a batch; None if no leaf has an axis."""
    for leaf in pytree.flatten(batch)[0]:
        if getattr(leaf, "ndim", 0):
            return int(leaf.shape[0])
    return None


def weighted(function: str, name: str, value: Any, row_count: int | None) -> tuple[Any, Any]:
    """Numbers and their weights; None as weight counts each number once.

    Args:
      function: What has returned the value, for messages.
      name: The name of the metric.
      value: One number for each example, or a pair of a mean and its weight.
      row_count: The number of rows of the part; None if it is not known.

    Raises:
      TypeError: It is a single number, a list, or a pair of anything else than two numbers.
      StructureError: It has another number of rows than the part, or several numbers for a row; or
        the weight of a part without rows is above 0.
    """
    if isinstance(value, tuple) and len(value) == 2:
        mean, weight = as_numbers(value[0]), as_numbers(value[1])
        if mean.ndim or weight.ndim:
            raise TypeError(
                f"{function} returned a pair for {name!r} with shapes {mean.shape} and "
                f"{weight.shape}; a pair is (mean, weight): two numbers. Return the array alone, "
                "with a number for each example."
            )
        if row_count == 0 and weight > 0:
            raise StructureError(
                f"{function} returned a pair for {name!r} with weight {weight}, but this replica's "
                "part of the batch has no rows. The weight is the number of rows, len(x); "
                "len(batch) counts the arrays of a batch (x, y), not its rows."
            )
        return mean, weight
    if isinstance(value, list):
        raise TypeError(
            f"{function} returned a list for {name!r}; return an array with a number for each "
            "example, or a tuple (mean, weight)."
        )
    return _check_numbers(function, name, as_numbers(value), row_count), None


def _check_numbers(function: str, name: str, numbers: Any, row_count: int | None) -> Any:
    """The numbers; raises where they are not one for each row."""
    if numbers.ndim and row_count is not None and numbers.shape[0] != row_count:
        raise StructureError(
            f"{function} returned {numbers.shape[0]} rows for {name!r}, but this replica's part of "
            f"the batch has {row_count}. Return a number for each example, or a pair (mean, "
            "weight)."
        )
    if numbers.ndim and row_count is not None and numbers.size != row_count:
        raise StructureError(
            f"{function} returned an array of shape {numbers.shape} for {name!r}, but this "
            f"replica's part of the batch has {row_count} rows: each has one number, as in shape "
            f"({row_count},). If (n,) and (n, 1) have broadcast to (n, n), take the column out of "
            "its axis: y[:, 0]. If a row has several numbers, give their mean: losses.mean(axis=1)."
        )
    if numbers.ndim == 0:
        raise TypeError(
            f"{function} returned one number for {name!r}, {numbers}: nobody knows how many "
            "examples it is the mean of, and parts of a batch differ in size. Return an array with "
            f"a number for each example, or a pair: {{{name!r}: (mean, len(x))}}, where "
            "len(x) is the number of rows of this replica."
        )
    return numbers


def add_results(
    function: str, means: Mapping[str, Mean], results: Any, row_count: int | None
) -> None:
    """Add what a replica function returned to metrics; replica code.

    Args:
      function: What has returned the results, for messages.
      means: The metrics by name.
      results: A dict with a value for each of them.
      row_count: The number of rows of the part that they are of; None if it is not known.

    Raises:
      TypeError: It is no dict, or a value is a single number.
      StructureError: Its names are not those of the metrics.
    """
    if not isinstance(results, Mapping):
        raise TypeError(
            f"{function} must return a dict of results such as {{'loss': losses}}, "
            f"not {results!r:.60}."
        )
    if results.keys() != means.keys():
        raise StructureError(
            f"{function} returned results named {sorted(results)}, but metrics={sorted(means)}. "
            "Give the names of all results as metrics=(...); a checkpoint is read by these names."
        )
    for name, value in results.items():
        numbers, weight = weighted(function, name, value, row_count)
        means[name].update_state(numbers, sample_weight=weight)
