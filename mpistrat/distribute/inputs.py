"""Options and contexts of inputs: `InputContext`, `InputOptions` and the like."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from mpistrat.errors import DataError


@final
class InputReplicationMode(enum.Enum):
    """How often a ``dataset_fn`` is called.

    - PER_WORKER: once for each input pipeline.
    - PER_REPLICA: once for each replica.

    A rank is both, so for ``distribute_datasets_from_function`` they are the same.

    As: ``tf.distribute.InputReplicationMode``.
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
    """How inputs are wanted; a named tuple.

    All memory is the host's here, so what speaks of devices changes nothing; `Dataset.prefetch`
    reads ahead.

    Args:
      experimental_fetch_to_device: No effect. None stands for True.
      experimental_replication_mode: Who calls a ``dataset_fn``.
      experimental_place_dataset_on_device: No effect.
      experimental_per_replica_buffer_size: No effect.

    As: ``tf.distribute.InputOptions``.

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
    def per_replica(self) -> bool:
        """Whether every replica is to have a pipeline of its own."""
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA

    def check(self) -> None:
        """Raise if they contradict each other.

        Raises:
          ValueError: A dataset is to be on a device without being made for each replica, or while
            elements are also to be fetched to it.
        """
        if not self.experimental_place_dataset_on_device:
            return
        if not self.per_replica:
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

    As: ``tf.distribute.RunOptions``.

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
    """Which input pipeline a ``dataset_fn`` is to make.

    Attributes:
      num_input_pipelines: How many pipelines there are.
      input_pipeline_id: Which one this is, from 0.
      num_replicas_in_sync: How many replicas there are.

    As: ``tf.distribute.InputContext``.
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
    """Which replica's value a ``value_fn`` is to make.

    Attributes:
      replica_id_in_sync_group: Which replica.
      num_replicas_in_sync: How many there are.

    As: ``tf.distribute.experimental.ValueContext``.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        """Return which replica this is."""
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group},  "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )
