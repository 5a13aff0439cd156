"""Topologies of ranks, device assignments, and strategies that place replicas by them.

`Topology` describes the nodes of the ranks, `DeviceAssignment` which rank is which replica, and
`PlacedStrategy` follows it. There is no TPU, though names of tf.tpu are kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import numpy as np

from mpistrat.arrays import Array, check_int
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.resolvers import default_resolver
from mpistrat.errors import StructureError
from mpistrat.lockstep.startup import begin_lockstep
from mpistrat.shm.nodes import find_nodes
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.strategy.run import MultiStepContext
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.arguments import check_class
from mpistrat.variables.kinds import GLOBAL_VIEW


@final
@dataclass(frozen=True)
class Topology:
    """The ranks of a job on its nodes, and as a mesh.

    Get it with `Topology.read`; made by hand it describes any job.

    Args:
      nodes: The number of the node of each rank, from 0.
      mesh_shape: The sizes of a Cartesian mesh, whose coordinates number the ranks row by row, the
        last one fastest, as MPI_Cart_create does. Empty for nodes times ranks per node if all nodes
        have as many consecutive ranks, else for one dimension.

    Raises:
      TypeError: `nodes` or `mesh_shape` is not a sequence of integers.
      ValueError: There are no ranks, the mesh has another size than there are ranks, or nodes are
        not numbered from 0.

    Like: ``tf.tpu.experimental.Topology``, with nodes for tasks and ranks for TPUs.

    Example:
      >>> topology = Topology(nodes=(0, 0, 1, 1))
      >>> topology.mesh_shape, topology.coordinates(2), topology.rank_at((1, 1))
      ((2, 2), (1, 0), 3)
    """

    nodes: tuple[int, ...] = ()
    mesh_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the sizes; see the class."""
        object.__setattr__(self, "nodes", _convert_integers("nodes", self.nodes, "(0, 0, 1, 1)"))
        if not self.nodes:
            raise ValueError(
                "a topology has at least one rank, but nodes is empty. Give the number of the node "
                "of each rank, Topology(nodes=(0, 0, 1, 1)), or ask MPI: Topology.read()."
            )
        if sorted(set(self.nodes)) != list(range(len(set(self.nodes)))):
            raise ValueError(f"nodes must be numbered from 0 without gaps, got {self.nodes}.")
        shape = (
            _convert_integers("mesh_shape", self.mesh_shape, "(2, 2)") or self._choose_mesh_shape()
        )
        if math.prod(shape) != self.num_ranks or min(shape) < 1:
            raise ValueError(f"a mesh of {shape} has no place for exactly {self.num_ranks} ranks.")
        object.__setattr__(self, "mesh_shape", shape)

    def _choose_mesh_shape(self) -> tuple[int, ...]:
        nodes, size = self.num_nodes, self.num_ranks
        ranks_per_node = size // nodes
        is_even = (
            self.nodes == tuple(rank // ranks_per_node for rank in range(size))
            if ranks_per_node
            else False
        )
        return (nodes, ranks_per_node) if is_even else (size,)

    @staticmethod
    def read(
        comm: object = None, mesh_shape: Sequence[int] = (), *, ranks_per_node: int = 0
    ) -> Topology:
        """Ask MPI which ranks share a node.

        Collective over `comm`.

        Args:
          comm: An mpi4py intracommunicator; None for all ranks of the job.
          mesh_shape: As in `Topology`.
          ranks_per_node: Take so many consecutive ranks as one node, whatever they share; 0 for
            ``MPISTRAT_RANKS_PER_NODE``, and if that is 0 too, to ask.

        Raises:
          TypeError: `ranks_per_node` is not an integer, or `mesh_shape` not a sequence of integers.
          ValueError: It is negative, or the mesh does not fit the ranks.

        Cost: two handshakes, two splits and a few small all-reduces and all-gathers.

        Example:
          >>> Topology.read().num_ranks
          1
        """
        lockstep = begin_lockstep(comm)
        ranks = lockstep.comm
        with lockstep.validating_collectively("Topology.read"):
            node_size = check_int("ranks_per_node", ranks_per_node, 0)
            shape = _convert_integers("mesh_shape", mesh_shape, "(2, 2)")
        lockstep.handshake(f"Topology.read({shape}, {node_size})")
        nodes = find_nodes(ranks, node_size or lockstep.options.ranks_per_node)
        first_ranks = np.empty(ranks.size, np.int64)
        ranks.allgather(np.array([min(nodes.ranks)], np.int64), first_ranks)
        nodes.free()
        node_numbers = {rank: i for i, rank in enumerate(sorted(set(first_ranks.tolist())))}
        with lockstep.validating_collectively("Topology.read"):
            return Topology(tuple(node_numbers[rank] for rank in first_ranks.tolist()), shape)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(set(self.nodes))

    num_tasks = num_nodes

    @property
    def num_tpus_per_task(self) -> int:
        """How many ranks every node has.

        Raises:
          ValueError: They have different numbers.
        """
        counts = {self.nodes.count(node) for node in set(self.nodes)}
        if len(counts) > 1:
            raise ValueError(f"the nodes have different numbers of ranks: {self.nodes}.")
        return counts.pop()

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions of the mesh."""
        return len(self.mesh_shape)

    @property
    def device_coordinates(self) -> Array:
        """The coordinates of each rank, by node and number on it: int[nodes, ranks, dims]."""
        ranks_per_node = self.num_tpus_per_task
        rows = [[self.coordinates(r) for r in self.ranks_of(n)] for n in range(self.num_nodes)]
        return np.array(rows, np.int32).reshape(self.num_nodes, ranks_per_node, self.mesh_rank)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node, ascending.

        Args:
          node: Its number; a number that does not exist has no ranks.
        """
        return tuple(rank for rank, node_of_rank in enumerate(self.nodes) if node_of_rank == node)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return where a rank is in the mesh: one number per dimension.

        Args:
          rank: From 0 to ``num_ranks - 1``; NumPy raises a ValueError for others.
        """
        return tuple(int(i) for i in np.unravel_index(rank, self.mesh_shape))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """Return the rank at a place of the mesh.

        Args:
          coordinates: One number per dimension, from 0.

        Raises:
          ValueError: There is no such place.
        """
        is_inside = len(coordinates) == self.mesh_rank and all(
            0 <= c < size for c, size in zip(coordinates, self.mesh_shape, strict=True)
        )
        if not is_inside:
            raise ValueError(f"{tuple(coordinates)} is outside of the mesh {self.mesh_shape}.")
        return int(np.ravel_multi_index(tuple(coordinates), self.mesh_shape))

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return the node of the rank at a place of the mesh.

        Args:
          device_coordinates: The place, as in `rank_at`, which raises if there is no such place.
        """
        return self.nodes[self.rank_at(device_coordinates)]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return which rank of its node is at a place of the mesh, from 0.

        Args:
          device_coordinates: The place, as in `rank_at`, which raises if there is no such place.
        """
        rank = self.rank_at(device_coordinates)
        return self.ranks_of(self.nodes[rank]).index(rank)


def _convert_integers(name: str, integers: object, example: str) -> tuple[int, ...]:
    """Return a sequence of integers, a NumPy array too, as a tuple of Python's."""
    try:
        # Neither a dict nor a set has an order; a bool has an index, but counts nothing.
        if isinstance(integers, (Sequence, np.ndarray)) and bool not in map(type, integers):
            return tuple(operator.index(integer) for integer in integers)
    except TypeError:
        pass
    raise TypeError(
        f"Topology: {name} must be a sequence of integers such as {example}, got {integers!r:.80} "
        f"({type(integers).__name__})."
    )


@final
@dataclass(frozen=True)
class DeviceAssignment:
    """The rank of each replica: replica i runs on rank ``ranks[i]``.

    Args:
      topology: Where the ranks are.
      core_assignment: The place in the mesh of each replica's only device: an int array of shape
        [replicas, 1, dimensions of the mesh]; or the rank of each replica, one number each.

    Attributes:
      ranks: The rank of each replica.

    Raises:
      TypeError: `topology` is not a `Topology`.
      ValueError: A rank has no replica, or several: every rank runs the program, so each is one.

    Like: ``tf.tpu.experimental.DeviceAssignment``.

    Example:
      >>> topology = Topology(nodes=(0, 0, 1, 1))
      >>> assignment = DeviceAssignment(topology, [[[0, 0]], [[1, 0]], [[0, 1]], [[1, 1]]])
      >>> assignment.ranks, assignment.lookup_replicas(task_id=1)
      ((0, 2, 1, 3), [1, 3])
    """

    topology: Topology
    core_assignment: Any = field(compare=False)
    ranks: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check that each rank is one replica."""
        topology, positions = self.topology, np.asarray(self.core_assignment)
        if not isinstance(topology, Topology):
            raise TypeError(
                f"topology must be a Topology, got {topology!r:.80}. Topology.read() asks MPI."
            )
        if positions.dtype.kind not in "iu" or positions.ndim not in (1, 3):
            raise ValueError(
                "core_assignment must be integers of shape [replicas, 1, dimensions], or one rank "
                f"per replica, got {positions.dtype} of shape {positions.shape}."
            )
        if positions.ndim == 3 and positions.shape[1] != 1:
            raise ValueError(
                f"{positions.shape[1]} devices per replica are asked for, but one rank is one "
                "replica."
            )
        ranks = tuple(
            int(position) if positions.ndim == 1 else topology.rank_at(position[0].tolist())
            for position in positions
        )
        if sorted(ranks) != list(range(topology.num_ranks)):
            raise ValueError(
                f"the replicas are on ranks {list(ranks)}, but each of the {topology.num_ranks} "
                "ranks must be one replica. Start as many ranks as there are replicas, or give the "
                "strategy a communicator of these."
            )
        coordinates = [[topology.coordinates(rank)] for rank in ranks]
        object.__setattr__(self, "core_assignment", np.array(coordinates, np.int32))
        object.__setattr__(self, "ranks", ranks)

    @staticmethod
    def build(
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int | None = None,
    ) -> DeviceAssignment:
        """Return the assignment in which replica i is rank i.

        Args:
          topology: Where the ranks are.
          computation_shape: How many devices a replica has along each dimension: ones, or None.
          computation_stride: Ones, or None.
          num_replicas: The number of ranks, or None.

        Raises:
          ValueError: A replica would have several devices, or some ranks none.
        """
        for name, sizes in (("shape", computation_shape), ("stride", computation_stride)):
            if sizes is not None and math.prod(sizes) != 1:
                raise ValueError(f"computation_{name} must be ones: one rank is one replica.")
        count = topology.num_ranks if num_replicas is None else num_replicas
        return DeviceAssignment(topology, list(range(count)))

    @property
    def num_replicas(self) -> int:
        """How many replicas there are: as many as ranks."""
        return len(self.core_assignment)

    @property
    def num_cores_per_replica(self) -> int:
        """How many devices a replica has: one, its rank."""
        return 1

    def coordinates(self, replica: int, logical_core: int = 0) -> tuple[int, ...]:
        """Return where a replica is in the mesh: one number per dimension.

        Args:
          replica: Which replica.
          logical_core: The number of its device; it has one, 0. NumPy raises an IndexError for
            others.
        """
        return tuple(int(i) for i in self.core_assignment[replica, logical_core])

    def lookup_replicas(self, task_id: int, logical_core: int = 0) -> list[int]:
        """Return the replicas of a node, ascending.

        Args:
          task_id: The number of the node.
          logical_core: The number of the replicas' device; they have one, 0.

        Raises:
          ValueError: There is no such node, or replicas have no such device.
        """
        if logical_core or not 0 <= task_id < self.topology.num_nodes:
            raise ValueError(f"no replica has device {logical_core} on node {task_id}.")
        nodes = self.topology.nodes
        return [i for i, rank in enumerate(self.ranks) if nodes[rank] == task_id]

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return which rank of its node a replica is on, from 0.

        Args:
          replica: Which replica.
          logical_core: As in `coordinates`.
        """
        position = self.coordinates(replica, logical_core)
        return self.topology.tpu_device_ordinal_at_coordinates(position)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: Any = None) -> str:
        """Return the label of a replica's node, such as ``"node:0"``.

        Args:
          replica: Which replica.
          logical_core: As in `coordinates`.
          job: Ignored: labels of nodes name no job.
        """
        position = self.coordinates(replica, logical_core)
        return f"node:{self.topology.task_ordinal_at_coordinates(position)}"

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: Any = None) -> str:
        """Return the label of a replica's device, such as ``"rank:0"``.

        Args:
          replica: Which replica.
          logical_core: As in `coordinates`.
          job: Ignored: labels of ranks name no job.
        """
        return f"rank:{self.topology.rank_at(self.coordinates(replica, logical_core))}"


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
        initial_loop_values: object = None,
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
      device_assignment: The rank of each replica; None for rank order.
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
        comm: object = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        # The group comes first, so that all ranks get the errors of one rank's arguments.
        group = ReplicaGroup.create(GLOBAL_VIEW, comm)
        rank, size = group.lockstep.comm.rank, group.lockstep.comm.size
        name = type(self).__name__
        with group.lockstep.validating_collectively(name):
            check_class("tpu_cluster_resolver", tpu_cluster_resolver, ClusterResolver)
            check_class("device_assignment", device_assignment, DeviceAssignment)
            steps = 1 if steps_per_run is None else check_int("steps_per_run", steps_per_run, 1)
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
            group = ReplicaGroup.create(GLOBAL_VIEW, comm, ranks)
        super().__init__(group, [f"rank:{rank}" for rank in ranks], cluster_resolver)
        self._assignment, self._steps = assignment, steps

    @property
    def device_assignment(self) -> DeviceAssignment:
        """The rank of each replica."""
        return self._assignment

    @property
    def steps_per_run(self) -> int:
        """How many steps ``extended.experimental_run_steps_on_iterator`` makes."""
        return self._steps

    @property
    def extended(self) -> PlacedExtended:
        """The lower-level methods."""
        return PlacedExtended(self)

    def experimental_assign_to_logical_device(self, tensor: object, logical_device_id: int) -> Any:
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
        self, tensor: object, partition_dimensions: Sequence[int]
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

    def experimental_replicate_to_logical_devices(self, tensor: object) -> Any:
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
        comm: object = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        super().__init__(tpu_cluster_resolver, 1, experimental_device_assignment, comm=comm)
        with self._replicas.lockstep.validating_collectively("TPUStrategy"):
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
        comm: object = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        super().__init__(tpu_cluster_resolver, 1, device_assignment, comm=comm)
