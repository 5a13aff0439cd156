"""``tf.compat.v1.distribute``: strategies with the older signatures.

Contexts, ``extended`` and everything else are the same objects as the newer names.
"""

from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.names import bind_public_names as _bound

__all__, __getattr__, __dir__ = _bound(__name__, __file__, _make_getattr("tf.compat.v1.distribute"))
