"""``tf.distribute.experimental.rpc``: names that say why there is no server, and what to use."""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.absent import refused as _refused

__all__ = ["Client", "Server"]

__getattr__ = _absent_from("mpistrat.experimental.rpc")

Client = _refused("experimental.rpc.Client")
Server = _refused("experimental.rpc.Server")
