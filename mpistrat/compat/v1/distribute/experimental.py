"""``tf.compat.v1.distribute.experimental``: what has that name there."""

from mpistrat.compat.v1.strategies import MultiWorkerMirroredStrategy
from mpistrat.refused import refused

__all__ = ["MultiWorkerMirroredStrategy", "ParameterServerStrategy"]

ParameterServerStrategy = refused("ParameterServerStrategy")
