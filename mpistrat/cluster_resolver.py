"""Cluster resolvers under the name that tf.distribute has for them.

They give names to the processes of a job; the rank always comes from MPI. `tf_config` and
`write_tf_config` are ours: they let a TensorFlow program run under the same launcher.
"""

from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.names import bind_public_names as _bound

__all__, __getattr__, __dir__ = _bound(
    __name__, __file__, _make_getattr("mpistrat.cluster_resolver")
)
