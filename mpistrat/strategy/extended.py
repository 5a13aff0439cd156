"""The lower-level methods of a strategy, for those who write optimizers and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from mpistrat.collectives.communication import CommunicationOptions
from mpistrat.errors import ContextError, StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.guards import VariableRegistry
from mpistrat.strategy.context_stack import (
    CodeContext,
    check_same_strategy,
    current_context,
    enter_cross_replica,
)
from mpistrat.strategy.destinations import (
    broadcast,
    check_destinations,
    check_own_variable,
    check_pairs,
    describe_destinations,
    unwrap_at_labels,
    update_non_slot,
)
from mpistrat.strategy.destinations import update as update_each
from mpistrat.strategy.reductions import reduce_over_replicas
from mpistrat.strategy.replica_group import StrategyBase
from mpistrat.strategy.run import MultiStepContext, run_steps
from mpistrat.variables.arguments import check_function, normalize_arguments
from mpistrat.variables.kinds import LOCAL_VIEW, SINGLE_REPLICA, DistributedVariable
from mpistrat.variables.regroup import select_local

S_co = TypeVar("S_co", bound=StrategyBase, covariant=True)


@dataclass(frozen=True)
class StrategyExtended(Generic[S_co]):
    """The lower-level methods of one strategy; get it as ``strategy.extended``.

    Like: ``tf.distribute.StrategyExtended``.

    Attributes:
      strategy: The strategy whose calls these are.
    """

    strategy: S_co

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The label of every replica's device that is seen here, such as ``"rank:0"``.

        Under `MultiWorkerMirroredStrategy` that is this rank's alone.

        Raises:
          ContextError: This is the default strategy, which has none.
        """
        if self.strategy._is_default:
            raise ContextError("the default strategy has no worker_devices; make a strategy.")
        labels = self.strategy._device_labels
        if self.strategy._replicas.view is not LOCAL_VIEW:
            return labels
        rank = self.strategy._replicas.lockstep.comm.rank
        return labels[rank : rank + 1]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The label of every device that holds variables: those of the replicas.

        Under `CentralStorageStrategy` that is its one parameter device.

        Raises:
          ContextError: This is the default strategy, which has none.
        """
        central = getattr(self.strategy, "_parameter_device", None)
        return self.worker_devices if central is None else (central,)

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each replica is a worker of its own, as with `MultiWorkerMirroredStrategy`."""
        return self.strategy._replicas.view is LOCAL_VIEW

    @property
    def experimental_should_init(self) -> bool:
        """Whether this rank has to set initial values: every rank takes part."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether shapes must be known beforehand: never."""
        return False

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank is the one to write files: rank 0, whichever replica that is."""
        return self.strategy._replicas.lockstep.session.comm.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank is the one to report: rank 0, as for `should_checkpoint`."""
        return self.should_checkpoint

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `fn` on every replica; an older spelling of `Strategy.run`. Collective.

        Args:
          fn: The function.
          args: Its arguments, of any kind that can be iterated over.
          kwargs: The same by name.
        """
        return self.strategy.run(fn, tuple(args) if hasattr(args, "__iter__") else args, kwargs)

    @property
    def steps_per_run(self) -> int:
        """How many steps `experimental_run_steps_on_iterator` makes without `iterations`."""
        return int(getattr(self.strategy, "steps_per_run", 1))

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: object = None,
    ) -> MultiStepContext:
        """Make several steps in one call.

        Collective: all ranks call it, in cross-replica code.

        Args:
          fn: ``fn(context, inputs)``, one step in cross-replica code; it calls `Strategy.run` and
            ``context.set_last_step_output``.
          iterator: A distributed iterator.
          iterations: How many steps. A strategy with `steps_per_run` makes that many unless this
            says otherwise.
          initial_loop_values: Outputs by name before the first step; the steps set no others.

        Returns:
          The context, with the outputs of the last step in ``last_step_outputs``.

        Raises:
          ContextError: Called in replica code.
          OutOfRangeError: The data end before the steps do.
          TypeError: `iterations` is not an integer.
          StructureError: The outputs are not those of `initial_loop_values`, or there are no
            steps to make.

        Cost: that of `iterations` calls of `fn` and of ``next(iterator)``; the loop adds nothing.
        """
        with self._enter_cross_replica("experimental_run_steps_on_iterator", "the step itself"):
            return run_steps(self.strategy, fn, iterator, iterations, initial_loop_values)

    def _enter_cross_replica(self, name: str, replacement: str) -> Any:
        return enter_cross_replica(self.strategy, f"StrategyExtended.{name}()", replacement)

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce the values of all replicas.

        Collective: all ranks call it, in cross-replica code.

        Args:
          reduce_op: ``"SUM"``, ``"MEAN"``, ``"MIN"``, ``"MAX"`` or ``"PROD"``; of bool ``"ANY"``
            (as MAX) or ``"ALL"`` (as MIN).
          value: Tree of `PerReplica`.
          destinations: A variable or distributed value, or the label of a device; where values
            are plain (`MultiWorkerMirroredStrategy`), such a value too. The result is on every rank
            in any case.
          options: How the values are to move, over what the strategy was given.

        Returns:
          The same tree: `Mirrored` leaves where all replicas are seen (`MirroredStrategy`) and
          `destinations` is not a label; plain arrays elsewhere.

        Raises:
          ContextError: Called in replica code.
          StructureError: A leaf is not a value per replica, or there are no destinations.

        Cost: as `ReplicaContext.all_reduce`.
        """
        with self._enter_cross_replica("reduce_to", "get_replica_context().all_reduce(...)"):
            group = self.strategy._replicas
            with group.lockstep.validating_collectively("reduce_to"):
                group = group.replace_options(options)
                check_destinations(self.strategy, "reduce_to", destinations)
            return reduce_over_replicas(
                group,
                "reduce_to",
                reduce_op,
                value,
                should_mirror=group.view.should_wrap and not isinstance(destinations, str),
                destination_text=describe_destinations(destinations),
            )

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values at once; see `reduce_to`.

        Collective. Cost: that of one `reduce_to` of all values together.

        Args:
          reduce_op: As in `reduce_to`.
          value_destination_pairs: Tuples of value and destinations.
          options: As in `reduce_to`.

        Returns:
          A list with one result per pair.

        Raises:
          StructureError: A pair is not a tuple of two.
        """
        with self._enter_cross_replica("batch_reduce_to", "get_replica_context().all_reduce(...)"):
            group, name = self.strategy._replicas, "batch_reduce_to"
            with group.lockstep.validating_collectively(name):
                group = group.replace_options(options)
                pairs = check_pairs(self.strategy, name, value_destination_pairs)
            values = [value for value, _ in pairs]
            texts = [describe_destinations(destinations) for _, destinations in pairs]
            results = reduce_over_replicas(
                group,
                name,
                reduce_op,
                values,
                should_mirror=group.view.should_wrap,
                destination_text="".join(texts),
            )
            return unwrap_at_labels(results, pairs)

    def broadcast_to(self, tensor: object, destinations: object) -> Any:
        """Broadcast replica 0's value to every replica.

        Collective under `MirroredStrategy`; elsewhere the value is returned as it is. A
        `CrossDeviceOps` of the program's own that the strategy was given does it, if there is one.

        Args:
          tensor: Array or number; equal shape and dtype on all ranks.
          destinations: As in `reduce_to`.

        Returns:
          `Mirrored`, or a plain array if `destinations` is a label; a Python number stays one.

        Raises:
          ContextError: Called in replica code.
          NotImplementedError: This is the default strategy.
          StructureError: There are no such destinations, or a class of the program's own returned
            another shape.
          LockstepError: Shapes or dtypes differ, or such a class returned other values on a rank.

        Cost: the handshake, and one ``MPI_Bcast`` of an array; with such a class two handshakes and
        what it does.
        """
        with self._enter_cross_replica("broadcast_to", "get_replica_context().merge_call(...)"):
            if self.strategy._is_default and destinations is not None:
                raise NotImplementedError("the default strategy has no broadcast_to; make another.")
            delegate = self.strategy._replicas.delegate
            return broadcast(self.strategy, tensor, destinations, delegate)

    def update(
        self,
        var: DistributedVariable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` on every rank, where it may write its copy of `var`.

        Collective: all ranks call it, with the same arguments; from replica code too.

        Args:
          var: A variable of this strategy.
          fn: The function; its writes to `var` change this rank's copy.
          args: Further arguments. `Mirrored` ones and those of `PerReplica` arrive as this rank's
            value. Unless `var` is ON_READ, arrays and numbers must be the same on all ranks.
          kwargs: The same by name.
          group: Return one tree; otherwise each leaf of it is a tuple, with that of every replica
            that is seen.

        Returns:
          The result of `fn`: arrays as `Mirrored` under `MirroredStrategy`. For an ON_READ variable
          each replica's copy is its own, so there every leaf comes as `PerReplica`.

        Raises:
          StrategyError: `var` is not a variable of this strategy.
          StructureError: `args` is not a list or tuple.
          TypeError: `fn` is not a function, or `kwargs` is not a dict.
          StructureError: Values per replica among the arguments differ: reduce them first. It is a
            LockstepError too.
          LockstepError: An argument differs between ranks, so the copies would drift apart. It is a
            ValueError.

        Cost: one handshake, with a hash of the variable if there are several ranks, and a copy of
        it until then; of an ON_READ variable two handshakes.
        """
        context = current_context()
        if context is not None and context.replica is not None:
            check_same_strategy(self.strategy, "StrategyExtended.update()")
            # Not through merge_call, which would make values per replica of the arguments: they
            # are checked to be the same on all replicas, as in cross-replica code.
            with CodeContext(self.strategy):
                return select_local(self.update(var, fn, args, kwargs, group))
        with self._enter_cross_replica("update", "get_replica_context().merge_call(...)"):
            arguments = self._prepare_arguments("update", fn, args, kwargs)
            return update_each(self.strategy, var, fn, arguments, group)

    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` on every rank, for state that is not a variable.

        Collective: all ranks call it, in cross-replica code.

        Args:
          colocate_with: The devices that `non_slot_devices` gave.
          fn: The function.
          args: Its arguments. For a `PerReplica` each rank gets its own component; plain arrays and
            numbers must have the same contents on all ranks.
          kwargs: The same by name.
          group: Return one tree; otherwise each leaf of it is a tuple, with that of every replica
            that is seen.

        Returns:
          The result of `fn`. Under `MirroredStrategy` its arrays come as `Mirrored`; if an argument
          was `PerReplica`, every leaf comes as `PerReplica`, because the results may differ.

        Raises:
          ContextError: Called in replica code.
          StructureError: `colocate_with` is not a tuple of devices, or `args` not a list or tuple.
          TypeError: `fn` is not a function, or `kwargs` is not a dict.
          LockstepError: An argument, or without values per replica a result, differs between ranks.

        Cost: one handshake, and another one with values per replica.
        """
        with self._enter_cross_replica("update_non_slot", "the function itself"):
            arguments = self._prepare_arguments("update_non_slot", fn, args, kwargs)
            with self.strategy._replicas.lockstep.validating_collectively("update_non_slot"):
                if self.strategy._replicas.view is not SINGLE_REPLICA and not isinstance(
                    colocate_with, tuple
                ):
                    raise StructureError(
                        "update_non_slot: expected the tuple of devices that extended."
                        f"non_slot_devices(variables) gives, got {colocate_with!r:.80}."
                    )
            return update_non_slot(self.strategy, fn, arguments, group)

    def _prepare_arguments(
        self, call: str, fn: object, args: object, kwargs: object
    ) -> tuple[Any, Any]:
        with self.strategy._replicas.lockstep.validating_collectively(call):
            check_function(call, "fn", fn)
            return normalize_arguments(call, args, kwargs)

    def non_slot_devices(self, var_list: Sequence[DistributedVariable]) -> Any:
        """Return the devices of a value that belongs to several variables: all of them.

        Args:
          var_list: The variables.

        Returns:
          The labels of `parameter_devices`; for the default strategy, the variable whose name
          comes first.
        """
        if self.strategy._is_default:
            return min(var_list, key=lambda variable: variable.name)
        return self.parameter_devices

    def read_var(self, v: DistributedVariable) -> Any:
        """Return the value of a variable, as cross-replica code reads it.

        Collective if it is ON_READ.

        Raises:
          StrategyError: `v` is not a variable of this strategy.
          ContextError: It is ON_READ, and this is replica code.
        """
        with self.strategy._replicas.lockstep.validating_collectively("read_var"):
            check_own_variable(self.strategy, "read_var", v)
        if not v._is_on_read:
            return v.read_value()
        with self._enter_cross_replica("read_var", "variable.read_value()"):
            return v.read_value()

    def value_container(self, value: object) -> Any:
        """Return the variable that a copy belongs to; return anything else unchanged.

        Args:
          value: An array that ``variable.values``, ``variable.handle`` or ``np.asarray(variable)``
            gave.
        """
        base = value.base if isinstance(value, np.ndarray) else None
        holder = self.strategy._replicas.lockstep.session.get_instance(
            VariableRegistry
        ).variables_by_array_id.get(id(base))
        return value if holder is None or not holder._is_base_of_views(base) else holder

    def variable_created_in_scope(self, v: object) -> bool:
        """Tell whether `v` is a variable of this strategy."""
        return isinstance(v, DistributedVariable) and v.strategy is self.strategy

    def colocate_vars_with(self, colocate_with_variable: object) -> AbstractContextManager[None]:
        """Return a context manager for variables on the devices of another one: all are.

        Args:
          colocate_with_variable: The other one, of this strategy.

        Raises:
          ContextError: This is not in the scope of the strategy.
          StrategyError: This is in the scope of another one.
          ValueError: The other one is not a variable of this strategy.
        """
        name = "StrategyExtended.colocate_vars_with()"
        if check_same_strategy(self.strategy, name) is None and not self.strategy._is_default:
            raise ContextError(
                f"{name} needs to be inside the scope of {self.strategy!r}: "
                "`with strategy.scope():`."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                f"{name}: expected a variable created in the scope of {self.strategy!r}, got "
                f"{colocate_with_variable!r:.80}."
            )
        return _enter_nothing()

    def experimental_make_numpy_dataset(self, numpy_input: object, session: object = None) -> Any:
        """Return an unbatched dataset of the rows of a tree of arrays; a list is stacked.

        Args:
          numpy_input: The tree.
          session: Ignored.
        """
        return self.strategy.experimental_make_numpy_dataset(numpy_input)


@contextmanager  # of which class it is, programs may have seen
def _enter_nothing() -> Iterator[None]:
    yield
