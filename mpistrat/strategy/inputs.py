"""Datasets and values that come into a strategy: its methods, their options and contexts.

`InputMethods` are the methods, which `Strategy` has. `InputIterator` is the iterator of older
loops, which starts over at `initialize`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import check_bool
from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed import DistributedDataset, DistributedIterator, InputGate
from mpistrat.data.iterators import ElementIterator
from mpistrat.data.sharding import (
    Sharding,
    ShardSpec,
    shard_by_policy,
    shard_function_calls,
    shard_in_turns,
    use_own_datasets,
)
from mpistrat.errors import ContextError, DataError, StrategyError, text_of
from mpistrat.strategy.context_stack import check_cross_replica, current_context
from mpistrat.strategy.replica_group import StrategyBase
from mpistrat.variables.arguments import check_class, check_function
from mpistrat.variables.kinds import GLOBAL_VIEW, SINGLE_REPLICA


@final
class InputIterator(ElementIterator):
    """An iterator over a distributed dataset that can start over.

    Made by ``Strategy.make_dataset_iterator`` and ``Strategy.make_input_fn_iterator``.

    Collective: each ``next()`` and `get_next`; the first one after the beginning is two handshakes.
    Like: the ``InputIterator`` of ``tf.compat.v1.distribute``.
    """

    def __init__(self, dataset: DistributedDataset):
        """Iterate over `dataset`; its first epoch begins with the first element."""
        self._dataset = dataset
        self._epoch: DistributedIterator | None = None
        self._failed = ""

    def __next__(self) -> Any:
        """Return the next element, as cross-replica code sees it. Collective.

        Raises:
          StopIteration: The data have ended; `initialize` begins the next epoch.
          DataError: Ranks have differed before, or the data have failed; `initialize` on all ranks
            begins the next epoch.
        """
        if self._failed:
            raise DataError(self._failed)
        if self._epoch is None:
            try:
                self._epoch = iter(self._dataset)
            except (ContextError, StrategyError):
                raise  # called at the wrong place, where nothing has begun
            except Exception as error:
                # The others may be in the middle of their epoch: to start over would be once more
                # to do what they do not.
                self._failed = (
                    f"this iterator could not begin an epoch ({text_of(error):.200}): call "
                    "initialize() on every rank."
                )
                raise
        return next(self._epoch)

    def initialize(self) -> list[Any]:
        """Let the next element be the first of the next epoch, and return an empty list.

        Not collective itself, but all ranks must do it, as the next element will show.
        """
        self._epoch, self._failed = None, ""
        return []

    @property
    def initializer(self) -> list[Any]:
        """An empty list, after `initialize`."""
        return self.initialize()

    @property
    def element_spec(self) -> Any:
        """As that of the dataset."""
        return self._dataset.element_spec

    @property
    def output_classes(self) -> Any:
        """The tree of the classes of a replica's leaves; None if they are known only by reading."""
        return self._map_spec(
            lambda spec: np.ndarray if spec.specs[0].shape else spec.specs[0].dtype.type
        )

    @property
    def output_shapes(self) -> Any:
        """The tree of the shapes of a replica's leaves; None if they are known only by reading."""
        return self._map_spec(lambda spec: spec.specs[0].shape)

    @property
    def output_types(self) -> Any:
        """The tree of the dtypes of the leaves; None if they are known only by reading."""
        return self._map_spec(lambda spec: spec.specs[0].dtype)

    def _map_spec(self, fn: Any) -> Any:
        spec = self.element_spec
        return None if spec is None else pytree.map(fn, spec)

    def __repr__(self) -> str:
        """Return what it iterates over."""
        return f"InputIterator({self._dataset!r})"


