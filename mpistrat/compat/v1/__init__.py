"""``tf.compat.v1``: what of it has to do with `distribute`."""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.v1 import distribute
from mpistrat.distribute.writes import VariableAggregation, VariableSynchronization

__all__ = ["VariableAggregation", "VariableSynchronization", "distribute"]

__getattr__ = _absent_from("tf.compat.v1")
