"""`Metric`, the base class of metrics, and the metrics: `Mean`, `Accuracy` and `Confusion`.

A metric is a few sums. `Mean` and `Accuracy` have a total and a count that divides it; `Confusion`
has a matrix of counts. A subclass computes the increments of the sums for some examples
(`Metric._compute_increments`) and the result of the sums (`Metric._compute_result`).
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike

from mpistrat import pytree
from mpistrat.arrays import Array, as_array, as_dtype, check_int, is_bfloat16, quiet
from mpistrat.collectives.dtypes import choose_wire_type
from mpistrat.collectives.plan import Contribution
from mpistrat.errors import LeafTypeError, StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.strategy.context_stack import check_same_strategy, copy_context, current_context
from mpistrat.strategy.strategies import current_strategy
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.kinds import PlainValueRule, VariableAggregation, VariableSynchronization
from mpistrat.variables.reading import ReadableVariable, unwrap_value
from mpistrat.variables.values import DistributedValues, PerReplica
from mpistrat.variables.variable import Variable
from mpistrat.variables.writes import check_same_contents

__all__ = [
    "Accuracy",
    "Confusion",
    "Mean",
    "Metric",
    "as_real",
    "describe_first_bad",
]


_FLOAT64 = np.dtype(np.float64)
_ADVICE = (
    "In cross-replica code plain values are those of the whole batch, and are counted once. Give "
    "what each replica has as a PerReplica, as strategy.run returns it, or update in replica code."
)


class Metric(abc.ABC):
    """Base class of metrics; subclasses compute increments of the sums, and the result.

    Created in a strategy's scope it belongs to that strategy, as its variables do; elsewhere to the
    default strategy.

    Collective: creation is.

    Args:
      name: For messages, and the beginning of the names of its variables.
      zeros: The initial values of its sums, by name.

    Attributes:
      name: As given.

    Cost: creation costs that of its variables.
    """

    # The arguments of `update_state`.
    _argument_names: tuple[str, ...] = ("y_true", "y_pred", "sample_weight")

    def __init_subclass__(cls, **more: Any) -> None:
        """Register metrics as leaves of trees."""
        super().__init_subclass__(**more)
        pytree.register_leaf_class(cls)

    def __init__(self, name: str, zeros: Mapping[str, Any]):
        """Create the variables."""
        self.name = name
        self._sums_by_name = {
            key: Variable(
                zero,
                name=f"{name}/{key}",
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            for key, zero in zeros.items()
        }
        self._strategy: Strategy = self.variables[0].strategy
        self._mark_variables()

    def __repr__(self) -> str:
        """Return class and name; never communicates."""
        return f"{type(self).__name__}({self.name!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a metric of the same strategy with sums of its own. Collective."""
        duplicate = memo[id(self)] = copy.copy(self)
        duplicate._sums_by_name = copy.deepcopy(self._sums_by_name, memo)
        duplicate._mark_variables()
        return duplicate

    def _mark_variables(self) -> None:
        for variable in self.variables:
            variable._is_metric_sum = True
        # ON_READ variables, so the arrays belong to this rank alone.
        self._sums = [variable._storage.array for variable in self.variables]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The sums: ON_READ variables with aggregation SUM, named as ``"loss/total"``."""
        return tuple(self._sums_by_name.values())

    def tree(self) -> dict[str, Variable]:
        """Return the sums by the names that they have in checkpoints."""
        return dict(self._sums_by_name)

    def reset_state(self) -> None:
        """Reset the sums to their initial values.

        Collective in cross-replica code. In replica code it forgets what this replica has added.

        Raises:
          StrategyError: Another strategy is in scope.
          LockstepError: The ranks make different calls.

        Cost: one handshake in cross-replica code.
        """
        strategy, is_single_replica = self._find_scope()
        if not is_single_replica:
            strategy._replicas.lockstep.handshake(f"{self._label}.reset_state()")
        for variable in self.variables:
            variable._store("assign", np.zeros_like(variable._storage.array), None)

    def result(self) -> Any:
        """Return the result over all replicas; in replica code, that of this one.

        Collective in cross-replica code.

        Raises:
          StrategyError: Another strategy is in scope.
          LockstepError: The ranks make different calls.

        Cost: one all-reduce in cross-replica code; a handshake if the sums are a few numbers.
        """
        strategy, is_single_replica = self._find_scope()
        arrays = self._sums
        if not is_single_replica:
            # In its strategy's scope, since the program may have chosen how that reduces.
            with copy_context(current_context(), strategy):
                contributions = [
                    Contribution(a, choose_wire_type(ReduceOp.SUM, a.dtype)) for a in arrays
                ]
                call = f"{self._label}.result()"
                arrays = strategy._replicas.all_reduce_contributions(
                    call, ReduceOp.SUM, contributions
                )
        return self._compute_result(*arrays)

    @abc.abstractmethod
    def _compute_increments(self, *arguments: Any) -> tuple[Any, ...]:
        """Return the increment of each sum by some examples."""

    @abc.abstractmethod
    def _compute_result(self, *sums: Array) -> Any:
        """Return the result of these sums."""

    @property
    def _label(self) -> str:
        return f"{type(self).__name__} {self.name!r}"

    @property
    def _prefix(self) -> str:
        return f"rank {self._strategy._replicas.lockstep.session.comm.rank}: {self._label}"

    def _find_scope(self) -> tuple[Strategy, bool]:
        """Return the strategy, and whether the calling code sees the sums of one replica only."""
        strategy, mode = self._strategy, current_context()
        if mode is not None and mode.strategy is strategy and mode.replica is not None:
            return strategy, True
        check_same_strategy(strategy, self._label)
        strategy._replicas.lockstep.check()
        return strategy, strategy._replicas.lockstep.comm.size == 1

    def _update(self, *arguments: object) -> None:
        """Add some examples to the sums, once; `_argument_names` names the `arguments`."""
        strategy, mode = self._strategy, current_context()
        is_replica_code = (
            mode is not None and mode.strategy is strategy and mode.replica is not None
        )
        if is_replica_code or self._find_scope()[1]:
            arrays: Sequence[Any] = arguments
            for value in arguments if arguments[-1] is not None else arguments[:-1]:
                if not (type(value) is np.ndarray and value.dtype is _FLOAT64):  # few losses are
                    arrays = [*map(self._convert_argument, arguments, self._argument_names)]
                    break
            increments = quiet().run(self._compute_increments, *arrays)
        else:
            increments = self._compute_increments_of_all(arguments)
        for sums, value in zip(self._sums, increments, strict=False):
            sums[...] = sums + value if sums.ndim else float(sums) + float(value)

    def _compute_increments_of_all(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return this rank's increments in cross-replica code; empty where rank 0 adds for all."""
        replicas = self._strategy._replicas
        lockstep, call = replicas.lockstep, f"{self._label}.update_state"
        is_per_rank = replicas.view.plain_rule is not PlainValueRule.REFUSED
        is_per_rank = is_per_rank or any(isinstance(value, PerReplica) for value in arguments)
        with lockstep.validating_collectively(call):
            arrays = [*map(self._convert_argument, arguments, self._argument_names)]
            increments: tuple[Any, ...] = quiet().run(self._compute_increments, *arrays)
        if not is_per_rank:
            named_arrays = zip(self._argument_names, arrays, strict=True)
            values = {name: array for name, array in named_arrays if array is not None}
            check_same_contents(lockstep, call, values, _ADVICE)
        return increments if is_per_rank or lockstep.comm.rank == 0 else ()

    def _convert_argument(self, value: object, name: str) -> Array | None:
        if value is None and name == self._argument_names[-1]:
            return None
        if type(value) is not np.ndarray and isinstance(
            value, DistributedValues | ReadableVariable
        ):
            regroup = self._strategy._replicas.regrouper
            regroup.check(f"{self._label}.update_state", [value])
            value = unwrap_value(value)
        return as_array(value, name, accepts_lists=True)

    def _broadcast_weights(self, sample_weight: Array, shape: tuple[int, ...]) -> Array:
        """Return the weight of every element, from one for all or one along the first axes."""
        weights = as_real(sample_weight, "sample_weight")
        if weights.shape != shape:
            try:
                trailing_axes = (1,) * (len(shape) - weights.ndim)
                weights = np.broadcast_to(weights.reshape(weights.shape + trailing_axes), shape)
            except ValueError:
                raise StructureError(
                    f"{self._prefix}: sample_weight of shape {sample_weight.shape} does "
                    f"not fit values of shape {shape}. Give one number, or one for each example."
                ) from None
        if not 0 <= weights.min(initial=0) <= weights.max(initial=0) < np.inf:  # NaN is neither
            index_text, weight = describe_first_bad(~((weights >= 0) & (weights < np.inf)), weights)
            raise ValueError(
                f"{self._prefix}: sample_weight{index_text} is {weight}; "
                "expected a finite number, 0 or more."
            )
        return weights

    def _find_labels(self, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
        """Return labels and predicted labels, of one shape."""
        if y_pred.ndim == y_true.ndim + 1 and y_pred.shape[:-1] == y_true.shape:
            if y_pred.shape[-1] < 2:
                raise StructureError(
                    f"{self._prefix}: y_pred of shape {y_pred.shape} has scores of "
                    f"{y_pred.shape[-1]} class; expected those of two or more, or labels of the "
                    "shape of y_true."
                )
            y_pred = as_real(y_pred, "y_pred").argmax(axis=-1)
        elif y_pred.shape != y_true.shape:
            raise StructureError(
                f"{self._prefix}: y_true has shape {y_true.shape}, y_pred {y_pred.shape}; "
                "expected labels of the same shape, or scores of all classes along one more axis."
            )
        for name, labels in (("y_true", y_true), ("y_pred", y_pred)):
            if labels.dtype.kind not in "biu" and labels.size:
                raise LeafTypeError(
                    f"{self._prefix}: {name} has dtype {labels.dtype}, shape {labels.shape}; "
                    "labels are integers (cast them with astype), scores have one more axis than "
                    "y_true."
                )
        return y_true, y_pred


def as_real(array: Array, name: str) -> Array:
    """Return real numbers as float64."""
    dtype = array.dtype
    if dtype.kind not in "biuf" and not is_bfloat16(dtype):
        raise LeafTypeError(f"{name} has dtype {dtype}; expected real numbers.")
    return array.astype(np.float64, copy=False)


def describe_first_bad(is_bad: Array, values: Array) -> tuple[str, Any]:
    """Return the index of the first bad element as a text, and the element."""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(is_bad)), is_bad.shape))
    return f"[{', '.join(map(str, index))}]" if index else "", values[index].item()