@final
class InputReplicationMode(enum.Enum):
    """How often a ``dataset_fn`` is called.

    - PER_WORKER: once for each input pipeline.
    - PER_REPLICA: once for each replica.

    A rank is both, so for ``distribute_datasets_from_function`` they are the same.

    Like: ``tf.distribute.InputReplicationMode``.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class _InputOptions(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int


@final
class InputOptions(_InputOptions):
    """Options of distributed inputs; a named tuple.

    All arrays are in host memory, so options about devices have no effect; `Dataset.prefetch` reads
    ahead.

    Args:
      experimental_fetch_to_device: No effect. None stands for True.
      experimental_replication_mode: Who calls a ``dataset_fn``.
      experimental_place_dataset_on_device: No effect.
      experimental_per_replica_buffer_size: No effect.

    Like: ``tf.distribute.InputOptions``.

    Example:
      >>> InputOptions().experimental_replication_mode.name
      'PER_WORKER'
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
    ) -> InputOptions:
        """Make the options; nothing is checked until they are used."""
        return super().__new__(
            cls,
            True if experimental_fetch_to_device is None else experimental_fetch_to_device,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
        )

    @property
    def _is_per_replica(self) -> bool:
        """Whether every replica is to have a pipeline of its own."""
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA

    def _check(self) -> None:
        """Raise if they contradict each other.

        Raises:
          ValueError: A dataset is to be on a device without being made for each replica, or while
            elements are also to be fetched to it.
        """
        if not self.experimental_place_dataset_on_device:
            return
        if not self._is_per_replica:
            raise DataError(
                "experimental_place_dataset_on_device=True needs the replication mode PER_REPLICA."
            )
        if self.experimental_fetch_to_device:
            raise DataError(
                "experimental_place_dataset_on_device and experimental_fetch_to_device cannot both "
                "be True in the replication mode PER_REPLICA."
            )


@final
class RunOptions(NamedTuple):
    """Options of ``Strategy.run``; a named tuple. They are for TPUs, and are ignored here.

    Like: ``tf.distribute.RunOptions``.

    Example:
      >>> RunOptions().experimental_enable_dynamic_batch_size
      True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


@final
@dataclass(frozen=True)
class InputContext:
    """The input pipeline that a ``dataset_fn`` is to make.

    Attributes:
      num_input_pipelines: How many pipelines there are.
      input_pipeline_id: Which one this is, from 0.
      num_replicas_in_sync: How many replicas there are.

    Like: ``tf.distribute.InputContext``.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows of a global batch of `global_batch_size` that one replica gets.

        Raises:
          ValueError: It cannot be split evenly.

        Example:
          >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(64)
          16
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise DataError(
                f"a global batch of {global_batch_size} cannot be split evenly over "
                f"{self.num_replicas_in_sync} replicas. Use experimental_distribute_dataset, which "
                "splits any batch, or another batch size."
            )
        return size

    def __str__(self) -> str:
        """Return which pipeline this is."""
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


