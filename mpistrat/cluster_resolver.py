"""Cluster resolvers under the name that tf.distribute has for them.

They give names to the processes of a job; the rank always comes from MPI. `tf_config` and
`write_tf_config` are ours: they let a TensorFlow program run under the same launcher.
"""

from mpistrat.cluster.clouds import GCEClusterResolver as GCEClusterResolver
from mpistrat.cluster.clouds import KubernetesClusterResolver as KubernetesClusterResolver
from mpistrat.cluster.clouds import KubernetesExecutableLocation as KubernetesExecutableLocation
from mpistrat.cluster.resolver import ClusterResolver as ClusterResolver
from mpistrat.cluster.resolvers import MPIClusterResolver as MPIClusterResolver
from mpistrat.cluster.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
from mpistrat.cluster.simple import SimpleClusterResolver as SimpleClusterResolver
from mpistrat.cluster.simple import UnionResolver as UnionResolver
from mpistrat.cluster.slurm import SlurmClusterResolver as SlurmClusterResolver
from mpistrat.cluster.spec import ClusterSpec as ClusterSpec
from mpistrat.cluster.tpu import TPUClusterResolver as TPUClusterResolver
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.launch.tf_config import tf_config as tf_config
from mpistrat.launch.tf_config import write_tf_config as write_tf_config

__all__ = sorted(name for name in globals() if not name.startswith("_"))

__getattr__ = _absent_from("mpistrat.cluster_resolver")
