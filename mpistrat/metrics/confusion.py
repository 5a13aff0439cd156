"""`Confusion`: a confusion matrix."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, as_dtype, whole_number
from mpistrat.distribute.strategies import current_strategy
from mpistrat.errors import LeafTypeError
from mpistrat.metrics.metric import Metric, first_bad

__all__ = ["Confusion"]


@final
class Confusion(Metric):
    """A confusion matrix: how often each class was predicted as each class.

    Collective: creation is.

    Args:
      classes: How many classes there are; labels are 0 to ``classes - 1``.
      name: For messages, checkpoints, and the name of its variable, ``matrix``.
      dtype: int64, which counts exactly; or float64, for weights that are not integers.

    Raises:
      ValueError: `classes` is less than 1.
      TypeError: `classes` is not an integer.
      LeafTypeError: `dtype` is another one.
      LockstepError: The ranks want different matrices.

    Cost: creation costs that of one variable. Like: ``tf.math.confusion_matrix``, added up.

    Example:
      >>> confusion = Confusion(2)
      >>> confusion.update_state([0, 0, 1], [0, 1, 1])
      >>> confusion.result()
      array([[1, 1],
             [0, 1]])
    """

    def __init__(self, classes: int, name: str = "confusion", dtype: Any = np.int64):
        """Create the variable."""
        with current_strategy().replicas.lockstep.preparing(f"Confusion {name!r}"):
            self.classes = whole_number(f"Confusion {name!r}: classes", classes, 1, ValueError)
            matrix_dtype = as_dtype(dtype, f"Confusion {name!r}")
            if matrix_dtype not in (np.int64, np.float64):
                raise LeafTypeError(
                    f"Confusion {name!r}: dtype is int64 or float64, not {matrix_dtype}."
                )
        super().__init__(name, {"matrix": np.zeros((self.classes, self.classes), matrix_dtype)})

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count examples; where, see `Mean.update_state`. For a weight of 0, labels are not read.

        Args:
          y_true: Labels: integers of any shape.
          y_pred: Labels of the same shape; or scores, as in `Accuracy.update_state`.
          sample_weight: As in `Mean.update_state`; whole numbers, if the matrix is int64.

        Raises:
          StructureError: The shapes do not fit.
          LeafTypeError: Labels are not integers, or scores no real numbers.
          ValueError: A label is not a class, or a weight does not fit; says which, where, and on
            which rank.
          StrategyError: Another strategy is in scope, or a value belongs to another.
          LockstepError: Plain values in cross-replica code differ between ranks.
        """
        self._update(y_true, y_pred, sample_weight)

    def result(self) -> Array:
        """Return the matrix over what all replicas have added; in replica code, this replica's.

        Collective in cross-replica code.

        Returns:
          An array of shape (classes, classes), the caller's own. Row i and column j hold the
          number of examples of class i that were predicted as class j.

        Raises:
          StrategyError: Another strategy is in scope.
          LockstepError: The ranks make different calls.

        Cost: an all-reduce of the matrix in cross-replica code.
        """
        matrix: Array = super().result()
        return matrix

    def _added(self, *arguments: Any) -> tuple[Any, ...]:
        y_true, y_pred, weights = arguments
        true, predicted = self._labels(y_true, y_pred)
        is_counted = np.ones(true.shape, bool)
        if weights is not None:
            weights = self._weights(weights, true.shape)
            is_counted = weights != 0
        for name, labels in (("y_true", true), ("y_pred", predicted)):
            is_out_of_range = is_counted & ((labels < 0) | (labels >= self.classes))
            if is_out_of_range.any():
                index_text, label = first_bad(is_out_of_range, labels)
                raise ValueError(
                    f"{self._who}: the label {name}{index_text} is {label}; classes "
                    f"are 0 to {self.classes - 1}. Leave an example out by a sample_weight of 0."
                )
        cell_indices = true[is_counted].astype(np.int64) * self.classes + predicted[
            is_counted
        ].astype(np.int64)
        counts = np.bincount(cell_indices, minlength=self.classes**2)
        if weights is not None:
            counts = np.zeros(self.classes**2, self.variables[0].dtype)
            np.add.at(counts, cell_indices, self._counts(weights)[is_counted])
        return (counts.reshape(self.classes, self.classes),)

    def _counts(self, weights: Array) -> Array:
        """Return weights in the dtype of the matrix."""
        counts = weights.astype(self.variables[0].dtype)
        is_rounded = counts != weights
        if is_rounded.any():
            index_text, weight = first_bad(is_rounded, weights)
            raise ValueError(
                f"{self._who}: sample_weight{index_text} is {weight}, and the matrix "
                "counts integers. For such weights create Confusion(classes, dtype=np.float64)."
            )
        return counts

    def _told(self, *sums: Array) -> Array:
        return sums[0].copy()
