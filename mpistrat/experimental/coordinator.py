"""``tf.distribute.experimental.coordinator``: the names of `mpistrat.coordinator`, as they were."""

from mpistrat.coordinator import ClusterCoordinator, RemoteValue
from mpistrat.refused import missing_from as _missing_from
from mpistrat.refused import refused as _refused

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]

__getattr__ = _missing_from("mpistrat.experimental.coordinator")

PerWorkerValues = _refused("experimental.coordinator.PerWorkerValues")
