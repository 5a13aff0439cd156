"""`Metric`: the base class of metrics."""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array, as_array, is_bfloat16, quiet
from mpistrat.collectives.dtypes import wire_type
from mpistrat.collectives.plan import Contribution
from mpistrat.distribute.kinds import VariableAggregation, VariableSynchronization
from mpistrat.distribute.mode import again, current, same_strategy
from mpistrat.distribute.reading import Reading, plain
from mpistrat.distribute.strategy import Strategy
from mpistrat.distribute.values import DistributedValues, PerReplica
from mpistrat.distribute.variables import Variable
from mpistrat.distribute.views import Plain
from mpistrat.distribute.writes import prove_same
from mpistrat.errors import LeafTypeError, StructureError
from mpistrat.kernels.ops import ReduceOp

__all__ = ["Metric", "first_bad", "real"]

_DOUBLE = np.dtype(np.float64)
_ADVICE = (
    "In cross-replica code plain values are those of the whole batch, and are counted once. Give "
    "what each replica has as a PerReplica, as strategy.run returns it, or update in replica code."
)


class Metric(abc.ABC):
    """Base class of metrics; subclasses say what is added, and how the result is computed.

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

    _given: tuple[str, ...] = ("y_true", "y_pred", "sample_weight")  # what `update_state` takes

    def __init_subclass__(cls, **more: Any) -> None:
        """Register metrics as leaves of trees."""
        super().__init_subclass__(**more)
        nest.leaf(cls)

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
        self._mark()

    def __repr__(self) -> str:
        """Return class and name; never communicates."""
        return f"{type(self).__name__}({self.name!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a metric of the same strategy with sums of its own. Collective."""
        duplicate = memo[id(self)] = copy.copy(self)
        duplicate._tree = copy.deepcopy(self._tree, memo)
        duplicate._mark()
        return duplicate

    def _mark(self) -> None:
        for variable in self.variables:
            variable.of_metric = True
        # This rank's alone, as they are ON_READ.
        self._sums = [variable.storage.array for variable in self.variables]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The sums: ON_READ variables with aggregation SUM, named as ``"loss/total"``."""
        return tuple(self._tree.values())

    def tree(self) -> dict[str, Variable]:
        """Return the sums by the names that they have in checkpoints."""
        return dict(self._tree)

    def reset_state(self) -> None:
        """Reset the sums to their initial values.

        Collective in cross-replica code. In replica code it forgets what this replica has added.

        Raises:
          StrategyError: Another strategy is in scope.
          LockstepError: The ranks make different calls.

        Cost: one handshake in cross-replica code.
        """
        strategy, is_single_replica = self._place()
        if not is_single_replica:
            strategy.replicas.lockstep.handshake(f"{self._label}.reset_state()")
        for variable in self.variables:
            variable.store("assign", np.zeros_like(variable.storage.array), None)

    def result(self) -> Any:
        """Return what has been added by all replicas; in replica code, by this one.

        Collective in cross-replica code.

        Raises:
          StrategyError: Another strategy is in scope.
          LockstepError: The ranks make different calls.

        Cost: one all-reduce in cross-replica code; a handshake if the sums are a few numbers.
        """
        strategy, is_single_replica = self._place()
        arrays = self._sums
        if not is_single_replica:
            # In its strategy's scope, for the sake of what a program has chosen to reduce it.
            with again(current(), strategy):
                contributions = [Contribution(a, wire_type(ReduceOp.SUM, a.dtype)) for a in arrays]
                call = f"{self._label}.result()"
                arrays = strategy.replicas.all_reduce_contributions(
                    call, ReduceOp.SUM, contributions
                )
        return self._told(*arrays)

    @abc.abstractmethod
    def _added(self, *arguments: Any) -> tuple[Any, ...]:
        """Return what some examples add to each of the sums."""

    @abc.abstractmethod
    def _told(self, *sums: Array) -> Any:
        """Return what sums come to."""

    @property
    def _label(self) -> str:
        return f"{type(self).__name__} {self.name!r}"

    @property
    def _who(self) -> str:
        return f"rank {self._strategy.replicas.lockstep.session.comm.rank}: {self._label}"

    def _place(self) -> tuple[Strategy, bool]:
        """Return the strategy, and whether code here sees the sums of one replica only."""
        strategy, mode = self._strategy, current()
        if mode is not None and mode.strategy is strategy and mode.replica is not None:
            return strategy, True
        same_strategy(strategy, self._label)
        strategy.replicas.lockstep.check()
        return strategy, strategy.replicas.lockstep.comm.size == 1

    def _update(self, *arguments: Any) -> None:
        """Add what some examples come to, once; `_given` names the `arguments`."""
        strategy, mode = self._strategy, current()
        is_replica_code = (
            mode is not None and mode.strategy is strategy and mode.replica is not None
        )
        if is_replica_code or self._place()[1]:
            arrays: Sequence[Any] = arguments
            for value in arguments if arguments[-1] is not None else arguments[:-1]:
                if not (type(value) is np.ndarray and value.dtype is _DOUBLE):  # as few losses are
                    arrays = [*map(self._array, arguments, self._given)]
                    break
            added = quiet().run(self._added, *arrays)
        else:
            added = self._added_by_all(arguments)
        for sums, value in zip(self._sums, added, strict=False):
            sums[...] = sums + value if sums.ndim else float(sums) + float(value)

    def _added_by_all(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what this rank adds in cross-replica code; nothing where rank 0 adds for all."""
        replicas = self._strategy.replicas
        lockstep, call = replicas.lockstep, f"{self._label}.update_state"
        is_per_rank = replicas.view.plain is not Plain.REFUSED
        is_per_rank = is_per_rank or any(isinstance(value, PerReplica) for value in arguments)
        with lockstep.preparing(call):
            arrays = [*map(self._array, arguments, self._given)]
            added: tuple[Any, ...] = quiet().run(self._added, *arrays)
        if not is_per_rank:
            named_arrays = zip(self._given, arrays, strict=True)
            values = {name: array for name, array in named_arrays if array is not None}
            prove_same(lockstep, call, values, _ADVICE)
        return added if is_per_rank or lockstep.comm.rank == 0 else ()

    def _array(self, value: Any, name: str) -> Array | None:
        if value is None and name == self._given[-1]:
            return None
        if type(value) is not np.ndarray and isinstance(value, DistributedValues | Reading):
            regroup = self._strategy.replicas.regroup
            regroup.check(f"{self._label}.update_state", [value])
            value = plain(value)
        return as_array(value, name, lists=True)

    def _weights(self, sample_weight: Array, shape: tuple[int, ...]) -> Array:
        """Return the weight of every element: given for all, or for some of the first axes."""
        weights = real(sample_weight, "sample_weight")
        if weights.shape != shape:
            try:
                trailing_axes = (1,) * (len(shape) - weights.ndim)
                weights = np.broadcast_to(weights.reshape(weights.shape + trailing_axes), shape)
            except ValueError:
                raise StructureError(
                    f"{self._who}: sample_weight of shape {sample_weight.shape} does "
                    f"not fit values of shape {shape}. Give one number, or one for each example."
                ) from None
        if not 0 <= weights.min(initial=0) <= weights.max(initial=0) < np.inf:  # NaN is neither
            index_text, weight = first_bad(~((weights >= 0) & (weights < np.inf)), weights)
            raise ValueError(
                f"{self._who}: sample_weight{index_text} is {weight}; "
                "expected a finite number, 0 or more."
            )
        return weights

    def _labels(self, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
        """Return labels and predicted labels, of one shape."""
        if y_pred.ndim == y_true.ndim + 1 and y_pred.shape[:-1] == y_true.shape:
            if y_pred.shape[-1] < 2:
                raise StructureError(
                    f"{self._who}: y_pred of shape {y_pred.shape} has scores of {y_pred.shape[-1]} "
                    "class; expected those of two or more, or labels of the shape of y_true."
                )
            y_pred = real(y_pred, "y_pred").argmax(axis=-1)
        elif y_pred.shape != y_true.shape:
            raise StructureError(
                f"{self._who}: y_true has shape {y_true.shape}, y_pred {y_pred.shape}; expected "
                "labels of the same shape, or scores of all classes along one more axis."
            )
        for name, labels in (("y_true", y_true), ("y_pred", y_pred)):
            if labels.dtype.kind not in "biu" and labels.size:
                raise LeafTypeError(
                    f"{self._who}: {name} has dtype {labels.dtype}, shape {labels.shape}; labels "
                    "are integers (cast them with astype), scores have one more axis than y_true."
                )
        return y_true, y_pred


def real(array: Array, name: str) -> Array:
    """Return real numbers as float64."""
    dtype = array.dtype
    if dtype.kind not in "biuf" and not is_bfloat16(dtype):
        raise LeafTypeError(f"{name} has dtype {dtype}; expected real numbers.")
    return array.astype(np.float64, copy=False)


def first_bad(is_bad: Array, values: Array) -> tuple[str, Any]:
    """Return in words where the first bad element is, and what it is."""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(is_bad)), is_bad.shape))
    return f"[{', '.join(map(str, index))}]" if index else "", values[index].item()
