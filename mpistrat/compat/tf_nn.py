"""``tf.nn`` as programs that import `mpistrat.compat.tf` see it: the losses of a replica."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.compat.tf_math import log_softmax as log_softmax
from mpistrat.compat.tf_math import sigmoid as sigmoid
from mpistrat.compat.tf_math import softmax as softmax
from mpistrat.compat.tf_math import softplus as softplus
from mpistrat.compat.tf_math import tanh as tanh
from mpistrat.compat.tf_reductions import reduce_sum
from mpistrat.compat.tf_tensors import convert_to_tensor, takes_name
from mpistrat.errors import ContextError
from mpistrat.strategy.replica_context import (
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)

__getattr__ = _make_getattr("tf.nn")

_OWN_FUNCTIONS = (
    "compute_average_loss l2_loss relu scale_regularization_loss sigmoid_cross_entropy_with_logits "
    "softmax_cross_entropy_with_logits sparse_softmax_cross_entropy_with_logits"
)
__all__ = [*_OWN_FUNCTIONS.split(), "log_softmax", "sigmoid", "softmax", "softplus", "tanh"]


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """Return this replica's share of the mean loss: its sum over the size of the *global* batch.

    The sum over all replicas is the mean over all examples, so reduce the loss, or gradients of it,
    with SUM. Never communicates.

    Args:
      per_example_loss: Losses of this replica's examples, with at least one axis.
      sample_weight: Weights to multiply them with; None for none. Broadcast to them from the first
        axis on, if they have one axis more or less: one for each example, or of shape (rows, 1).
      global_batch_size: The number of examples of all replicas; if it is 0, so is the result. None
        for this replica's rows times the number of replicas, which is wrong for a batch that is not
        divided evenly: give it then.

    Raises:
      ValueError: `per_example_loss` has no axis, the weights do not fit, or `global_batch_size` is
        negative or no scalar.
      TypeError: `global_batch_size` is not an integer.
      ContextError: Called without a `global_batch_size` in cross-replica code, where no replica has
        rows.

    Example:
      >>> float(compute_average_loss([1.0, 2.0], global_batch_size=4))
      0.75
    """
    losses = convert_to_tensor(per_example_loss)
    if not losses.ndim:
        raise ValueError(
            "compute_average_loss: per_example_loss has no axis; give one loss per example."
        )
    if sample_weight is not None:
        weights = np.asarray(sample_weight)
        if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
            weights = weights[..., 0]
        elif weights.ndim and weights.ndim == losses.ndim - 1:
            weights = weights[..., None]
        if weights.ndim > losses.ndim:
            raise ValueError(
                f"compute_average_loss: sample_weight of shape {weights.shape} does not fit losses "
                f"of shape {losses.shape}; give one weight per example."
            )
        losses = (losses * weights).astype(losses.dtype)
    if global_batch_size is None:
        _refuse_cross_replica("compute_average_loss")
        global_batch_size = len(losses) * get_strategy().num_replicas_in_sync
    size = np.asarray(global_batch_size)
    if size.ndim or size < 0:
        raise ValueError(
            "compute_average_loss: global_batch_size must be scalar and non-negative, got "
            f"{global_batch_size!r:.80}."
        )
    if size.dtype.kind not in "iu":
        raise TypeError(
            "compute_average_loss: global_batch_size must be an integer, got "
            f"{global_batch_size!r:.80}."
        )
    total = reduce_sum(losses)
    # Without examples there is nothing to share, where the quotient would be NaN.
    return total / size.astype(losses.dtype) if size else np.zeros_like(total)[()]


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return the sum of `regularization_loss` over the number of replicas.

    So a loss that every replica computes alike counts once in a SUM over replicas.

    Raises:
      ContextError: Called in cross-replica code.
    """
    _refuse_cross_replica("scale_regularization_loss")
    tensor = convert_to_tensor(regularization_loss)
    total = reduce_sum(tensor)
    return total / np.asarray(get_strategy().num_replicas_in_sync, tensor.dtype)


@takes_name
def relu(features: Any) -> Any:
    """Return `features`, and 0 where they are negative."""
    return np.maximum(convert_to_tensor(features), 0)


