"""The presets: each is a choice of parts, and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, final

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.resolvers import default_resolver
from mpistrat.collectives.communication import (
    CommunicationImplementation,
    CommunicationOptions,
    as_implementation,
)
from mpistrat.distribute.cross_device import CrossDeviceOps
from mpistrat.distribute.parts import Parts
from mpistrat.distribute.strategy import Strategy
from mpistrat.distribute.views import ALONE, GLOBAL, LOCAL

__all__ = [
    "CentralStorageStrategy",
    "DefaultStrategy",
    "ExperimentalMultiWorkerMirroredStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
]


@final
class MirroredStrategy(Strategy):
    """All ranks together are one machine: cross-replica code sees the values of every replica.

    Collective: making the first strategy of a communicator duplicates it.

    Args:
      devices: Labels for the replicas, such as ``["GPU:0", "GPU:1"]``. They choose nothing: the
        launcher says how many ranks there are. A list of another length warns.
      cross_device_ops: How values move: `NcclAllReduce`, `HierarchicalCopyAllReduce`,
        `ReductionToOneDevice` or another `CrossDeviceOps`. None: what is best for the sizes.
      comm: An mpi4py intracommunicator whose ranks are the replicas; None for all of the job's.

    Raises:
      TypeError: `cross_device_ops` are none.
      ValueError: A label comes twice.

    As: ``tf.distribute.MirroredStrategy``.

    Example:
      >>> import mpistrat as ms
      >>> strategy = ms.MirroredStrategy()
      >>> strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
      PerReplica:{
        0: 0
      }
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        comm: Any = None,
    ):
        """Make a strategy over all ranks of `comm`."""
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                f"cross_device_ops must be a CrossDeviceOps or None, got {cross_device_ops!r:.80}."
            )
        if isinstance(devices, str):
            raise TypeError(f"devices must be a list of labels, not {devices!r}.")
        labels = tuple(devices or ())
        if len(set(labels)) != len(labels):
            raise ValueError(f"devices must be different labels, got {list(labels)}.")
        super().__init__(Parts.over(GLOBAL, comm), labels)
        self.parts = self.parts.by(ops=cross_device_ops, labels=self.device_labels)
        if labels and len(labels) != self.num_replicas_in_sync:
            self._warn(labels)

    def _warn(self, labels: tuple[str, ...]) -> None:
        lockstep = self.parts.lockstep
        with lockstep.preparing("MirroredStrategy"):  # a warning may be an error, on one rank only
            if lockstep.comm.rank == 0:
                warnings.warn(
                    f"MirroredStrategy was given {len(labels)} devices, {list(labels)}, but this "
                    f"job has {lockstep.comm.size} ranks, and one rank is one replica. Start that "
                    f"many: mpistrat run -n {len(labels)} program.py",
                    stacklevel=3,
                )
        lockstep.prove(f"MirroredStrategy({list(labels)})")


class MultiWorkerMirroredStrategy(Strategy):
    """Each rank is a worker of its own: cross-replica code sees this rank's values only.

    Variables are mirrored and reductions meet all ranks, as with `MirroredStrategy`; what differs
    is what `Strategy.run`, ``merge_fn`` and `experimental_local_results` show.

    Collective: making the first strategy of a communicator duplicates it.

    Args:
      cluster_resolver: Names this process in the job; None for ``TF_CONFIG`` if that is set, else
        for MPI. The rank always comes from MPI.
      communication_options: `CommunicationOptions`: the algorithm and the size of messages of all
        collectives of this strategy, and the time of all its calls that wait for other ranks:
        reductions and gathers, the end of `run`, variables, steps of a dataset.
      comm: An mpi4py intracommunicator whose ranks are the workers; None for all of the job's.

    Raises:
      TypeError: `cluster_resolver` is none.
      ValueError: `communication_options` are none, or ``TF_CONFIG`` is malformed.

    As: ``tf.distribute.MultiWorkerMirroredStrategy``.

    Example:
      >>> MultiWorkerMirroredStrategy().cluster_resolver.task_type
      'worker'
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        comm: Any = None,
    ):
        """Make a strategy over all ranks of `comm`."""
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise TypeError(
                f"cluster_resolver must be a ClusterResolver, got {cluster_resolver!r}."
            )
        if not isinstance(communication_options, CommunicationOptions | None):
            raise ValueError(
                "communication_options must be an instance of CommunicationOptions, got "
                f"{communication_options!r:.80}."
            )
        seconds = None if communication_options is None else communication_options.timeout_seconds
        parts = Parts.over(LOCAL, comm, seconds=seconds).by(communication_options)
        group = parts.lockstep.comm
        with parts.lockstep.preparing("MultiWorkerMirroredStrategy"):
            resolver = cluster_resolver or default_resolver(group.rank, group.size)
        super().__init__(parts, (), resolver)


@final
class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` with the older order of arguments.

    Args:
      communication: A `CommunicationImplementation`, or its name.
      cluster_resolver: As there.
      comm: As there.

    As: ``tf.distribute.experimental.MultiWorkerMirroredStrategy``.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
        *,
        comm: Any = None,
    ):
        """Make a strategy over all ranks of `comm`."""
        implementation = CommunicationOptions(0, None, as_implementation(communication))
        super().__init__(cluster_resolver, implementation, comm=comm)


@final
class CentralStorageStrategy(Strategy):
    """Each variable is one value that all replicas share; cross-replica code sees all replicas.

    Ranks share no variable, so each has a copy, and the proof keeps the copies equal: what a
    program sees is one value. To write it in replica code, give it an aggregation, or write the
    same on all replicas.

    Collective: making the first strategy of a communicator duplicates it.

    Args:
      compute_devices: Labels for the replicas, as the devices of `MirroredStrategy`.
      parameter_device: The label of the device of the variables; None for the first replica's.
      comm: An mpi4py intracommunicator whose ranks are the replicas; None for all of the job's.

    Raises:
      ValueError: A label comes twice.

    As: ``tf.distribute.experimental.CentralStorageStrategy``.

    Example:
      >>> import mpistrat as ms
      >>> strategy = CentralStorageStrategy()
      >>> with strategy.scope():
      ...     v = ms.Variable(1.0, aggregation=ms.VariableAggregation.SUM)
      >>> _ = strategy.run(lambda: v.assign_add(2.0))
      >>> float(v.numpy())
      3.0
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        comm: Any = None,
    ):
        """Make a strategy over all ranks of `comm`."""
        parts = Parts.over(GLOBAL, comm)
        with parts.lockstep.preparing("CentralStorageStrategy"):
            labels = tuple(compute_devices or ())
            if isinstance(compute_devices, str) or len(set(labels)) != len(labels):
                raise ValueError(f"compute_devices must be different labels: {compute_devices!r}.")
        super().__init__(parts, labels)
        self.parameter_device = parameter_device or self.device_labels[0]


@final
class OneDeviceStrategy(Strategy):
    """One replica by construction, in each process for itself; it never communicates.

    Args:
      device: The label of its device.

    As: ``tf.distribute.OneDeviceStrategy``.

    Example:
      >>> OneDeviceStrategy("cpu").num_replicas_in_sync
      1
    """

    def __init__(self, device: str):
        """Make a strategy of one replica."""
        super().__init__(Parts.over(ALONE), (device,))


@final
class DefaultStrategy(Strategy):
    """What rules where no strategy is in scope: one replica, no communication."""

    def __init__(self) -> None:
        """Make the strategy; programs get it from `get_strategy`."""
        super().__init__(Parts.over(ALONE))
