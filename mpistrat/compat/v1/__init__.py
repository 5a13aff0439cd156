"""``tf.compat.v1``, as far as it belongs to `distribute`."""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.tf_system import no_op as enable_eager_execution
from mpistrat.compat.tf_system import no_op as enable_v2_behavior
from mpistrat.compat.v1 import distribute
from mpistrat.distribute.kinds import VariableAggregation, VariableSynchronization

__all__ = ["VariableAggregation", "VariableSynchronization", "distribute"]
__all__ += ["enable_eager_execution", "enable_v2_behavior"]

__getattr__ = _absent_from("tf.compat.v1")
