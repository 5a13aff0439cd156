"""Means and counts over the examples of all replicas, however unevenly these have them.

A metric keeps sums in ON_READ variables: replica code adds to its own without communicating, and
`result` in cross-replica code adds up those of all replicas. So every example counts once, or with
its weight, wherever it was; a replica without examples adds nothing. Words and meaning are those of
Keras.
"""

from __future__ import annotations

import abc
import copy
import operator
from collections.abc import Mapping
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, as_array, as_dtype, is_bfloat16, quiet
from mpistrat.collectives.call import Contribution
from mpistrat.collectives.dtypes import wire_type
from mpistrat.distribute.default import current_strategy
from mpistrat.distribute.mode import again, current, entered, same_strategy
from mpistrat.distribute.reading import Reading, plain
from mpistrat.distribute.strategy import Strategy
from mpistrat.distribute.values import DistributedValues, PerReplica
from mpistrat.distribute.variables import Variable
from mpistrat.distribute.views import Plain
from mpistrat.distribute.writes import VariableAggregation, VariableSynchronization, prove_same
from mpistrat.errors import LeafTypeError, StructureError
from mpistrat.kernels.ops import ReduceOp

__all__ = ["Accuracy", "Confusion", "Mean", "Metric"]

_DOUBLE = np.dtype(np.float64)
_ADVICE = (
    "In cross-replica code plain values are those of the whole batch, and are counted once. Give "
    "what each replica has as a PerReplica, as strategy.run returns it, or update in replica code."
)


