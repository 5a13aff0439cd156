"""Means and counts over the examples of all replicas, however they are divided.

A metric keeps sums in ON_READ variables: replica code adds to its own without communicating, and
`result` in cross-replica code adds up those of all replicas. So every example counts once, or with
its weight, wherever it was; a replica without examples adds nothing. Names and
semantics are those of Keras.
"""

from mpistrat.metrics.binary import AUC, Precision, Recall
from mpistrat.metrics.metric import Accuracy, Confusion, Mean, Metric

__all__ = ["AUC", "Accuracy", "Confusion", "Mean", "Metric", "Precision", "Recall"]
