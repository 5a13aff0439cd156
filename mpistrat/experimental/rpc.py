"""The names of ``tf.distribute.experimental.rpc``, which are refused with a reason."""

from mpistrat.compat.absent import get_refused_names as _get_refused_names
from mpistrat.compat.absent import make_getattr as _make_getattr

_NAMES = _get_refused_names("experimental.rpc")
globals().update(_NAMES)
__all__ = sorted(_NAMES)
__getattr__ = _make_getattr("mpistrat.experimental.rpc")
