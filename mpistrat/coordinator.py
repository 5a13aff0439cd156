"""``tf.distribute.coordinator``: names that say why there is no coordinator, and what to use."""

from mpistrat.refused import missing_from as _missing_from
from mpistrat.refused import refused

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

__getattr__ = _missing_from("mpistrat.coordinator")

ClusterCoordinator = refused("coordinator.ClusterCoordinator")
PerWorkerValue = refused("coordinator.PerWorkerValue")
RemoteValue = refused("coordinator.RemoteValue")
experimental_get_current_worker_index = refused("coordinator.experimental_get_current_worker_index")
