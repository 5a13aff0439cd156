"""``tf.compat.v1.distribute.experimental``: what has that name there."""

from mpistrat.collectives.communication import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.absent import refused as _refused
from mpistrat.compat.v1.strategies import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    TPUStrategy,
)

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]

__getattr__ = _absent_from("tf.compat.v1.distribute.experimental")

ParameterServerStrategy = _refused("ParameterServerStrategy")
