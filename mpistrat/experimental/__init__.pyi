"""The names of this module, for type checkers; it binds them when they are used."""

from mpistrat.checkpoint.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from mpistrat.checkpoint.preemption import PreemptionWatcher as PreemptionWatcher
from mpistrat.checkpoint.preemption import TerminationConfig as TerminationConfig
from mpistrat.collectives.communication import CollectiveCommunication as CollectiveCommunication
from mpistrat.collectives.communication import CollectiveHints as CollectiveHints
from mpistrat.collectives.communication import (
    CommunicationImplementation as CommunicationImplementation,
)
from mpistrat.collectives.communication import CommunicationOptions as CommunicationOptions
from mpistrat.compat.absent import ParameterServerStrategy as ParameterServerStrategy
from mpistrat.distribute.feeding import ValueContext as ValueContext
from mpistrat.distribute.strategies import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.distribute.strategies import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpistrat.distribute.topology_strategy import TPUStrategyExperimental as TPUStrategy
from mpistrat.experimental import coordinator as coordinator
from mpistrat.experimental import partitioners as partitioners
from mpistrat.experimental import rpc as rpc

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
    "rpc",
]
