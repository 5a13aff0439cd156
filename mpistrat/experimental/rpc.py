"""``tf.distribute.experimental.rpc``: names that say why there is no server, and what to use."""

from mpistrat.refused import refused

__all__ = ["Client", "Server"]

Client = refused("experimental.rpc.Client")
Server = refused("experimental.rpc.Server")
