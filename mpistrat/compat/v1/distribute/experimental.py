"""The names of ``tf.compat.v1.distribute.experimental``."""

from mpistrat.collectives.communication import CollectiveCommunication as CollectiveCommunication
from mpistrat.collectives.communication import CollectiveHints as CollectiveHints
from mpistrat.collectives.communication import (
    CommunicationImplementation as CommunicationImplementation,
)
from mpistrat.collectives.communication import CommunicationOptions as CommunicationOptions
from mpistrat.compat.absent import ParameterServerStrategy as ParameterServerStrategy
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.v1.strategies import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.compat.v1.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpistrat.compat.v1.strategies import TPUStrategy as TPUStrategy

__all__ = [name for name in dir() if not name.startswith("_")]
__getattr__ = _absent_from("tf.compat.v1.distribute.experimental")
