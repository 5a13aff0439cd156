"""The names of ``tf.distribute.experimental.rpc``, which are refused with a reason."""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.absent import refused_in as _refused_in

_NAMES = _refused_in("experimental.rpc")
globals().update(_NAMES)
__all__ = sorted(_NAMES)
__getattr__ = _absent_from("mpistrat.experimental.rpc")