class _Fraction(Metric):
    """A mean: a total divided by a count."""

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

    def _compute_result(self, *sums: Array) -> float:
        total, count = map(float, sums)
        return total / count if count else 0.0

    def _compute_increments(self, *arguments: Any) -> tuple[Any, ...]:
        values, weights = arguments
        if values.dtype is not _FLOAT64:
            values = as_real(values, "values")
        if weights is None:
            return np.add.reduce(values, None), values.size
        weights = self._broadcast_weights(weights, values.shape)
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

    _argument_names = ("values", "sample_weight")

    def __init__(self, name: str = "mean"):
        """Create the variables."""
        super().__init__(name)

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Add numbers to the mean; an array without elements adds nothing.

        In replica code each replica adds its own, and nothing communicates. In cross-replica code a
        `PerReplica` adds every replica's part. Plain values are those of the whole batch there, the
        same on all ranks, and are added once; with `MultiWorkerMirroredStrategy`, whose `run`
        returns plain values, they are this rank's own.

        Collective for plain values in cross-replica code, but with `MultiWorkerMirroredStrategy`.

        Args:
          values: A real number, or an array of any shape. Each element counts.
          sample_weight: How much it counts: a number for all, or an array whose axes are the first
            of `values`, with one weight for each example or element. A value of weight 0 is not
            read.

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

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
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

    def _compute_increments(self, *arguments: Any) -> tuple[Any, ...]:
        y_true, y_pred, weights = arguments
        labels, predicted_labels = self._find_labels(y_true, y_pred)
        return super()._compute_increments(np.asarray(labels == predicted_labels), weights)


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

    def __init__(self, classes: int, name: str = "confusion", dtype: DTypeLike = np.int64):
        """Create the variable."""
        with current_strategy()._replicas.lockstep.validating_collectively(f"Confusion {name!r}"):
            self.classes = check_int(f"Confusion {name!r}: classes", classes, 1, ValueError)
            matrix_dtype = as_dtype(dtype, f"Confusion {name!r}")
            if matrix_dtype not in (np.int64, np.float64):
                raise LeafTypeError(
                    f"Confusion {name!r}: dtype is int64 or float64, not {matrix_dtype}."
                )
        super().__init__(name, {"matrix": np.zeros((self.classes, self.classes), matrix_dtype)})

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
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

    def _compute_increments(self, *arguments: Any) -> tuple[Any, ...]:
        y_true, y_pred, weights = arguments
        labels, predicted_labels = self._find_labels(y_true, y_pred)
        is_counted = np.ones(labels.shape, bool)
        if weights is not None:
            weights = self._broadcast_weights(weights, labels.shape)
            is_counted = weights != 0
        for name, checked_labels in (("y_true", labels), ("y_pred", predicted_labels)):
            is_out_of_range = is_counted & ((checked_labels < 0) | (checked_labels >= self.classes))
            if is_out_of_range.any():
                index_text, label = describe_first_bad(is_out_of_range, checked_labels)
                raise ValueError(
                    f"{self._prefix}: the label {name}{index_text} is {label}; classes "
                    f"are 0 to {self.classes - 1}. Leave an example out by a sample_weight of 0."
                )
        cell_indices = labels[is_counted].astype(np.int64) * self.classes + predicted_labels[
            is_counted
        ].astype(np.int64)
        counts = np.bincount(cell_indices, minlength=self.classes**2)
        if weights is not None:
            counts = np.zeros(self.classes**2, self.variables[0].dtype)
            np.add.at(counts, cell_indices, self._convert_counts(weights)[is_counted])
        return (counts.reshape(self.classes, self.classes),)

    def _convert_counts(self, weights: Array) -> Array:
        """Return weights in the dtype of the matrix."""
        counts = weights.astype(self.variables[0].dtype)
        is_rounded = counts != weights
        if is_rounded.any():
            index_text, weight = describe_first_bad(is_rounded, weights)
            raise ValueError(
                f"{self._prefix}: sample_weight{index_text} is {weight}, and the matrix "
                "counts integers. For such weights create Confusion(classes, dtype=np.float64)."
            )
        return counts

    def _compute_result(self, *sums: Array) -> Array:
        return sums[0].copy()
