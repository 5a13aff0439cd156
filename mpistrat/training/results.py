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

from mpistrat.errors import StructureError
from mpistrat.metrics import Mean


def as_numbers(value: Any) -> Any:
    """A value as NumPy takes it: tensors of PyTorch without their graph."""
    return value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)


def weighted(function: str, name: str, value: Any) -> tuple[Any, Any]:
    """Numbers and their weights; None as weight counts each number once.

    Args:
      function: What has returned the value, for messages.
      name: The name of the metric.
      value: One number for each example, or a pair of a mean and its weight.

    Raises:
      TypeError: It is a single number.
    """
    if isinstance(value, tuple) and len(value) == 2:
        return as_numbers(value[0]), as_numbers(value[1])
    numbers = as_numbers(value)
    if numbers.ndim == 0:
        raise TypeError(
            f"{function} returned one number for {name!r}, {numbers}: nobody knows how many "
            "examples it is the mean of, and parts of a batch differ in size. Return an array with "
            f"a number for each example, or a pair: {{{name!r}: (mean, len(batch))}}."
        )
    return numbers, None


def add_results(function: str, means: Mapping[str, Mean], results: Any) -> None:
    """Add what a replica function returned to metrics; replica code.

    Args:
      function: What has returned the results, for messages.
      means: The metrics by name.
      results: A dict with a value for each of them.

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
        numbers, weight = weighted(function, name, value)
        means[name].update_state(numbers, sample_weight=weight)
