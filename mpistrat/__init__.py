"""The programming model of tf.distribute for NumPy on MPI; one MPI rank is one replica.

Importing mpistrat starts neither MPI nor Numba: names are bound when they are first used, and MPI
starts when the first strategy is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpistrat.environment import check_system as _check_system

__version__ = "0.1.0"  # nowhere else

_check_system()

# Public name -> module that holds it, grouped as in tf.distribute.
_NAMES = {
    # strategies
    "CentralStorageStrategy": "mpistrat.distribute.strategies",
    "DeviceAssignment": "mpistrat.distribute.topology",
    "MirroredStrategy": "mpistrat.distribute.strategies",
    "MultiWorkerMirroredStrategy": "mpistrat.distribute.strategies",
    "OneDeviceStrategy": "mpistrat.distribute.strategies",
    "ParameterServerStrategy": "mpistrat.compat.absent",
    "Strategy": "mpistrat.distribute.strategy",
    "StrategyExtended": "mpistrat.distribute.extended",
    "TPUStrategy": "mpistrat.distribute.topology_strategy",
    "Topology": "mpistrat.distribute.topology",
    # started by the launcher
    "Server": "mpistrat.compat.absent",
    # contexts
    "ReplicaContext": "mpistrat.distribute.context",
    "experimental_set_strategy": "mpistrat.distribute.context",
    "get_replica_context": "mpistrat.distribute.context",
    "get_strategy": "mpistrat.distribute.context",
    "has_strategy": "mpistrat.distribute.context",
    "in_cross_replica_context": "mpistrat.distribute.context",
    # how values move
    "CommunicationImplementation": "mpistrat.collectives.communication",
    "CommunicationOptions": "mpistrat.collectives.communication",
    "CrossDeviceOps": "mpistrat.distribute.cross_device",
    "HierarchicalCopyAllReduce": "mpistrat.distribute.cross_device",
    "NcclAllReduce": "mpistrat.distribute.cross_device",
    "ReductionToOneDevice": "mpistrat.distribute.cross_device",
    # values and variables
    "DistributedValues": "mpistrat.distribute.values",
    "IndexedSlices": "mpistrat.distribute.slices",
    "Mirrored": "mpistrat.distribute.values",
    "PerReplica": "mpistrat.distribute.values",
    "ReduceOp": "mpistrat.kernels.ops",
    "Variable": "mpistrat.distribute.variables",
    "VariableAggregation": "mpistrat.distribute.writes",
    "VariableSynchronization": "mpistrat.distribute.writes",
    # inputs
    "AutoShardPolicy": "mpistrat.feed.policies",
    "Dataset": "mpistrat.feed.dataset",
    "DatasetOptions": "mpistrat.feed.policies",
    "DistributedDataset": "mpistrat.feed.distributed",
    "DistributedIterator": "mpistrat.feed.distributed",
    "InputContext": "mpistrat.distribute.inputs",
    "InputOptions": "mpistrat.distribute.inputs",
    "InputReplicationMode": "mpistrat.distribute.inputs",
    "RunOptions": "mpistrat.distribute.inputs",
    "ValueContext": "mpistrat.distribute.inputs",
    # saving and restoring
    "Checkpoint": "mpistrat.checkpoint.checkpoint",
    "CheckpointManager": "mpistrat.checkpoint.manager",
    "latest_checkpoint": "mpistrat.checkpoint.files",
    # errors
    "AxisError": "mpistrat.errors",
    "CheckpointError": "mpistrat.errors",
    "ContextError": "mpistrat.errors",
    "DataError": "mpistrat.errors",
    "DivergenceError": "mpistrat.errors",
    "LaunchError": "mpistrat.errors",
    "LeafTypeError": "mpistrat.errors",
    "LockstepError": "mpistrat.errors",
    "MpistratError": "mpistrat.errors",
    "NonFiniteError": "mpistrat.errors",
    "OptionError": "mpistrat.errors",
    "OutOfRangeError": "mpistrat.errors",
    "PreflightError": "mpistrat.errors",
    "RefusedError": "mpistrat.errors",
    "RemoteError": "mpistrat.errors",
    "StrategyError": "mpistrat.errors",
    "StructureError": "mpistrat.errors",
}
_MODULES = (
    *("cluster_resolver", "compat", "coordinator", "experimental", "metrics", "optim", "testing"),
    "vjp",
)

__all__ = [
    "AutoShardPolicy",
    "AxisError",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ContextError",
    "CrossDeviceOps",
    "DataError",
    "Dataset",
    "DatasetOptions",
    "DeviceAssignment",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "DivergenceError",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LaunchError",
    "LeafTypeError",
    "LockstepError",
    "Mirrored",
    "MirroredStrategy",
    "MpistratError",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "NonFiniteError",
    "OneDeviceStrategy",
    "OptionError",
    "OutOfRangeError",
    "ParameterServerStrategy",
    "PerReplica",
    "PreflightError",
    "ReduceOp",
    "ReductionToOneDevice",
    "RefusedError",
    "RemoteError",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyError",
    "StrategyExtended",
    "StructureError",
    "TPUStrategy",
    "Topology",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "cluster_resolver",
    "compat",
    "coordinator",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "latest_checkpoint",
    "metrics",
    "optim",
    "testing",
    "vjp",
]

if TYPE_CHECKING:
    from mpistrat import (
        cluster_resolver,
        compat,
        coordinator,
        experimental,
        metrics,
        optim,
        testing,
        vjp,
    )
    from mpistrat.checkpoint.checkpoint import Checkpoint
    from mpistrat.checkpoint.files import latest_checkpoint
    from mpistrat.checkpoint.manager import CheckpointManager
    from mpistrat.collectives.communication import (
        CommunicationImplementation,
        CommunicationOptions,
    )
    from mpistrat.compat.absent import ParameterServerStrategy, Server
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
        ValueContext,
    )
    from mpistrat.distribute.slices import IndexedSlices
    from mpistrat.distribute.strategies import (
        CentralStorageStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
    )
    from mpistrat.distribute.strategy import Strategy
    from mpistrat.distribute.topology import DeviceAssignment, Topology
    from mpistrat.distribute.topology_strategy import TPUStrategy
    from mpistrat.distribute.values import DistributedValues, Mirrored, PerReplica
    from mpistrat.distribute.variables import Variable
    from mpistrat.distribute.writes import VariableAggregation, VariableSynchronization
    from mpistrat.errors import (
        AxisError,
        CheckpointError,
        ContextError,
        DataError,
        DivergenceError,
        LaunchError,
        LeafTypeError,
        LockstepError,
        MpistratError,
        NonFiniteError,
        OptionError,
        OutOfRangeError,
        PreflightError,
        RefusedError,
        RemoteError,
        StrategyError,
        StructureError,
    )
    from mpistrat.feed.dataset import Dataset
    from mpistrat.feed.distributed import DistributedDataset, DistributedIterator
    from mpistrat.feed.policies import AutoShardPolicy, DatasetOptions
    from mpistrat.kernels.ops import ReduceOp


def __getattr__(name: str) -> Any:
    """Bind a public name when it is first used."""
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"mpistrat.{name}")
    else:
        raise AttributeError(f"module 'mpistrat' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
