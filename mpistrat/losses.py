"""Losses with their gradients, for models whose backward passes are written by hand.

Each function takes what a model gives for the examples of this replica, and the targets, and
returns a `Loss`: the loss of every example, and the gradient of the mean over them. That mean is
over the examples of this replica alone, as ``optimizer.apply_gradients(..., weight=len(targets))``
expects it: the update then goes by the mean over the examples of all replicas. A replica without
examples gets no losses and an empty gradient, and gives its zeros with weight 0.

Nothing here is collective, and nothing communicates.
"""

from __future__ import annotations

import math
from typing import NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, as_array
from mpistrat.errors import LeafTypeError, StructureError

__all__ = [
    "Loss",
    "binary_cross_entropy",
    "mean_squared_error",
    "sparse_categorical_cross_entropy",
]


@final
class Loss(NamedTuple):
    """The losses of some examples, and the gradient of their mean.

    Attributes:
      values: One number for each example; shape ``(n,)``, dtype of the predictions.
      gradient: The gradient of ``values.mean()`` by the predictions; of their shape and dtype.
    """

    values: Array
    gradient: Array


def mean_squared_error(predictions: object, targets: object) -> Loss:
    """Return the squared errors of examples, and their gradient by the predictions.

    Formula: the mean of ``(predictions - targets) ** 2`` over all axes but the first. Equal to
    ``torch.nn.MSELoss`` and ``tf.keras.losses.MeanSquaredError``.

    Not collective: each replica gives its own examples.

    Args:
      predictions: Array of float32 or float64; the first axis is that of the examples.
      targets: Real numbers of the same shape; rounded to the dtype of the predictions.

    Returns:
      A `Loss`. Its gradient is that of the mean over the examples of this replica.

    Raises:
      StructureError: The shapes differ, or there is no axis of examples.
      LeafTypeError: Predictions are not float32 or float64, or targets not real numbers.

    Cost: Some passes over the predictions; nothing communicates.

    Example:
      >>> loss = mean_squared_error(np.array([1.0, 4.0]), np.array([1.0, 2.0]))
      >>> loss.values.tolist(), loss.gradient.tolist()
      ([0.0, 4.0], [0.0, 2.0])
    """
    call = "mean_squared_error"
    outputs, target_array = _as_pair(call, "predictions", predictions, targets)
    errors = outputs - target_array
    return Loss(_average_each(errors * errors), errors * (2.0 / max(errors.size, 1)))


def binary_cross_entropy(logits: object, targets: object) -> Loss:
    """Return the cross entropies of two classes, and their gradient by the logits.

    Formula: ``max(x, 0) - x * y + log(1 + exp(-abs(x)))`` of logits x and targets y, which is
    ``-y * log(p) - (1 - y) * log(1 - p)`` with ``p = 1 / (1 + exp(-x))``, and overflows nowhere;
    the mean over all axes but the first. Equal to ``torch.nn.BCEWithLogitsLoss`` and
    ``tf.keras.losses.BinaryCrossentropy(from_logits=True)``.

    Not collective: each replica gives its own examples.

    Args:
      logits: Array of float32 or float64; the first axis is that of the examples. Not
        probabilities: give what comes before the sigmoid.
      targets: Labels 0 and 1, or probabilities between them, of the same shape.

    Returns:
      A `Loss`. Its gradient is that of the mean over the examples of this replica.

    Raises:
      StructureError: The shapes differ, or there is no axis of examples.
      LeafTypeError: Logits are not float32 or float64, or targets not real numbers.
      ValueError: A target is below 0, above 1 or NaN; names the first.

    Cost: Some passes over the logits; nothing communicates.

    Example:
      >>> loss = binary_cross_entropy(np.array([0.0, 1000.0]), np.array([1, 1]))
      >>> loss.values.round(4).tolist(), loss.gradient.tolist()
      ([0.6931, 0.0], [-0.25, 0.0])
    """
    call = "binary_cross_entropy"
    outputs, target_array = _as_pair(call, "logits", logits, targets)
    _check_range(
        call,
        "targets",
        target_array,
        (target_array >= 0) & (target_array <= 1),
        "targets are 0 to 1",
    )
    small = np.exp(-np.abs(outputs))
    values = np.maximum(outputs, 0) - outputs * target_array + np.log1p(small)
    # Of p and 1 - p each is exact also where it is small.
    larger_share, smaller_share = 1 / (1 + small), small / (1 + small)
    is_positive = outputs >= 0
    p, q = (
        np.where(is_positive, larger_share, smaller_share),
        np.where(is_positive, smaller_share, larger_share),
    )
    gradient = ((1 - target_array) * p - target_array * q) / max(outputs.size, 1)
    return Loss(_average_each(values), gradient)


