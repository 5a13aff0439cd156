"""The names of ``tf.compat.v1.distribute.experimental``."""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.names import bind_public_names as _bound

__all__, __getattr__, __dir__ = _bound(
    __name__, __file__, _absent_from("tf.compat.v1.distribute.experimental")
)
