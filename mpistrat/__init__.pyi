"""The public names of mpistrat, for type checkers; `__init__.py` binds them when they are used."""

from mpistrat import cluster_resolver as cluster_resolver
from mpistrat import compat as compat
from mpistrat import coordinator as coordinator
from mpistrat import experimental as experimental
from mpistrat import metrics as metrics
from mpistrat import optim as optim
from mpistrat import random as random
from mpistrat import testing as testing
from mpistrat import vjp as vjp
from mpistrat.checkpoint.checkpoint import Checkpoint as Checkpoint
from mpistrat.checkpoint.files import latest_checkpoint as latest_checkpoint
from mpistrat.checkpoint.history import History as History
from mpistrat.checkpoint.manager import CheckpointManager as CheckpointManager
from mpistrat.checkpoint.planned import preemption as preemption
from mpistrat.collectives.communication import (
    CommunicationImplementation as CommunicationImplementation,
)
from mpistrat.collectives.communication import CommunicationOptions as CommunicationOptions
from mpistrat.compat.absent import ParameterServerStrategy as ParameterServerStrategy
from mpistrat.compat.absent import Server as Server
from mpistrat.distribute.context import ReplicaContext as ReplicaContext
from mpistrat.distribute.context import experimental_set_strategy as experimental_set_strategy
from mpistrat.distribute.context import get_replica_context as get_replica_context
from mpistrat.distribute.context import get_strategy as get_strategy
from mpistrat.distribute.context import has_strategy as has_strategy
from mpistrat.distribute.context import in_cross_replica_context as in_cross_replica_context
from mpistrat.distribute.cross_device import CrossDeviceOps as CrossDeviceOps
from mpistrat.distribute.cross_device import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from mpistrat.distribute.cross_device import NcclAllReduce as NcclAllReduce
from mpistrat.distribute.cross_device import ReductionToOneDevice as ReductionToOneDevice
from mpistrat.distribute.extended import StrategyExtended as StrategyExtended
from mpistrat.distribute.feeding import InputContext as InputContext
from mpistrat.distribute.feeding import InputOptions as InputOptions
from mpistrat.distribute.feeding import InputReplicationMode as InputReplicationMode
from mpistrat.distribute.feeding import RunOptions as RunOptions
from mpistrat.distribute.feeding import ValueContext as ValueContext
from mpistrat.distribute.kinds import VariableAggregation as VariableAggregation
from mpistrat.distribute.kinds import VariableSynchronization as VariableSynchronization
from mpistrat.distribute.once import once as once
from mpistrat.distribute.once import once_per_node as once_per_node
from mpistrat.distribute.slices import IndexedSlices as IndexedSlices
from mpistrat.distribute.strategies import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.distribute.strategies import MirroredStrategy as MirroredStrategy
from mpistrat.distribute.strategies import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpistrat.distribute.strategies import OneDeviceStrategy as OneDeviceStrategy
from mpistrat.distribute.strategy import Strategy as Strategy
from mpistrat.distribute.topology import DeviceAssignment as DeviceAssignment
from mpistrat.distribute.topology import Topology as Topology
from mpistrat.distribute.topology_strategy import TPUStrategy as TPUStrategy
from mpistrat.distribute.values import DistributedValues as DistributedValues
from mpistrat.distribute.values import Mirrored as Mirrored
from mpistrat.distribute.values import PerReplica as PerReplica
from mpistrat.distribute.variables import Variable as Variable
from mpistrat.errors import AxisError as AxisError
from mpistrat.errors import CheckpointError as CheckpointError
from mpistrat.errors import ContextError as ContextError
from mpistrat.errors import DataError as DataError
from mpistrat.errors import DivergenceError as DivergenceError
from mpistrat.errors import LaunchError as LaunchError
from mpistrat.errors import LeafTypeError as LeafTypeError
from mpistrat.errors import LockstepError as LockstepError
from mpistrat.errors import MpistratError as MpistratError
from mpistrat.errors import NonFiniteError as NonFiniteError
from mpistrat.errors import OptionError as OptionError
from mpistrat.errors import OutOfRangeError as OutOfRangeError
from mpistrat.errors import PreflightError as PreflightError
from mpistrat.errors import RefusedError as RefusedError
from mpistrat.errors import RemoteError as RemoteError
from mpistrat.errors import StrategyError as StrategyError
from mpistrat.errors import StructureError as StructureError
from mpistrat.feed.dataset import Dataset as Dataset
from mpistrat.feed.distributed import DistributedDataset as DistributedDataset
from mpistrat.feed.distributed import DistributedIterator as DistributedIterator
from mpistrat.feed.policies import AutoShardPolicy as AutoShardPolicy
from mpistrat.feed.policies import DatasetOptions as DatasetOptions
from mpistrat.kernels.ops import ReduceOp as ReduceOp

__version__: str
