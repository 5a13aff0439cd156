"""Variables: one copy per rank, kept equal on every write or made one on every read."""

from __future__ import annotations

from typing import Any, NoReturn, final

import numpy as np
from xxhash import xxh3_64_intdigest

from mpistrat import pytree
from mpistrat.arrays import Array, digest, seal, spec_text
from mpistrat.errors import ContextError, StructureError
from mpistrat.lockstep.guards import VariableRegistry, warn_initial_values
from mpistrat.shm import storage
from mpistrat.shm.storage import PrivateStorage, Slices, SpreadStorage, Storage
from mpistrat.strategy.context_stack import Mode, check_readable, current
from mpistrat.strategy.strategies import current_strategy
from mpistrat.variables import on_read
from mpistrat.variables.aggregation import write
from mpistrat.variables.assignment import (
    ScatterUpdates,
    incoming,
    initial,
    kinds,
    own_copy,
)
from mpistrat.variables.kinds import (
    ALONE,
    WRITES,
    DistributedVariable,
    VariableAggregation,
    VariableSynchronization,
)
from mpistrat.variables.reading import Reading, Reference

_NO_NAME = "Variable:0"  # what TensorFlow calls those to which no name was given


@final
class Variable(Reading, ScatterUpdates):
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
      UserWarning: Once: the initial values of a variable without a name differ between ranks.

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
        lockstep = self.strategy.replicas.lockstep
        with lockstep.preparing("Variable"):
            self.name = f"{name}:0" if name else _NO_NAME
            self.label = f"variable {self.name!r}"
            value = initial_value() if callable(initial_value) else initial_value
            self.storage: Storage = PrivateStorage(initial(self.name, value, dtype))
            self.synchronization, self.aggregation = kinds(
                self.name,
                self.dtype,
                synchronization,
                aggregation,
                alone=self.strategy.replicas.view is ALONE,
            )
            self.trainable = not self.on_read if trainable is None else bool(trainable)
        self._enrol("Variable", given=True)

    def _enrol(self, call: str, given: bool) -> None:
        """Make the variable one of the session, of replica 0's contents if it is `given` them."""
        lockstep = self.strategy.replicas.lockstep
        registry = lockstep.session.get_instance(VariableRegistry)
        # Counted only once the handshake has passed: a creation that failed must not leave ranks
        # apart.
        self.number = registry.created + 1
        self.mark = xxh3_64_intdigest(b"%d" % self.number) >> 1
        kind_text = (
            f"{self.synchronization.name}, {self.aggregation.name}, trainable={self.trainable}"
        )
        text = f"{call}({self.spec()}, {kind_text})"
        should_compare = given and self.name == _NO_NAME and not registry.warned
        should_compare = should_compare and lockstep.comm.size > 1
        digests = lockstep.compare_payloads(
            text, digest([self.storage.array]) if should_compare else b""
        )
        registry.created = self.number
        if self.storage.is_complete and (given or not self.on_read):
            node = self.strategy.replicas.reducer.node
            self.storage = node.storage(call, self.storage.array, shared=not self.on_read)
        array, size = self.storage.array, lockstep.comm.size
        self.large = not self.on_read and size > 1 and array.nbytes >= storage.MIN_SHARED_NBYTES
        needs_equal_writes = self.aggregation is VariableAggregation.NONE and not self.on_read
        self.waits = needs_equal_writes and size > 1 and not self.large
        self.simple = array.dtype.kind in "biufc" and array.dtype.char not in "gG"
        registry.holders[id(self.storage.base)] = self
        if not self.on_read and self.storage.is_complete:
            registry.copies[self.number] = self
        if digests is not None:
            warn_initial_values(lockstep, registry, self.spec(), digests)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: its other copies are on other ranks, and so is a part of what it is.

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
        value = self.storage.array if self.storage.is_complete else self._read()
        duplicate.storage = PrivateStorage(value.copy())
        duplicate._enrol(f"deepcopy of no. {self.number}", given=False)
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
            self.strategy.replicas.lockstep.comm.size if self.strategy.replicas.view.wraps else 1
        )
        if self.on_read and copy_count > 1:
            raise StructureError(
                f"the copies of ON_READ variable {self.name!r} are on other ranks. Fetch them: "
                "strategy.experimental_local_results(variable), on every rank."
            )
        return (self.component(),) * copy_count

    @property
    def handle(self) -> Array:
        """This replica's copy: a live, read-only view. Never communicates.

        Raises:
          ContextError: This is cross-replica code, which sees all copies as one.
        """
        mode = current()
        if mode is not None and not own_copy(self, mode):
            raise ContextError(
                f"the handle of {self.name!r} was read in cross-replica code, but each "
                "replica has its own. Read it in replica code, or in the function of "
                "extended.update."
            )
        return self.component()

    @property
    def device(self) -> str:
        """The label of the device of this replica's copy."""
        label: str = self.strategy.device_labels[self.strategy.replicas.lockstep.comm.rank]
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
        mode = current()
        if mode is not None and mode.strategy is not self.strategy:
            check_readable(self)
        if not self.on_read and self.storage.is_complete:
            array = self.storage.view.view()
        else:
            array = self._read_parts(mode)
        return array if dtype is None and not copy else self._converted(array, dtype, copy)

    _read = __array__

    def _read_parts(self, mode: Mode | None) -> Array:
        """Return the value where other ranks may have parts of it."""
        storage = self.storage
        if isinstance(storage, SpreadStorage):
            self.strategy.replicas.lockstep.handshake(f"read({self.spec()})")
            return seal(storage.read())
        if self.strategy.replicas.view is ALONE or own_copy(self, mode):
            return storage.view.view()
        return on_read.read(self)

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

        What replicas write without aggregation must be the same on all. For a variable of 64 KiB or
        more that is checked here, before anything is written. For a smaller one it is checked by
        the next collective call, at the latest at the end of the run, and undone if it differs. A
        write that all ranks have made alike stays, whatever happens later.

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
        then each rank writes its part of what the node has in common. In replica code with
        aggregation, an all-reduce.
        """
        write(self, "assign", value, _convert_value)
        return self

    def assign_add(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Add to the value, and return the variable; collective as `assign` in all else."""
        write(self, "assign_add", value, _convert_value)
        return self

    def assign_sub(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Subtract from the value, and return the variable; collective as `assign` in all else."""
        write(self, "assign_sub", value, _convert_value)
        return self

    def store(self, kind: str, values: Array, rows: Array | None) -> None:
        """Write the same values on all ranks.

        Collective over the node if its ranks have the variable in common.

        Args:
          kind: Which method writes.
          values: What; of the variable's dtype.
          rows: To which rows; None for all.
        """
        self.storage.write(WRITES[kind], values, rows)

    def __repr__(self) -> str:
        """Return name, kind and this replica's copy. Never communicates."""
        kinds = f"{self.synchronization.name}, {self.aggregation.name}"
        value_text = repr(self.storage.array)
        if not self.storage.is_complete:
            value_text = f"{spec_text(self.storage.array)}, sharded over all ranks"
        return f"Variable({self.name!r}, {kinds}, {value_text})"


pytree.register_leaf_class(Variable)
pytree.KEY_TEXTS[Variable] = Variable.spec
pytree.KEY_TEXTS[Reference] = lambda reference: reference.deref().spec()


def spread_like(variable: Variable, name: str, slices: Slices) -> Variable:
    """Return a new variable of zeros, of which each rank of the strategy has a slice alone.

    It is ON_WRITE with aggregation NONE, and not trainable. Whatever reads it is collective: a
    handshake and two gathers, of which comes a copy. `repr` does not read it.

    Collective.

    Args:
      variable: One that is ON_WRITE, of the same strategy, dtype and shape.
      name: As of `Variable`.
      slices: Which elements are whose.
    """
    spread_variable = variable.__copy__()
    spread_variable.name = f"{name}:0"
    spread_variable.label = f"variable {spread_variable.name!r}"
    spread_variable.synchronization = VariableSynchronization.ON_WRITE
    spread_variable.aggregation = VariableAggregation.NONE
    spread_variable.trainable = False
    with variable.strategy.replicas.lockstep.preparing("Variable"):
        spread_variable.storage = SpreadStorage(slices, variable.storage.array)
    spread_variable._enrol("Variable, spread", given=False)
    return spread_variable


def move_to(variable: Variable, memory: Array) -> None:
    """Move a variable to other memory of this rank, before anybody has read it.

    Args:
      variable: Each rank has its own memory for it.
      memory: Flat, and of its size; the variable's from now on.
    """
    memory[:] = variable.storage.array.reshape(-1)
    variable.storage = PrivateStorage(memory.reshape(variable.shape))
    registry = variable.strategy.replicas.lockstep.session.get_instance(VariableRegistry)
    registry.holders[id(variable.storage.base)] = variable


def _convert_value(
    variable: DistributedVariable, mode: Mode | None, kind: str, value: Any
) -> tuple[Array, Array | None]:
    array = variable.storage.array
    if (
        type(value) is np.ndarray
        and value.dtype == array.dtype
        and value.shape == array.shape
        and value.flags.c_contiguous
        and value.flags.aligned
        and not variable.on_read
    ):  # as most do
        return value, None
    return incoming(variable, mode, kind, value), None
