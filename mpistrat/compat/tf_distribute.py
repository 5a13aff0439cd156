"""``tf.distribute`` as programs that import `mpistrat.compat.tf` see it."""

from mpistrat import cluster_resolver, coordinator, experimental
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.absent import refused as _refused
from mpistrat.distribute.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrat.distribute.cross_device import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from mpistrat.distribute.extended import StrategyExtended
from mpistrat.distribute.inputs import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    RunOptions,
)
from mpistrat.distribute.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
)
from mpistrat.distribute.strategy import Strategy
from mpistrat.distribute.topology_strategy import TPUStrategy
from mpistrat.distribute.values import DistributedValues
from mpistrat.feed.distributed import DistributedDataset, DistributedIterator
from mpistrat.kernels.ops import ReduceOp

__all__ = [
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "cluster_resolver",
    "coordinator",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

__getattr__ = _absent_from("tf.distribute")

ParameterServerStrategy = _refused("ParameterServerStrategy")
Server = _refused("Server")