def l2_loss(t: Any, name: Any = None) -> Any:
    """Return half the sum of the squares of `t`; `name` has no effect."""
    tensor = convert_to_tensor(t)
    return reduce_sum(tensor * tensor) / tensor.dtype.type(2)


def softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, axis: int | None = -1, name: Any = None
) -> Any:
    """Return the cross entropy between `labels` and the `softmax` of `logits`, one per example.

    Args:
      labels: Probabilities of the classes, of the shape of `logits`.
      logits: Logarithms of weights of the classes.
      axis: That of the classes; the last if None.
      name: No effect.

    Raises:
      ValueError: The shapes differ.

    Example:
      >>> softmax_cross_entropy_with_logits([[0.0, 1.0]], [[0.0, 0.0]]).tolist()
      [0.6931471824645996]
    """
    sparse = "; for numbers of classes there is sparse_softmax_cross_entropy_with_logits"
    label_tensor, logit_tensor = _match_shapes(
        "softmax_cross_entropy_with_logits", labels, logits, sparse
    )
    axis = -1 if axis is None else axis
    return -reduce_sum(label_tensor * log_softmax(logit_tensor, axis), axis)


def sparse_softmax_cross_entropy_with_logits(labels: Any, logits: Any, name: Any = None) -> Any:
    """Return the cross entropy of the classes `labels` and the `softmax` of `logits`.

    Args:
      labels: The class of each example, counted from 0.
      logits: Logarithms of weights of the classes, with one more axis.
      name: No effect.

    Raises:
      ValueError: The shapes do not fit, or a label is out of range.
      TypeError: The labels are not integers.

    Example:
      >>> sparse_softmax_cross_entropy_with_logits([1], [[0.0, 0.0]]).tolist()
      [0.6931471824645996]
    """
    logit_tensor, classes = convert_to_tensor(logits), convert_to_tensor(labels)
    if classes.dtype.kind not in "iu":
        raise TypeError(f"labels must be integers, got {classes.dtype}.")
    if not logit_tensor.ndim or classes.shape != logit_tensor.shape[:-1]:
        raise ValueError(
            f"sparse_softmax_cross_entropy_with_logits: labels of shape {classes.shape} do not fit "
            f"logits of shape {logit_tensor.shape}, which need labels of shape "
            f"{logit_tensor.shape[:-1]}."
        )
    invalid_labels = classes[(classes < 0) | (classes >= logit_tensor.shape[-1])]
    if invalid_labels.size:
        raise ValueError(
            f"label {invalid_labels.flat[0]} is out of range for {logit_tensor.shape[-1]} classes."
        )
    log_probabilities = log_softmax(logit_tensor)
    return -np.take_along_axis(log_probabilities, classes[..., None].astype(np.int64), -1)[..., 0]


def sigmoid_cross_entropy_with_logits(labels: Any, logits: Any, name: Any = None) -> Any:
    """Return the cross entropy between `labels` and the `sigmoid` of `logits`, one per element.

    Args:
      labels: Probabilities.
      logits: Their logits, of the same shape.
      name: No effect.

    Raises:
      ValueError: The shapes differ.
    """
    label_tensor, logit_tensor = _match_shapes("sigmoid_cross_entropy_with_logits", labels, logits)
    return (
        np.maximum(logit_tensor, 0)
        - logit_tensor * label_tensor
        + np.log1p(np.exp(-np.abs(logit_tensor)))
    )


def _match_shapes(name: str, labels: Any, logits: Any, hint: str = "") -> tuple[Any, Any]:
    """Return labels and logits as tensors of one shape and the dtype of the logits."""
    logit_tensor = convert_to_tensor(logits)
    label_tensor = convert_to_tensor(labels).astype(logit_tensor.dtype)
    if label_tensor.shape != logit_tensor.shape:
        raise ValueError(
            f"{name}: labels of shape {label_tensor.shape} do not fit logits of shape "
            f"{logit_tensor.shape}{hint}."
        )
    return label_tensor, logit_tensor


def _refuse_cross_replica(name: str) -> None:
    if has_strategy() and in_cross_replica_context():
        raise ContextError(
            f"{name} was called in cross-replica code; it gives one replica's share. Call it in "
            "the function of strategy.run, and reduce with SUM."
        )
