"""Options for how a dataset is distributed."""

from __future__ import annotations

import enum
from typing import final


@final
class AutoShardPolicy(enum.IntEnum):
    """How ``experimental_distribute_dataset`` gives each replica its part.

    - AUTO, DATA, HINT: every global batch of L rows is divided into parts of ``ceil(L / n)`` rows;
      each replica reads its own part.
    - OFF: under ``MirroredStrategy`` the rows of all batches are dealt out in turns of the batch
      size B, of which replica i takes ``B // n`` rows, one more if ``i < B % n``; so a short last
      batch goes to the first replicas. Under ``MultiWorkerMirroredStrategy`` nothing is divided:
      every rank goes over its whole dataset, in batches of such sizes.
    - FILE: for `Dataset.from_files`: replica i reads files i, i + n and so on. For data that come
      from no files it is OFF under ``MirroredStrategy``, else an error.

    Like: ``tf.data.experimental.AutoShardPolicy``.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@final
class DistributeOptions:
    """The part of `DatasetOptions` that is about distribution.

    Attributes:
      num_devices: No effect.

    Like: ``tf.data.experimental.DistributeOptions``.
    """

    __slots__ = ("_policy", "num_devices")

    def __init__(self) -> None:
        """Create options that ask for nothing."""
        self._policy = AutoShardPolicy.AUTO
        self.num_devices: int | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """How each replica gets its part.

        Raises:
          TypeError: Set to something else than an `AutoShardPolicy`.
        """
        return self._policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        if not isinstance(policy, AutoShardPolicy):
            raise TypeError(f"auto_shard_policy must be an AutoShardPolicy, got {policy!r}.")
        self._policy = policy

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` asks for the same."""
        if not isinstance(other, DistributeOptions):
            return NotImplemented
        return (self._policy, self.num_devices) == (other._policy, other.num_devices)


class DatasetOptions:
    """What `Dataset.with_options` takes.

    Attributes:
      experimental_distribute: `DistributeOptions`.

    Like: ``tf.data.Options``.

    Example:
      >>> options = DatasetOptions()
      >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    """

    __slots__ = ("experimental_distribute",)

    def __init__(self) -> None:
        """Create options that ask for nothing."""
        self.experimental_distribute = DistributeOptions()

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` asks for the same."""
        if not isinstance(other, DatasetOptions):
            return NotImplemented
        return self.experimental_distribute == other.experimental_distribute
