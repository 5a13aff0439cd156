"""``tf.distribute`` as programs that import `mpistrat.compat.tf` see it."""

from types import SimpleNamespace

from mpistrat import cluster_resolver
from mpistrat.distribute.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrat.distribute.extended import StrategyExtended
from mpistrat.distribute.inputs import InputContext, ValueContext
from mpistrat.distribute.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
)
from mpistrat.distribute.strategy import Strategy
from mpistrat.distribute.values import DistributedValues
from mpistrat.feed.distributed import DistributedDataset, DistributedIterator
from mpistrat.kernels.ops import ReduceOp

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "InputContext",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

experimental = SimpleNamespace(
    MultiWorkerMirroredStrategy=MultiWorkerMirroredStrategy, ValueContext=ValueContext
)
