"""Names of other libraries, so that programs written for them run.

- `tf`: the few ``tf.*`` names that code for tf.distribute without models needs.
- `v1`: ``tf.compat.v1``, whose strategies have older signatures.
"""

from mpistrat.compat import tf, v1

__all__ = ["tf", "v1"]
