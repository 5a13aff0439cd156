"""The names of ``tf.distribute.experimental``.

- Options of collectives, and strategies with the constructors that they have there.
- `partitioners`: how many shards to cut a variable into.
- `PreemptionCheckpointHandler`: saves when the job is about to be ended.
- `coordinator`, `rpc`: names that are refused, with a reason.
"""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.names import bind_public_names as _bound

__all__, __getattr__, __dir__ = _bound(__name__, __file__, _absent_from("mpistrat.experimental"))
