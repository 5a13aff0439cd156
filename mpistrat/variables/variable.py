"""Variables: one copy per rank, kept equal on every write or made one on every read."""

from __future__ import annotations

from typing import Any, NoReturn, final

import numpy as np
from xxhash import xxh3_64_intdigest

from mpistrat import pytree
from mpistrat.arrays import Array, digest, seal, spec_text
from mpistrat.errors import ContextError, StructureError
from mpistrat.lockstep.guards import VariableRegistry, warn_initial_values, warn_repeated_creation
from mpistrat.shm import storage
from mpistrat.shm.storage import PrivateStorage, Slices, SpreadStorage, Storage
from mpistrat.strategy.context_stack import CodeContext, check_readable, current_context
from mpistrat.strategy.strategies import current_strategy
from mpistrat.variables import on_read
from mpistrat.variables.aggregation import write
from mpistrat.variables.assignment import (
    ScatterUpdates,
    convert_initial_value,
    prepare_value,
    resolve_kinds,
    sees_own_copy,
)
from mpistrat.variables.kinds import (
    SINGLE_REPLICA,
    WRITES,
    DistributedVariable,
    VariableAggregation,
    VariableSynchronization,
)
from mpistrat.variables.reading import ReadableVariable, Reference

_DEFAULT_NAME = "Variable:0"  # what TensorFlow calls those to which no name was given


