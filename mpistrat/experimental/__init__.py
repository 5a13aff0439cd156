"""``tf.distribute.experimental``: what has that name there.

- `partitioners`: into how many shards a variable would be cut.
- `coordinator`, `rpc`: names that are refused, with a reason.
"""

from mpistrat.distribute.inputs import ValueContext
from mpistrat.distribute.strategies import MultiWorkerMirroredStrategy
from mpistrat.experimental import coordinator, partitioners, rpc
from mpistrat.refused import refused

__all__ = [
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
    "rpc",
]

ParameterServerStrategy = refused("ParameterServerStrategy")
PreemptionCheckpointHandler = refused("experimental.PreemptionCheckpointHandler")
PreemptionWatcher = refused("experimental.PreemptionWatcher")
TerminationConfig = refused("experimental.TerminationConfig")
