"""TensorFlow's names, so that programs written for tf.distribute run.

The room has no semantics of its own: a name here calls a function of mpistrat or NumPy with the
parameters that TensorFlow's function has, and arguments that change nothing here are accepted. It
promises that a name that is missing raises an error that names a replacement. Programs import `tf`
and `v1` only; begin with `tf`, whose tables say where each name is from.

- `tf`: the few ``tf.*`` names that code for tf.distribute without models needs.
- `tf_tensors`, `tf_arrays`, `tf_math`, `tf_reductions`, `tf_nn`: tensors, which are NumPy arrays,
  and functions of them; `tf_debugging`: assertions about them; `tf_nest`: trees of them.
- `tf_data`, `tf_elements`: ``tf.data``; datasets made of the elements of others.
- `tf_random`, `tf_train`, `tf_system`: random numbers, checkpoints, and errors, devices and graphs.
- `tf_distribute`: ``tf.distribute``.
- `v1`: ``tf.compat.v1``, whose strategies have older signatures.
- `absent`: the errors of names that are missing or refused.
"""

from mpistrat.names import bind_public_names as _bound

__all__, __getattr__, __dir__ = _bound(__name__, __file__)
