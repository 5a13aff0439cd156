"""The names of ``tf.distribute.experimental.coordinator``, which are refused with a reason."""

from mpistrat.compat.absent import get_refused as _get_refused
from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.coordinator import ClusterCoordinator, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]

__getattr__ = _make_getattr("mpistrat.experimental.coordinator")

PerWorkerValues = _get_refused("experimental.coordinator.PerWorkerValues")
