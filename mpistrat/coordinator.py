"""``tf.distribute.coordinator``: names that say why there is no coordinator, and what to use."""

from mpistrat.refused import refused

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

ClusterCoordinator = refused("coordinator.ClusterCoordinator")
PerWorkerValue = refused("coordinator.PerWorkerValue")
RemoteValue = refused("coordinator.RemoteValue")
experimental_get_current_worker_index = refused("coordinator.experimental_get_current_worker_index")
