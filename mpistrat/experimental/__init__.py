"""``tf.distribute.experimental``: what has that name there.

- Options of collectives, and strategies with the constructors that they have there.
- `partitioners`: into how many shards a variable would be cut.
- `PreemptionCheckpointHandler`: saves when the job is about to be ended.
- `coordinator`, `rpc`: names that are refused, with a reason.
"""

from mpistrat.checkpoint.preemption import (
    PreemptionCheckpointHandler,
    PreemptionWatcher,
    TerminationConfig,
)
from mpistrat.collectives.communication import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.absent import refused as _refused
from mpistrat.distribute.inputs import ValueContext
from mpistrat.distribute.strategies import CentralStorageStrategy
from mpistrat.distribute.strategies import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpistrat.distribute.topology_strategy import TPUStrategyExperimental as TPUStrategy
from mpistrat.experimental import coordinator, partitioners, rpc

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

__getattr__ = _absent_from("mpistrat.experimental")

ParameterServerStrategy = _refused("ParameterServerStrategy")
