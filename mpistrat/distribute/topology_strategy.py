"""Strategies whose replicas are placed on the ranks of a topology; no TPU is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, final

from mpistrat.arrays import whole_number
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.resolvers import default_resolver
from mpistrat.distribute.arguments import check_kind
from mpistrat.distribute.extended import StrategyExtended
from mpistrat.distribute.multi_step import MultiStepContext
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.strategy import Strategy
from mpistrat.distribute.topology import DeviceAssignment, Topology
from mpistrat.distribute.views import GLOBAL
from mpistrat.errors import StructureError


@dataclass(frozen=True)
class PlacedExtended(StrategyExtended["PlacedStrategy"]):
    """The lower-level methods of a strategy with a topology."""

    @property
    def num_hosts(self) -> int:
        """How many nodes the replicas are on."""
        return self.strategy.device_assignment.topology.num_nodes

    @property
    def num_replicas_per_host(self) -> int:
        """How many replicas each node has.

        Raises:
          ValueError: Nodes have different numbers.
        """
        return self.strategy.device_assignment.topology.num_tpus_per_task

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        iterations: int | None = None,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Make several steps in one call; see `StrategyExtended`. Collective.

        Args:
          fn: As there.
          iterator: As there.
          iterations: How many steps; None for `steps_per_run`.
          initial_loop_values: As there.
        """
        steps = self.steps_per_run if iterations is None else iterations
        return super().experimental_run_steps_on_iterator(fn, iterator, steps, initial_loop_values)

    @property
    def tpu_hardware_feature(self) -> NoReturn:
        """Refuse: there is no TPU.

        Raises:
          NotImplementedError: Always.
        """
        raise NotImplementedError("there is no TPU here; replicas are MPI ranks.")

    def experimental_logical_device(self, logical_device_id: int) -> Any:
        """Return a context manager that does nothing: a replica has one device, number 0.

        Raises:
          ValueError: Another one is asked for.
        """
        self.strategy.experimental_assign_to_logical_device(None, logical_device_id)
        return nullcontext()


