"""The names of this module, for type checkers; it binds them when they are used."""

from mpistrat.compat.tf_system import no_op as enable_eager_execution
from mpistrat.compat.tf_system import no_op as enable_v2_behavior
from mpistrat.compat.v1 import distribute as distribute
from mpistrat.variables.kinds import VariableAggregation as VariableAggregation
from mpistrat.variables.kinds import VariableSynchronization as VariableSynchronization

__all__ = [
    "VariableAggregation",
    "VariableSynchronization",
    "distribute",
    "enable_eager_execution",
    "enable_v2_behavior",
]
