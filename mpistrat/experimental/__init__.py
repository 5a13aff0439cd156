"""The names of ``tf.distribute.experimental``.

Most of them are made elsewhere and bound here; a name without a meaning where every rank runs the
same program exists and raises `RefusedError`.

- Options of collectives, and strategies with the constructors that they have there.
- `partitioners`: how many shards to cut a variable into.
- `PreemptionCheckpointHandler`: saves when the job is about to be ended.
- `coordinator`, `rpc`: names that are refused, with a reason.
"""

from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.names import bind_public_names as _bound

__all__, __getattr__, __dir__ = _bound(__name__, __file__, _make_getattr("mpistrat.experimental"))
