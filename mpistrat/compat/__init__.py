"""TensorFlow's names, so that programs written for tf.distribute run.

- `tf`: the few ``tf.*`` names that code for tf.distribute without models needs.
- `v1`: ``tf.compat.v1``, whose strategies have older signatures.
- `absent`: the errors of names that are not here.
"""

from mpistrat.names import bind_public_names as _bound

__all__, __getattr__, __dir__ = _bound(__name__, __file__)
