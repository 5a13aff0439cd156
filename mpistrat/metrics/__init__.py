"""Means and counts over the examples of all replicas, however they are divided.

A metric keeps sums in ON_READ variables: replica code adds to its own sums without communicating,
and `result` in cross-replica code adds up the sums of all replicas. So every example counts once,
or with its weight, on whatever replica it was; a replica without examples adds nothing. Names and
semantics are those of Keras. The room promises that `result` is the same on all ranks, and that a
bad label or weight is an error that names the element and the rank.

- `metric`: the base class `Metric`, and `Mean`, `Accuracy` and `Confusion`.
- `binary`: metrics of two classes, `Precision`, `Recall` and `AUC`.
"""

from mpistrat.metrics.binary import AUC, Precision, Recall
from mpistrat.metrics.metric import Accuracy, Confusion, Mean, Metric

__all__ = ["AUC", "Accuracy", "Confusion", "Mean", "Metric", "Precision", "Recall"]
