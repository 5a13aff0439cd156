"""``tf.distribute.experimental.coordinator``: the names of `mpistrat.coordinator`, as they were."""

from mpistrat.coordinator import ClusterCoordinator, RemoteValue
from mpistrat.refused import refused

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]

PerWorkerValues = refused("experimental.coordinator.PerWorkerValues")
