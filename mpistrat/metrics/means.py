"""`Mean` and `Accuracy`: a total, and what it is divided by."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.metrics.metric import Metric, real

__all__ = ["Accuracy", "Mean"]

_DOUBLE = np.dtype(np.float64)


class _Fraction(Metric):
    """A mean: a total, and what it is divided by."""

    def __init__(self, name: str):
        super().__init__(name, {"total": 0.0, "count": 0.0})

    def result(self) -> float:
        """Return the mean over what all replicas have added; in replica code, this replica's.

        Collective in cross-replica code.

        Returns:
          A Python float; 0.0 if nothing was added, as in Keras.

        Raises:
          StrategyError: Another strategy is in scope.
          LockstepError: The ranks make different calls.

        Cost: one handshake in cross-replica code.
        """
        mean: float = super().result()
        return mean

    def _told(self, *sums: Array) -> float:
        total, count = map(float, sums)
        return total / count if count else 0.0

    def _added(self, *arguments: Any) -> tuple[Any, ...]:
        values, weights = arguments
        if values.dtype is not _DOUBLE:
            values = real(values, "values")
        if weights is None:
            return np.add.reduce(values, None), values.size
        weights = self._weights(weights, values.shape)
        if np.count_nonzero(weights) < weights.size:
            is_counted = weights != 0
            values, weights = values[is_counted], weights[is_counted]
        return np.add.reduce(values * weights, None), np.add.reduce(weights, None)


@final
class Mean(_Fraction):
    """The mean of numbers, such as the losses of examples.

    Formula: ``sum(weights * values) / sum(weights)``, over all elements that all replicas have
    added, in float64.

    Collective: creation is.

    Args:
      name: For messages, checkpoints, and the names of its variables, ``total`` and ``count``.

    Cost: creation costs that of two variables. Like: ``tf.keras.metrics.Mean``.

    Example:
      >>> loss = Mean("loss")
      >>> loss.update_state([1.0, 2.0, 6.0])
      >>> loss.update_state(5.0, sample_weight=3)
      >>> loss.result()
      4.0
    """

    _given = ("values", "sample_weight")

    def __init__(self, name: str = "mean"):
        """Create the variables."""
        super().__init__(name)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add numbers to the mean; an array without elements adds nothing.

        In replica code each replica adds its own, and nothing communicates. In cross-replica code a
        `PerReplica` adds every replica's part. Plain values are those of the whole batch there, the
        same on all ranks, and are added once; with `MultiWorkerMirroredStrategy`, whose `run`
        returns plain values, they are this rank's own.

        Collective for plain values in cross-replica code, but with `MultiWorkerMirroredStrategy`.

        Args:
          values: A real number, or an array of any shape. Each element counts.
          sample_weight: How much it counts: a number for all, or an array whose axes are the first
            of `values`, with one weight for each example or element. What has weight 0 is not read.

        Raises:
          StructureError: The weights do not fit.
          LeafTypeError: Something is not an array of real numbers.
          ValueError: A weight is below 0, NaN or infinite; says which.
          StrategyError: Another strategy is in scope, or a value belongs to another.
          LockstepError: Plain values in cross-replica code differ between ranks.

        Cost: a sum. For plain values in cross-replica code also a hash of them and a handshake.
        """
        self._update(values, sample_weight)


@final
class Accuracy(_Fraction):
    """The fraction of the examples whose label was predicted.

    Collective: creation is.

    Args:
      name: For messages, checkpoints, and the names of its variables, ``total`` and ``count``.

    Cost: creation costs that of two variables.
    Like: ``tf.keras.metrics.Accuracy``, and ``SparseCategoricalAccuracy`` where scores are given.

    Example:
      >>> accuracy = Accuracy()
      >>> accuracy.update_state([0, 1], [[0.9, 0.1], [0.6, 0.4]])
      >>> accuracy.update_state([1, 1], [1, 1])
      >>> accuracy.result()
      0.75
    """

    def __init__(self, name: str = "accuracy"):
        """Create the variables."""
        super().__init__(name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count examples, and those that were predicted right; where, see `Mean.update_state`.

        Args:
          y_true: Labels: integers of any shape.
          y_pred: Labels of the same shape; or scores, real numbers with the classes along one more
            axis, of which the first highest is the label.
          sample_weight: As in `Mean.update_state`.

        Raises:
          StructureError: The shapes do not fit.
          LeafTypeError: Labels are not integers, or scores no real numbers.
          ValueError: A weight is below 0, NaN or infinite; says which.
          StrategyError: Another strategy is in scope, or a value belongs to another.
          LockstepError: Plain values in cross-replica code differ between ranks.
        """
        self._update(y_true, y_pred, sample_weight)

    def _added(self, *given: Any) -> tuple[Any, ...]:
        y_true, y_pred, weights = given
        true, predicted = self._labels(y_true, y_pred)
        return super()._added(np.asarray(true == predicted), weights)
