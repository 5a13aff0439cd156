"""The programming model of tf.distribute for NumPy on MPI; one MPI rank is one replica.

Importing mpistrat starts neither MPI nor Numba: names are bound when they are first used, and MPI
starts when the first strategy is made. ``__init__.pyi`` has the same names for type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpistrat.environment import check_system as _check_system

__version__ = "0.1.0"  # nowhere else

_check_system()

_SPACES = "cluster_resolver compat coordinator experimental metrics optim testing vjp"  # modules
_NAMES = {  # module: its public names
    "checkpoint.checkpoint": "Checkpoint",
    "checkpoint.files": "latest_checkpoint",
    "checkpoint.manager": "CheckpointManager",
    "collectives.communication": "CommunicationImplementation CommunicationOptions",
    "compat.absent": "ParameterServerStrategy Server",
    "distribute.context": (
        "ReplicaContext experimental_set_strategy get_replica_context get_strategy "
        "has_strategy in_cross_replica_context"
    ),
    "distribute.cross_device": (
        "CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce ReductionToOneDevice"
    ),
    "distribute.extended": "StrategyExtended",
    "distribute.inputs": "InputContext InputOptions InputReplicationMode RunOptions ValueContext",
    "distribute.slices": "IndexedSlices",
    "distribute.strategies": (
        "CentralStorageStrategy MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy"
    ),
    "distribute.strategy": "Strategy",
    "distribute.topology": "DeviceAssignment Topology",
    "distribute.topology_strategy": "TPUStrategy",
    "distribute.values": "DistributedValues Mirrored PerReplica",
    "distribute.variables": "Variable",
    "distribute.writes": "VariableAggregation VariableSynchronization",
    "errors": (
        "AxisError CheckpointError ContextError DataError DivergenceError LaunchError "
        "LeafTypeError LockstepError MpistratError NonFiniteError OptionError OutOfRangeError "
        "PreflightError RefusedError RemoteError StrategyError StructureError"
    ),
    "feed.dataset": "Dataset",
    "feed.distributed": "DistributedDataset DistributedIterator",
    "feed.policies": "AutoShardPolicy DatasetOptions",
    "kernels.ops": "ReduceOp",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_HOMES |= dict.fromkeys(_SPACES.split(), "")

__all__ = sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> Any:
    """Bind a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mpistrat' has no attribute {name!r}")
    home = _HOMES[name]
    found: Any = importlib.import_module(f"mpistrat.{home or name}")
    globals()[name] = getattr(found, name) if home else found
    return globals()[name]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
