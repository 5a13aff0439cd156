"""``tf.distribute`` as programs that import `mpistrat.compat.tf` see it."""

from mpistrat import CrossDeviceOps as CrossDeviceOps
from mpistrat import DistributedDataset as DistributedDataset
from mpistrat import DistributedIterator as DistributedIterator
from mpistrat import DistributedValues as DistributedValues
from mpistrat import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from mpistrat import InputContext as InputContext
from mpistrat import InputOptions as InputOptions
from mpistrat import InputReplicationMode as InputReplicationMode
from mpistrat import MirroredStrategy as MirroredStrategy
from mpistrat import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpistrat import NcclAllReduce as NcclAllReduce
from mpistrat import OneDeviceStrategy as OneDeviceStrategy
from mpistrat import ParameterServerStrategy as ParameterServerStrategy
from mpistrat import ReduceOp as ReduceOp
from mpistrat import ReductionToOneDevice as ReductionToOneDevice
from mpistrat import ReplicaContext as ReplicaContext
from mpistrat import RunOptions as RunOptions
from mpistrat import Server as Server
from mpistrat import Strategy as Strategy
from mpistrat import StrategyExtended as StrategyExtended
from mpistrat import TPUStrategy as TPUStrategy
from mpistrat import cluster_resolver as cluster_resolver
from mpistrat import coordinator as coordinator
from mpistrat import experimental as experimental
from mpistrat import experimental_set_strategy as experimental_set_strategy
from mpistrat import get_replica_context as get_replica_context
from mpistrat import get_strategy as get_strategy
from mpistrat import has_strategy as has_strategy
from mpistrat import in_cross_replica_context as in_cross_replica_context
from mpistrat.compat.absent import absent_from as _absent_from

__all__ = [name for name in dir() if not name.startswith("_")]
__getattr__ = _absent_from("tf.distribute")
