"""``tf.distribute.experimental.rpc``: names that say why there is no server, and what to use."""

from mpistrat.refused import missing_from as _missing_from
from mpistrat.refused import refused as _refused

__all__ = ["Client", "Server"]

__getattr__ = _missing_from("mpistrat.experimental.rpc")

Client = _refused("experimental.rpc.Client")
Server = _refused("experimental.rpc.Server")
