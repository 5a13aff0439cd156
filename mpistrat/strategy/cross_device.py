"""Reduction algorithms, as classes that a program passes to `MirroredStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import as_int
from mpistrat.collectives.communication import CommunicationOptions
from mpistrat.kernels.ops import ReduceOp
from mpistrat.strategy.context_stack import require_chosen_strategy
from mpistrat.strategy.destinations import (
    broadcast,
    check_destinations,
    check_pairs,
    unwrap_at_labels,
)
from mpistrat.strategy.reductions import gather, reduce_over_replicas
from mpistrat.strategy.replica_group import CrossDeviceOpsBase
from mpistrat.strategy.strategies import current_strategy
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.regroup import select_local


class CrossDeviceOps(CrossDeviceOpsBase):
    """How the values of all replicas are reduced; subclass it for your own algorithm.

    A subclass defines `reduce_implementation`; also `batch_reduce_implementation` if it can reduce
    several values at once faster than one after another; `broadcast_implementation`, if replica 0's
    value is to be sent another way too. Given to `MirroredStrategy`, it does all reductions of the
    strategy, in replica code and of variables too, and the broadcasts of
    `StrategyExtended.broadcast_to`. It is called on every rank in cross-replica code, with a
    `PerReplica` whose values ``strategy.experimental_local_results`` fetches, and must return the
    same on every rank, which is checked. float16 values come as float32, and integers of a MEAN as
    float64. A weighted mean comes as a SUM. `IndexedSlices` come as such, and must come back as
    such: the rows of all replicas. Gathers are not asked for. Options of a call that name an
    implementation take the place of the class.

    Like: ``tf.distribute.CrossDeviceOps``.

    Example:
      >>> import mpistrat as ms
      >>> class Largest(CrossDeviceOps):
      ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
      ...         return max(ms.get_strategy().experimental_local_results(per_replica_value))
      >>> strategy = ms.MirroredStrategy(cross_device_ops=Largest())
      >>> float(strategy.reduce("SUM", strategy.run(lambda: 2.0), axis=None))
      2.0
    """

    def reduce(
        self,
        reduce_op: Any,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value over all replicas.

        Collective: all ranks call it, in cross-replica code.

        Args:
          reduce_op: ``"SUM"`` or ``"MEAN"``, or another operation of `ReduceOp`.
          per_replica_value: A `PerReplica`.
          destinations: A variable, a distributed value or the label of a device. The result is on
            every rank in any case.
          options: Sizes of messages, time; None for the usual ones.

        Returns:
          What `reduce_implementation` returns. For the classes here that is a `Mirrored` where all
          replicas are seen (`MirroredStrategy`) and `destinations` is not a label, else a plain
          array.

        Raises:
          StructureError: There are no such destinations; as all errors here, on every rank.
          ContextError: No strategy is in scope, in a job of several ranks.
          StrategyError: They, or the value, are of another strategy than the current one;
            so are all values per replica outside of any scope.
          ValueError: There is no such operation, or `options` is of another class.

        Cost: what `reduce_implementation` does; for the classes here, that of `Strategy.reduce`.
        """
        name = "CrossDeviceOps.reduce"
        with _validating(name) as strategy:
            check_destinations(strategy, name, destinations)
            strategy._replicas.regrouper.check(name, pytree.flatten(per_replica_value)[0])
            options = CommunicationOptions().merge(options)
            ReduceOp.parse(reduce_op)
        return self.reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values, each given with its destinations; see `reduce`. Collective.

        Args:
          reduce_op: As in `reduce`, for all of them.
          value_destination_pairs: Tuples of value and destinations.
          options: As in `reduce`.

        Returns:
          A list with one result per pair.

        Raises:
          StructureError: A pair is not a tuple of two, or there are no such destinations.
          ValueError: There is no such operation, or `options` is of another class.
        """
        name = "CrossDeviceOps.batch_reduce"
        with _validating(name) as strategy:
            pairs = check_pairs(strategy, name, value_destination_pairs)
            strategy._replicas.regrouper.check(
                name, pytree.flatten([value for value, _ in pairs])[0]
            )
            options = CommunicationOptions().merge(options)
            ReduceOp.parse(reduce_op)
        return list(self.batch_reduce_implementation(reduce_op, pairs, options))

    def broadcast(self, tensor: object, destinations: object) -> Any:
        """Broadcast replica 0's value. Collective; see `StrategyExtended.broadcast_to`.

        Args:
          tensor: Array or number; equal shape and dtype on all ranks.
          destinations: As in `reduce`.

        Returns:
          What `broadcast_implementation` returns.

        Raises:
          StructureError: There are no such destinations.
        """
        name = "CrossDeviceOps.broadcast"
        with _validating(name) as strategy:
            check_destinations(strategy, name, destinations)
            strategy._replicas.regrouper.check(name, [tensor])
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: Any,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value; subclasses define it.

        Every rank calls it, in cross-replica code, so it may call what is collective.

        Args:
          reduce_op: A `ReduceOp` where a strategy reduces; what the program gave to `reduce` there.
          per_replica_value: A `PerReplica`; ``strategy.experimental_local_results`` fetches the
            values of all replicas.
          destinations: A variable, a distributed value or the label of a device. A strategy gives
            `per_replica_value` again: the result is wanted wherever there is a value.
          options: `CommunicationOptions`.

        Returns:
          The result: an array or number, or a distributed value that holds one; the same bits on
          every rank. For a strategy it must have the shape of one replica's value, and a dtype that
          casts to its dtype within its kind.

        Raises:
          NotImplementedError: The subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reduce_implementation.")

    def batch_reduce_implementation(
        self,
        reduce_op: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values, one after another unless a subclass overrides it.

        Args:
          reduce_op: As in `reduce_implementation`, for all of them.
          value_destination_pairs: Tuples of value and destinations.
          options: As in `reduce_implementation`.

        Returns:
          A list with one result per pair.
        """
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast by MPI, unless a subclass overrides it; see `StrategyExtended.broadcast_to`.

        Every rank calls it, in cross-replica code, so it may make collective calls. The results
        must be the same on every rank, which a strategy checks.

        Args:
          tensor: Array or number; equal shape and dtype on all ranks. A strategy gives an array,
            also of a number.
          destinations: A variable, a distributed value or the label of a device.

        Returns:
          A `Mirrored` where all replicas are seen, or a plain array if `destinations` is a label;
          elsewhere `tensor` itself.
        """
        return broadcast(current_strategy(), tensor, destinations)


class _LibraryOps(CrossDeviceOps):
    """A name of tf.distribute for the library's own algorithm."""

    @property
    def _replacement(self) -> CrossDeviceOpsBase | None:
        """None: nothing takes the place of the library's algorithm."""
        return None

    def reduce_implementation(
        self,
        reduce_op: Any,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value, and return the result; see `batch_reduce_implementation`.

        Collective. Cost: that of `Strategy.reduce`.

        Args:
          reduce_op: The operation, or its name.
          per_replica_value: A `PerReplica`, or a tree of them.
          destinations: A label, for a plain result; or anything else that `reduce` takes.
          options: `CommunicationOptions`.
        """
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values together.

        Collective: all ranks call it, in cross-replica code of the current strategy.

        Args:
          reduce_op: The operation, or its name; for all of them.
          value_destination_pairs: Tuples of value and destinations.
          options: `CommunicationOptions`.

        Returns:
          A list with one result per pair: a `Mirrored` where all replicas are seen
          (`MirroredStrategy`) and the destinations are not a label, else a plain array.

        Raises:
          StructureError: A value is not a value per replica (SUM and PROD).
          LeafTypeError: A dtype cannot be reduced.
          LockstepError: The calls, or shapes, differ between ranks.

        Cost: that of one `Strategy.reduce` of all values.
        """
        strategy = current_strategy()
        name = type(self).__name__
        with strategy._replicas.lockstep.validating_collectively(name):
            group = strategy._replicas.replace_options(options, self)
        values = [value for value, _ in value_destination_pairs]
        results = reduce_over_replicas(
            group, name, reduce_op, values, should_mirror=group.view.should_wrap
        )
        return unwrap_at_labels(results, value_destination_pairs)


@final
class ReductionToOneDevice(_LibraryOps):
    """The library's algorithm, unless there is an `accumulation_fn`, which then adds values up.

    Args:
      reduce_to_device: The label of a device, or the number of a rank; it has no effect.
      accumulation_fn: Takes the list of all replicas' arrays, in replica order, and returns their
        sum, of the same shape; it must not change them. Every rank gathers the values and calls it,
        once per leaf, for SUM and MEAN of arrays and numbers; the results must be the same on all
        ranks, which is checked. None for addition.

    Raises:
      ValueError: `reduce_to_device` is neither a label nor a number.

    Like: ``tf.distribute.ReductionToOneDevice``, which calls the function on that device only.

    Example:
      >>> import mpistrat as ms
      >>> ops = ReductionToOneDevice(accumulation_fn=sum)
      >>> strategy = ms.MirroredStrategy(cross_device_ops=ops)
      >>> float(strategy.reduce("MEAN", strategy.run(lambda: 2.0), axis=None))
      2.0
    """

    def __init__(
        self,
        reduce_to_device: str | int | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ):
        """Add up by `accumulation_fn`, if there is one."""
        device: Any = reduce_to_device
        if as_int(device) is None and not isinstance(device, str | None):
            raise ValueError(
                "reduce_to_device must be the label of a device or the number of a rank, got "
                f"{reduce_to_device!r:.80}."
            )
        self._accumulation_ops = (
            None if accumulation_fn is None else AccumulationFunction(accumulation_fn)
        )

    @property
    def _replacement(self) -> CrossDeviceOpsBase | None:
        """The object that calls the `accumulation_fn`, if there is one."""
        return self._accumulation_ops


@final
class AccumulationFunction(CrossDeviceOps):
    """Adds up the arrays of all replicas by a function of the program.

    Args:
      accumulation_fn: As `ReductionToOneDevice` takes it.
    """

    def __init__(self, accumulation_fn: Callable[[list[Any]], Any]):
        """Add up by this function."""
        self._function = accumulation_fn

    def reduce_implementation(
        self,
        reduce_op: Any,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Return the total of one value, or for MEAN its part. Collective; costs a gather.

        Args:
          reduce_op: The operation. The function is called for SUM and MEAN only.
          per_replica_value: A `PerReplica`. Of `IndexedSlices`, the function is not called.
          destinations: As in `CrossDeviceOps.reduce_implementation`.
          options: `CommunicationOptions`.
        """
        op, local_value = ReduceOp.parse(reduce_op), select_local(per_replica_value)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN) or isinstance(local_value, IndexedSlices):
            library = NcclAllReduce()
            return library.reduce_implementation(op, per_replica_value, destinations, options)
        replicas, stacked_value = current_strategy()._replicas, np.asarray(local_value)[np.newaxis]
        total = self._function(list(gather(replicas, "accumulation_fn", stacked_value, axis=0)))
        return total / replicas.lockstep.comm.size if op is ReduceOp.MEAN else total


@final
class HierarchicalCopyAllReduce(_LibraryOps):
    """The library's algorithm, which reduces within nodes first.

    Args:
      num_packs: A number that is not negative; it has no effect.
      ranks_per_node: Another one.

    Raises:
      ValueError: A number is negative.

    Like: ``tf.distribute.HierarchicalCopyAllReduce``.
    """

    def __init__(self, num_packs: int = 1, *, ranks_per_node: int = 0):
        """Check the numbers."""
        _check_packs("HierarchicalCopy", num_packs)
        _check_count("ranks_per_node must be 0 or more, got", "instead.", ranks_per_node)


@final
class NcclAllReduce(_LibraryOps):
    """The library's algorithm.

    Args:
      num_packs: A number that is not negative; it has no effect.

    Raises:
      ValueError: It is negative.

    Like: ``tf.distribute.NcclAllReduce``; the name is kept for programs that use it.
    """

    def __init__(self, num_packs: int = 1):
        """Check the number."""
        _check_packs("NCCL all-reduce", num_packs)


@contextmanager
def _validating(name: str) -> Iterator[Strategy]:
    """Yield the current strategy; what the body raises on one rank is raised on all."""
    strategy = current_strategy()
    with strategy._replicas.lockstep.validating_collectively(name):
        yield strategy
    require_chosen_strategy(name)


def _check_packs(name: str, count: object) -> None:
    _check_count(f"{name} requires num_packs >= 0, but", "is specified.", count)


def _check_count(prefix: str, suffix: str, count: object) -> None:
    number = as_int(count)
    if number is None or number < 0:
        raise ValueError(f"{prefix} {count!r:.80} {suffix}")