@final
@dataclass(frozen=True)
class ValueContext:
    """The replica whose value a ``value_fn`` is to make.

    Attributes:
      replica_id_in_sync_group: Which replica.
      num_replicas_in_sync: How many there are.

    Like: ``tf.distribute.experimental.ValueContext``.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        """Return which replica this is."""
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group},  "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


class InputMethods(StrategyBase):
    """The methods of a strategy about inputs; `Strategy` has them."""

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Make one value per replica: each rank calls `value_fn` for its own.

        Collective: all ranks call it; in replica code too.

        Args:
          value_fn: ``value_fn(ValueContext)``.

        Returns:
          The tree that it returned, with `PerReplica` for every leaf but variables; a plain value
          where there is one replica by construction (`OneDeviceStrategy`).

        Raises:
          TypeError: `value_fn` is not a function.
          LockstepError: The replicas returned trees of different structure.

        Cost: one handshake; small values are sent with it.
        """
        call = "experimental_distribute_values_from_function"
        lockstep = self._replicas.lockstep
        with lockstep.validating_collectively(call):
            check_function(call, "value_fn", value_fn)
            value = value_fn(ValueContext(lockstep.comm.rank, lockstep.comm.size))
        return self._replicas.regrouper.wrap_inputs(call, value)

    def experimental_distribute_dataset(
        self,
        dataset: Dataset,
        options: InputOptions | None = None,
        *,
        unbatched: bool = False,
        rows_may_differ: bool = False,
    ) -> DistributedDataset | Any:
        """Divide every global batch of `dataset` over the replicas.

        Collective: all ranks call it; iterating is collective too.

        Args:
          dataset: The same on every rank: ranks that made it otherwise, with another seed, or of
            other rows, get an error here. A sample of rows in memory is compared: all of an array
            up to 1 MB, rows at 64 places of a larger one; not those of files and iterables. Batched
            by the *global* batch size. Its options choose another `AutoShardPolicy`.
          options: `InputOptions`, which change nothing here.
          unbatched: Take a dataset whose elements are single examples as if it were batched by the
            number of replicas: each gets one example in a step, so results depend on their number.
          rows_may_differ: The rows, and what a map makes of whole batches, may differ between
            ranks, and are not compared; else only rounding may differ, which warns.

        Returns:
          A `DistributedDataset`: replica i of n gets the rows ``[i * k, min((i + 1) * k, L))`` of a
          batch of L, ``k = ceil(L / n)``, possibly none. Under `OneDeviceStrategy` and the default
          strategy, `dataset` itself.

        Raises:
          TypeError: `dataset` is not a `Dataset`.
          DataError: Its elements are single examples: call ``batch``, or pass ``unbatched=True``.
          LockstepError: The ranks hold datasets of different descriptions, or different rows.
          NotImplementedError: The replication mode is PER_REPLICA.

        Warns:
          UserWarning: Rows differ between ranks by rounding.

        Cost: one handshake with a digest of the sample, and one a step. If samples differ, that of
        replica 0 is broadcast.
        """
        name = "experimental_distribute_dataset"
        with self._replicas.lockstep.validating_collectively(name):
            _check_dataset(name, dataset)
            if _check_options(name, options)._is_per_replica:
                raise NotImplementedError(
                    f"{name} divides one dataset over all replicas; PER_REPLICA is for "
                    "distribute_datasets_from_function."
                )
            if self._replicas.view is SINGLE_REPLICA:
                return dataset
            sharding = _shard_dataset(self, name, dataset, unbatched, rows_may_differ)
        return DistributedDataset(sharding, _make_gate(self), dataset)

    # The short name, which pages and examples use.
    distribute = experimental_distribute_dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DistributedDataset | Any:
        """Let every replica bring its own dataset, batched for one replica.

        Collective: all ranks call it; iterating is collective too. Replicas whose data end early
        get empty batches until all have ended.

        Args:
          dataset_fn: ``dataset_fn(InputContext)``, called once on each rank: one input pipeline is
            one rank. Take its part of the data by
            ``dataset.shard(context.num_input_pipelines, context.input_pipeline_id)``. If the first
            batches of all ranks are the same, the first ``next()`` warns.
          options: `InputOptions`. Both replication modes are the same here, but PER_REPLICA is for
            `MirroredStrategy`.

        Returns:
          A `DistributedDataset`; under `OneDeviceStrategy` and the default strategy, the dataset.

        Raises:
          TypeError: `dataset_fn` returned no `Dataset`.
          ValueError: The options contradict each other.
          NotImplementedError: PER_REPLICA under another strategy than `MirroredStrategy`.

        Cost: one handshake, and one a step.
        """
        name = "distribute_datasets_from_function"
        view = self._replicas.view
        shard_spec = _make_shard_spec(self)
        with self._replicas.lockstep.validating_collectively(name):
            checked_options = _check_options(name, options)
            checked_options._check()
            if checked_options._is_per_replica and not getattr(
                self, "_has_pipeline_per_replica", False
            ):
                raise NotImplementedError(
                    f"{name}: PER_REPLICA is for MirroredStrategy. Here leave it out: dataset_fn "
                    "is called on every rank, which is one replica, anyway."
                )
            check_function(name, "dataset_fn", dataset_fn)
            dataset = dataset_fn(InputContext(shard_spec.size, shard_spec.rank, shard_spec.size))
            _check_dataset(name, dataset)
        if view is SINGLE_REPLICA:
            return dataset
        return DistributedDataset(use_own_datasets(dataset), _make_gate(self))

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_dataset_iterator(
        self, dataset: Dataset, *, unbatched: bool = False, rows_may_differ: bool = False
    ) -> InputIterator:
        """Divide `dataset` as `experimental_distribute_dataset` does, for an older loop.

        Collective: all ranks call it; each element is collective too.

        Args:
          dataset: Batched by the *global* batch size; the same on every rank.
          unbatched: As there.
          rows_may_differ: As there.

        Returns:
          An `InputIterator`, to be asked by ``get_next()`` or given to `experimental_run`.

        Raises:
          DataError: The elements are single examples, as there.
          LockstepError: The ranks hold different datasets.

        Cost: one handshake, and one a step.
        """
        name = "make_dataset_iterator"
        with self._replicas.lockstep.validating_collectively(name):
            _check_dataset(name, dataset)
            if self._replicas.view is SINGLE_REPLICA:
                sharding = use_own_datasets(dataset)
            else:
                sharding = _shard_dataset(self, name, dataset, unbatched, rows_may_differ)
        return InputIterator(DistributedDataset(sharding, _make_gate(self), dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Make an iterator over what `input_fn` brings, for an older loop.

        Collective: all ranks call it; each element is collective too. It ends when the data of the
        first replica end.

        Args:
          input_fn: ``input_fn(InputContext)``, called once on each rank, returns a dataset batched
            for one replica or of single examples, or a callable that returns one element each
            time. Under `MirroredStrategy` there is one pipeline: the dataset must be the same on
            every rank, and its elements go to the replicas in turns, each read by its replica only.
            Elsewhere each rank has a pipeline of its own.
          replication_mode: PER_WORKER.

        Returns:
          An `InputIterator`, as `make_dataset_iterator` does.

        Raises:
          ValueError: Another mode, or `input_fn` returned something else.

        Cost: one handshake, and one a step.
        """
        name = "make_input_fn_iterator"
        shard_spec = _make_shard_spec(self)
        is_global = self._replicas.view is GLOBAL_VIEW
        with self._replicas.lockstep.validating_collectively(name):
            if replication_mode is not InputReplicationMode.PER_WORKER:
                raise DataError(
                    f"{name}: input replication mode not supported: {replication_mode!r}."
                )
            check_function(name, "input_fn", input_fn)
            pipeline_count, pipeline_id = (
                (1, 0) if is_global else (shard_spec.size, shard_spec.rank)
            )
            dataset_or_function = input_fn(
                InputContext(pipeline_count, pipeline_id, shard_spec.size)
            )
            if not isinstance(dataset_or_function, Dataset):
                if not callable(dataset_or_function):
                    raise DataError(
                        f"{name}: input_fn must return an mpistrat.Dataset or a callable, not "
                        f"{type(dataset_or_function).__name__}."
                    )
                sharding = shard_function_calls(dataset_or_function)
            else:
                sharding = (
                    shard_in_turns(dataset_or_function, shard_spec)
                    if is_global
                    else use_own_datasets(dataset_or_function)
                )
        return InputIterator(DistributedDataset(sharding, _make_gate(self), ends_with_first=True))


def _shard_dataset(
    strategy: StrategyBase, name: str, dataset: Dataset, unbatched: bool, rows_may_differ: bool
) -> Sharding:
    """Return the way in which the batches of a dataset are divided.

    Raises:
      DataError: Its elements are examples, and nobody said that this is meant.
    """
    shard_spec = _make_shard_spec(strategy)
    is_dealt_singly = check_bool(f"{name}(unbatched)", unbatched)
    is_compared = not check_bool(f"{name}(rows_may_differ)", rows_may_differ)
    if not dataset.batched:
        if not is_dealt_singly:
            raise DataError(
                f"{name}: the elements of this dataset are single examples, and batches are what "
                "is divided between replicas. Call dataset.batch(global_batch_size) first. Batches "
                "that a generator gives are batches by mpistrat.Dataset.from_batches(function). To "
                "give each replica one example in a step, pass unbatched=True."
            )
        dataset = dataset.batch(shard_spec.size)
    if is_compared:
        return shard_by_policy(dataset, shard_spec)
    return shard_by_policy(dataset, shard_spec._replace(check_interval=0)).without_comparison()


def _make_shard_spec(strategy: StrategyBase) -> ShardSpec:
    lockstep = strategy._replicas.lockstep
    comm = lockstep.comm
    check_interval = lockstep.options.check_every if comm.size > 1 else 0
    return ShardSpec(
        comm.rank, comm.size, strategy._replicas.view is not GLOBAL_VIEW, check_interval
    )


def _check_options(name: str, options: Any) -> InputOptions:
    check_class(f"{name}: options", options, InputOptions)
    return options or InputOptions()


def _check_dataset(name: str, dataset: object) -> None:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name}: expected an mpistrat.Dataset, got {type(dataset).__name__}. Make one: "
            "mpistrat.Dataset(arrays).batch(global_batch_size)."
        )


def _make_gate(strategy: StrategyBase) -> InputGate:
    group = strategy._replicas

    def check() -> None:
        context = current_context()
        if context is not None and context.replica is not None:
            raise ContextError(
                "next(iterator) was called in replica code. Call it outside, and pass the element: "
                "strategy.run(fn, args=(next(iterator),))."
            )
        check_cross_replica(strategy, "next(iterator)", "")

    return InputGate(
        group.lockstep, group.regrouper.wrap_input, check, group.view is not GLOBAL_VIEW
    )
