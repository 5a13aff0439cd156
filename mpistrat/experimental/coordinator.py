"""``tf.distribute.experimental.coordinator``: the names of `mpistrat.coordinator`, as they were."""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.absent import refused as _refused
from mpistrat.coordinator import ClusterCoordinator, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]

__getattr__ = _absent_from("mpistrat.experimental.coordinator")

PerWorkerValues = _refused("experimental.coordinator.PerWorkerValues")
