"""Metrics of two classes: `Precision`, `Recall`, and `AUC`, the area under the ROC curve."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, check_int, is_real
from mpistrat.errors import StructureError
from mpistrat.metrics.metric import Metric, as_real, describe_first_bad
from mpistrat.strategy.strategies import current_strategy

__all__ = ["AUC", "Precision", "Recall"]

_EPSILON = 1e-7  # how far Keras has the first and the last threshold beyond 0 and 1


class _CountedExamples(NamedTuple):
    """The examples that count, flat: whether they are of class 1, predictions, and weights."""

    is_positive: Array
    predictions: Array
    weights: Array


class _Binary(Metric):
    """A metric of labels 0 and 1 and of probabilities of class 1."""

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
        """Count examples; where, see `Mean.update_state`. Those of weight 0 are not read.

        Args:
          y_true: Labels: 0 and 1, or False and True, of any shape.
          y_pred: Probabilities of class 1, from 0 to 1, or predicted labels; of the same shape.
          sample_weight: As in `Mean.update_state`.

        Raises:
          StructureError: The shapes do not fit.
          LeafTypeError: Something is not an array of real numbers.
          ValueError: A label is neither 0 nor 1, a prediction is not from 0 to 1, or a weight is
            below 0, NaN or infinite; says which.
          StrategyError: Another strategy is in scope, or a value belongs to another.
          LockstepError: Plain values in cross-replica code differ between ranks.
        """
        self._update(y_true, y_pred, sample_weight)

    def result(self) -> float:
        """Return the metric over what all replicas have added; in replica code, this replica's.

        Collective in cross-replica code.

        Returns:
          A Python float; 0.0 where Keras has it, in place of a division by 0.

        Raises:
          StrategyError: Another strategy is in scope.
          LockstepError: The ranks make different calls.

        Cost: one all-reduce of the sums in cross-replica code.
        """
        value: float = super().result()
        return value

    def _select_examples(
        self, y_true: Array, y_pred: Array, weights: Array | None
    ) -> _CountedExamples:
        if y_true.shape != y_pred.shape:
            raise StructureError(
                f"{self._prefix}: y_true has shape {y_true.shape}, y_pred {y_pred.shape}; expected "
                "a label and a probability of class 1 for each example, as with y_pred[:, 0]."
            )
        labels, predictions = as_real(y_true, "y_true"), as_real(y_pred, "y_pred")
        weights = (
            np.ones(labels.shape)
            if weights is None
            else self._broadcast_weights(weights, labels.shape)
        )
        is_counted = weights != 0
        is_binary = (labels == 0) | (labels == 1)
        self._check(is_counted & ~is_binary, labels, "y_true", "labels are 0 and 1")
        is_probability = (predictions >= 0) & (predictions <= 1)
        expected = "predictions are from 0 to 1; of logits x take 1 / (1 + exp(-x))"
        self._check(is_counted & ~is_probability, predictions, "y_pred", expected)
        return _CountedExamples(
            labels[is_counted] == 1, predictions[is_counted], weights[is_counted]
        )

    def _check(self, is_bad: Array, values: Array, name: str, expected: str) -> None:
        if is_bad.any():
            index_text, value = describe_first_bad(is_bad, values)
            raise ValueError(f"{self._prefix}: {name}{index_text} is {value}; {expected}.")


class _Ratio(_Binary):
    """Examples of class 1 that were predicted as such, over those and others."""

    def __init__(self, name: str, error_name: str, threshold: float):
        with current_strategy()._replicas.lockstep.validating_collectively(
            f"{type(self).__name__} {name!r}"
        ):
            if not is_real(threshold) or not 0 <= threshold <= 1:
                raise ValueError(
                    f"{type(self).__name__} {name!r}: threshold is {threshold!r:.60}; expected a "
                    "number from 0 to 1."
                )
        self.threshold = float(threshold)
        super().__init__(name, {"true_positives": 0.0, error_name: 0.0})

    def _compute_result(self, *sums: Array) -> float:
        true_positives, errors = map(float, sums)
        return true_positives / (true_positives + errors) if true_positives else 0.0


@final
class Precision(_Ratio):
    """The fraction of the examples predicted as class 1 that are of class 1.

    Formula: ``true_positives / (true_positives + false_positives)``, sums of weights over the
    examples of all replicas, in float64. An example is predicted as class 1 if its prediction is
    above the threshold. 0.0 if none is.

    Collective: creation is.

    Args:
      name: For messages, checkpoints, and the names of its variables, ``true_positives`` and
        ``false_positives``.
      threshold: From 0 to 1.

    Attributes:
      threshold: As given.

    Raises:
      ValueError: `threshold` is not a number from 0 to 1.

    Cost: creation costs that of two variables. Like: ``tf.keras.metrics.Precision``.

    Example:
      >>> precision = Precision()
      >>> precision.update_state([0, 1, 1, 1], [0.9, 0.2, 0.8, 0.7])
      >>> round(precision.result(), 4)
      0.6667
    """

    def __init__(self, name: str = "precision", threshold: float = 0.5):
        """Create the variables."""
        super().__init__(name, "false_positives", threshold)

    def _compute_increments(self, *arguments: Any) -> tuple[Any, ...]:
        examples = self._select_examples(*arguments)
        is_predicted = examples.predictions > self.threshold
        weights, is_true = examples.weights[is_predicted], examples.is_positive[is_predicted]
        return weights[is_true].sum(), weights[~is_true].sum()


@final
class Recall(_Ratio):
    """The fraction of the examples of class 1 that are predicted as class 1.

    Formula: ``true_positives / (true_positives + false_negatives)``, sums of weights over the
    examples of all replicas, in float64. An example is predicted as class 1 if its prediction is
    above the threshold. 0.0 if no example is of class 1.

    Collective: creation is.

    Args:
      name: For messages, checkpoints, and the names of its variables, ``true_positives`` and
        ``false_negatives``.
      threshold: From 0 to 1.

    Attributes:
      threshold: As given.

    Raises:
      ValueError: `threshold` is not a number from 0 to 1.

    Cost: creation costs that of two variables. Like: ``tf.keras.metrics.Recall``.

    Example:
      >>> recall = Recall()
      >>> recall.update_state([0, 1, 1, 1], [0.9, 0.2, 0.8, 0.7])
      >>> round(recall.result(), 4)
      0.6667
    """

    def __init__(self, name: str = "recall", threshold: float = 0.5):
        """Create the variables."""
        super().__init__(name, "false_negatives", threshold)

    def _compute_increments(self, *arguments: Any) -> tuple[Any, ...]:
        examples = self._select_examples(*arguments)
        is_predicted = examples.predictions[examples.is_positive] > self.threshold
        weights = examples.weights[examples.is_positive]
        return weights[is_predicted].sum(), weights[~is_predicted].sum()


@final
class AUC(_Binary):
    """The area under the ROC curve: how well predictions put class 1 above class 0.

    Formula: the rates of true positives and of false positives, of the examples of all replicas,
    at thresholds ``-1e-7, 1 / (n - 1), 2 / (n - 1), ..., 1 + 1e-7``, where a prediction above the
    threshold is class 1; between them the curve is a line (trapezoids). These are the definition
    and the defaults of ``tf.keras.metrics.AUC``, with ``curve="ROC"`` and
    ``summation_method="interpolation"``. 0.0 if one of the classes has no example. The exact area
    differs by up to the weight of the pairs of both classes between two thresholds.

    Collective: creation is.

    Args:
      name: For messages, checkpoints, and the names of its variables, ``positives`` and
        ``negatives``: the weights of each class between two thresholds.
      num_thresholds: How many thresholds, at least 2; n in the formula.

    Attributes:
      num_thresholds: As given.
      thresholds: The thresholds; an array of float64.

    Raises:
      ValueError: `num_thresholds` is less than 2.
      TypeError: `num_thresholds` is not an integer.
      LockstepError: The ranks want different numbers of thresholds.

    Cost: creation costs that of two variables of ``n - 1`` numbers.
    Like: ``tf.keras.metrics.AUC``.

    Example:
      >>> auc = AUC(num_thresholds=3)
      >>> auc.update_state([0, 0, 1, 1], [0.0, 0.5, 0.3, 0.9])
      >>> auc.result()
      0.75
    """

    def __init__(self, name: str = "auc", num_thresholds: int = 200):
        """Create the variables."""
        with current_strategy()._replicas.lockstep.validating_collectively(f"AUC {name!r}"):
            self.num_thresholds = check_int(
                f"AUC {name!r}: num_thresholds", num_thresholds, 2, ValueError
            )
        self.thresholds = np.arange(self.num_thresholds) / (self.num_thresholds - 1)
        self.thresholds[0], self.thresholds[-1] = -_EPSILON, 1 + _EPSILON
        zeros = np.zeros(self.num_thresholds - 1)
        super().__init__(name, {"positives": zeros, "negatives": zeros})

    def _compute_increments(self, *arguments: Any) -> tuple[Any, ...]:
        examples = self._select_examples(*arguments)
        # How many thresholds are below; the first is below each prediction, the last above.
        bins = np.searchsorted(self.thresholds, examples.predictions, side="left") - 1
        size, is_positive = self.num_thresholds - 1, examples.is_positive
        return tuple(
            np.bincount(bins[mask], examples.weights[mask], minlength=size)
            for mask in (is_positive, ~is_positive)
        )

    def _compute_result(self, *sums: Array) -> float:
        # Rates at each threshold, from the first on.
        rates = [np.append(np.cumsum(counts[::-1])[::-1], 0.0) for counts in sums]
        if not (rates[0][0] and rates[1][0]):
            return 0.0
        true_rates, false_rates = (counts / counts[0] for counts in rates)
        heights = (true_rates[:-1] + true_rates[1:]) / 2
        return float(np.sum((false_rates[:-1] - false_rates[1:]) * heights))
