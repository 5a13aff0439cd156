"""Cluster resolvers under the name that tf.distribute has for them.

They give names to the processes of a job; the rank always comes from MPI. `tf_config` and
`write_tf_config` are ours: they let a TensorFlow program run under the same launcher.
"""

from mpistrat.cluster.clouds import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.resolvers import MPIClusterResolver, TFConfigClusterResolver
from mpistrat.cluster.simple import SimpleClusterResolver, UnionResolver
from mpistrat.cluster.slurm import SlurmClusterResolver
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.cluster.tpu import TPUClusterResolver
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.launch.tf_config import tf_config, write_tf_config

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
    "tf_config",
    "write_tf_config",
]

__getattr__ = _absent_from("mpistrat.cluster_resolver")
