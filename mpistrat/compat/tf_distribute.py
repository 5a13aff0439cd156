"""``tf.distribute`` as programs that import `mpistrat.compat.tf` see it."""

from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.names import bind_public_names as _bound

__all__, __getattr__, __dir__ = _bound(__name__, __file__, _absent_from("tf.distribute"))
