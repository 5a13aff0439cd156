"""``tf.distribute.coordinator``: names that say why there is no coordinator, and what to use."""

from mpistrat.refused import missing_from as _missing_from
from mpistrat.refused import refused as _refused

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

__getattr__ = _missing_from("mpistrat.coordinator")

ClusterCoordinator = _refused("coordinator.ClusterCoordinator")
PerWorkerValue = _refused("coordinator.PerWorkerValue")
RemoteValue = _refused("coordinator.RemoteValue")
experimental_get_current_worker_index = _refused(
    "coordinator.experimental_get_current_worker_index"
)