@final
class Variable(ReadableVariable, ScatterUpdates):
    """An array that a strategy keeps on every replica.

    A variable belongs to the strategy in whose scope it is created; outside of scopes to the
    default strategy. A variable of the default strategy, or of a `OneDeviceStrategy`, is local to
    this rank: all code may read it, cross-replica code of any strategy may write to it, and its
    copies on different ranks are not compared. While a strategy is in scope, variables of another
    strategy of several ranks are refused.

    ``np.asarray(variable)`` is a live, read-only view; `read_value`, `numpy` and ``variable[key]``
    copy. Arithmetic and NumPy functions read it.

    Collective: creation, writes of an ON_WRITE variable, and reads of an ON_READ variable in
    cross-replica code.

    Args:
      initial_value: Array or number, or a function that returns one. Replica 0's value is taken.
      trainable: Kept for optimizers; True unless said otherwise, or if it is ON_READ.
      name: A name for messages and checkpoints.
      dtype: Dtype, to which the initial value must convert without loss of kind: an integer to
        floating point, not the other way round. That of the initial value if None.
      synchronization: ON_WRITE (as AUTO): all copies are equal, always. ON_READ: each replica
        writes its own, and reading in cross-replica code makes them one.
      aggregation: How values that replicas write (ON_WRITE) or hold (ON_READ) become one. With
        NONE, replicas may only write values that are the same on all of them.

    Raises:
      ValueError: The synchronization or aggregation is unknown, or means integers.
      LeafTypeError: The initial value does not convert to `dtype`, or is not an array.
      LockstepError: The ranks create different variables.

    Warns:
      UserWarning: Once: the initial values of a variable without a name differ between ranks. Once:
        a line of replica code creates a variable anew in each run.

    Cost: creation broadcasts the initial value; without a name it is hashed, at memory bandwidth.
    Like: ``tf.Variable`` under ``strategy.scope()``.

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
        initial_value: object,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ):
        """Create the variable on every replica, with replica 0's initial value."""
        self.strategy = current_strategy()
        lockstep = self.strategy._replicas.lockstep
        with lockstep.validating_collectively("Variable"):
            self.name = f"{name}:0" if name else _DEFAULT_NAME
            self._label = f"variable {self.name!r}"
            value = initial_value() if callable(initial_value) else initial_value
            self._storage: Storage = PrivateStorage(convert_initial_value(self.name, value, dtype))
            self.synchronization, self.aggregation = resolve_kinds(
                self.name,
                self.dtype,
                synchronization,
                aggregation,
                is_single_replica=self.strategy._replicas.view is SINGLE_REPLICA,
            )
            self.trainable = not self._is_on_read if trainable is None else bool(trainable)
            context = current_context()
            if context is not None and context.replica is not None:
                warn_repeated_creation(lockstep, self)
        self._register("Variable", has_initial_value=True)

    def _register(self, call: str, has_initial_value: bool) -> None:
        """Make the variable one of the session; it gets replica 0's initial value if it has one."""
        lockstep = self.strategy._replicas.lockstep
        registry = lockstep.session.get_instance(VariableRegistry)
        # Counted only once the handshake has passed: a creation that failed must not leave ranks
        # apart.
        self._number = registry.created_count + 1
        self._number_hash = xxh3_64_intdigest(b"%d" % self._number) >> 1
        kind_text = (
            f"{self.synchronization.name}, {self.aggregation.name}, trainable={self.trainable}"
        )
        text = f"{call}({self._spec()}, {kind_text})"
        should_compare = (
            has_initial_value and self.name == _DEFAULT_NAME and not registry.has_warned
        )
        should_compare = should_compare and lockstep.comm.size > 1
        digests = lockstep.compare_payloads(
            text, digest([self._storage.array]) if should_compare else b""
        )
        registry.created_count = self._number
        if self._storage.is_complete and (has_initial_value or not self._is_on_read):
            node = self.strategy._replicas.reducer.node
            self._storage = node.create_storage(
                call, self._storage.array, is_shared=not self._is_on_read
            )
        array, size = self._storage.array, lockstep.comm.size
        self._is_large = (
            not self._is_on_read and size > 1 and array.nbytes >= storage.MIN_SHARED_NBYTES
        )
        needs_equal_writes = self.aggregation is VariableAggregation.NONE and not self._is_on_read
        self._has_deferred_checks = needs_equal_writes and size > 1 and not self._is_large
        self._has_plain_bytes = array.dtype.kind in "biufc" and array.dtype.char not in "gG"
        registry.variables_by_array_id[id(self._storage.base)] = self
        if not self._is_on_read and self._storage.is_complete:
            registry.variables_by_number[self._number] = self
        if digests is not None:
            warn_initial_values(lockstep, registry, self._spec(), digests)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: its other copies are on other ranks.

        Raises:
          TypeError: Always; says what to save instead.
        """
        raise TypeError(
            f"variable {self.name!r} cannot be pickled: it exists on all ranks of its "
            "strategy. Save its value, np.save(path, v.numpy()), and assign it to a "
            "variable in the other program, v.assign(np.load(path)), on every rank."
        )

    def __copy__(self) -> Variable:
        """Return another name of the same variable; it has the same memory."""
        duplicate = object.__new__(Variable)
        duplicate.__dict__.update(self.__dict__)
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Return a new variable of the same strategy and kind, with a copy of each copy.

        Collective: it is one more variable.
        """
        check_readable(self)
        duplicate = self.__copy__()
        memo[id(self)] = duplicate
        value = self._storage.array if self._storage.is_complete else self._read()
        duplicate._storage = PrivateStorage(value.copy())
        duplicate._register(f"deepcopy of no. {self._number}", has_initial_value=False)
        return duplicate

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that it belongs to."""
        return self.strategy

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies that this rank has, without communication.

        Raises:
          StructureError: It is ON_READ, and other replicas' copies are on other ranks; or it is
            sharded over all ranks, so that there is no copy.
        """
        copy_count = (
            self.strategy._replicas.lockstep.comm.size
            if self.strategy._replicas.view.should_wrap
            else 1
        )
        if self._is_on_read and copy_count > 1:
            raise StructureError(
                f"the copies of ON_READ variable {self.name!r} are on other ranks. Fetch them: "
                "strategy.experimental_local_results(variable), on every rank."
            )
        return (self._component(),) * copy_count

    @property
    def handle(self) -> Array:
        """This replica's copy: a live, read-only view. Never communicates.

        Raises:
          ContextError: This is cross-replica code, which sees all copies as one.
        """
        context = current_context()
        if context is not None and not sees_own_copy(self, context):
            raise ContextError(
                f"the handle of {self.name!r} was read in cross-replica code, but each "
                "replica has its own. Read it in replica code, or in the function of "
                "extended.update."
            )
        return self._component()

    @property
    def device(self) -> str:
        """The label of the device of this replica's copy."""
        label: str = self.strategy._device_labels[self.strategy._replicas.lockstep.comm.rank]
        return label

    @property
    def initializer(self) -> None:
        """None: creation has set the initial value."""
        return None

    @property
    def constraint(self) -> None:
        """None: no optimizer would apply one."""
        return None

    def is_initialized(self, name: str | None = None) -> bool:
        """Return True: creation has set the initial value. `name` is ignored."""
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the value: a live, read-only view unless a copy or another dtype is asked for."""
        context = current_context()
        if context is not None and context.strategy is not self.strategy:
            check_readable(self)
        if not self._is_on_read and self._storage.is_complete:
            array = self._storage.view.view()
        else:
            array = self._read_elsewhere(context)
        return array if dtype is None and not copy else self._convert_array(array, dtype, copy)

    _read = __array__

    def _read_elsewhere(self, context: CodeContext | None) -> Array:
        """Return the value where other ranks may have parts of it."""
        storage = self._storage
        if isinstance(storage, SpreadStorage):
            self.strategy._replicas.lockstep.handshake(f"read({self._spec()})")
            return seal(storage.read())
        if self.strategy._replicas.view is SINGLE_REPLICA or sees_own_copy(self, context):
            return storage.view.view()
        return on_read.read_aggregated(self)

    def assign(
        self,
        value: object,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Set the value, and return the variable.

        Collective, unless it is ON_READ and this is replica code.

        In cross-replica code the value must be the same on all ranks. In replica code the values of
        the replicas become one by `aggregation`. An ON_READ variable with SUM takes ``value / n``
        on each replica in cross-replica code, so that it reads as `value`.

        Without aggregation all replicas must write the same. For a variable of 64 KiB or more that
        is checked here, before anything is written. For a smaller one it is checked by the next
        collective call, at the latest at the end of the run, and undone if it differs. A write that
        all ranks have made alike stays, whatever happens later.

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
          StrategyError: Another strategy is in scope; but its cross-replica code may write to a
            variable of the default strategy, or of a `OneDeviceStrategy`.

        Cost: with one rank, NumPy's own operation. With several, a hash of the value at the speed
        of memory and a handshake, which smaller variables in replica code leave to the next call;
        then each rank writes its part of the array that the node shares. In replica code with
        aggregation, an all-reduce.
        """
        write(self, "assign", value, _convert_value)
        return self

    def assign_add(
        self,
        value: object,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Add to the value, and return the variable; collective as `assign` in all else."""
        write(self, "assign_add", value, _convert_value)
        return self

    def assign_sub(
        self,
        value: object,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Subtract from the value, and return the variable; collective as `assign` in all else."""
        write(self, "assign_sub", value, _convert_value)
        return self

    def _store(self, kind: str, new_values: Array, rows: Array | None) -> None:
        """Write the same values on all ranks.

        Collective over the node if its ranks have the variable in common.

        Args:
          kind: The method that writes.
          new_values: The values, of the variable's dtype.
          rows: The numbers of the rows; None for all.
        """
        self._storage.write(WRITES[kind], new_values, rows)

    def __repr__(self) -> str:
        """Return name, kind and this replica's copy. Never communicates."""
        kinds = f"{self.synchronization.name}, {self.aggregation.name}"
        value_text = repr(self._storage.array)
        if not self._storage.is_complete:
            value_text = f"{spec_text(self._storage.array)}, sharded over all ranks"
        return f"Variable({self.name!r}, {kinds}, {value_text})"


pytree.register_leaf_class(Variable)
pytree.KEY_TEXTS[Variable] = Variable._spec
pytree.KEY_TEXTS[Reference] = lambda reference: reference.deref()._spec()


def create_spread_slot(variable: Variable, name: str, slices: Slices) -> Variable:
    """Return a new variable of zeros, of which each rank of the strategy has a slice alone.

    It is ON_WRITE with aggregation NONE, and not trainable. Each read is collective: a handshake
    and two gathers, and a copy. `repr` does not read it.

    Collective.

    Args:
      variable: One that is ON_WRITE, of the same strategy, dtype and shape.
      name: The name, as `Variable` takes it.
      slices: The elements of each rank.
    """
    spread_variable = variable.__copy__()
    spread_variable.name = f"{name}:0"
    spread_variable._label = f"variable {spread_variable.name!r}"
    spread_variable.synchronization = VariableSynchronization.ON_WRITE
    spread_variable.aggregation = VariableAggregation.NONE
    spread_variable.trainable = False
    with variable.strategy._replicas.lockstep.validating_collectively("Variable"):
        spread_variable._storage = SpreadStorage(slices, variable._storage.array)
    spread_variable._register("Variable, spread", has_initial_value=False)
    return spread_variable


def move_to_memory(variable: Variable, memory: Array) -> None:
    """Move a variable to other memory of this rank, before anybody has read it.

    Args:
      variable: Each rank has its own memory for it.
      memory: Flat, and of its size; the variable's from now on.
    """
    memory[:] = variable._storage.array.reshape(-1)
    variable._storage = PrivateStorage(memory.reshape(variable.shape))
    registry = variable.strategy._replicas.lockstep.session.get_instance(VariableRegistry)
    registry.variables_by_array_id[id(variable._storage.base)] = variable


def _convert_value(
    variable: DistributedVariable, context: CodeContext | None, kind: str, value: object
) -> tuple[Array, Array | None]:
    array = variable._storage.array
    if (
        type(value) is np.ndarray
        and value.dtype == array.dtype
        and value.shape == array.shape
        and value.flags.c_contiguous
        and value.flags.aligned
        and not variable._is_on_read
    ):  # as most do
        return value, None
    return prepare_value(variable, context, kind, value), None