class Metric(abc.ABC):
    """What all metrics can do. They differ in what they add, and in what that comes to.

    Created in a strategy's scope it belongs to that strategy, as its variables do; elsewhere to the
    default strategy.

    Collective: creation is.

    Args:
      name: For messages, and the beginning of the names of its variables.
      zeros: What its sums begin with, by name.

    Attributes:
      name: As given.

    Cost: creation costs that of its variables.
    """

    def __init__(self, name: str, zeros: Mapping[str, Any]):
        """Create the variables."""
        self.name = name
        self._tree = {
            key: Variable(
                zero,
                name=f"{name}/{key}",
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            for key, zero in zeros.items()
        }
        self._strategy: Strategy = self.variables[0].strategy

    def __repr__(self) -> str:
        """Return class and name; never communicates."""
        return f"{type(self).__name__}({self.name!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a metric of the same strategy with sums of its own. Collective."""
        made = memo[id(self)] = copy.copy(self)
        made._tree = copy.deepcopy(self._tree, memo)
        return made

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The sums: ON_READ variables with aggregation SUM, named as ``"loss/total"``."""
        return tuple(self._tree.values())

    def tree(self) -> dict[str, Variable]:
        """Return the sums by the names that they have in checkpoints."""
        return dict(self._tree)

    def reset_state(self) -> None:
        """Begin anew.

        Collective in cross-replica code. In replica code it forgets what this replica has added.

        Raises:
          StrategyError: Another strategy rules here.
          LockstepError: The ranks make different calls.

        Cost: one handshake in cross-replica code.
        """
        strategy, own = self._place()
        if not own:
            strategy.parts.lockstep.prove(f"{self._label}.reset_state()")
        for variable in self.variables:
            variable.store("assign", np.zeros_like(variable.storage.array), None)

    def result(self) -> Any:
        """Return what has been added by all replicas; in replica code, by this one.

        Collective in cross-replica code.

        Raises:
          StrategyError: Another strategy rules here.
          LockstepError: The ranks make different calls.

        Cost: one all-reduce in cross-replica code; a handshake if the sums are a few numbers.
        """
        strategy, own = self._place()
        arrays = [variable.storage.array for variable in self.variables]
        if not own:
            # In its strategy's scope, for the sake of what a program has chosen to fold it.
            with entered(again(current(), strategy)):
                given = [Contribution(a, wire_type(ReduceOp.SUM, a.dtype)) for a in arrays]
                call = f"{self._label}.result()"
                arrays = strategy.parts.all_reduce_given(call, ReduceOp.SUM, given)
        return self._told(*arrays)

    @abc.abstractmethod
    def _added(self, *given: Any) -> tuple[Any, ...]:
        """Return what some examples add to each of the sums."""

    @abc.abstractmethod
    def _told(self, *sums: Array) -> Any:
        """Return what sums come to."""

    @property
    def _label(self) -> str:
        return f"{type(self).__name__} {self.name!r}"

    @property
    def _who(self) -> str:
        return f"rank {self._strategy.parts.lockstep.session.comm.rank}: {self._label}"

    def _place(self) -> tuple[Strategy, bool]:
        """Return the strategy, and whether code here sees the sums of one replica only."""
        strategy, mode = self._strategy, current()
        if mode is not None and mode.strategy is strategy and mode.replica is not None:
            return strategy, True
        same_strategy(strategy, self._label)
        strategy.parts.lockstep.check()
        return strategy, strategy.parts.lockstep.comm.size == 1

    def _update(self, **given: Any) -> None:
        """Add what some examples come to, once."""
        strategy, mode = self._strategy, current()
        own = mode is not None and mode.strategy is strategy and mode.replica is not None
        if own or self._place()[1]:
            self._add(quiet().run(self._added, *self._arrays(given)))
            return
        lockstep = strategy.parts.lockstep
        call = f"{self._label}.update_state"
        names = [key for key, value in given.items() if value is not None]
        each = strategy.parts.view.plain is not Plain.REFUSED
        each = each or any(isinstance(value, PerReplica) for value in given.values())
        with lockstep.preparing(call):
            added = quiet().run(self._added, *(arrays := self._arrays(given)))
        if not each:
            values = [array for array in arrays if array is not None]
            prove_same(lockstep, call, dict(zip(names, values, strict=True)), _ADVICE)
        if each or lockstep.comm.rank == 0:
            self._add(added)

    def _add(self, added: tuple[Any, ...]) -> None:
        for variable, value in zip(self._tree.values(), added, strict=True):
            sums = variable.storage.array  # this rank's alone, as it is ON_READ
            sums[...] = sums + value if sums.ndim else float(sums) + float(value)

    def _arrays(self, given: Mapping[str, Any]) -> list[Array | None]:
        found: list[Array | None] = []
        for key, value in given.items():
            if value is None or (type(value) is np.ndarray and value.dtype is _DOUBLE):
                found.append(value)  # as losses most often are
                continue
            if type(value) is not np.ndarray:
                if isinstance(value, DistributedValues | Reading):
                    regroup = self._strategy.parts.regroup
                    regroup.check(f"{self._label}.update_state", [value])
                    value = plain(value)
                if isinstance(value, list | tuple):
                    value = np.asarray(value)
            found.append(as_array(value, key))
        return found

    def _weights(self, given: Array, shape: tuple[int, ...]) -> Array:
        """Return the weight of every element: given for all, or for some of the first axes."""
        weights = _real(given, "sample_weight")
        if weights.shape != shape:
            try:
                more = (1,) * (len(shape) - weights.ndim)
                weights = np.broadcast_to(weights.reshape(weights.shape + more), shape)
            except ValueError:
                raise StructureError(
                    f"{self._who}: sample_weight of shape {given.shape} does "
                    f"not fit values of shape {shape}. Give one number, or one for each example."
                ) from None
        if not 0 <= weights.min(initial=0) <= weights.max(initial=0) < np.inf:  # NaN is neither
            where, what = _first(~((weights >= 0) & (weights < np.inf)), weights)
            raise ValueError(
                f"{self._who}: sample_weight{where} is {what}; wanted is a "
                "finite number, 0 or more."
            )
        return weights

    def _labels(self, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
        """Return labels and predicted labels, of one shape."""
        if y_pred.ndim == y_true.ndim + 1 and y_pred.shape[:-1] == y_true.shape:
            if y_pred.shape[-1] < 2:
                raise StructureError(
                    f"{self._who}: y_pred of shape {y_pred.shape} has scores of {y_pred.shape[-1]} "
                    "class; wanted are those of two or more, or labels of the shape of y_true."
                )
            y_pred = _real(y_pred, "y_pred").argmax(axis=-1)
        elif y_pred.shape != y_true.shape:
            raise StructureError(
                f"{self._who}: y_true has shape {y_true.shape}, y_pred {y_pred.shape}; wanted are "
                "labels of the same shape, or scores of all classes along one more axis."
            )
        for name, labels in (("y_true", y_true), ("y_pred", y_pred)):
            if labels.dtype.kind not in "biu" and labels.size:
                raise LeafTypeError(
                    f"{self._who}: {name} has dtype {labels.dtype}, shape {labels.shape}; labels "
                    "are integers (cast them with astype), scores have one more axis than y_true."
                )
        return y_true, y_pred


def _real(array: Array, name: str) -> Array:
    """Return real numbers as float64."""
    dtype = array.dtype
    if dtype is _DOUBLE:
        return array
    if dtype.kind not in "biuf" and not is_bfloat16(dtype):
        raise LeafTypeError(f"{name} has dtype {dtype}; wanted are real numbers.")
    return array.astype(np.float64, copy=False)


def _first(bad: Array, values: Array) -> tuple[str, Any]:
    """Return in words where the first bad element is, and what it is."""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
    return f"[{', '.join(map(str, index))}]" if index else "", values[index].item()


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
          StrategyError: Another strategy rules here.
          LockstepError: The ranks make different calls.

        Cost: one handshake in cross-replica code.
        """
        found: float = super().result()
        return found

    def _told(self, *sums: Array) -> float:
        total, count = map(float, sums)
        return total / count if count else 0.0

    def _fraction(self, values: Array, weights: Array | None) -> tuple[Any, Any]:
        if weights is None:
            return np.add.reduce(values, None, np.float64), values.size
        weights = self._weights(weights, values.shape)
        if np.count_nonzero(weights) < weights.size:
            used = weights != 0
            values, weights = values[used], weights[used]
        return np.add.reduce(values * weights, None), np.add.reduce(weights, None)


@final
class Mean(_Fraction):
    """The mean of numbers, such as the losses of examples.

    Formula: ``sum(weights * values) / sum(weights)``, over all elements that all replicas have
    added, in float64.

    Collective: creation is.

    Args:
      name: For messages, checkpoints, and the names of its variables, ``total`` and ``count``.

    Cost: creation costs that of two variables. As: ``tf.keras.metrics.Mean``.

    Example:
      >>> loss = Mean("loss")
      >>> loss.update_state([1.0, 2.0, 6.0])
      >>> loss.update_state(5.0, sample_weight=3)
      >>> loss.result()
      4.0
    """

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
          LeafTypeError: Something is no array of real numbers.
          ValueError: A weight is below 0, NaN or infinite; says which.
          StrategyError: Another strategy rules here, or a value belongs to another.
          LockstepError: Plain values in cross-replica code differ between ranks.

        Cost: a sum. For plain values in cross-replica code also a hash of them and a handshake.
        """
        self._update(values=values, sample_weight=sample_weight)

    def _added(self, *given: Any) -> tuple[Any, ...]:
        values, weights = given
        return self._fraction(_real(values, "values"), weights)


@final
class Accuracy(_Fraction):
    """The part of the examples whose label was predicted.

    Collective: creation is.

    Args:
      name: For messages, checkpoints, and the names of its variables, ``total`` and ``count``.

    Cost: creation costs that of two variables.
    As: ``tf.keras.metrics.Accuracy``, and ``SparseCategoricalAccuracy`` where scores are given.

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
          LeafTypeError: Labels are no integers, or scores no real numbers.
          ValueError: A weight is below 0, NaN or infinite; says which.
          StrategyError: Another strategy rules here, or a value belongs to another.
          LockstepError: Plain values in cross-replica code differ between ranks.
        """
        self._update(y_true=y_true, y_pred=y_pred, sample_weight=sample_weight)

    def _added(self, *given: Any) -> tuple[Any, ...]:
        y_true, y_pred, weights = given
        true, predicted = self._labels(y_true, y_pred)
        return self._fraction(np.asarray(true == predicted), weights)


@final
class Confusion(Metric):
    """How often examples of each class were taken for each class.

    Collective: creation is.

    Args:
      classes: How many classes there are; labels are 0 to ``classes - 1``.
      name: For messages, checkpoints, and the name of its variable, ``matrix``.
      dtype: int64, which counts exactly; or float64, for weights that are no integers.

    Raises:
      ValueError: `classes` is less than 1.
      TypeError: `classes` is no integer.
      LeafTypeError: `dtype` is another one.
      LockstepError: The ranks want different matrices.

    Cost: creation costs that of one variable. As: ``tf.math.confusion_matrix``, added up.

    Example:
      >>> confusion = Confusion(2)
      >>> confusion.update_state([0, 0, 1], [0, 1, 1])
      >>> confusion.result()
      array([[1, 1],
             [0, 1]])
    """

    def __init__(self, classes: int, name: str = "confusion", dtype: Any = np.int64):
        """Create the variable."""
        with current_strategy().parts.lockstep.preparing(f"Confusion {name!r}"):
            self.classes = operator.index(classes)
            if self.classes < 1:
                raise ValueError(f"Confusion {name!r}: classes must be 1 or more, not {classes}.")
            found = as_dtype(dtype, f"Confusion {name!r}")
            if found not in (np.int64, np.float64):
                raise LeafTypeError(f"Confusion {name!r}: dtype is int64 or float64, not {found}.")
        super().__init__(name, {"matrix": np.zeros((self.classes, self.classes), found)})

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count examples; where, see `Mean.update_state`. Of a weight of 0, labels are not read.

        Args:
          y_true: Labels: integers of any shape.
          y_pred: Labels of the same shape; or scores, as in `Accuracy.update_state`.
          sample_weight: As in `Mean.update_state`; whole numbers, if the matrix is int64.

        Raises:
          StructureError: The shapes do not fit.
          LeafTypeError: Labels are no integers, or scores no real numbers.
          ValueError: A label is no class, or a weight does not fit; says which, where, and on which
            rank.
          StrategyError: Another strategy rules here, or a value belongs to another.
          LockstepError: Plain values in cross-replica code differ between ranks.
        """
        self._update(y_true=y_true, y_pred=y_pred, sample_weight=sample_weight)

    def result(self) -> Array:
        """Return the matrix over what all replicas have added; in replica code, this replica's.

        Collective in cross-replica code.

        Returns:
          An array of shape (classes, classes), the caller's own. In row i and column j it has how
          many examples of class i were taken for class j.

        Raises:
          StrategyError: Another strategy rules here.
          LockstepError: The ranks make different calls.

        Cost: an all-reduce of the matrix in cross-replica code.
        """
        found: Array = super().result()
        return found

    def _added(self, *given: Any) -> tuple[Any, ...]:
        y_true, y_pred, weights = given
        true, predicted = self._labels(y_true, y_pred)
        used = np.ones(true.shape, bool)
        if weights is not None:
            weights = self._weights(weights, true.shape)
            used = weights != 0
        for name, labels in (("y_true", true), ("y_pred", predicted)):
            bad = used & ((labels < 0) | (labels >= self.classes))
            if bad.any():
                where, what = _first(bad, labels)
                raise ValueError(
                    f"{self._who}: the label {name}{where} is {what}; classes "
                    f"are 0 to {self.classes - 1}. Leave an example out by a sample_weight of 0."
                )
        place = true[used].astype(np.int64) * self.classes + predicted[used].astype(np.int64)
        found = np.bincount(place, minlength=self.classes**2)
        if weights is not None:
            found = np.zeros(self.classes**2, self.variables[0].dtype)
            np.add.at(found, place, self._counts(weights)[used])
        return (found.reshape(self.classes, self.classes),)

    def _counts(self, weights: Array) -> Array:
        """Return weights in the dtype of the matrix."""
        counts = weights.astype(self.variables[0].dtype)
        bad = counts != weights
        if bad.any():
            where, what = _first(bad, weights)
            raise ValueError(
                f"{self._who}: sample_weight{where} is {what}, and the matrix "
                "counts integers. For such weights create Confusion(classes, dtype=np.float64)."
            )
        return counts

    def _told(self, *sums: Array) -> Array:
        return sums[0].copy()
