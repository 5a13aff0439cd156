"""``tf.distribute.coordinator``: names that say why there is no coordinator, and what to use."""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.absent import refused as _refused

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

__getattr__ = _absent_from("mpistrat.coordinator")

ClusterCoordinator = _refused("coordinator.ClusterCoordinator")
PerWorkerValue = _refused("coordinator.PerWorkerValue")
RemoteValue = _refused("coordinator.RemoteValue")
experimental_get_current_worker_index = _refused(
    "coordinator.experimental_get_current_worker_index"
)
