"""``tf.distribute.experimental.rpc``: names that say why there is no server, and what to use."""

from mpistrat.refused import missing_from as _missing_from
from mpistrat.refused import refused

__all__ = ["Client", "Server"]

__getattr__ = _missing_from("mpistrat.experimental.rpc")

Client = refused("experimental.rpc.Client")
Server = refused("experimental.rpc.Server")
