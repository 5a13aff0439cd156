"""``tf.distribute`` as programs that import `mpistrat.compat.tf` see it."""

from mpistrat import cluster_resolver, coordinator, experimental
from mpistrat.distribute.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
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
from mpistrat.distribute.values import DistributedValues
from mpistrat.feed.distributed import DistributedDataset, DistributedIterator
from mpistrat.kernels.ops import ReduceOp
from mpistrat.refused import refused

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "coordinator",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

ParameterServerStrategy = refused("ParameterServerStrategy")
Server = refused("Server")
