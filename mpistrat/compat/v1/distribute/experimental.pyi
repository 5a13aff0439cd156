"""The names of this module, for type checkers; it binds them when they are used."""

from mpistrat.collectives.communication import CollectiveCommunication as CollectiveCommunication
from mpistrat.collectives.communication import CollectiveHints as CollectiveHints
from mpistrat.collectives.communication import (
    CommunicationImplementation as CommunicationImplementation,
)
from mpistrat.collectives.communication import CommunicationOptions as CommunicationOptions
from mpistrat.compat.absent import ParameterServerStrategy as ParameterServerStrategy
from mpistrat.compat.v1.strategies import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.compat.v1.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpistrat.compat.v1.strategies import TPUStrategy as TPUStrategy