class PlacedStrategy(Strategy):
    """All ranks together, each of them the replica that an assignment says.

    Everything follows the assignment: replica ids, the rows of a batch, the order of gathers and
    local results, replica 0's initial values, and which replicas are reduced in one node.

    Collective: making the first strategy of a communicator duplicates it.

    Its arguments are those of ``tf.compat.v1.distribute.experimental.TPUStrategy``.

    Args:
      tpu_cluster_resolver: Names this process in the job; None for ``TF_CONFIG`` if that is set,
        else for MPI.
      steps_per_run: How many steps ``extended.experimental_run_steps_on_iterator`` makes; None
        for one.
      device_assignment: Which rank is which replica; None for rank order.
      comm: An mpi4py intracommunicator whose ranks are the replicas; None for all of the job's.

    Raises:
      TypeError: `tpu_cluster_resolver` or `device_assignment` is of another class, or
        `steps_per_run` is not an integer.
      ValueError: The assignment is for another number of ranks, or there are no steps.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        steps_per_run: int | None = None,
        device_assignment: DeviceAssignment | None = None,
        *,
        comm: Any = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        # The group comes first, so that all ranks get the errors of one rank's arguments.
        group = ReplicaGroup.over(GLOBAL, comm)
        rank, size = group.lockstep.comm.rank, group.lockstep.comm.size
        name = type(self).__name__
        with group.lockstep.preparing(name):
            check_kind("tpu_cluster_resolver", tpu_cluster_resolver, ClusterResolver)
            check_kind("device_assignment", device_assignment, DeviceAssignment)
            steps = 1 if steps_per_run is None else whole_number("steps_per_run", steps_per_run, 1)
            if device_assignment is not None and len(device_assignment.ranks) != size:
                raise ValueError(
                    f"device_assignment places {len(device_assignment.ranks)} replicas, but there "
                    f"are {size} ranks."
                )
            cluster_resolver = tpu_cluster_resolver or default_resolver(rank, size)
        assignment = device_assignment or DeviceAssignment.build(Topology.read(comm))
        ranks = assignment.ranks
        # A replica would wait for another one that counts differently, so it is checked first.
        group.lockstep.handshake(f"{name}({ranks}, {assignment.topology}, {steps})")
        if ranks != tuple(range(size)):
            group = ReplicaGroup.over(GLOBAL, comm, ranks)
        super().__init__(group, [f"rank:{rank}" for rank in ranks], cluster_resolver)
        self._assignment, self._steps = assignment, steps

    @property
    def device_assignment(self) -> DeviceAssignment:
        """Which rank is which replica."""
        return self._assignment

    @property
    def steps_per_run(self) -> int:
        """How many steps ``extended.experimental_run_steps_on_iterator`` makes."""
        return self._steps

    @property
    def extended(self) -> PlacedExtended:
        """The lower-level methods."""
        return PlacedExtended(self)

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Return `tensor`: a replica has one device, number 0.

        Args:
          tensor: Anything; it is not looked at.
          logical_device_id: 0.

        Raises:
          ValueError: Another one is asked for.
        """
        if logical_device_id != 0:
            raise ValueError(
                f"logical_device_id is {logical_device_id!r}, but a replica has one device, 0: its "
                "rank."
            )
        return tensor

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Return `tensor`, which is cut in one part along every dimension.

        Args:
          tensor: An array; what has no ``ndim`` counts as of no dimensions.
          partition_dimensions: How many parts along each dimension: ones.

        Raises:
          ValueError: More parts are asked for.
          StructureError: There are not as many dimensions.
        """
        if len(partition_dimensions) != getattr(tensor, "ndim", 0):
            raise StructureError(
                f"partition_dimensions {list(partition_dimensions)} must have one number for each "
                f"of the {getattr(tensor, 'ndim', 0)} dimensions."
            )
        if math.prod(partition_dimensions) != 1:
            raise ValueError(
                f"partition_dimensions {list(partition_dimensions)} make several parts, but a "
                "replica has one device: its rank."
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Return `tensor`: it is on the one device of this replica."""
        return tensor


@final
class TPUStrategy(PlacedStrategy):
    """`MirroredStrategy` with a device assignment: it says which rank is which replica.

    For programs that place replicas. No TPU is used.

    Collective: making the first strategy of a communicator duplicates it.

    Args:
      tpu_cluster_resolver: Names this process in the job; None for MPI.
      experimental_device_assignment: A `DeviceAssignment`; None for rank order.
      experimental_spmd_xla_partitioning: Must be False: a replica has one device.
      comm: An mpi4py intracommunicator whose ranks are the replicas; None for all of the job's.

    Raises:
      TypeError: `tpu_cluster_resolver` or the assignment is of another class.
      ValueError: The assignment is for another number of ranks; or partitioning is asked for.

    Like: ``tf.distribute.TPUStrategy``.

    Example:
      >>> strategy = TPUStrategy()
      >>> strategy.extended.num_hosts, strategy.num_replicas_in_sync
      (1, 1)
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        comm: Any = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        super().__init__(tpu_cluster_resolver, 1, experimental_device_assignment, comm=comm)
        with self.replicas.lockstep.preparing("TPUStrategy"):
            if experimental_spmd_xla_partitioning:
                raise ValueError(
                    "a replica has one device, its rank, so nothing can be partitioned."
                )


@final
class TPUStrategyExperimental(PlacedStrategy):
    """`TPUStrategy` with the arguments of ``tf.distribute.experimental.TPUStrategy``.

    Args:
      tpu_cluster_resolver: As there.
      device_assignment: As there.
      comm: As there.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
        *,
        comm: Any = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        super().__init__(tpu_cluster_resolver, 1, device_assignment, comm=comm)
