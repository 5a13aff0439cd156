"""``tf.compat.v1.distribute``: strategies with the older signatures.

Contexts, ``extended`` and everything else are the same objects as the newer names.
"""

from mpistrat import cluster_resolver
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.absent import refused as _refused
from mpistrat.compat.v1.distribute import experimental
from mpistrat.compat.v1.strategies import MirroredStrategy, OneDeviceStrategy, Strategy
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
from mpistrat.distribute.inputs import InputContext, InputReplicationMode, RunOptions
from mpistrat.kernels.ops import ReduceOp

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

__getattr__ = _absent_from("tf.compat.v1.distribute")

Server = _refused("Server")


def get_loss_reduction() -> ReduceOp:
    """Return how losses of replicas are added up: SUM, always.

    Example:
      >>> get_loss_reduction().name
      'SUM'
    """
    return ReduceOp.SUM
