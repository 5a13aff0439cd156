"""What functions that make inputs are told about where they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from mpistrat.errors import DataError

__all__ = ["InputContext", "ValueContext"]


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
        """Return the rows of a global batch that one replica gets.

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