def sparse_categorical_cross_entropy(logits: object, labels: object) -> Loss:
    """Return the cross entropies of several classes, and their gradient by the logits.

    Formula: ``log(sum(exp(x - max(x)))) - (x[label] - max(x))`` of the logits x of an example,
    which is minus the logarithm of the softmax at the label, and overflows nowhere; the mean over
    all axes of the labels but the first. Equal to ``torch.nn.CrossEntropyLoss`` and
    ``tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)``; PyTorch has the classes
    along axis 1.

    Not collective: each replica gives its own examples.

    Args:
      logits: Array of float32 or float64, shape ``(n, ..., classes)``. Not probabilities: give what
        comes before the softmax.
      labels: Integers from 0 to ``classes - 1``, of shape ``(n, ...)``.

    Returns:
      A `Loss`. Its gradient is that of the mean over the examples of this replica.

    Raises:
      StructureError: The shapes do not fit.
      LeafTypeError: Logits are not float32 or float64, or labels not integers.
      ValueError: A label is not a class; names the first.

    Cost: Some passes over the logits; nothing communicates.

    Example:
      >>> loss = sparse_categorical_cross_entropy(np.zeros((2, 2)), [0, 1])
      >>> loss.values.round(4).tolist(), loss.gradient.tolist()
      ([0.6931, 0.6931], [[-0.25, 0.25], [0.25, -0.25]])
    """
    call = "sparse_categorical_cross_entropy"
    outputs, classes = (
        _as_floats(call, "logits", logits),
        as_array(labels, "labels", accepts_lists=True),
    )
    if outputs.ndim < 2 or not outputs.shape[-1] or outputs.shape[:-1] != classes.shape:
        raise StructureError(
            f"{call}: logits have shape {outputs.shape}, labels {classes.shape}; expected logits "
            "of shape (examples, classes) and labels of shape (examples,). Labels are numbers of "
            "classes, not one-hot rows: labels.argmax(axis=-1) makes them so."
        )
    if classes.dtype.kind not in "iu" and classes.size:
        raise LeafTypeError(
            f"{call}: labels have dtype {classes.dtype}; expected integers (cast them with astype)."
        )
    count = outputs.shape[-1]
    is_class = (classes >= 0) & (classes < count)
    _check_range(call, "labels", classes, is_class, f"classes are 0 to {count - 1}")
    label_indices = classes.astype(np.int64)[..., None]
    shifted = outputs - outputs.max(axis=-1, keepdims=True)
    gradient = np.exp(shifted)
    totals = gradient.sum(axis=-1, keepdims=True)
    values = np.log(totals) - np.take_along_axis(shifted, label_indices, -1)
    gradient /= totals
    # Not p - 1, which would lose the digits of a p close to 1: minus the sum of all others.
    np.put_along_axis(gradient, label_indices, 0, -1)
    np.put_along_axis(gradient, label_indices, -gradient.sum(axis=-1, keepdims=True), -1)
    return Loss(_average_each(values[..., 0]), gradient / max(classes.size, 1))


def _as_floats(call: str, name: str, value: object) -> Array:
    """Return an array of float32 or float64."""
    array = as_array(value, name, accepts_lists=True)
    if array.dtype not in (np.float32, np.float64):
        raise LeafTypeError(
            f"{call}: {name} have dtype {array.dtype}; expected float32 or float64 (cast them with "
            "astype)."
        )
    return array


def _as_pair(call: str, name: str, predictions: object, targets: object) -> tuple[Array, Array]:
    """Return predictions and targets, of one shape and dtype."""
    outputs, target_array = (
        _as_floats(call, name, predictions),
        as_array(targets, "targets", accepts_lists=True),
    )
    if outputs.shape != target_array.shape or not outputs.ndim:
        raise StructureError(
            f"{call}: {name} have shape {outputs.shape}, targets {target_array.shape}; expected "
            "the same shape, with the examples along the first axis. Reshape one of them, as with "
            f"{name}[:, 0] or targets[:, None]."
        )
    if target_array.dtype.kind not in "biuf":
        raise LeafTypeError(
            f"{call}: targets have dtype {target_array.dtype}; expected real numbers."
        )
    return outputs, target_array.astype(outputs.dtype, copy=False)


def _check_range(call: str, name: str, values: Array, is_valid: Array, expected: str) -> None:
    """Raise ValueError if a number is not valid, with the first of them."""
    if not is_valid.all():
        index = np.unravel_index(int(np.argmin(is_valid)), values.shape)
        index_text, bad_value = ", ".join(map(str, map(int, index))), values[index].item()
        raise ValueError(f"{call}: {name}[{index_text}] is {bad_value}; {expected}.")


def _average_each(values: Array) -> Array:
    """Return the mean of each example over the axes after the first."""
    width = math.prod(values.shape[1:])
    sums: Array = values.reshape(len(values), width).sum(axis=1)
    return sums / max(width, 1)
