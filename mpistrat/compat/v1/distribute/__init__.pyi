"""The names of this module, for type checkers; it binds them when they are used."""

from mpistrat import CrossDeviceOps as CrossDeviceOps
from mpistrat import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from mpistrat import InputContext as InputContext
from mpistrat import InputReplicationMode as InputReplicationMode
from mpistrat import NcclAllReduce as NcclAllReduce
from mpistrat import ReduceOp as ReduceOp
from mpistrat import ReductionToOneDevice as ReductionToOneDevice
from mpistrat import ReplicaContext as ReplicaContext
from mpistrat import RunOptions as RunOptions
from mpistrat import Server as Server
from mpistrat import StrategyExtended as StrategyExtended
from mpistrat import cluster_resolver as cluster_resolver
from mpistrat import experimental_set_strategy as experimental_set_strategy
from mpistrat import get_replica_context as get_replica_context
from mpistrat import get_strategy as get_strategy
from mpistrat import has_strategy as has_strategy
from mpistrat import in_cross_replica_context as in_cross_replica_context
from mpistrat.compat.v1.distribute import experimental as experimental
from mpistrat.compat.v1.strategies import MirroredStrategy as MirroredStrategy
from mpistrat.compat.v1.strategies import OneDeviceStrategy as OneDeviceStrategy
from mpistrat.compat.v1.strategies import Strategy as Strategy
from mpistrat.compat.v1.strategies import get_loss_reduction as get_loss_reduction
