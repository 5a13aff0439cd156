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
from mpistrat.experimental import coordinator as coordinator
from mpistrat.experimental import partitioners as partitioners
from mpistrat.experimental import rpc as rpc
from mpistrat.strategy.inputs import ValueContext as ValueContext
from mpistrat.strategy.strategies import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.strategy.strategies import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpistrat.strategy.topology import TPUStrategyExperimental as TPUStrategy

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
