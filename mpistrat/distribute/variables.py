"""Variables: one copy per rank, kept equal on every write or made one on every read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, as_array, is_bfloat16, spec_text
from mpistrat.distribute import writes
from mpistrat.distribute.default import current_strategy
from mpistrat.distribute.mode import current, same_strategy
from mpistrat.distribute.values import Mirrored, PerReplica
from mpistrat.distribute.views import ALONE
from mpistrat.distribute.writes import VariableAggregation, VariableSynchronization
from mpistrat.errors import LeafTypeError, StructureError

__all__ = ["Variable", "VariableAggregation", "VariableSynchronization"]

_UFUNCS = {"assign_add": np.add, "assign_sub": np.subtract}


@final
class Variable(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that a strategy keeps on every replica.

    Created in a strategy's scope it belongs to that strategy; elsewhere to the default strategy.
    ``np.asarray(variable)`` is a live, read-only view; `read_value` and `numpy` copy. Arithmetic
    and NumPy functions read it.

    Collective: creation is; so are writes of an ON_WRITE variable, and reads of an ON_READ variable
    in cross-replica code.

    Args:
      initial_value: Array or number, or a function that returns one. Replica 0's value is taken.
      trainable: Kept for optimizers; True unless said otherwise.
      name: A name for messages and checkpoints.
      dtype: Dtype; that of the initial value if None.
      synchronization: ON_WRITE (as AUTO): all copies are equal, always. ON_READ: each replica
        writes its own, and reading in cross-replica code makes them one.
      aggregation: How values that replicas write (ON_WRITE) or hold (ON_READ) become one. With
        NONE, replicas may only write values that are the same on all of them.

    Raises:
      ValueError: The synchronization or aggregation is unknown, or means integers.
      LockstepError: The ranks create different variables.

    Cost: creation broadcasts the initial value.
    As: ``tf.Variable`` under ``strategy.scope()``.

    Example:
      >>> v = Variable([1.0, 2.0], name="v")
      >>> v.assign_add([1.0, 1.0]).numpy()
      array([2., 3.])
      >>> v * 2
      array([4., 6.])
    """

    __hash__ = object.__hash__

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ):
        """Create the variable on every replica, with replica 0's initial value."""
        self.strategy = current_strategy()
        lockstep = self.strategy.parts.lockstep
        with lockstep.preparing("Variable"):
            self.name = f"{name or 'Variable'}:0"
            self.trainable = True if trainable is None else bool(trainable)
            value = initial_value() if callable(initial_value) else initial_value
            source = np.asarray(value) if isinstance(value, list | tuple) else _plain(value)
            source = np.array(as_array(source, self.name), dtype, order="C")
            self._array = as_array(source, self.name)
            self.synchronization, self.aggregation = self._kinds(synchronization, aggregation)
        # Counted only once the proof has passed: a creation that failed must not leave ranks apart.
        self.number = lockstep.session.variables + 1
        kinds = f"{self.synchronization.name}, {self.aggregation.name}, trainable={self.trainable}"
        lockstep.prove(f"Variable({self.spec()}, {kinds})")
        lockstep.session.variables = self.number
        if not self.on_read:
            lockstep.session.copies[self.number] = self
        lockstep.comm.bcast(self._array, 0)

    def _kinds(
        self, synchronization: VariableSynchronization, aggregation: VariableAggregation
    ) -> tuple[VariableSynchronization, VariableAggregation]:
        if not isinstance(synchronization, VariableSynchronization):
            raise ValueError(f"Invalid synchronization {synchronization!r} for {self.name!r}.")
        if synchronization is VariableSynchronization.NONE:
            raise ValueError(
                f"synchronization NONE of {self.name!r} would let replicas drift apart. "
                "Use ON_READ for values that each replica owns."
            )
        if not isinstance(aggregation, VariableAggregation):
            raise ValueError(f"Invalid aggregation {aggregation!r} for {self.name!r}.")
        dtype = self._array.dtype
        if aggregation is VariableAggregation.MEAN and not (
            dtype.kind in "fc" or is_bfloat16(dtype)
        ):
            raise ValueError(
                f"aggregation MEAN of {self.name!r} needs a floating dtype, got {dtype}; a mean of "
                "integers is no integer. Use SUM, or another dtype."
            )
        if synchronization is VariableSynchronization.AUTO:
            synchronization = VariableSynchronization.ON_WRITE
        return synchronization, aggregation

    def spec(self) -> str:
        """Return name, number, dtype and shape, as messages and proofs show them."""
        return f"{self.name!r} no. {self.number} {spec_text(self._array)}"

    @property
    def on_read(self) -> bool:
        """Whether each replica owns its copy."""
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self._array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._array.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._array.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._array.size

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that it belongs to."""
        return self.strategy

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies that this rank can name without communicating.

        Raises:
          StructureError: It is ON_READ, and other replicas' copies are on other ranks.
        """
        shown = self.strategy.parts.lockstep.comm.size if self.strategy.parts.view.wraps else 1
        if self.on_read and shown > 1:
            raise StructureError(
                f"the copies of ON_READ variable {self.name!r} are on other ranks. Fetch them: "
                "strategy.experimental_local_results(variable), on every rank."
            )
        return (self.component(),) * shown

    def component(self) -> Array:
        """Return this replica's copy: a live, read-only view. Never communicates."""
        view = self._array.view()
        view.flags.writeable = False
        return view

    def _read(self) -> Array:
        mode = same_strategy(self.strategy, f"variable {self.name!r}")
        own = mode is not None and (mode.replica is not None or mode.updating is self)
        if not self.on_read or own:
            return self.component()
        parts = self.strategy.parts
        call = f"read({self.spec()})"
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"ON_READ variable {self.name!r} has aggregation NONE, so cross-replica code "
                "cannot read it as one value. Use experimental_local_results, or an aggregation."
            )
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return writes.REPLICA[self.aggregation](self, call, self._array)
        return writes.reduced(parts.reducer, call, writes.OPS[self.aggregation], self._array)

    def read_value(self) -> Any:
        """Return a copy of the value, a NumPy scalar if it has no dimensions.

        Collective in cross-replica code if it is ON_READ: the copies become one by `aggregation`.

        Raises:
          ValueError: It is ON_READ with aggregation NONE, in cross-replica code.
        """
        return np.array(self._read())[()]

    value = read_value
    numpy = read_value

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Set the value, and return the variable.

        Collective, unless it is ON_READ and this is replica code.

        In cross-replica code the value must be the same on all ranks. In replica code the values of
        the replicas become one by `aggregation`. An ON_READ variable with SUM takes ``value / n``
        on each replica in cross-replica code, so that it reads as `value`.

        What replicas write without aggregation is shown alike by the next collective call, at the
        latest the end of the run; if that fails, for whatever reason, the write is undone.

        Args:
          value: Array or number of the variable's shape, of a dtype that converts to its own.
          use_locking: Ignored; for callers of ``tf.Variable``.
          name: Ignored.
          read_value: Ignored.

        Raises:
          ValueError: A value per replica in cross-replica code; reduce it first.
          StructureError: The shape differs from the variable's.
          LeafTypeError: The dtype does not convert.
          LockstepError: The value differs between ranks where it may not.

        Cost: the proof with a hash of the value; in replica code with aggregation, an all-reduce.
        """
        return self._write("assign", value)

    def assign_add(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Add to the value, and return the variable; as `assign` in all else."""
        return self._write("assign_add", value)

    def assign_sub(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Subtract from the value, and return the variable; as `assign` in all else."""
        return self._write("assign_sub", value)

    def _write(self, kind: str, value: Any) -> Variable:
        mode = same_strategy(self.strategy, f"variable {self.name!r}")
        replica = mode is not None and mode.replica is not None
        if (mode is not None and mode.updating is self) or (replica and self.on_read):
            self._apply(kind, self._incoming(kind, value))
            return self
        call = f"{kind}({self.spec()})"
        with self.strategy.parts.lockstep.preparing(call):
            array = self._incoming(kind, value)
        if replica:
            array = writes.REPLICA[self.aggregation](self, call, array)
        else:
            self._prove_cross(call, value, array)
            if self.on_read and self.aggregation is VariableAggregation.SUM:
                array = (array / self.strategy.num_replicas_in_sync).astype(self.dtype)
        self._apply(kind, array)
        return self

    def _prove_cross(self, call: str, value: Any, array: Array) -> None:
        lockstep = self.strategy.parts.lockstep
        if isinstance(value, Mirrored) and value.proved:
            lockstep.prove(f"{call} of what call {value.proved} gave")
            return
        writes.prove_same(
            lockstep, call, array, "Compute it alike on all ranks, or broadcast or reduce it first."
        )

    def _incoming(self, kind: str, value: Any) -> Array:
        mode = current()
        replica = mode is not None and (mode.replica is not None or mode.updating is self)
        if isinstance(value, PerReplica) and not replica:
            raise StructureError(
                f"{kind} of {self.name!r}: got a value per replica, which would make the copies "
                "differ. Reduce it first (strategy.reduce, extended.reduce_to)."
            )
        several = self.strategy.parts.view is not ALONE
        summed = self.on_read and several and self.aggregation is VariableAggregation.SUM
        if summed and kind != "assign" and not replica:
            raise ValueError(
                f"{kind} of ON_READ variable {self.name!r} with aggregation SUM has no meaning in "
                "cross-replica code. Do it in replica code, or assign."
            )
        source = np.asarray(value) if isinstance(value, list | tuple) else _plain(value)
        array = as_array(source, self.name)
        if array.shape != self.shape:
            raise StructureError(
                f"{kind} of {self.name!r}: wanted shape {self.shape}, got {array.shape}."
            )
        if isinstance(value, int) and self.dtype.kind in "iu":
            return self._integer(kind, value)
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise LeafTypeError(
                f"{kind} of {self.name!r}: a value of dtype {array.dtype} does not convert to "
                f"{self.dtype}. Cast it with astype if that is meant."
            )
        return array.astype(self.dtype, copy=False)

    def _integer(self, kind: str, value: int) -> Array:
        try:
            return np.array(value, self.dtype)
        except OverflowError as error:
            raise LeafTypeError(f"{kind} of {self.name!r}: {error}.") from error

    def restorer(self) -> Callable[[], None]:
        """Return a function that puts this replica's copy back to what it is now; once."""
        before = [self._array.copy()]

        def restore() -> None:
            if before:
                self._array[...] = before.pop()

        return restore

    def _apply(self, kind: str, array: Array) -> None:
        if kind == "assign":
            self._array[...] = array
        else:
            _UFUNCS[kind](self._array, array, out=self._array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the value: a live, read-only view unless a copy or another dtype is asked for."""
        array = self._read()
        if copy or (dtype is not None and np.dtype(dtype) != array.dtype):
            return array.astype(dtype or array.dtype)
        return array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply a NumPy function to the value; never write to it."""
        if any(isinstance(out, Variable) for out in kwargs.get("out", ())):
            raise TypeError(
                f"{self.name!r} is a variable; write with assign, assign_add, assign_sub."
            )
        return getattr(ufunc, method)(*map(_plain, inputs), **kwargs)

    def __getitem__(self, key: Any) -> Any:
        """Return a part of the value."""
        return self._read()[key]

    def __float__(self) -> float:
        """Return the value as a float."""
        return float(self._read())

    def __int__(self) -> int:
        """Return the value as an int."""
        return int(self._read())

    def __bool__(self) -> bool:
        """Return the truth of the value, as NumPy does."""
        return bool(self._read())

    def __repr__(self) -> str:
        """Return name, kind and this replica's copy. Never communicates."""
        kinds = f"{self.synchronization.name}, {self.aggregation.name}"
        return f"Variable({self.name!r}, {kinds}, {self._array!r})"


def _plain(value: Any) -> Any:
    if isinstance(value, Variable):
        return value._read()
    return value.local if isinstance(value, Mirrored | PerReplica) else value
